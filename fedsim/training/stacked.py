"""Stacked trainer, which trains many workers at a time with batched kernels."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedsim.core.rows import clip_rows, new_rows
from fedsim.processes.process_context import ProcessContext
from fedsim.system.devices import to_device, total_memory_of
from fedsim.training.batches import Alteration, BatchSource, WorkItem
from fedsim.training.client_rounds import ClientRounds
from fedsim.training.cuda_graphs import CapturedSteps, CUDAGraphCache, sizes_of_stacks, unsafe
from fedsim.training.forward_functions import FactorsAhead, ahead_bytes, mask_bytes
from fedsim.training.probe import StackingProbe
from fedsim.training.sample_gradients import Moment
from fedsim.training.shared_state import SharedState
from fedsim.training.stack import Stack, Stacks, StepBatch
from fedsim.training.stack_step import Batch, StackState, StackStep, gather, move_rows
from fedsim.training.stacked_module import StackedModule
from fedsim.training.stacked_tests import StackedTests
from fedsim.training.task import RunTask

# For a round of synchronous SGD: (stack, state of its workers, their dropout factors, remaining batches).
StackedGradientState = tuple[Stack, StackState, FactorsAhead, Iterator[StepBatch]]


class StackTrainer:
    """Trainer that trains several workers at once (a stack of at most `width` workers).

    Short batches are padded with samples of weight 0. With BatchNorm or a joint loss, batches are not padded, and only
    workers with equal batch sizes are computed together.
    """

    averages = False

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
        self._module = StackedModule(task.new_module, task.objective, merged=probe.merged, turns=probe.turns)
        self._step, self._has_buffers = StackStep(task, self._module), bool(shared.server.buffers.numel())
        refusal = "cuda_graphs = false" if task.experiment.cuda_graphs is False else unsafe(task, probe)
        self._client_rounds = ClientRounds(task, shared, batch_source)
        usual = self._usual_sizes()
        sizes = sizes_of_stacks(min(width, shared.cohort.size), usual)
        steps = partial(CapturedSteps, task, shared, self._module, probe.dropouts, sizes, usual, self._client_rounds)
        self.replays = CUDAGraphCache(steps, refusal=refusal, warns=process.index == 0)
        # On a CPU, a launch costs nothing that stacks could save, and single tests have the same bits in all engines.
        on_cpu = task.device.type == "cpu"
        self.stacked_tests = (
            None if on_cpu else StackedTests(process, task, shared, batch_source, width=width, probe=probe)
        )
        self._room = new_rows(0, self._module.layout.d, task.dtype, task.device)
        self._gradient_states: list[StackedGradientState] = []
        self._announced: Stacks | None = None

    def announce(self, members: Sequence[WorkItem]) -> None:
        self._announced = self._stacks(members)
        for stack in self._announced[:1]:  # the batches of all stacks may not fit into memory at a time
            stack.draw()

    def train(self, members: Sequence[WorkItem], meanwhile: Callable[[], None] = lambda: None) -> None:
        stacks, self._announced = self._stacks(members), None
        for stack in stacks:
            with self._process.working_on_several(stack.members.round):
                self._train(stack)
        meanwhile()
        stacks.write_losses(self._shared.cohort.train_loss)  # last, because reading values waits for the device

    def full_gradients(self, members: Sequence[WorkItem]) -> None:
        """Compute each worker's mean gradient over all its samples; see `Trainer.full_gradients`."""
        shared = self._shared
        for stack in self._stacks(members):
            with self._process.working_on_several(stack.members.round):
                rows = shared.cohort.rows[stack.index]
                state = StackState(self._module, rows, {"sum": torch.zeros_like(rows)}, self._buffers(stack))
                samples = to_device(torch.from_numpy(stack.members.sizes), rows.device)
                ahead = stack.dropout_factors(self._probe.dropouts, after=True)
                alterations = self._batch_source.alterations(stack.members, "full_gradient")
                for whole in stack.full_pass():
                    for part, theirs, batch in self._parts(stack, state, whole, ahead, alterations, moves=True):
                        self._step.sum_gradients(theirs, batch, part.counts / samples[part.stack_index])
                shared.cohort.full_gradients[stack.index] = state.algorithm_state["sum"]

    def begin_gradient_round(self, members: Sequence[WorkItem]) -> None:
        self._gradient_states, work = [], self._batch_source.work(members)
        if self._batch_source.root is not None:  # the server trains until the last worker has finished
            is_root = work.workers == self._batch_source.root
            work = replace(work, steps=np.where(is_root, sys.maxsize, work.steps))
        self._gradient_stacks = self._stacks(work)
        for stack in self._gradient_stacks:
            rows = self._shared.server.row.expand(len(stack), -1)
            state = StackState(self._module, rows, {}, self._buffers(stack), settings=stack.settings)
            factors = stack.dropout_factors(self._probe.dropouts)
            self._gradient_states.append((stack, state, factors, stack.step_batches()))

    def gradients(self, step: int) -> None:
        shared, slots, of_step = self._shared, list[Tensor](), list[Tensor]()
        for stack, state, ahead, step_batches in self._gradient_states:
            whole = next(step_batches, None)
            if whole is None:
                continue
            with self._process.working_on_several(stack.members.round):
                for part, theirs, batch in self._parts(stack, state, whole, ahead):
                    losses, gradients = self._step.row_gradients(theirs, batch)
                    index = stack.index_of(part)
                    shared.cohort.rows[index] = gradients
                    self._client_rounds.send_gradients(index)
                    stack.count(part, losses)
                    slots.append(stack.slots[part.stack_index])
                    of_step.append(losses)
        if slots and self._task.experiment.rule.accepts("losses"):
            shared.cohort.losses[torch.cat(slots)] = torch.cat(of_step).cpu().double()

    def end_gradient_round(self) -> None:
        for stack, state, *_ in self._gradient_states:
            self._give_buffers(stack, state)
        self._gradient_stacks.write_losses(self._shared.cohort.train_loss)
        self._gradient_states = []

    def _stacks(self, members: Sequence[WorkItem]) -> Stacks:
        if self._announced is not None and self._announced.of is members:
            return self._announced
        work = self._batch_source.work(members)
        self._batch_source.announce(work)
        return Stacks(work, self._task, self._batch_source)

    def _train(self, stack: Stack) -> None:
        shared, rounds = self._shared, self._client_rounds
        if self.replays.train(stack, self._process.heartbeat):
            return
        in_place = isinstance(stack.index, slice)
        rows = shared.cohort.rows[stack.index] if in_place else self._copies(stack)
        algorithm_state = rounds.start(rows, stack.index, stack.members)
        beside = rounds.buffers_beside()
        of_stack = [] if beside is None else self._module.unpack_buffers(beside[stack.index])
        buffers = self._buffers(stack)
        state = StackState(self._module, rows, algorithm_state, buffers, of_stack, settings=stack.settings)
        if self._task.schedule.accumulation_steps > 1:
            self._accumulate(stack, state)
        else:
            ahead = stack.dropout_factors(self._probe.dropouts)
            for whole in stack.step_batches():
                for part, theirs, batch in self._parts(stack, state, whole, ahead, moves=True):
                    stack.count(part, self._step(theirs, batch, moment=(stack.members.round, whole.step)))
        self._give_buffers(stack, state)
        if beside is not None:
            beside[stack.index] = self._module.pack_buffers(of_stack, torch.empty_like(beside[: len(stack)]))
        rounds.finish(rows, state.algorithm_state, stack.index, stack.members)
        if not in_place:
            shared.cohort.rows[stack.index] = rows

    def _accumulate(self, stack: Stack, state: StackState) -> None:
        """Train a stack with one parameter update per `local.accumulation_steps` batches."""
        ahead, per_update = stack.dropout_factors(self._probe.dropouts), self._task.schedule.accumulation_steps
        total = torch.zeros_like(state.rows)
        for whole in stack.step_batches():
            for part, theirs, batch in self._parts(stack, state, whole, ahead):
                losses, gradients = self._step.row_gradients(theirs, batch, clips=False)
                total[part.stack_index] += gradients
                stack.count(part, losses)
            number, count = whole.step // per_update, whole.step % per_update + 1
            waiting = int((stack.steps > whole.step + 1).sum()) if count < per_update else 0
            if waiting < len(whole.in_stack):  # members are sorted by descending number of steps
                stepping = slice(waiting, len(whole.in_stack))
                theirs = state.of(stepping)
                clip_rows(mean := total[stepping].div_(count), self._task.clip_norm(theirs.settings))
                move_rows(self._task.algorithm_at(stack.members.round, number, settings=theirs.settings), theirs, mean)
                state.take_back(theirs, moved=True)
                total[stepping] = 0

    def _parts(
        self,
        stack: Stack,
        state: StackState,
        whole: StepBatch,
        ahead: FactorsAhead,
        alterations: Sequence[Alteration | None] | None = None,
        *,
        moves: bool = False,
    ) -> Iterator[tuple[StepBatch, StackState, Batch]]:
        """Divide a step's workers into parts that are computed together. Yield (batches, state, data) of each part.

        The caller trains each part before it asks for the next one, and the part's state is then copied to `state`.

        Args:
            stack: stack of workers.
            state: state of the whole stack.
            whole: batches of all workers of the stack that have not finished.
            ahead: dropout masks of the stack.
            alterations: for each worker of the stack, a function that alters its batch, or None to keep it. An empty
                list keeps all batches. None: the functions that training uses.
            moves: whether to copy back parameters and algorithm state as well as buffers.
        """
        factors = ahead.of(whole.step, whole.in_stack[-1] + 1)
        for part in whole.by_size() if self._probe.coupled else [whole]:
            self._process.heartbeat()
            inputs, targets = gather(self._shared.data.train, part.positions)
            stack.alter(part, inputs, targets, alterations)
            theirs, size = state.of(part.stack_index), part.positions.shape[1]
            of_part = [of_all[part.stack_index][:, :size] for of_all in factors]
            yield part, theirs, Batch(inputs, targets, part.weights, of_part, self._moments(stack, part))
            state.take_back(theirs, moved=moves)

    def _moments(self, stack: Stack, part: StepBatch) -> list[Moment]:
        """Return (round, worker, step) of each batch; [] if the gradients of samples get no noise."""
        if self._task.algorithm.sample_noise is None:
            return []
        members = stack.members[list(part.in_stack)]
        return [(member.round, member.worker, (member.step or 0) + part.step) for member in members]

    def _usual_sizes(self) -> list[int]:
        """Return the numbers of workers in the stacks of a typical round, largest first."""
        size = self._shared.cohort.size
        stacks = -(-size // self.width)
        return sorted({-(-size // stacks), size // stacks}, reverse=True)

    def _copies(self, stack: Stack) -> Tensor:
        """Return a copy of the parameters of a stack's workers, which the next call overwrites."""
        if len(self._room) < len(stack):
            self._room = new_rows(len(stack), self._module.layout.d, self._task.dtype, self._task.device)
        return self._room[: len(stack)].copy_(self._shared.cohort.rows[stack.index])

    def _buffers(self, stack: Stack) -> list[Tensor]:
        return self._module.unpack_buffers(self._shared.cohort.buffers[stack.index]) if self._has_buffers else []

    def _give_buffers(self, stack: Stack, state: StackState) -> None:
        if not self._has_buffers:
            return
        rows = torch.empty_like(self._shared.cohort.buffers[: len(stack)])
        self._shared.cohort.buffers[stack.index] = self._module.pack_buffers(state.buffers, rows)


MEMORY_SHARE = 0.5  # share of a GPU's total memory for all stacks; results must not depend on free memory
WIDEST_ON_CPU = 32  # wider stacks no longer reduce a step's fixed cost per row
NARROWEST_ON_CPU = 4  # narrower stacks spend too much on fixed cost, even for large rows
STACK_BYTES_ON_CPU = 2**23  # parameters of a stack per thread; larger stacks do not fit into the caches
MOST_PARALLEL = 8  # maximum number of stacks that are made only so that processes can work in parallel


def stack_width(task: RunTask, shared: SharedState, probe: StackingProbe, threads: int, sharing: int = 1) -> int:
    """Return the maximum number of workers that are trained at once.

    This number determines how sums are rounded. On a CPU it therefore depends only on the experiment, and not on the
    number of cores or processes or on the memory. It is chosen so that a stack should fit into the caches, and so that
    there are 2, 4 or 8 stacks if each then has at least `NARROWEST_ON_CPU` workers. If more stacks are needed, their
    number is even, so that two processes can share them. On a GPU, the number also depends on its total memory, and on
    how many processes share it: only the experiment and the launcher set this number there, not the cores.

    Args:
        task, shared: run and its tensors.
        probe: result of a trial run of the model.
        threads: number of PyTorch threads per process.
        sharing: number of processes that train on the same GPU.
    """
    if task.experiment.batched.stack_size is not None:
        return task.experiment.batched.stack_size
    workers = shared.cohort.size
    if task.device.type != "cpu":
        room = MEMORY_SHARE * total_memory_of(task.device) / sharing - bytes_beside_workers(task, shared, probe)
        fitting = room / bytes_per_worker(task, shared, probe)
        return max(1, int(min(workers, fitting)))
    row_bytes = shared.cohort.rows.shape[1] * task.dtype.itemsize
    widest = min(WIDEST_ON_CPU, max(NARROWEST_ON_CPU, threads * (STACK_BYTES_ON_CPU // row_bytes)))
    parallel = min(MOST_PARALLEL, 2 ** int(math.log2(max(1, workers // NARROWEST_ON_CPU))))
    stacks = max(parallel, -(-workers // widest))
    stacks += stacks > 1 and stacks % 2
    return -(-workers // stacks)


def bytes_per_worker(task: RunTask, shared: SharedState, probe: StackingProbe) -> int:
    """Estimate the memory that a stack needs for each of its workers, in bytes."""
    row_bytes, batch = shared.cohort.rows.shape[1] * task.dtype.itemsize, task.schedule.largest_batch
    state_rows = len(task.algorithm.start(shared.server.row[:1]))
    clips = task.experiment.local.clip_norm is not None
    gradients = 1 + clips + 2 * (task.schedule.accumulation_steps > 1)  # plus the concatenated gradients and their sums
    made = (gradients if task.device.type == "cpu" else 3 + state_rows) * row_bytes
    made += 2 * batch * probe.sample_bytes + mask_bytes(probe.dropouts, batch, task.dtype.itemsize)
    return (2 + 2 * state_rows) * row_bytes + _times_made(task, probe) * made


def bytes_beside_workers(task: RunTask, shared: SharedState, probe: StackingProbe) -> int:
    """Estimate the memory, in bytes, that dropout needs on a GPU for any number of workers in a stack."""
    sizes = task.schedule.largest_batch, task.dtype.itemsize, shared.cohort.size
    return _times_made(task, probe) * ahead_bytes(probe.dropouts, *sizes)


def _times_made(task: RunTask, probe: StackingProbe) -> int:
    """Return how often the memory of a step is allocated: CUDA graphs have their own, beside that of the warm-up."""
    return 2 if task.experiment.cuda_graphs is not False and unsafe(task, probe) is None else 1
