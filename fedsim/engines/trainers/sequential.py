"""The trainer that trains the members of a cohort one after another. The trainer in `stacked.py` trains stacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedsim.clients import RowOptimizer, State
from fedsim.clients.adapters import TrainFunction
from fedsim.core.randomness import seed_everything
from fedsim.core.rows import clip_rows, new_rows
from fedsim.core.training import Backward, Loss, MetricSums, Optimizer, train_epoch
from fedsim.engines.pool.process_context import ProcessContext
from fedsim.engines.task import SharedState, TaskSpec
from fedsim.engines.trainers.batches import Batches, BatchSource, WorkItem
from fedsim.engines.trainers.client_rounds import ClientRounds
from fedsim.engines.trainers.dropout import RoundDropout, RowDropout
from fedsim.engines.trainers.feature_losses import FeatureLosses
from fedsim.engines.trainers.further_gradients import FurtherGradients
from fedsim.engines.trainers.round_batches import RoundBatches
from fedsim.engines.trainers.row_module import RowModule
from fedsim.system.devices import wide_dtype


class Trainer(Protocol):
    """The interface of trainers. Rows, buffers and losses are in the `SharedState`.

    A trainer is made with (process, task, shared, batch_source) in every process.
    """

    @property
    def width(self) -> int | None:
        """The most rows in a stack; None if rows are trained one by one."""

    @property
    def replays(self) -> Any:
        """The captured steps; None if none are captured."""

    def train(self, members: Sequence[WorkItem]) -> None:
        """Train each member's row on its worker's shard, for a round or for one step."""

    def full_gradients(self, members: Sequence[WorkItem]) -> None:
        """Write the mean gradient of all samples of each member, at its row, to `SharedState.full_gradients`."""

    def begin_gradient_round(self, members: Sequence[WorkItem]) -> None:
        """Begin a round of synchronous SGD, in which the members' rows hold gradients."""

    def gradients(self, step: int) -> None:
        """Write the gradients of the next batches, at the global row, to the rows of the members that have one."""

    def end_gradient_round(self) -> None:
        """End the round that `begin_gradient_round` began."""


@dataclass
class SyncParticipant:
    """A member in a round of synchronous SGD."""

    member: WorkItem
    module: RowModule
    batches: Batches
    dropout: RoundDropout
    loss_sum: Tensor
    samples: int = 0
    batch: tuple[Tensor, Tensor] | None = None  # of the current step

    def count(self, loss: Tensor) -> None:
        """Add the loss of the current batch."""
        assert self.batch is not None
        size = len(self.batch[1])
        self.loss_sum.add_(loss, alpha=size)
        self.samples += size


