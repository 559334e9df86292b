"""Sequential trainer, which trains workers one after another. See `stacked.py` for the stacked trainer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedsim.clients import FeatureLoss, State
from fedsim.clients.adapters import TrainFunction
from fedsim.core.randomness import seed_everything
from fedsim.core.recorded_features import recorded_features
from fedsim.core.rows import clip_rows, new_rows
from fedsim.core.training import Loss, MetricSums, train_epoch
from fedsim.errors import ExperimentError
from fedsim.processes.process_context import ProcessContext
from fedsim.system.devices import wide_dtype
from fedsim.training.batches import Batches, BatchSource, WorkItem
from fedsim.training.client_rounds import ClientRounds
from fedsim.training.forward_functions import RoundDropout, RowDropout
from fedsim.training.row_module import RowModule
from fedsim.training.sample_gradients import SampleGradients
from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask


class Trainer(Protocol):
    """Base class of trainers, which train the workers of one process.

    A worker's row is the flat vector of its parameters or gradients. Results are written to the `SharedState`.

    Attributes:
        averages: whether the trainer has the method `step_along_mean`, which averages gradients instead of storing the
            gradient of each worker.
    """

    averages: bool

    @property
    def width(self) -> int | None:
        """Maximum number of workers that are trained at once; None if workers are trained one by one."""

    @property
    def replays(self) -> Any:
        """CUDA graphs of the training steps; None if this trainer never uses CUDA graphs."""

    def announce(self, members: Sequence[WorkItem]) -> None:
        """Announce which workers are trained next, so that their batches can be drawn together, and early on a GPU."""

    def train(self, members: Sequence[WorkItem], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Train each worker of `members` on its own samples.

        Training starts from the parameters in the worker's row, and writes the trained parameters to the same row.
        `meanwhile` is called after all steps are launched, before this process waits for the device.
        """

    def full_gradients(self, members: Sequence[WorkItem]) -> None:
        """Compute each worker's mean gradient over all its samples, at the parameters in the worker's row."""

    def begin_gradient_round(self, members: Sequence[WorkItem]) -> Any:
        """Begin a round of synchronous SGD for the given workers. Their rows will contain gradients."""

    def gradients(self, step: int) -> None:
        """Compute the gradient of the global model on each worker's next batch, and write it to the worker's row.

        Workers that have no more batches are skipped.
        """

    def end_gradient_round(self) -> None:
        """End the round that `begin_gradient_round` began."""


@dataclass
class SyncParticipant:
    """Worker in a round of synchronous SGD.

    Attributes:
        member: the worker and the steps to train, as a `WorkItem`.
        module: model that writes its gradient to the worker's row.
        batches: remaining batches of the round.
        dropout: dropout masks of the worker in the round.
        loss_sum: sum of the losses of all samples so far.
        samples: number of samples so far.
        batch: batch of the current step.
        draws: whether the model may use PyTorch's global random generators. They are then seeded before each step.
    """

    member: WorkItem
    module: RowModule
    batches: Batches
    dropout: RoundDropout
    loss_sum: Tensor
    samples: int = 0
    batch: tuple[Tensor, Tensor] | None = None
    draws: bool = True

    def count(self, loss: Tensor) -> None:
        """Add the current batch, which has the mean loss `loss`, to `loss_sum` and `samples`."""
        self.loss_sum.add_(loss, alpha=self.batch_size)
        self.samples += self.batch_size

    @property
    def batch_size(self) -> int:
        """Number of samples in the current batch."""
        assert self.batch is not None
        return len(self.batch[1])


