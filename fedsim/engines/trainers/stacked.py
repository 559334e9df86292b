"""The trainer of stacks: trains many members of the cohort at a time with one set of kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from fedsim.core.rows import clip_rows, new_rows
from fedsim.engines.pool.process_context import ProcessContext
from fedsim.engines.shared_state import SharedState
from fedsim.engines.stacking.probe import StackingProbe
from fedsim.engines.stacking.stacked_module import StackedModule
from fedsim.engines.task import RunTask
from fedsim.engines.trainers.batches import Alteration, BatchSource, WorkItem
from fedsim.engines.trainers.client_rounds import ClientRounds
from fedsim.engines.trainers.cuda_graphs import CapturedSteps, CUDAGraphCache, sizes_of_stacks, unsafe
from fedsim.engines.trainers.dropout import FactorsAhead
from fedsim.engines.trainers.stack import Stack, StepBatch
from fedsim.engines.trainers.stack_step import Batch, StackState, StackStep, gather, move_rows
from fedsim.system.devices import total_memory_of

# In a round of synchronous SGD: a stack, its members' state, the factors of dropout, and the batches to come.
StackedGradientState = tuple[Stack, StackState, FactorsAhead, Iterator[StepBatch]]


class StackTrainer:
    """Trains a process's members in stacks of at most `width` rows.

    A member that has finished is not touched again: the members that still train are the first rows of their stack.
    Short batches are filled up with samples of weight 0; where a model's samples see each other (BatchNorm), rows with
    batches of one size are trained together instead.
    """

    def __init__(
        self,
        process: ProcessContext,
        task: RunTask,
        shared: SharedState,
        batch_source: BatchSource,
        *,
        width: int,
        probe: StackingProbe,
    ) -> None:
        self._process, self._task, self._shared, self._batch_source = process, task, shared, batch_source
        self.width, self._probe = width, probe
        self._module = StackedModule(task.new_module, task.objective, merged=probe.merged)
        self._step = StackStep(task, self._module)
        refusal = "they are off" if task.experiment.cuda_graphs is False else unsafe(task, probe)
        self._client_rounds = ClientRounds(task, shared, batch_source)
        usual = self._usual_sizes()
        sizes = sizes_of_stacks(min(width, max(1, len(shared.cohort.rows))), usual)
        steps = partial(CapturedSteps, task, shared, self._module, probe.dropouts, sizes, usual, self._client_rounds)
        self.replays = CUDAGraphCache(steps, refusal=refusal, warns=process.index == 0)
        self._room = new_rows(0, self._module.layout.d, task.dtype, task.device)
        self._gradient_states: list[StackedGradientState] = []

    def train(self, members: Sequence[WorkItem]) -> None:
        stacks = self._stacks(members)
        for stack in stacks:
            with self._process.working_on_several(stack.members[0].round):
                self._train(stack)
        self._record_losses(stacks)

    def full_gradients(self, members: Sequence[WorkItem]) -> None:
        """One pass over the samples of each member; the dropout masks are those of the steps after its last."""
        shared = self._shared
        for stack in self._stacks(members):
            with self._process.working_on_several(stack.members[0].round):
                rows = shared.cohort.rows[stack.index]
                state = StackState(self._module, rows, {"sum": torch.zeros_like(rows)}, self._buffers(stack))
                sizes = [[self._batch_source.size(member.worker)] for member in stack.members]
                samples = torch.tensor(sizes, dtype=rows.dtype, device=rows.device)
                ahead = stack.dropout_factors(self._probe.dropouts, after=True)
                alterations = stack.alterations_of_view("full_gradient")
                for whole in stack.full_pass():
                    factors = ahead.of(whole.step, len(stack))
                    for part, theirs, batch in self._parts(stack, state, whole, factors, alterations, moves=True):
                        share = part.counts.unsqueeze(1).to(rows.dtype) / samples[part.places]
                        self._step.sum_gradients(theirs, batch._replace(weights=batch.weights * share))
                shared.cohort.full_gradients[stack.index] = state.algorithm_state["sum"]

    def begin_gradient_round(self, members: Sequence[WorkItem]) -> None:
        self._gradient_states = []
        for stack in self._stacks(members):
            rows = self._shared.server.row.expand(len(stack), -1)
            state = StackState(self._module, rows, {}, self._buffers(stack))
            factors = stack.dropout_factors(self._probe.dropouts)
            self._gradient_states.append((stack, state, factors, stack.step_batches()))

    def gradients(self, step: int) -> None:
        shared = self._shared
        for stack, state, ahead, step_batches in self._gradient_states:
            whole = next(step_batches, None)
            if whole is None:
                continue
            with self._process.working_on_several(stack.members[0].round):
                factors = ahead.of(step, len(whole.members))
                for part, theirs, batch in self._parts(stack, state, whole, factors):
                    losses, gradients = self._step.clipped_gradients(theirs, batch)
                    index = stack.index_of(part)
                    shared.cohort.rows[index] = gradients
                    self._client_rounds.send_gradients(index)
                    stack.count(part, losses)
                    if self._task.experiment.rule.accepts("losses"):
                        shared.cohort.losses[stack.slots[part.places]] = losses.double().cpu()

    def end_gradient_round(self) -> None:
        for stack, state, *_ in self._gradient_states:
            self._give_buffers(stack, state)
        self._record_losses([stack for stack, *_ in self._gradient_states])
        self._gradient_states = []

    def _stacks(self, members: Sequence[WorkItem]) -> list[Stack]:
        """As few stacks as the width allows, of about the same size; members with like numbers of steps together."""
        if not members:
            return []
        members = sorted(members, key=lambda member: -self._batch_source.steps_of(member))
        count = -(-len(members) // self.width)
        cuts = [len(members) * part // count for part in range(count + 1)]
        self._batch_source.announce(members)
        return [Stack(members[start:stop], self._task, self._batch_source) for start, stop in pairwise(cuts)]

    def _train(self, stack: Stack) -> None:
        shared, rounds = self._shared, self._client_rounds
        if self.replays.train(stack, self._process.heartbeat):
            return
        in_place = isinstance(stack.index, slice)
        rows = shared.cohort.rows[stack.index] if in_place else self._copies(stack)
        algorithm_state = rounds.start(rows, stack.index, stack.members)
        beside = rounds.buffers_beside()
        of_stack = [] if beside is None else self._module.unpack_buffers(beside[stack.index])
        state = StackState(self._module, rows, algorithm_state, self._buffers(stack), of_stack)
        if self._task.schedule.accumulate > 1:
            self._accumulate(stack, state)
        else:
            self._step_by_batch(stack, state)
        self._give_buffers(stack, state)
        if beside is not None:
            beside[stack.index] = self._module.pack_buffers(of_stack, torch.empty_like(beside[: len(stack)]))
        rounds.finish(rows, state.algorithm_state, stack.index, stack.members)
        if not in_place:
            shared.cohort.rows[stack.index] = rows

    def _step_by_batch(self, stack: Stack, state: StackState) -> None:
        ahead = stack.dropout_factors(self._probe.dropouts)
        for whole in stack.step_batches():
            factors, moment = ahead.of(whole.step, len(whole.members)), (stack.members[0].round, whole.step)
            for part, theirs, batch in self._parts(stack, state, whole, factors, moves=True):
                stack.count(part, self._step(theirs, batch, moment=moment))

    def _accumulate(self, stack: Stack, state: StackState) -> None:
        """Steps along the mean gradient of several batches, of fewer at the end of a member's round."""
        ahead, accumulate = stack.dropout_factors(self._probe.dropouts), self._task.schedule.accumulate
        total = torch.zeros_like(state.rows)
        for whole in stack.step_batches():
            factors = ahead.of(whole.step, len(whole.members))
            for part, theirs, batch in self._parts(stack, state, whole, factors):
                losses, gradients = self._step.whole_gradients(theirs, batch)
                total[part.places] += gradients
                stack.count(part, losses)
            number, count = whole.step // accumulate, whole.step % accumulate + 1
            going_on = sum(steps > whole.step + 1 for steps in stack.steps) if count < accumulate else 0
            if going_on < len(whole.members):  # the last of the members, since those with most steps come first
                stepping = slice(going_on, len(whole.members))
                theirs = state.of(stepping)
                clip_rows(mean := total[stepping].div_(count), self._task.experiment.local.clip_norm)
                move_rows(self._task.algorithm_at(stack.members[0].round, number), theirs, mean)
                state.take_back(theirs, moved=True)
                total[stepping] = 0

    def _parts(
        self,
        stack: Stack,
        state: StackState,
        whole: StepBatch,
        factors: Sequence[Tensor],
        alterations: Sequence[Alteration | None] = (),
        *,
        moves: bool = False,
    ) -> Iterator[tuple[StepBatch, StackState, Batch]]:
        """Yield the batches of a step that are computed together, with the members' state and the data.

        Afterwards the state is taken back: the buffers, and all of it if it `moves`.

        Args:
            factors: of the whole stack's dropouts, [k, batch, ...].
        """
        for part in whole.by_size() if self._probe.coupled else [whole]:
            self._process.heartbeat()
            inputs, targets = gather(self._shared.data.train, part.positions)
            stack.alter(part, inputs, targets, alterations)
            theirs, size = state.of(part.places), part.positions.shape[1]
            of_part = [of_all[part.places][:, :size] for of_all in factors]
            yield part, theirs, Batch(inputs, targets, part.weights, of_part)
            state.take_back(theirs, moved=moves)

    def _usual_sizes(self) -> list[int]:
        """How many rows the stacks of a round have, the most first, where all workers take as many steps."""
        members = -(-len(self._shared.cohort.rows) // self._process.count)
        stacks = -(-members // self.width)
        return sorted({-(-members // stacks), members // stacks}, reverse=True)

    def _copies(self, stack: Stack) -> Tensor:
        """The rows of members whose rows do not lie so that a stack of them would be a view."""
        if len(self._room) < len(stack):
            self._room = new_rows(len(stack), self._module.layout.d, self._task.dtype, self._task.device)
        return self._room[: len(stack)].copy_(self._shared.cohort.rows[stack.index])

    def _buffers(self, stack: Stack) -> list[Tensor]:
        return self._module.unpack_buffers(self._shared.cohort.buffers[stack.index])

    def _give_buffers(self, stack: Stack, state: StackState) -> None:
        rows = torch.empty_like(self._shared.cohort.buffers[: len(stack)])
        self._shared.cohort.buffers[stack.index] = self._module.pack_buffers(state.buffers, rows)

    def _record_losses(self, stacks: Sequence[Stack]) -> None:
        for stack in stacks:  # only now, because reading numbers waits for the device
            self._shared.cohort.train_loss[stack.slots] = stack.mean_losses()


MEMORY_SHARE = 0.5  # of the device's total memory, for stacks; results must not depend on its free memory
WIDEST_ON_CPU = 32  # more rows share no more of a step's fixed cost
NARROWEST_ON_CPU = 4  # fewer rows share too little of it, however large they are
STACK_BYTES_ON_CPU = 2**23  # of a stack's parameters, for each thread: more of them leave the caches


def stack_width(task: RunTask, shared: SharedState, probe: StackingProbe, processes: int, threads: int) -> int:
    """How many rows a process should stack: its share of the cohort, if that fits into memory (and, on a CPU, caches).

    On any device there are two copies of a row and of its client algorithm state: the row's own and that in the stack.
    A step allocates a gradient and activations. On a GPU it also allocates the joined gradients, and copies of the row
    and its client algorithm state for rows that a mask does not move. If steps are captured, the memory of a step
    exists twice: for the graphs, and for the steps before a capture.
    """
    row, kept = shared.cohort.rows.shape[1] * task.dtype.itemsize, len(task.algorithm.start(shared.server.row[:1]))
    on_cpu = task.device.type == "cpu"
    captured = task.experiment.cuda_graphs is not False and unsafe(task, probe) is None
    clips = task.experiment.local.clip_norm is not None
    gradients = 1 + clips + 2 * (task.schedule.accumulate > 1)  # and joined, and their sums
    made = (gradients if on_cpu else 3 + kept) * row + 2 * task.schedule.batch_size * probe.sample_bytes
    row_bytes = (2 + 2 * kept) * row + (2 if captured else 1) * made
    most = math.inf
    if on_cpu:
        most = min(WIDEST_ON_CPU, max(NARROWEST_ON_CPU, threads * (STACK_BYTES_ON_CPU // row)))
    share = -(-len(shared.cohort.rows) // processes)
    return max(1, int(min(share, most, MEMORY_SHARE * total_memory_of(task.device) / processes / row_bytes)))
