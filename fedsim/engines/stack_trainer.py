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
from fedsim.engines.feed import Feed, Member
from fedsim.engines.graphs import Replays, unsafe
from fedsim.engines.job import Memory, Task
from fedsim.engines.rehearsal import Rehearsal
from fedsim.engines.scaling import LossScale, step_where, zero_where_not
from fedsim.engines.stack import Holdings, Lot, Stack, starting_states
from fedsim.engines.stacked_module import StackedModule
from fedsim.local import Product, step_along
from fedsim.randomness import Stream
from fedsim.rows import new_rows

LossesOf = Callable[..., tuple[Tensor, list[Tensor]]]


class Meeting(NamedTuple):
    """A stack in a round of synchronous SGD: its members' buffers, and the batches still to come."""

    stack: Stack
    holdings: Holdings
    lots: Iterator[Lot]
    scale: LossScale | None


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
        refusal = "they are off" if task.cuda_graphs is False else unsafe(task, rehearsal)
        self.replays = Replays(task, memory, self._module, refusal, tells=seat.index == 0)
        for k in self._usual_sizes():
            self.replays.of(k)  # now, not within a round
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
        self._meetings = [
            Meeting(stack, Holdings([], [], self._buffers(stack)), stack.lots(), self._new_scale(stack))
            for stack in self._stacks(members)
        ]

    def gradients(self, step: int) -> None:
        memory = self._memory
        for stack, holdings, lots, scale in self._meetings:
            whole = next(lots, None)
            if whole is None:
                continue
            with self._seat.working_on_several(stack.members[0].round):
                streams = self._streams(stack, step)
                for lot in self._lots_of(whole):
                    theirs = holdings.of(lot)
                    parameters = self._module.views(memory.global_row.expand(len(lot.members), -1))
                    losses, gradients = self._gradients(stack, lot, parameters, theirs.buffers, streams, scale)
                    if scale is not None:
                        zero_where_not(scale.unscale(gradients, lot.places), gradients)
                    holdings.take_back(lot, theirs)
                    slots = stack.slots[lot.places]
                    memory.rows[slots] = torch.cat([gradient.unsqueeze(-1).flatten(1) for gradient in gradients], 1)
                    if self._task.rule.takes("losses"):
                        memory.losses[slots] = losses.double().cpu()

    def part(self) -> None:
        for stack, holdings, *_ in self._meetings:
            self._give_buffers(stack, holdings)
        self._tell_losses([meeting.stack for meeting in self._meetings])
        self._meetings = []

    def _stacks(self, members: Sequence[Member]) -> list[Stack]:
        """As few stacks as the width allows, of about the same size; members with like numbers of steps together."""
        if not members:
            return []
        members = sorted(members, key=lambda member: -self._feed.steps_of(member))
        count = -(-len(members) // self.width)
        cuts = [len(members) * part // count for part in range(count + 1)]
        return [Stack(members[start:stop], self._task, self._feed) for start, stop in pairwise(cuts)]

    def _train(self, stack: Stack) -> None:
        memory, solver = self._memory, self._task.solver
        if (replayed := self.replays.of(len(stack))) is not None:
            memory.buffers[stack.slots] = replayed.train(stack, self._seat.beat)
            return
        rows = memory.rows[stack.evenly] if stack.evenly else self._copies(stack)
        parameters = self._module.views(rows)
        holdings = Holdings(parameters, starting_states(solver, rows, self._module), self._buffers(stack))
        streams, scale = self._streams(stack), self._new_scale(stack)
        for whole in stack.lots():
            for lot in self._lots_of(whole):
                theirs = holdings.of(lot)
                held = theirs.parameters, theirs.buffers
                _, found = self._gradients(stack, lot, *held, streams, scale, leave_products=scale is None)
                step = partial(step_along, solver)
                if scale is not None:
                    step = partial(step_where, scale.unscale(found, lot.places), solver)
                for parameter, gradient, state in zip(theirs.parameters, found, theirs.states, strict=True):
                    step(parameter, gradient, state)
                holdings.take_back(lot, theirs)
        if not stack.evenly:
            memory.rows[stack.slots] = rows
        self._give_buffers(stack, holdings)

    def _gradients(
        self,
        stack: Stack,
        lot: Lot,
        parameters: list[Tensor],
        buffers: list[Tensor],
        streams: Sequence[Stream],
        scale: LossScale | None,
        *,
        leave_products: bool = False,
    ) -> tuple[Tensor, list[Tensor | Product]]:
        """The losses [m] and gradients, times the scale, of a lot's members at these parameters.

        Their buffers are replaced.
        """
        self._seat.beat()
        inputs, targets = self._memory.train.gather(lot.positions.flatten())
        inputs, targets = (tensor.unflatten(0, lot.positions.shape) for tensor in (inputs, targets))
        for place, member in enumerate(lot.members):
            if alter := stack.alterations[member]:
                size = int(lot.sizes[place])
                inputs[place, :size], targets[place, :size] = alter(inputs[place, :size], targets[place, :size])
        factors = self._factors(lot, streams)
        scales = None if scale is None else scale.of(lot.places)
        given = parameters, buffers, inputs, targets, lot.weights, factors, scales
        losses, gradients = self._module.gradients(*given, leave_products=leave_products)
        stack.count(lot, losses)
        return losses, gradients

    def _factors(self, lot: Lot, streams: Sequence[Stream]) -> list[Tensor]:
        """What each dropout multiplies by, [m, batch, ...]: each member's drawn as if it trained alone."""
        dropouts = self._rehearsal.dropouts
        factors = [lot.weights.new_zeros(*lot.positions.shape, *dropout.shape) for dropout in dropouts]
        for place, member in enumerate(lot.members if dropouts else ()):
            size = int(lot.sizes[place])
            with streams[member]:
                for dropout, of_all in zip(dropouts, factors, strict=True):
                    of_all[place, :size] = dropout.draw(size, like=of_all)
        return factors

    def _streams(self, stack: Stack, *step: int) -> list[Stream]:
        return stack.streams(*step) if self._rehearsal.dropouts else []

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
        return self._room[: len(stack)].copy_(self._memory.rows[stack.slots])

    def _buffers(self, stack: Stack) -> list[Tensor]:
        return self._module.unpack_buffers(self._memory.buffers[stack.slots])

    def _give_buffers(self, stack: Stack, holdings: Holdings) -> None:
        rows = torch.empty_like(self._memory.buffers[: len(stack)])
        self._module.pack_buffers(holdings.buffers, rows)
        self._memory.buffers[stack.slots] = rows

    def _tell_losses(self, stacks: Sequence[Stack]) -> None:
        for stack in stacks:  # only now, because reading numbers waits for the device
            self._memory.train_loss[stack.slots] = stack.mean_losses()
