"""How a process trains its members of the cohort: one row after another. `stack_trainer.py` has the other way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedsim.engines.compiling import Compilation
from fedsim.engines.crew import Seat
from fedsim.engines.dropout import RoundDropout, RowDropout
from fedsim.engines.feed import Batches, Feed, Member
from fedsim.engines.job import Memory, Task
from fedsim.engines.module import RowModule, differ
from fedsim.engines.scaling import LossScale, Scaled, zero_where_not
from fedsim.engines.stacked_operations import PreparedDropout
from fedsim.errors import ExperimentError
from fedsim.local import RowOptimizer
from fedsim.randomness import seed_everything
from fedsim.rows import new_rows
from fedsim.system.devices import wide_dtype
from fedsim.training import Loss, Objective, train_epoch


class Trainer(Protocol):
    """What a station asks of whoever trains its members. Rows, buffers and losses lie in the engine's Memory.

    A class of these is made with (seat, task, memory, feed) in every process.
    """

    compiled: Compilation | None  # what is compiled of its work
    width: int | None  # of stacks at most, if it has such
    replays: Any  # its steps that are captured, if it has such

    def train(self, members: Sequence[Member]) -> None:
        """Each member's row learns on its worker's shard, for a round or for one step."""

    def meet_at_global_row(self, members: Sequence[Member]) -> None:
        """Begin a round of synchronous SGD, in which the members' rows hold gradients."""

    def gradients(self, step: int) -> None:
        """The gradients of the next batches, all at the global row, into the rows of the members who still have any."""

    def part(self) -> None:
        """End that round."""


@dataclass
class Partaker:
    """A member that takes part in synchronous SGD, for one round."""

    member: Member
    module: RowModule
    batches: Batches
    dropout: RoundDropout
    loss_sum: Tensor
    scale: LossScale | None
    samples: int = 0
    batch: tuple[Tensor, Tensor] | None = None  # of the step in hand

    def count(self, loss: Tensor) -> None:
        """Add what the step's batch has shown to what the round comes to."""
        assert self.batch is not None
        size = len(self.batch[1])
        self.loss_sum.add_(loss, alpha=size)
        self.samples += size


