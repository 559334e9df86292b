"""How a process trains its members of the cohort many at a time, as stacks of rows in one set of kernels each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fedsim.engines.compiling import Compilation
from fedsim.engines.crew import Seat
from fedsim.engines.dropout import FactorsAhead
from fedsim.engines.feed import Feed, Member
from fedsim.engines.graphs import Replays, unsafe
from fedsim.engines.job import Memory, Task
from fedsim.engines.rehearsal import Rehearsal
from fedsim.engines.scaling import LossScale, zero_where_not
from fedsim.engines.stack import Lot, Stack
from fedsim.engines.stack_step import Batch, StackState, StackStep, gather, side_by_side
from fedsim.engines.stacked_module import StackedModule
from fedsim.rows import new_rows

LossesOf = Callable[..., tuple[Tensor, list[Tensor]]]


class Meeting(NamedTuple):
    """A stack in a round of synchronous SGD: its members' state, the factors of dropout, and the batches to come."""

    stack: Stack
    state: StackState
    factors: FactorsAhead
    lots: Iterator[Lot]


class StackTrainer:
    """Trains a process's members in stacks of at most `width` rows.

    A member that has finished is not touched again, since those who still train are the first rows of their stack.
    Short batches are filled up with samples of weight 0; where a model's samples see each other (BatchNorm), rows with
    batches of one size are trained together instead.
    """

    def __init__(self, seat: Seat, task: Task, memory: Memory, feed: Feed, *, width: int, rehearsal: Rehearsal) -> None:
        self._seat, self._task, self._memory, self._feed = seat, task, memory, feed
        self.width, self._rehearsal = width, rehearsal
        self._module = StackedModule(task.new_module, task.precision, merged=rehearsal.merged)
        if task.compile:
            self._compile()
        self._step = StackStep(task, self._module)
        refusal = "they are off" if task.cuda_graphs is False else unsafe(task, rehearsal)
        self.replays = Replays(
            task,
            memory,
            self._module,
            rehearsal.dropouts,
            width=min(width, max(1, len(memory.rows))),
            usual=self._usual_sizes(),
            refusal=refusal,
            tells=seat.index == 0,
        )
        self._room = new_rows(0, self._module.layout.d, task.dtype, task.device)
        self._meetings: list[Meeting] = []

    @property
    def compiled(self) -> Compilation | None:
        return self._module.compiled

    def train(self, members: Sequence[Member]) -> None:
        stacks = self._stacks(members)
        for stack in stacks:
            with self._seat.working_on_several(stack.members[0].round):
                self._train(stack)
        self._tell_losses(stacks)

    def meet_at_global_row(self, members: Sequence[Member]) -> None:
        self._meetings = []
        for stack in self._stacks(members):
            rows = self._memory.global_row.expand(len(stack), -1)
            state = StackState(self._module, rows, {}, self._buffers(stack), self._new_scale(stack))
            factors = stack.dropout_factors(self._rehearsal.dropouts)
            self._meetings.append(Meeting(stack, state, factors, stack.lots()))

    def gradients(self, step: int) -> None:
        for stack, state, ahead, lots in self._meetings:
            whole = next(lots, None)
            if whole is None:
                continue
            with self._seat.working_on_several(stack.members[0].round):
                factors = ahead.of(step, len(whole.members))
                for lot in self._lots_of(whole):
                    theirs = state.of(lot.places)
                    losses, gradients = self._step.gradients(theirs, self._batch(stack, lot, factors))
                    self._give_gradients(stack, lot, theirs, gradients)
                    state.take_back_buffers(theirs)
                    stack.count(lot, losses)
                    if self._task.rule.takes("losses"):
                        self._memory.losses[stack.slots[lot.places]] = losses.double().cpu()

    def _give_gradients(self, stack: Stack, lot: Lot, state: StackState, gradients: Sequence[Tensor]) -> None:
        """Write a lot's gradients [m, ...] to the rows of its members; zeros for a row whose gradient overflowed."""
        flat = side_by_side(gradients)
        if state.scale is not None:
            zero_where_not(state.scale.unscale([flat], state.places), [flat])
        self._memory.rows[stack.index_of(lot)] = flat

    def part(self) -> None:
        for stack, state, *_ in self._meetings:
            self._give_buffers(stack, state)
        self._tell_losses([meeting.stack for meeting in self._meetings])
        self._meetings = []

    def _stacks(self, members: Sequence[Member]) -> list[Stack]:
        """As few stacks as the width allows, of about the same size; members with like numbers of steps together."""
        if not members:
            return []
        members = sorted(members, key=lambda member: -self._feed.steps_of(member))
        count = -(-len(members) // self.width)
        cuts = [len(members) * part // count for part in range(count + 1)]
        self._feed.announce(members)
        return [Stack(members[start:stop], self._task, self._feed) for start, stop in pairwise(cuts)]

    def _train(self, stack: Stack) -> None:
        memory, solver = self._memory, self._task.solver
        if (buffers := self.replays.train(stack, self._seat.beat)) is not None:
            memory.buffers[stack.index] = buffers
            return
        in_place = isinstance(stack.index, slice)
        rows = memory.rows[stack.index] if in_place else self._copies(stack)
        state = StackState(self._module, rows, solver.start(rows), self._buffers(stack), self._new_scale(stack))
        ahead = stack.dropout_factors(self._rehearsal.dropouts)
        for whole in stack.lots():
            factors = ahead.of(whole.step, len(whole.members))
            for lot in self._lots_of(whole):
                theirs = state.of(lot.places)
                losses = self._step(theirs, self._batch(stack, lot, factors))
                state.take_back(theirs)
                stack.count(lot, losses)
        if not in_place:
            memory.rows[stack.index] = rows
        self._give_buffers(stack, state)

    def _batch(self, stack: Stack, lot: Lot, factors: Sequence[Tensor]) -> Batch:
        """What a lot's members train on; `factors` are those of the whole stack's dropouts, [k, batch, ...]."""
        self._seat.beat()
        inputs, targets = gather(self._memory.train, lot.positions)
        stack.alter(lot, inputs, targets)
        size = lot.positions.shape[1]
        return Batch(inputs, targets, lot.weights, [of_all[lot.places][:, :size] for of_all in factors])

    def _compile(self) -> None:
        """Compile for whole stacks of whole batches; where members have finished, or batches are short, it is not."""
        size = self._feed.whole_batch() if self._rehearsal.coupled else self._task.schedule.batch_size
        runs = {(k, size): partial(self._rehearsed, k, size) for k in self._usual_sizes()}
        self._module.compile(runs, self._task.device, tells=self._seat.index == 0)

    def _rehearsed(self, k: int, size: int, losses_of: LossesOf) -> list[Tensor]:
        """The losses of k rows on batches of one size, their gradients, and their buffers afterwards.

        Of rows that all are the global row, where gradients are taken there, and of rows of their own.
        """
        rows = {"gradients": self._memory.global_row.expand(k, -1)}
        if "parameters" in self._task.syncs:
            room = new_rows(k, self._module.layout.d, self._task.dtype, self._task.device)
            rows["parameters"] = room.copy_(rows["gradients"])
        return [result for sync in self._task.syncs for result in self._tried(rows[sync], size, losses_of)]

    def _tried(self, rows: Tensor, size: int, losses_of: LossesOf) -> list[Tensor]:
        task, memory, module, k = self._task, self._memory, self._module, len(rows)
        gathered = memory.train.gather((torch.arange(size) % len(memory.train)).repeat(k))
        inputs, targets = (tensor.unflatten(0, (k, size)) for tensor in gathered)
        weights = torch.full((k, size), 1 / size, dtype=task.dtype, device=task.device)
        factors = [weights.new_ones(k, size, *dropout.shape) for dropout in self._rehearsal.dropouts]
        leaves = [view.detach().requires_grad_() for view in module.views(rows)]
        buffers = module.unpack_buffers(memory.global_buffers.expand(k, -1))
        losses, buffers = losses_of(leaves, buffers, inputs, targets, weights, factors)
        found = torch.autograd.grad(losses.sum(), leaves, allow_unused=True, materialize_grads=True)
        return [losses.detach(), *found, *buffers]

    def _usual_sizes(self) -> list[int]:
        """How many rows the stacks of a round have, the most first, where all workers take as many steps."""
        members = -(-len(self._memory.rows) // self._seat.count)
        stacks = -(-members // self.width)
        return sorted({-(-members // stacks), members // stacks}, reverse=True)

    def _new_scale(self, stack: Stack) -> LossScale | None:
        return LossScale((len(stack),), self._task.device) if self._task.precision.scales_losses else None

    def _lots_of(self, lot: Lot) -> list[Lot]:
        return lot.by_size() if self._rehearsal.coupled else [lot]

    def _copies(self, stack: Stack) -> Tensor:
        """The rows of members whose rows do not lie so that a stack of them would be a view."""
        if len(self._room) < len(stack):
            self._room = new_rows(len(stack), self._module.layout.d, self._task.dtype, self._task.device)
        return self._room[: len(stack)].copy_(self._memory.rows[stack.index])

    def _buffers(self, stack: Stack) -> list[Tensor]:
        return self._module.unpack_buffers(self._memory.buffers[stack.index])

    def _give_buffers(self, stack: Stack, state: StackState) -> None:
        rows = torch.empty_like(self._memory.buffers[: len(stack)])
        self._memory.buffers[stack.index] = self._module.pack_buffers(state.buffers, rows)

    def _tell_losses(self, stacks: Sequence[Stack]) -> None:
        for stack in stacks:  # only now, because reading numbers waits for the device
            self._memory.train_loss[stack.slots] = stack.mean_losses()