class RowTrainer:
    """Trainer that trains one worker after another with the same module."""

    replays = width = None
    averages = False

    def __init__(self, process: ProcessContext, task: RunTask, shared: SharedState, batch_source: BatchSource) -> None:
        self._process, self._task, self._shared, self._batch_source = process, task, shared, batch_source
        self._rows = list(shared.cohort.rows)
        self._gradient = new_rows(1, shared.cohort.rows.shape[1], task.dtype, task.device)[0]
        self._client_rounds = ClientRounds(task, shared, batch_source)
        self._buffers_beside = self._client_rounds.buffers_beside()
        self._objective = task.objective
        self._dropout = RowDropout(task, shared, batch_source)
        self._modules = [RowModule(self._dropout.new_module)]  # in rounds of gradients, one module per worker
        self._points = PointModules(self._dropout.new_module, shared)
        self._samples = SampleGradients.of(task)
        self._step_by_step: dict[int, RoundDropout] = {}  # by worker, for workers that train step by step
        self._participants = list[SyncParticipant]()

    def announce(self, members: Sequence[WorkItem]) -> None:
        self._batch_source.announce(members)

    def train(self, members: Sequence[WorkItem], meanwhile: Callable[[], None] = lambda: None) -> None:
        task, shared, module = self._task, self._shared, self._modules[0]
        self.announce(members)
        losses: dict[int, float | MetricSums] = {}
        for member in members:
            slot = member.slot
            with self._process.working_on(member.worker, member.round):
                self.seed_layers(member, *member.moment)
                state = self._client_rounds.start(self._rows[slot], slot, [member])
                module.load(self._rows[slot], self._gradient, shared.cohort.buffers[slot])
                data = with_heartbeats(self._process, self._batch_source.batches_of(member))
                algorithm = task.algorithm_at(member.round, settings=task.step_settings(member.worker, member.round))
                if isinstance(algorithm, TrainFunction):
                    losses[slot] = self._call(algorithm, member, module, data)
                else:
                    steps = self._local_steps(member, module, state)
                    losses[slot] = train_epoch(module.module, data, steps, backward=steps.backward)
                module.store(shared.cohort.buffers[slot])
                self._client_rounds.finish(self._rows[slot], state, slot, [member])
        meanwhile()
        for slot, loss in losses.items():  # last, because reading values waits for the device
            shared.cohort.train_loss[slot] = loss if isinstance(loss, float) else loss.loss

    def _local_steps(self, member: WorkItem, module: RowModule, state: State) -> LocalSteps:
        row, gradient = self._rows[member.slot], self._gradient
        beside = None if self._buffers_beside is None else self._buffers_beside[member.slot]
        dropout, batches = self._dropout_of(member), self._batch_source.steps_of(member)
        points, samples = self._points, self._samples
        return LocalSteps(self._task, member, batches, module, row, gradient, state, dropout, points, beside, samples)

    def _call(self, function: TrainFunction, member: WorkItem, module: RowModule, data: Batches) -> float:
        """Train a worker's model with the user's training function, and return the mean loss."""
        batches = RoundBatches(data, self._batch_source.steps_of(member), self._dropout_of(member).at)
        precision = self._objective.precision
        with module.lent() as model, precision.forwards_of(model, self._task.device), closing(batches):
            return function(model, batches, member.worker)

    def full_gradients(self, members: Sequence[WorkItem]) -> None:
        """Compute each worker's mean gradient over all its samples; see `Trainer.full_gradients`."""
        task, shared, module = self._task, self._shared, self._modules[0]
        for member in members:
            with self._process.working_on(member.worker, member.round):
                gradient = shared.cohort.full_gradients[member.slot].zero_()
                module.load(self._rows[member.slot], gradient, shared.cohort.buffers[member.slot])
                seed_everything(task.device, task.experiment.seed, "full_gradient", member.round, member.worker)
                size, first = self._batch_source.size(member.worker), self._batch_source.steps_of(member)
                schedule = task.schedule.of(member.worker, member.round)
                seen = self._batch_source.samples_seen(
                    member.worker, member.round, schedule.batch_size, "full_gradient"
                )
                dropout = self._dropout.of(member.worker, member.round, first + schedule.batches_of_all(size))
                for step, (inputs, targets) in enumerate(with_heartbeats(self._process, seen), first):
                    with dropout.at(step, len(inputs)):
                        value = self._objective(module.module, inputs, targets)
                    (value * (len(inputs) / size)).backward()

    def begin_gradient_round(self, members: Sequence[WorkItem]) -> list[SyncParticipant]:
        self._batch_source.announce(members)
        while len(self._modules) < len(members):
            self._modules.append(self._new_row_module())
        self._participants = list(map(self._participant, members, self._modules))
        return self._participants

    def _new_row_module(self) -> RowModule:
        return RowModule(self._dropout.new_module)

    def _gradient_of(self, member: WorkItem) -> Tensor:
        """Return the tensor [d] that contains a worker's gradient in a round of synchronous SGD."""
        return self._rows[member.slot]

    def gradients(self, step: int) -> None:
        for participant in self._participants:
            member = participant.member
            if step < self._batch_source.steps(member.worker, member.round):
                with self._process.working_on(member.worker, member.round):
                    loss = self.gradient(participant, step)
                    if self._task.experiment.rule.accepts("losses"):
                        self._shared.cohort.losses[member.slot] = loss.item()
                    participant.count(loss)

    def end_gradient_round(self) -> None:
        for participant in self._participants:
            with self._process.working_on(participant.member.worker, participant.member.round):
                participant.module.store(self._shared.cohort.buffers[participant.member.slot])
            self._shared.cohort.train_loss[participant.member.slot] = participant.loss_sum.item() / participant.samples

    def _participant(self, member: WorkItem, module: RowModule) -> SyncParticipant:
        device, shared = self._task.device, self._shared
        module.load(shared.server.row, self._gradient_of(member), shared.cohort.buffers[member.slot])
        module.module.train()
        loss_sum = torch.zeros((), dtype=wide_dtype(device), device=device)
        dropout = self._dropout.of(member.worker, member.round)
        batches = with_heartbeats(self._process, self._batch_source.batches(member.worker, member.round))
        return SyncParticipant(member, module, batches, dropout, loss_sum)

    def _loss_of(self, participant: SyncParticipant, step: int) -> Tensor:
        """Return the mean loss on the participant's current batch, without a backward pass.

        `step` is the number of the step in the round.
        """
        assert participant.batch is not None
        if participant.draws:
            self.seed_layers(participant.member, participant.member.round, step)
        inputs, targets = participant.batch
        with participant.dropout.at(step, len(inputs)):
            return self._objective(participant.module.module, inputs, targets)

    def gradient(self, participant: SyncParticipant, step: int) -> Tensor:
        """Write the gradient on the participant's next batch to the worker's row, and return the mean loss."""
        slot = participant.member.slot
        participant.batch = next(participant.batches)
        loss = self._loss_of(participant, step)
        self._rows[slot].zero_()
        loss.backward()
        settings = self._task.step_settings(participant.member.worker, participant.member.round)
        clip_rows(self._rows[slot], self._task.clip_norm(settings))
        self._client_rounds.send_gradients(slot)
        return loss.detach()

    def seed_layers(self, member: WorkItem, round: int, *step: int) -> None:
        """Seed PyTorch's global random generators for a worker's forward passes in a round (or in one `step`)."""
        seed_everything(self._task.device, self._task.experiment.seed, "forward", round, member.worker, *step)

    def _dropout_of(self, member: WorkItem) -> RoundDropout:
        """Return the dropout masks of `member` in its round."""
        worker, round = member.worker, member.round
        if member.step is None:
            return self._dropout.of(worker, round, member.steps)
        if worker not in self._step_by_step or self._step_by_step[worker].round != round:
            self._step_by_step[worker] = self._dropout.of(worker, round)
        return self._step_by_step[worker]


