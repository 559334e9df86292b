"""What one process does in a round. All engines run this code; they differ in how many processes run it, and where.

The public methods of `Executor` are the lines of a round. Methods of `Engine` with the same names call them in every
process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from fedsim.core.rows import index_of, new_rows, pull_down
from fedsim.engines.aggregator import weights_of
from fedsim.engines.deferred_check import DeferredCheck
from fedsim.engines.evaluation import Evaluation
from fedsim.engines.exchange import Exchange, balance_load
from fedsim.engines.out_of_memory import explain_oom
from fedsim.engines.pool.process_context import ProcessContext
from fedsim.engines.round_stats import AggregationContext, AggregationStats, GradientRoundStats, SentUpdates
from fedsim.engines.sample_losses import SampleLosses
from fedsim.engines.task import SharedState, TaskSpec
from fedsim.engines.trainers.batches import BatchSource, WorkItem
from fedsim.engines.trainers.capture import can_capture
from fedsim.engines.trainers.row_module import RowModule
from fedsim.engines.trainers.sequential import Trainer
from fedsim.engines.worker_evaluation import Tested, WorkerTests
from fedsim.processing import apply_chain
from fedsim.system.c_libraries import keep_freed_memory
from fedsim.system.devices import synchronize
from fedsim.system.precision import full_precision

MakeTrainer = Callable[[ProcessContext, TaskSpec, SharedState, BatchSource], Trainer]


class Executor:
    """One process's share of the work of an engine: of the rows, the columns and the test batches.

    Call the methods within `environment`.

    Args:
        exchange: what this process shares with the others, and how.
        shared: where the results go.
        make_trainer: makes the trainer of this process.
    """

    def __init__(self, exchange: Exchange, task: TaskSpec, shared: SharedState, make_trainer: MakeTrainer) -> None:
        if task.device.type == "cpu":
            keep_freed_memory()
        self.exchange, self.process, self.task, self.shared = exchange, exchange.process, task, shared
        self.module = RowModule(task.new_module)
        self.gradient = new_rows(1, self.module.layout.d, task.dtype, task.device)[0]
        self.batch_source = BatchSource(task, shared)
        self._loss_on_samples = SampleLosses(task, self.module, self.gradient, self.batch_source)
        self.aggregator = exchange.aggregator(task, shared, has_root=self.batch_source.root is not None)
        # A captured step keeps the precision in which it was captured.
        with explain_oom(task, self.process.count), self.in_precision():
            self.trainer = make_trainer(self.process, task, shared, self.batch_source)
        captured = self.trainer.replays is not None and task.cuda_graphs is not False and can_capture(task.device)
        evaluated = partial(Evaluation, task, shared, self.module, exchange.index, exchange.count, captured=captured)
        self._evaluations = [evaluated("test"), evaluated("validation")]

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """In the block, numbers have full precision, and an out-of-memory error suggests smaller settings."""
        with explain_oom(self.task, self.process.count, self.trainer.width), full_precision(self.task.device):
            yield

    def in_precision(self) -> contextlib.AbstractContextManager[None]:
        """In the block, numbers have the precision of training, which may be lower."""
        return self.task.precision.training(self.task.device)

    def place(self, cohort: Sequence[int], round: int) -> None:
        """Decide which process trains which members of a cohort."""
        self._mine(cohort, round)

    def pull_down(self, cohort: Sequence[int], round: int) -> None:
        """Copy the global model to the rows of this process's members of the cohort.

        The engine has loaded the state that workers keep.
        """
        task, shared = self.task, self.shared
        members = self._mine(cohort, round)
        index = index_of([member.slot for member in members], task.device)
        if task.sync_in(round) == "parameters":
            pull_down(self.aggregator.sent_row(round), shared.rows, index)
        if task.buffers != "local":
            pull_down(shared.global_buffers, shared.buffers, index)
        synchronize(task.device)

    def full_gradients(self, cohort: Sequence[int], round: int) -> None:
        """Compute the gradients of this process's members of the cohort over all their samples."""
        with self.in_precision():
            self.trainer.full_gradients(self._mine(cohort, round))
        synchronize(self.task.device)

    def global_losses(self, workers: Sequence[int], round: int) -> list[float]:
        """The global model's mean loss on each worker's samples; of this process's workers, or of all in ranks."""
        losses, row, buffers = torch.zeros(len(workers)).double(), self.shared.global_row, self.shared.global_buffers
        for place in range(self.exchange.index, len(workers), self.exchange.count):
            with self.process.working_on(workers[place], round):
                losses[place] = self._loss_on_samples(row, buffers, workers[place], round)
        self.exchange.collect(losses)
        return losses.tolist()

    def train(self, cohort: Sequence[int], round: int) -> None:
        """Train this process's members of the cohort, each on its own row and shard; their rows become updates."""
        members = self._mine(cohort, round)
        if self.task.rule.accepts("losses"):
            for member in members:
                worker, row, buffers = member.worker, self.shared.rows[member.slot], self.shared.buffers[member.slot]
                with self.process.working_on(worker, round):
                    self.shared.losses[member.slot] = self._loss_on_samples(row, buffers, worker, round)
        with self.in_precision():
            self.trainer.train(members)
        self.aggregator.begin(round, [member.slot for member in members])
        synchronize(self.task.device)

    def train_apart(self, members: Sequence[WorkItem]) -> None:
        """Train this process's share of members whose rounds differ. Their rows hold the parameters to start from."""
        self.train_mine(self._share_of(members))

    def train_mine(self, members: Sequence[WorkItem]) -> None:
        """Train members of this process alone."""
        with self.in_precision():
            if self.task.solver.full_gradient:
                self.trainer.full_gradients(members)
            self.trainer.train(members)
        synchronize(self.task.device)

    def attack(self, cohort: Sequence[int], round: int) -> None:
        """Replace the updates of the Byzantine workers of the cohort."""
        self.aggregator.attack(self.context(cohort, round))
        synchronize(self.task.device)

    def process_updates(self, cohort: Sequence[int], round: int) -> SentUpdates:
        """Apply the processors to the updates of this process's members of the cohort."""
        sent = SentUpdates()
        self._process(self._mine(cohort, round), self.context(cohort, round), sent)
        synchronize(self.task.device)
        return self.exchange.total(sent.on_host())

    def aggregate(self, cohort: Sequence[int], round: int) -> AggregationStats:
        """Apply the rule to the cohort's updates. The result stays here for `server_step`."""
        return self.aggregator.aggregate(self.context(cohort, round)).on_host()

    def server_step(self) -> None:
        """Move the global row along the aggregated update."""
        self.aggregator.server_step()
        synchronize(self.task.device)

    def combine_buffers(self, cohort: Sequence[int], round: int, excluded: Sequence[int]) -> None:
        """Update the global buffers from those of the cohort, without the excluded workers."""
        self.aggregator.combine_buffers(self.context(cohort, round), excluded)
        synchronize(self.task.device)

    def test(self, round: int) -> None:
        """Test the global model on this process's share of the test batches and of the validation batches."""
        for evaluation in self._evaluations:
            evaluation(round, self.process.heartbeat)
            for values in evaluation.results:
                self.exchange.collect(values)

    def evaluate_workers(self, workers: Sequence[int], round: int, fine_tune: int) -> dict[int, Tested]:
        """Test the models of this process's share of some workers on their own test samples; no more than a cohort.

        The engine has loaded the state that these workers keep. The rows are overwritten.

        Args:
            fine_tune: epochs of local training of the global model, after which it is tested again; 0: none.
        """
        task, shared, tests = self.task, self.shared, WorkerTests(self.task, self.shared, self.batch_source)
        members = [member for member in self._mine(workers, round) if member.worker != self.batch_source.root]
        tested = {}
        for member in members:
            with self.process.working_on(member.worker, round):
                tested[member.worker] = tests.before_training(member)
            shared.rows[member.slot] = shared.global_row
            if task.buffers != "local":
                shared.buffers[member.slot] = shared.global_buffers
        if fine_tune:
            ends = task.solver.has("personal_rows")  # what they keep is part of the personal model
            members = [
                m._replace(steps=fine_tune * self.batch_source.steps_of_epoch(m.worker), ends=ends) for m in members
            ]
            self.train_mine(members)
            for member in members:
                tested[member.worker] |= tests.after_training(member)
        return self.exchange.gather(tested)

    def rule_state(self) -> tuple[dict[str, np.ndarray], bool]:
        """The state of the rule, and whether there is a last update.

        By value: tensors would travel as shared memory, which a killed process would leave behind.
        """
        state = {name: tensor.cpu().numpy() for name, tensor in self.aggregator.rule_state().items()}
        return state, self.aggregator.has_last

    def restore_rule(self, state: dict[str, np.ndarray], has_last: bool) -> None:
        """Continue with the state of a rule."""
        self.aggregator.restore_rule({name: torch.from_numpy(array) for name, array in state.items()})
        self.aggregator.has_last = has_last

    def end_round(self, round: int) -> None:
        """Begin with parameters if this was the last round in which gradients are aggregated."""
        if round == self.task.gradient_rounds < self.task.rounds:
            self.aggregator.begin_with_parameters()

    def begin_with_parameters(self) -> None:
        """Reset the states of rule and server after the last round in which gradients are aggregated."""
        self.aggregator.begin_with_parameters()

    def replay_refusal(self) -> str | None:
        """Why this process does not replay captured steps."""
        replays = self.trainer.replays
        return "only steps of stacks are" if replays is None else replays.refusal

    def train_on_averaged_gradients(self, cohort: Sequence[int], round: int) -> AggregationStats:
        """Synchronous SGD: at every step the cohort's gradients are aggregated, and one optimizer step is taken.

        The rows hold gradients here, all of them at the global row. A worker without data left is excluded from the
        remaining steps.
        """
        check = self.aggregator.deferred_check
        stats = self._steps_checked_later(cohort, round, check) if check is not None and check.usable else None
        if stats is None:
            stats = self._steps_together(cohort, round)
        self.end_round(round)
        if self.task.processors:
            stats.sent = self.exchange.total(stats.sent)
        return stats

    def _steps_together(self, cohort: Sequence[int], round: int) -> AggregationStats:
        of_round, members = GradientRoundStats(cohort), self._mine(cohort, round)
        self.trainer.begin_gradient_round(members)
        for step, context in enumerate(self._contexts_of_steps(cohort, round)):
            if not self.task.processors and self.process.index == 0:
                of_round.sent.add(len(context.slots), len(context.slots) * self.shared.global_row.nbytes)
            stats = self.exchange.average_gradients(self.task, step, context, self.trainer)
            of_round.add(context, stats or self._step_together(step, context, members, of_round.sent))
        self.trainer.end_gradient_round()
        return of_round.total()

    def _steps_checked_later(self, cohort: Sequence[int], round: int, check: DeferredCheck) -> AggregationStats | None:
        """The steps of a round, after which all rows are checked together.

        If a row is not finite, the result is None, with the global row and the buffers as before. Such a row may also
        make a model or a rule fail, so any error repeats the round with a check at each step.
        """
        had_last = self.aggregator.has_last
        before = {name: rows.clone() for name, rows in self.shared.worker_rows.items()}
        check.begin()
        try:
            stats = self._steps_together(cohort, round)
        except Exception:
            stats = None
        if check.end(failed=stats is None):
            return stats
        self.aggregator.has_last = had_last
        for name, rows in before.items():
            self.shared.worker_rows[name].copy_(rows)
        return None

    def _step_together(
        self, step: int, context: AggregationContext, members: Sequence[WorkItem], sent: SentUpdates
    ) -> AggregationStats:
        """A step of synchronous SGD: the lines of a round of federated averaging, with gradients as updates."""
        aggregator, barrier = self.aggregator, self.exchange.barrier
        with self.in_precision():
            self.trainer.gradients(step)
        aggregator.begin(context.moment[0], [member.slot for member in members])
        barrier(self.task)
        if self.task.byzantine.in_round(context.moment[0]):
            aggregator.attack(context)
            barrier(self.task)
        if self.task.processors:
            self._process(members, context, sent)
            barrier(self.task)
        stats = aggregator.aggregate(context)
        aggregator.server_step()
        barrier(self.task)
        return stats

    def _process(self, members: Sequence[WorkItem], context: AggregationContext, sent: SentUpdates) -> None:
        """Apply the processors to what those members send that take part in an aggregation."""
        task, rows, active = self.task, self.shared.rows, set(context.workers)
        sent_columns = task.solver.personal_columns.others(rows.shape[1])
        personal = task.solver.personal_columns.width > 0
        members = [member for member in members if member.worker in active]  # the server's own row is not sent
        for member in members:
            metrics: dict[str, Any] = {}
            with self.process.working_on(member.worker, context.moment[0]):
                coordinates = (*context.moment, member.worker)
                row, residuals = rows[member.slot], {n: e[member.slot] for n, e in self.shared.residuals.items()}
                parts = [row, *residuals.values()]
                if personal:
                    parts = [sent_columns.of(part) for part in parts]
                given = dict(zip(residuals, parts[1:], strict=True))
                nbytes = apply_chain(task.processors, parts[0], task.seed, coordinates, metrics, given)
                if task.nonfinite != "keep":
                    for residual in parts[1:]:  # NaN that the update has left out would be in later ones
                        parts[0] += (residual * 0).sum()
                if personal:
                    for whole, part in zip([row, *residuals.values()], parts, strict=True):
                        sent_columns.write(whole, part)
            sent.add(1, nbytes, metrics)
        self.aggregator.rows_processed([member.slot for member in members])

    def context(self, cohort: Sequence[int], round: int) -> AggregationContext:
        """The aggregation of a whole cohort."""
        samples = [self.batch_source.size(worker) for worker in cohort]
        weights = weights_of(self.task, self.shared, cohort, samples)
        return AggregationContext(range(len(cohort)), list(cohort), weights, (round,))

    def _contexts_of_steps(self, cohort: Sequence[int], round: int) -> Iterator[AggregationContext]:
        """The aggregations of a round of synchronous SGD: at each step, of the workers that still have data."""
        works = [(self.task.schedule.of(worker, round), self.batch_source.size(worker)) for worker in cohort]
        batch_sizes: list[int] = []
        for step in range(max(schedule.steps_for(n) for schedule, n in works)):
            if batch_sizes != (batch_sizes := [schedule.batch_size_at(step, n) for schedule, n in works]):
                active = [slot for slot, size in enumerate(batch_sizes) if size]
                workers, samples = [cohort[slot] for slot in active], [batch_sizes[slot] for slot in active]
                weights = weights_of(self.task, self.shared, workers, samples)
                if weights is not None and not weights.any():
                    return  # the workers that still have data have weight 0
            yield AggregationContext(active, workers, weights, (round, step))

    def _mine(self, cohort: Sequence[int], round: int) -> list[WorkItem]:
        """The members that this process trains: of the cohort, and the server if it has a row of its own."""
        workers, slots = list(cohort), list(range(len(cohort)))
        if self.batch_source.root is not None:
            workers, slots = [*workers, self.batch_source.root], [*slots, len(self.shared.rows) - 1]
        steps = [self.task.schedule.of(k, round).steps_for(self.batch_source.size(k)) for k in workers]
        return [WorkItem(row, workers[place], round) for place, row in self.exchange.assign(slots, steps)]

    def _share_of(self, members: Sequence[WorkItem]) -> list[WorkItem]:
        """A worker that trains step by step stays with one process, whose batch source has its next batch."""
        index, count = self.exchange.index, self.exchange.count
        by_step = [member for member in members if member.step is not None]
        rounds = [member for member in members if member.step is None]
        assignment = balance_load([self.batch_source.steps_of(member) for member in rounds], count)[index]
        return [rounds[place] for place in assignment] + [member for member in by_step if member.slot % count == index]