class RowTrainer:
    """Trains one row after another, with a module that is bound to each in turn."""

    replays = width = None

    def __init__(self, process: ProcessContext, task: TaskSpec, shared: SharedState, batch_source: BatchSource) -> None:
        self._process, self._task, self._shared, self._batch_source = process, task, shared, batch_source
        self._rows = list(shared.rows)
        self._gradient = new_rows(1, shared.rows.shape[1], task.dtype, task.device)[0]
        self._client_rounds = ClientRounds(task, shared, batch_source)
        self._buffers_beside = self._client_rounds.buffers_beside()
        self._objective = task.objective
        self._dropout = RowDropout(task, shared, batch_source)
        self._modules = [RowModule(self._dropout.new_module)]  # where gradients are aggregated, one for each member
        self._further = None if task.solver.element_wise else FurtherGradients(self._dropout.new_module, task, shared)
        self._feature_losses = FeatureLosses(self._dropout.new_module, task, shared)
        self._step_by_step: dict[int, RoundDropout] = {}  # of workers who go step by step
        self._participants = list[SyncParticipant]()

    def train(self, members: Sequence[WorkItem]) -> None:
        task, shared, module = self._task, self._shared, self._modules[0]
        self._batch_source.announce(members)
        losses: dict[int, float | MetricSums] = {}
        for member in members:
            slot = member.slot
            with self._process.working_on(member.worker, member.round):
                self._seed_layers(member, *member.moment)
                state = self._client_rounds.start(self._rows[slot], slot, [member])
                module.load(self._rows[slot], self._gradient, shared.buffers[slot])
                solver = task.solver_at(member.round)
                if isinstance(solver, TrainFunction):
                    losses[slot] = self._call(solver, member, module)
                else:
                    optimizer, backward = self._optimizer(member, module, state)
                    data = with_heartbeats(self._process, self._batch_source.batches_of(member))
                    with self._feature_losses.of(module, state):
                        losses[slot] = train_epoch(module.module, data, optimizer, backward=backward)
                module.store(shared.buffers[slot])
                self._client_rounds.finish(self._rows[slot], state, slot, [member])
        for slot, loss in losses.items():  # only now, because reading a number waits for the device
            shared.train_loss[slot] = loss if isinstance(loss, float) else loss.loss

    def _optimizer(self, member: WorkItem, module: RowModule, state: State) -> tuple[Optimizer, Backward]:
        """The optimizer and the backward pass of a member's work, which begins from the state of a round."""
        row, gradient = self._rows[member.slot], self._gradient
        batches = self._batch_source.steps_of(member)
        optimizer: Optimizer = LocalOptimizer(self._task, member.round, batches, row, gradient, state)
        dropout, first = self._dropout_of(member), member.step or 0
        backward: Backward = partial(self._backward, dropout, count(first))
        if self._further is not None:
            backward_at = partial(self._backward_at, dropout)
            beside = None if self._buffers_beside is None else self._buffers_beside[member.slot]
            optimizer = self._further.begin(row, gradient, state, module, backward_at, member.round, first, beside)
            backward = self._further.backward
        return optimizer, backward

    def _call(self, function: TrainFunction, member: WorkItem, module: RowModule) -> float:
        """Let a function train a member's model; returns its mean loss."""
        data = with_heartbeats(self._process, self._batch_source.batches_of(member))
        batches = RoundBatches(data, self._batch_source.steps_of(member), self._dropout_of(member).at)
        with module.lent() as model, self._objective.precision.forwards_of(model, self._task.device):
            try:
                return function(model, batches, member.worker)
            finally:
                batches.close()

    def full_gradients(self, members: Sequence[WorkItem]) -> None:
        """One pass over the samples of each member; the dropout masks are those of the steps after its last."""
        task, shared, module = self._task, self._shared, self._modules[0]
        for member in members:
            with self._process.working_on(member.worker, member.round):
                gradient = shared.full_gradients[member.slot].zero_()
                module.load(self._rows[member.slot], gradient, shared.buffers[member.slot])
                seed_everything(task.device, task.seed, "full_gradient", member.round, member.worker)
                size, first = self._batch_source.size(member.worker), self._batch_source.steps_of(member)
                seen = self._batch_source.samples_seen(
                    member.worker, member.round, task.schedule.batch_size, "full_gradient"
                )
                dropout = self._dropout.of(member.worker, member.round, first + task.schedule.batches_of_all(size))
                for step, (inputs, targets) in enumerate(with_heartbeats(self._process, seen), first):
                    value = self._value(module.module, inputs, targets, dropout, step)
                    (value * (len(inputs) / size)).backward()

    def begin_gradient_round(self, members: Sequence[WorkItem]) -> None:
        shared = self._shared
        self._batch_source.announce(members)
        while len(self._modules) < len(members):
            self._modules.append(RowModule(self._dropout.new_module))
        self._participants = []
        for member, module in zip(members, self._modules, strict=False):
            module.load(shared.global_row, self._rows[member.slot], shared.buffers[member.slot])
            self._participants.append(self._participant(member, module))

    def gradients(self, step: int) -> None:
        for participant in self._participants:
            member = participant.member
            if step < self._batch_source.steps(member.worker, member.round):
                with self._process.working_on(member.worker, member.round):
                    self._gradient_of(participant, step)

    def end_gradient_round(self) -> None:
        for participant in self._participants:
            with self._process.working_on(participant.member.worker, participant.member.round):
                participant.module.store(self._shared.buffers[participant.member.slot])
            self._shared.train_loss[participant.member.slot] = participant.loss_sum.item() / participant.samples

    def _participant(self, member: WorkItem, module: RowModule) -> SyncParticipant:
        device = self._task.device
        module.module.train()
        loss_sum = torch.zeros((), dtype=wide_dtype(device), device=device)
        dropout = self._dropout.of(member.worker, member.round)
        batches = with_heartbeats(self._process, self._batch_source.batches(member.worker, member.round))
        return SyncParticipant(member, module, batches, dropout, loss_sum)

    def _loss_of(self, participant: SyncParticipant, step: int) -> Tensor:
        """The objective on a participant's batch of this step, not yet differentiated."""
        assert participant.batch is not None
        self._seed_layers(participant.member, participant.member.round, step)
        return self._value(participant.module.module, *participant.batch, participant.dropout, step)

    def _gradient_of(self, participant: SyncParticipant, step: int) -> None:
        slot, task = participant.member.slot, self._task
        participant.batch = next(participant.batches)
        value = self._loss_of(participant, step)
        self._rows[slot].zero_()
        value.backward()
        clip_rows(self._rows[slot], task.clip_norm)
        self._client_rounds.send_gradients(slot)
        loss = value.detach()
        if task.rule.accepts("losses"):
            self._shared.losses[slot] = loss.item()
        participant.count(loss)

    def _seed_layers(self, member: WorkItem, round: int, *step: int) -> None:
        """Seed the generators that layers other than dropout draw from.

        Not by the key of dropout: PyTorch's generator of a GPU is Philox too, and would give the same words again.
        """
        seed_everything(self._task.device, self._task.seed, "forward", round, member.worker, *step)

    def _dropout_of(self, member: WorkItem) -> RoundDropout:
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
    ) -> Tensor:
        """Add the gradient of the objective to the parameters' `.grad`; returns the objective, detached."""
        return self._backward_at(dropout, next(steps), model, inputs, targets)

    def _backward_at(
        self, dropout: RoundDropout, step: int, model: nn.Module, inputs: Tensor, targets: Tensor
    ) -> Tensor:
        value = self._value(model, inputs, targets, dropout, step)
        value.backward()
        return value.detach()

    def _value(self, model: nn.Module, inputs: Tensor, targets: Tensor, dropout: RoundDropout, step: int) -> Tensor:
        masks = partial(dropout.at, step, len(inputs))
        with self._feature_losses.added(model, inputs, masks) as added, masks():
            value = self._objective(model, inputs, targets)
        return added(value)


class LocalOptimizer(RowOptimizer):
    """The solver of a row in a round of so many batches: it accumulates and clips gradients, and has a schedule."""

    def __init__(self, task: TaskSpec, round: int, batches: int, row: Tensor, gradient: Tensor, state: State) -> None:
        super().__init__(task.solver_at(round), row, gradient, state)
        self._task, self._round, self._batches = task, round, batches
        self._steps = self._accumulated = 0

    def zero_grad(self) -> None:
        if not self._accumulated:
            self._gradient.zero_()

    def step(self) -> None:
        self._batches, self._accumulated = self._batches - 1, self._accumulated + 1
        if self._accumulated < self._task.schedule.accumulate and self._batches:
            return
        if self._accumulated > 1:
            self._gradient.div_(self._accumulated)
        clip_rows(self._gradient, self._task.clip_norm)
        solver = self._task.solver_at(self._round, self._steps)
        solver.step(self._row, self._gradient, self._state)
        self._steps, self._accumulated = self._steps + 1, 0


def with_heartbeats(process: ProcessContext, batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches; send a heartbeat before each."""
    for batch in batches:
        process.heartbeat()
        yield batch