class PointModules:
    """Modules for gradients and features at points (parameter vectors) that differ from the trained parameters.

    Args:
        make: function that returns a new module.
        shared: tensors of the run.
    """

    def __init__(self, make: Callable[[], nn.Module], shared: SharedState) -> None:
        self._make, self._shared, self._made = make, shared, list[RowModule]()

    @cached_property
    def room(self) -> tuple[Tensor, Tensor]:
        """Two reusable tensors [d], for the parameters and the gradient of one of the modules."""
        return torch.empty_like(self._shared.server.row), torch.empty_like(self._shared.server.row)

    @cached_property
    def buffers(self) -> Tensor:
        """Reusable tensor [b] for the buffers of one of the modules."""
        return torch.empty_like(self._shared.server.buffers)

    def at(self, number: int, point: Tensor, gradient: Tensor, buffers: Tensor) -> RowModule:
        """Return one of the modules, with its parameters, gradients and buffers set to these flat vectors.

        Args:
            number: number of the module, from 0. A module that does not exist yet is created.
            point: parameters [d]. The module's parameters become views of this tensor.
            gradient: gradients [d]. The gradients of the module's parameters become views of this tensor.
            buffers: buffers [b], which are copied.
        """
        while len(self._made) <= number:
            self._made.append(RowModule(self._make))
        self._made[number].load(point, gradient, buffers)
        self._made[number].module.train()
        return self._made[number]


