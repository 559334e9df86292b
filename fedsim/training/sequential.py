"""Sequential trainer, which trains workers one after another. See `stacked.py` for the stacked trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedsim.clients.adapters import TrainFunction
from fedsim.core.randomness import seed_everything
from fedsim.core.rows import new_rows
from fedsim.core.training import MetricSums, train_epoch
from fedsim.processes.process_context import ProcessContext
from fedsim.training.batches import BatchSource, WorkItem
from fedsim.training.forward_functions import RoundDropout
from fedsim.training.gradient_rounds import GradientRounds, with_heartbeats
from fedsim.training.gradients_at_points import PointModules
from fedsim.training.local_modes import gradients_for, optimizer_for
from fedsim.training.local_training import LocalModel
from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask
from fedsim.training.train_functions import train_by_function


class RowTrainer(GradientRounds):
    """Trainer that trains one worker after another with the same module."""

    replays = width = stacked_tests = None
    averages = False

    def __init__(self, process: ProcessContext, task: RunTask, shared: SharedState, batch_source: BatchSource) -> None:
        super().__init__(process, task, shared, batch_source)
        self._gradient = new_rows(1, shared.cohort.rows.shape[1], task.dtype, task.device)[0]
        modules = PointModules(self._dropout.new_module, shared.server.row)
        self._gradients_of = gradients_for(task, modules)
        self._optimizer_of = optimizer_for(task, modules, self._client_rounds.buffers_beside())
        self._step_by_step: dict[int, RoundDropout] = {}  # by worker, for workers that train step by step

    def announce(self, members: Sequence[WorkItem]) -> None:
        self._batch_source.announce(members)

    def train(self, members: Sequence[WorkItem], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Train the model of each worker in `members`; see `Trainer.train`."""
        task, shared, module = self._task, self._shared, self._modules[0]
        self.announce(members)
        losses, sums = dict[int, float](), dict[int, MetricSums]()
        for member in members:
            slot, row, buffers = member.slot, self._rows[member.slot], shared.cohort.buffers[member.slot]
            with self._process.working_on(member.worker, member.round):
                self.seed_layers(member, *member.moment)
                state = self._client_rounds.start(row, slot, [member])
                module.load(row, self._gradient, buffers)
                count, dropout = self._batch_source.steps_of(member), self._dropout_of(member)
                local = LocalModel(member, count, module, row, self._gradient, buffers, state, dropout)
                batches = with_heartbeats(self._process, self._batch_source.batches_of(member))
                if isinstance(task.algorithm, TrainFunction):
                    losses[slot] = train_by_function(task, local, batches)
                else:
                    gradients = self._gradients_of(local)
                    optimizer = self._optimizer_of(local, gradients)
                    sums[slot] = train_epoch(module.module, batches, optimizer, backward=gradients)
                module.store(buffers)
                self._client_rounds.finish(row, state, slot, [member])
        meanwhile()
        for slot, of_worker in zip(sums, MetricSums.on_host([*sums.values()]), strict=True):  # last, because this waits
            losses[slot] = of_worker.loss
        for slot, loss in losses.items():
            shared.cohort.train_loss[slot] = loss

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
                    with dropout.at(step, len(targets)):
                        value = self._objective(module.module, inputs, targets)
                    (value * (len(targets) / size)).backward()

    def _dropout_of(self, member: WorkItem) -> RoundDropout:
        """Return the dropout masks of `member` in its round."""
        worker, round = member.worker, member.round
        if member.step is None:
            return self._dropout.of(worker, round, member.steps)
        if worker not in self._step_by_step or self._step_by_step[worker].round != round:
            self._step_by_step[worker] = self._dropout.of(worker, round)
        return self._step_by_step[worker]