class RowTrainer:
    """Trains one row after another, with a module that is bound to each in turn."""

    replays = width = None

    def __init__(self, seat: Seat, task: Task, memory: Memory, feed: Feed) -> None:
        self._seat, self._task, self._memory, self._feed = seat, task, memory, feed
        self._rows = list(memory.rows)
        self._modules = [RowModule(task.new_module)]  # where gradients are aggregated, one for each member
        self._gradient = new_rows(1, memory.rows.shape[1], task.dtype, task.device)[0]
        self._objective = Objective(task.precision)
        self._dropout = RowDropout(task, memory, feed)
        self._step_by_step: dict[int, RoundDropout] = {}  # of workers who go step by step
        self.compiled = self._compile() if task.compile else None
        self._partakers = list[Partaker]()

    def train(self, members: Sequence[Member]) -> None:
        task, memory, module = self._task, self._memory, self._modules[0]
        self._feed.announce(members)
        tallies = {}
        for member in members:
            slot = member.slot
            with self._seat.working_on(member.worker, member.round):
                module.take(self._rows[slot], self._gradient, memory.buffers[slot])
                self._seed_layers(member, *member.moment)
                scale = self._new_scale()
                solver = task.solver if scale is None else Scaled(task.solver, scale)
                optimizer = RowOptimizer(solver, self._rows[slot], self._gradient)
                tallies[slot] = train_epoch(
                    module.module,
                    with_heartbeats(self._seat, self._feed.batches_of(member)),
                    optimizer,
                    backward=partial(self._backward, self._dropout_of(member), count(member.step or 0), scale=scale),
                )
                module.give(memory.buffers[slot])
        for slot, tally in tallies.items():  # only now, because reading a number waits for the device
            memory.train_loss[slot] = tally.loss

    def meet_at_global_row(self, members: Sequence[Member]) -> None:
        memory = self._memory
        self._feed.announce(members)
        while len(self._modules) < len(members):
            self._modules.append(RowModule(self._task.new_module))
        self._partakers = []
        for member, module in zip(members, self._modules, strict=False):
            module.take(memory.global_row, self._rows[member.slot], memory.buffers[member.slot])
            self._partakers.append(self._partaker(member, module))

    def gradients(self, step: int) -> None:
        for partaker in self._partakers:
            member = partaker.member
            if step < self._feed.steps(member.worker, member.round):
                with self._seat.working_on(member.worker, member.round):
                    self._gradient_of(partaker, step)

    def part(self) -> None:
        for partaker in self._partakers:
            with self._seat.working_on(partaker.member.worker, partaker.member.round):
                partaker.module.give(self._memory.buffers[partaker.member.slot])
            self._memory.train_loss[partaker.member.slot] = partaker.loss_sum.item() / partaker.samples

    def _partaker(self, member: Member, module: RowModule) -> Partaker:
        device = self._task.device
        module.module.train()
        loss_sum = torch.zeros((), dtype=wide_dtype(device), device=device)
        dropout = self._dropout.of(member.worker, member.round)
        batches = with_heartbeats(self._seat, self._feed.batches(member.worker, member.round))
        return Partaker(member, module, batches, dropout, loss_sum, self._new_scale())

    def _loss_of(self, partaker: Partaker, step: int) -> Tensor:
        """The objective on a partaker's batch of this step, not yet differentiated."""
        assert partaker.batch is not None
        self._seed_layers(partaker.member, partaker.member.round, step)
        return self._value(partaker.module.module, *partaker.batch, partaker.dropout, step)

    def _gradient_of(self, partaker: Partaker, step: int) -> None:
        slot, task = partaker.member.slot, self._task
        partaker.batch = next(partaker.batches)
        value = self._loss_of(partaker, step)
        self._rows[slot].zero_()
        (value if partaker.scale is None else value * partaker.scale.of()).backward()
        loss = value.detach()
        if partaker.scale is not None:
            zero_where_not(partaker.scale.unscale([self._rows[slot]]), [self._rows[slot]])
        if task.rule.takes("losses"):
            self._memory.losses[slot] = loss.item()
        partaker.count(loss)

    def _seed_layers(self, member: Member, round: int, *step: int) -> None:
        """Seed the generators that layers other than dropout draw from.

        Not by the key of dropout: PyTorch's generator of a GPU is Philox too, and would give the same words again.
        """
        seed_everything(self._task.device, self._task.seed, "forward", round, member.worker, *step)

    def _new_scale(self) -> LossScale | None:
        return LossScale((), self._task.device) if self._task.precision.scales_losses else None

    def _dropout_of(self, member: Member) -> RoundDropout:
        """The dropout of a member's round, kept for its next step where it goes step by step."""
        worker, round = member.worker, member.round
        if member.step is None:
            return self._dropout.of(worker, round, member.steps)
        if worker not in self._step_by_step or self._step_by_step[worker].round != round:
            self._step_by_step[worker] = self._dropout.of(worker, round)
        return self._step_by_step[worker]

    def _backward(
        self,
        dropout: RoundDropout,
        steps: Iterator[int],
        model: nn.Module,
        inputs: Tensor,
        targets: Tensor,
        loss: Loss | None = None,
        *,
        scale: LossScale | None,
    ) -> Tensor:
        """Add the gradient of the objective, scaled, to the parameters' `.grad`; returns it without the scale."""
        value = self._value(model, inputs, targets, dropout, next(steps))
        (value if scale is None else value * scale.of()).backward()
        return value.detach()

    def _value(self, model: nn.Module, inputs: Tensor, targets: Tensor, dropout: RoundDropout, step: int) -> Tensor:
        samples = len(inputs)
        if self.compiled and self.compiled.refusal is None and samples == self._compiled_size:
            return self.compiled(model, inputs, targets, dropout.factors(step, samples))
        with dropout.at(step, samples):
            return self._objective(model, inputs, targets)

    def _compile(self) -> Compilation:
        """Compile for whole batches; others, as the last of an epoch may be, go uncompiled."""
        task, memory = self._task, self._memory
        size = self._compiled_size = self._feed.whole_batch()
        inputs, targets = memory.train.gather(torch.arange(size))
        kept = [torch.ones(size, *d.shape, dtype=task.dtype, device=task.device) for d in self._dropout.dropouts]
        compiled = Compilation(partial(_with_dropout, self._objective), tells=self._seat.index == 0)
        compiled.rehearse(partial(_step_of_a_new, task.new_module, inputs, targets, kept), task.device, task.precision)
        return compiled


def with_heartbeats(seat: Seat, batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches; send a heartbeat before each."""
    for batch in batches:
        seat.beat()
        yield batch


def _with_dropout(
    objective: Objective, model: nn.Module, inputs: Tensor, targets: Tensor, factors: list[Tensor]
) -> Tensor:
    """The objective with dropout by these factors."""
    with PreparedDropout(factors):
        return objective(model, inputs, targets)


def _step_of_a_new(
    make: Callable[[], nn.Module],
    inputs: Tensor,
    targets: Tensor,
    factors: list[Tensor],
    objective: Callable[..., Tensor],
) -> list[Tensor]:
    """The loss of a new module, its gradients, and its buffers afterwards."""
    module = make().train()
    start = copy.deepcopy(module)
    loss = objective(module, inputs, targets, factors)
    if differ(start, module):
        raise ExperimentError("its training changes attributes or unsaved buffers")
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return [loss.detach(), *gradients, *module.buffers()]