@dataclass
class LocalSteps:
    """Local training of one worker, used like an optimizer (`zero_grad`, `backward`, `step`).

    Attributes:
        task: description of the run.
        member: the worker and the steps to train, as a `WorkItem`.
        batches: number of batches that remain to be trained.
        module: module whose parameters are views of `row` [d] and whose gradients are views of `gradient` [d].
        state: state of the client algorithm.
        dropout: dropout masks of the worker in the round.
        points: modules that compute gradients and features at parameters other than those in `row`.
        buffers_beside: buffers [b] of a second, personal model that the worker trains; None if there is none.
        samples: object that computes private gradients; None for ordinary gradients.
        steps: number of client algorithm steps so far.
        accumulated: number of batches since the last client algorithm step.
    """

    task: RunTask
    member: WorkItem
    batches: int
    module: RowModule
    row: Tensor
    gradient: Tensor
    state: State
    dropout: RoundDropout
    points: PointModules
    buffers_beside: Tensor | None
    samples: SampleGradients | None = None
    steps: int = 0
    accumulated: int = 0

    def __post_init__(self) -> None:
        self._objective, algorithm = self.task.objective, self.task.algorithm
        self._feature_points = algorithm.feature_points(self.state) if isinstance(algorithm, FeatureLoss) else ()
        self._settings = self.task.step_settings(self.member.worker, self.member.round)
        self._batch_number = self.member.step or 0  # number of the current batch in the worker's round

    def zero_grad(self) -> None:
        if not self.accumulated:
            self.gradient.zero_()

    def backward(self, model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss | None = None) -> Tensor:
        """Compute the mean loss of a batch, add its gradient to the parameters' `.grad`, and return the detached loss.

        The argument `loss` is ignored, because the experiment defines the loss function.
        """
        self._batch = inputs, targets
        if self.samples is not None:
            return self._add_private_gradient(self.samples, inputs, targets)
        masks = partial(self.dropout.at, self._batch_number, len(inputs))
        if isinstance(self.task.algorithm, FeatureLoss) and self._feature_points:
            at_points = [self._features_at(place, masks) for place in range(len(self._feature_points))]
            with recorded_features(model) as recorded, masks():
                value = self._objective(model, inputs, targets)
            features = self._objective.precision.widened(recorded.of(len(inputs)))
            value = value + self.task.algorithm.feature_loss(features, at_points).mean()
        else:
            with masks():
                value = self._objective(model, inputs, targets)
        value.backward()
        return value.detach()

    def step(self) -> None:
        self.batches, self.accumulated = self.batches - 1, self.accumulated + 1
        if self.accumulated == self.task.schedule.accumulation_steps or not self.batches:
            if self.accumulated > 1:
                self.gradient.div_(self.accumulated)
            clip_rows(self.gradient, self.task.clip_norm(self._settings))
            algorithm = self.task.algorithm_at(self.member.round, self.steps, settings=self._settings)
            if algorithm.element_wise:
                algorithm.step(self.row, self.gradient, self.state)
            else:
                algorithm.step_rows(self.row, self.gradient, self.state, self._gradient_at)
            self.steps, self.accumulated = self.steps + 1, 0
        self._batch_number += 1

    def _add_private_gradient(self, samples: SampleGradients, inputs: Tensor, targets: Tensor) -> Tensor:
        """Add the mean of the samples' clipped gradients, with noise, to the gradient. Return the mean loss."""
        step, n, row = self._batch_number, len(inputs), self.row.detach().unsqueeze(0)
        factors = [factor.unsqueeze(0) for factor in self.dropout.factors(step, n)]
        buffers = samples.module.unpack_buffers(self._buffers_of_row().unsqueeze(0))
        weights, moment = row.new_full((1, n), 1 / n), (self.member.round, self.member.worker, step)
        losses, gradients = samples(row, buffers, inputs.unsqueeze(0), targets.unsqueeze(0), weights, factors, [moment])
        self.gradient.add_(gradients[0])
        return losses[0]

    @torch.no_grad()
    def _features_at(self, place: int, masks: Callable[[], AbstractContextManager[Any]]) -> Tensor:
        """Return another model's features of the current batch.

        Args:
            place: number of the other model, from 0.
            masks: function that returns a context with the dropout masks of the batch.
        """
        inputs, precision = self._batch[0], self._objective.precision
        point, gradient = self._feature_points[place], self.points.room[1]
        model = self.points.at(1 + place, point, gradient, self._buffers_of_row()).module
        with masks(), recorded_features(model) as recorded, precision.forward(inputs.device):
            model(inputs.clone())
        return precision.widened(recorded.of(len(inputs)))

    def _gradient_at(self, point: Tensor) -> Tensor:
        """Return the gradient [d] on the current batch at the parameters `point` [d]."""
        buffers = self._buffers_of_row() if self.buffers_beside is None else self.buffers_beside
        row, gradient = self.points.room
        module = self.points.at(0, row, gradient, buffers)
        with torch.no_grad():
            row.copy_(point)
        gradient.zero_()
        self.backward(module.module, *self._batch)
        module.layout.read_buffers(module.module, out=buffers)
        clip_rows(gradient, self.task.clip_norm(self._settings))
        return gradient.clone()

    def _buffers_of_row(self) -> Tensor:
        """Return a copy of the buffers [b] of the worker's module."""
        return self.module.layout.read_buffers(self.module.module, out=self.points.buffers)


class RoundBatches:
    """Batches (inputs, targets) of a round, for a user's training function. They can be iterated only once.

    Args:
        batches: batches of the round.
        count: number of batches.
        masks: `masks(step, samples)` returns a context with the dropout masks of a batch.
    """

    def __init__(self, batches: Batches, count: int, masks: Callable[[int, int], AbstractContextManager[Any]]) -> None:
        self._batches, self._count, self._masks = batches, count, masks
        self._reader, self._begun = self._read(), False
        self.close = self._reader.close

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._begun:
            raise ExperimentError(
                "local.algorithm: the function iterates over its batches twice; iterate once, and use local.epochs to "
                "set the number of passes over a worker's samples"
            )
        self._begun = True
        return self._reader

    def _read(self) -> Generator[tuple[Tensor, Tensor], None, None]:
        for step, (inputs, targets) in enumerate(self._batches):
            with self._masks(step, len(inputs)):
                yield inputs, targets


def with_heartbeats(process: ProcessContext, batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches, and send a heartbeat before each batch."""
    for batch in batches:
        process.heartbeat()
        yield batch
