"""Rounds of synchronous SGD: the gradient of each step, computed for one worker after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.core.model_inputs import Inputs
from fedsim.core.randomness import seed_everything
from fedsim.core.rows import clip_rows
from fedsim.processes.process_context import ProcessContext
from fedsim.system.devices import wide_dtype
from fedsim.training.batches import Batches, BatchSource, WorkItem
from fedsim.training.client_rounds import ClientRounds
from fedsim.training.forward_functions import RoundDropout, RowDropout
from fedsim.training.row_module import RowModule
from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask


@dataclass
class SyncParticipant:
    """Worker in a round of synchronous SGD.

    Attributes:
        member: the worker and the steps to train, as a `WorkItem`.
        module: model whose gradients are views of the worker's gradient vector [d].
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
    batch: tuple[Inputs, Tensor] | None = None
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


class GradientRounds:
    """Base class of `RowTrainer`, with the rounds of synchronous SGD (see `Trainer.begin_gradient_round`)."""

    def __init__(self, process: ProcessContext, task: RunTask, shared: SharedState, batch_source: BatchSource) -> None:
        self._process, self._task, self._shared, self._batch_source = process, task, shared, batch_source
        self._rows = list(shared.cohort.rows)
        self._client_rounds = ClientRounds(task, shared, batch_source)
        self._objective = task.objective
        self._dropout = RowDropout(task, shared, batch_source)
        self._modules = [RowModule(self._dropout.new_module)]  # in rounds of gradients, one module per worker
        self._participants = list[SyncParticipant]()

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
        losses = dict[int, Tensor]()
        for participant in self._participants:
            member = participant.member
            if step < self._batch_source.steps(member.worker, member.round):
                with self._process.working_on(member.worker, member.round):
                    losses[member.slot] = loss = self.gradient(participant, step)
                    participant.count(loss)
        if losses and self._task.experiment.rule.accepts("losses"):
            self._shared.cohort.losses[[*losses]] = torch.stack([*losses.values()]).cpu().double()

    def end_gradient_round(self) -> None:
        for participant in self._participants:
            with self._process.working_on(participant.member.worker, participant.member.round):
                participant.module.store(self._shared.cohort.buffers[participant.member.slot])
        if self._participants:
            slots = [participant.member.slot for participant in self._participants]
            sums = torch.stack([participant.loss_sum for participant in self._participants]).cpu().double()
            samples = torch.tensor([participant.samples for participant in self._participants])
            self._shared.cohort.train_loss[slots] = sums / samples

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
        with participant.dropout.at(step, len(targets)):
            return self._objective(participant.module.module, inputs, targets)

    def gradient(self, participant: SyncParticipant, step: int) -> Tensor:
        """Compute and store the gradient that the worker sends for its next batch, and return the mean loss."""
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


def with_heartbeats(process: ProcessContext, batches: Batches) -> Batches:
    """Yield the batches, and send a heartbeat before each batch."""
    for batch in batches:
        process.heartbeat()
        yield batch
