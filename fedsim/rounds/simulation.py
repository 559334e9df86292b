"""One round of federated averaging or synchronous SGD, as every process runs it. Start reading the code here."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedsim.clients import CohortGradient, PersonalModel
from fedsim.clients.algorithm import state_at_first
from fedsim.config.experiment import Experiment
from fedsim.config.schema import OWN
from fedsim.core.randomness import numpy_generator, sample_workers
from fedsim.core.rows import index_of, pull_down
from fedsim.core.timer import PhaseTimer
from fedsim.data import Shards
from fedsim.errors import DivergedError, ExperimentError, show
from fedsim.records.record import MOST_NAMES, RoundRecord
from fedsim.records.round_stats import AggregationStats, GradientRoundStats, MetricLog, SentUpdates
from fedsim.records.worker_results import Tested, WorkerResults
from fedsim.rounds.aggregator import Aggregator, ReportCheck, StreamedSums
from fedsim.rounds.executor import Executor
from fedsim.rounds.parameter_server import ParameterServer
from fedsim.rounds.private_rounds import PrivateRounds
from fedsim.rounds.round_clock import RoundClock
from fedsim.rounds.update_steps import AttackStep, ProcessingStep, UpdateStep
from fedsim.server import Cohort, CohortSampler
from fedsim.system.devices import synchronize
from fedsim.training.batches import WorkItems
from fedsim.training.memory import buffer_bytes, personal_bytes
from fedsim.training.shared_state import message_bytes
from fedsim.training.task import RunTask
from fedsim.training.weights import AggregationContext, set_cohort_weights, weights_of

Round = tuple[RoundRecord, WorkerResults | None]  # record of a round, and tests of single workers, if any


class Simulation(Executor):
    """Synchronous rounds: in each round, some workers (the cohort) train, and the server aggregates their updates.

    Every process of a run has one Simulation. All processes call the same methods at the same time. The arguments are
    those of `Executor`.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        group, task, shared, self.timer = self.group, self.task, self.shared, PhaseTimer()
        self.draw = cohorts_of(task.experiment, shared.data.shards)
        self.clock = RoundClock.of(task, shared) if task.experiment.mode == "clock" else None
        self.server = ParameterServer(group, task, shared)
        self.aggregator = Aggregator.of(group, task, shared, self.server)
        self.privacy = PrivateRounds(group, task, shared)
        self.attack = AttackStep(group, task, shared, self.aggregator)
        self.steps = self.steps_on_updates(self.attack)
        self.evaluated, self.unseen = workers_to_evaluate(task, shared.data.worker_tests)
        self.check_reports = ReportCheck(task.experiment)
        self.latest: tuple[AggregationContext, np.ndarray | None] | None = None
        self.prepared: tuple[int, Cohort, WorkItems, WorkItems] | None = None  # the next round and its workers

    @property
    def levels(self) -> dict[str, Any]:
        """Objects with a server, its aggregator and its attack, by the prefix of their states in a checkpoint."""
        return {"": self}

    def steps_on_updates(self, attack: AttackStep) -> list[UpdateStep]:
        """Return the steps between training and aggregation, in their order. `attack` replaces Byzantine updates."""
        processing: UpdateStep = ProcessingStep(self.group, self.task, self.shared)
        attacks: list[UpdateStep] = [attack] if self.task.byzantine else []
        # Attackers that need not compress see what the others send after compression.
        changes = [processing, *attacks] if self.task.attackers_skip_chain else [*attacks, processing]
        return [self.privacy.at_workers, *changes, self.privacy.as_received]

    def run_round(self, round: int) -> Round | None:
        """Run one round, counted from 1. Return (record of the round, test results of individual workers).

        The test results are None if no workers are tested. Processes that keep no records return None instead of the
        pair.
        """
        task, shared, group, self.timer = self.task, self.shared, self.group, PhaseTimer()
        with self.phase("broadcast"):
            drawn, work, mine = self.cohort_of(round)
            self.agree_on(drawn, round)
            if not drawn.workers:
                return self.skip_round(round, drawn)
            self.require_reports(round, drawn)
            whole = self.context(work)
            if task.sync_in(round) == "parameters":
                self.server.send(round)
            if not task.streams:
                self.pull_down(drawn.workers, mine, round)
        if task.streams:
            stats = self.train_in_waves(whole, work)
        elif task.sync_in(round) == "parameters":
            with self.phase("train"):
                self.train_cohort(drawn.workers, mine, round)
                group.barrier()
            with self.phase("aggregate"):
                aggregate = self.aggregate_clusters if task.algorithm.clusters > 1 else self.aggregate_rows
                stats = aggregate(whole, mine)
        else:
            with self.phase("train"):
                stats = self.aggregate_each_step(work, mine)
        stats = self.of_all_processes(stats)  # also a barrier: all processes have written the buffers
        for context in whole.by_cluster(stats.clusters):
            self.combine_buffers(context, stats.excluded)
        group.barrier()
        self.require_finite(round)
        group.barrier()  # no process saves states of a round that diverges
        if task.streams:
            self.states.take_over(self.new_states, drawn.workers, stats.excluded)
            del self.new_states
        else:
            self.states.save_cohort(drawn.workers, mine, stats.excluded, shared.cohort.worker_rows)
        with self.phase("test"):
            self.test(round)
        self.pass_time(work, stats.sent)
        samples = task.schedule.of(work.workers, work.rounds).samples_in(work.steps, work.sizes)
        counted = np.where(np.isin(work.workers, stats.excluded), 0, samples)
        train_loss = mean_loss(self.aggregator.train_losses(whole), counted)
        group.barrier()  # all processes have used the rows, which the tests of single workers overwrite
        with self.phase("test"):
            of_workers = self.evaluate_workers(round)
        return self.record(round, drawn, stats, of_workers, samples, train_loss) if group.computes else None

    def require_reports(self, round: int, drawn: Cohort) -> None:
        """Raise ExperimentError if the rule cannot aggregate the updates of the cohort `drawn`."""
        self.check_reports(round, drawn)

    def begin_updates(self, mine: WorkItems) -> None:
        """Turn the trained parameters of the workers `mine` into updates, and check them for NaN and infinity."""
        self.aggregator.updates.begin(mine.slots, self.server.sent)

    def combine_buffers(self, context: AggregationContext, excluded: Sequence[int]) -> None:
        """Average the buffers of the workers in `context`, except `excluded` ones."""
        self.aggregator.combine_buffers(context, excluded)

    def record(
        self,
        round: int,
        drawn: Cohort,
        stats: AggregationStats,
        of_workers: WorkerResults | None,
        samples: np.ndarray | None = None,
        train_loss: float | None = None,
    ) -> Round:
        """Return (record of a round, test results of individual workers).

        Args:
            round: number of the round.
            drawn: cohort of the round.
            stats: statistics of all aggregations of the round.
            of_workers: test results of individual workers; None if no workers are tested.
            samples: number of samples that each worker processed; None if no worker has trained.
            train_loss: mean training loss per sample; None if no worker has trained.
        """
        tested = self.tested()
        metrics, means_of_workers = (of_workers.metrics(), of_workers.means()) if of_workers else ({}, {})
        of_tests = tested.metrics | metrics | self.privacy.metrics(round)
        record = RoundRecord(
            round=round,
            train_loss=train_loss,
            seconds=self.timer.seconds,
            cohort=drawn.workers,
            weights=stats.shares,
            clusters=stats.clusters,
            excluded=stats.excluded,
            dropped=drawn.dropped,
            bytes_up=self.bytes_up(drawn, stats.sent, round),
            bytes_down=self.bytes_down(drawn, stats.sent, round),
            samples=[] if samples is None else samples.tolist(),
            virtual_seconds=self.clock.now if self.clock else None,
            **means_of_workers,
            **tested.fields() | {"metrics": joined(means(stats.sent.metrics, stats.metrics), drawn.metrics, of_tests)},
        )
        return record, of_workers

    def aggregate_rows(self, context: AggregationContext, mine: WorkItems) -> AggregationStats:
        """Aggregate the updates of the workers, and update the global model. Return statistics of the aggregation.

        Args:
            context: workers whose updates are aggregated, with their weights.
            mine: workers that this process trains.
        """
        round, sent = context.moment[0], SentUpdates()
        last = self.server.last if round in self.task.experiment.records.updates else None
        self.latest = replace(context, weights=None), None if last is None else last.cpu().numpy().copy()
        self.change_updates(context, mine, sent)
        return self.step(context, sent)

    def train_in_waves(self, whole: AggregationContext, work: WorkItems) -> AggregationStats:
        """Train one wave of the cohort after another, and aggregate sums of the updates. Return statistics.

        Args:
            whole: all workers of the round, with their weights.
            work: the same workers.
        """
        assert isinstance(self.aggregator, StreamedSums)
        group, rows, sent = self.group, self.shared.cohort.worker_rows, SentUpdates()
        self.aggregator.begin(whole)
        self.new_states = self.states.of_waves(group.process.count)
        for places, wave, mine in self.waves_of(work):
            context = whole.of_wave(places.tolist())
            with self.phase("broadcast"):
                self.pull_down(context.workers, mine, work.round)
            with self.phase("train"):
                self.train_cohort(context.workers, mine, work.round)
                group.barrier()
            with self.phase("aggregate"):
                self.change_updates(context, mine, sent)
                excluded = self.aggregator.add(context, places, wave.stacks)
                saved = context.workers if group.divided else mine.workers.tolist()
                self.new_states.save_cohort(saved, mine, excluded, rows)
                group.barrier()  # all processes have used the rows
        with self.phase("aggregate"):
            return self.step(whole, sent)

    def waves_of(self, work: WorkItems) -> Iterator[tuple[np.ndarray, WorkItems, WorkItems]]:
        """Divide the workers into waves (see `Group.waves`) that have as many workers as there are rows."""
        return self.group.waves(work, len(self.shared.cohort.train_loss) // self.group.process.count)

    def change_updates(
        self, context: AggregationContext, mine: WorkItems, sent: SentUpdates, level: Any = None
    ) -> None:
        """Apply the steps between training and aggregation to the updates of the workers.

        Args:
            context: workers whose updates are aggregated.
            mine: workers that this process trains.
            sent: receives the sizes of the updates.
            level: object with the `steps` and the `aggregator` of a server. None: this one.
        """
        level = level or self
        senders = mine[mine.workers < len(self.shared.data.shards)]  # without the server's own row
        for step in level.steps:
            if step(context, senders, sent):
                level.aggregator.updates.changed(senders.slots)
                self.group.barrier()

    def step(self, context: AggregationContext, sent: SentUpdates) -> AggregationStats:
        """Update the global model with the aggregate of the updates. Return statistics of the aggregation.

        Args:
            context: workers whose updates are aggregated.
            sent: sizes of the updates.
        """
        round = context.moment[0]
        self.privacy.count(round)
        aggregate, stats = self.aggregator.aggregate(context)
        if self.shared.cohort.messages and self.task.sync_in(round) == "parameters":
            self.receive_messages(context, stats.excluded)
        self.server.step(aggregate.plus(self.privacy.noise_of_mean(round)), context.moment, context.cluster)
        self.group.barrier()
        stats.sent = sent
        return stats

    def aggregate_clusters(self, whole: AggregationContext, mine: WorkItems) -> AggregationStats:
        """Update each of several global models with the updates of the workers that have selected it.

        A model whose updates are all excluded does not change. Returns statistics of all aggregations. The arguments
        are those of `aggregate_rows`. Raises DivergedError if all updates of all models are excluded.
        """
        clusters = self.group.of_all(self.shared.cohort.clusters, whole.slots).tolist()
        of_round, finite, updates = GradientRoundStats(len(clusters), clusters), 0, self.aggregator.updates
        for context in whole.by_cluster(clusters):
            members, sent = mine[np.isin(mine.workers, context.workers)], SentUpdates()
            updates.begin(members.slots, self.shared.server.model(context.cluster)[0])
            self.group.barrier()
            self.change_updates(context, members, sent)
            n, bad = len(context.slots), len(updates.nonfinite(context))
            excluded = self.task.experiment.nonfinite == "exclude" and bad == n
            left_out = AggregationStats([0.0] * n, context.workers, sent=sent)
            of_round.add(context.slots, left_out if excluded else self.step(context, sent))
            finite += n - bad
        if not finite:
            raise DivergedError(
                f"all {len(clusters)} updates contain NaN or infinity", "reduce local.lr", whole.moment[0]
            )
        return of_round.total()

    def of_all_processes(self, stats: AggregationStats) -> AggregationStats:
        """Return the statistics of a round in all processes, from those of this process."""
        sent = stats.sent
        if self.task.experiment.chain:
            sent = SentUpdates.total(self.group.gather(sent.on_host()))
        return replace(self.group.from_first(replace(stats, sent=SentUpdates()).on_host()), sent=sent)

    def aggregate_each_step(self, work: WorkItems, mine: WorkItems) -> AggregationStats:
        """Train a round of synchronous SGD, with a single check for NaN and infinity at its end if possible.

        Returns the statistics of all aggregations of the round.

        Args:
            work: all workers of the round.
            mine: workers that this process trains.
        """
        stats = self.steps_checked_later(work, mine) or self.steps_of_round(work, mine)
        self.end_round(work.round)
        return stats

    def steps_of_round(self, work: WorkItems, mine: WorkItems) -> AggregationStats:
        """Run all steps of a round of synchronous SGD: compute gradients, aggregate them, and update the global model.

        Returns the statistics of all aggregations of the round.

        Args:
            work: all workers of the round.
            mine: workers that this process trains.
        """
        of_round, trainer = GradientRoundStats(len(work)), cast("Any", self.trainer)
        self.trainer.begin_gradient_round(mine)
        for step, context in enumerate(self.contexts_of_steps(work)):
            if trainer.averages:  # stores no per-worker gradients
                sent = SentUpdates([(context.workers, self.shared.server.row.nbytes)])
                of_round.add(context.slots, AggregationStats(trainer.step_along_mean(step, context), sent=sent))
                continue
            with self.in_precision():
                self.trainer.gradients(step)
            self.aggregator.updates.begin(mine.slots)
            self.group.barrier()
            of_round.add(context.slots, self.aggregate_rows(context, mine))
        self.trainer.end_gradient_round()
        return of_round.total()

    def steps_checked_later(self, work: WorkItems, mine: WorkItems) -> AggregationStats | None:
        """Run all steps of a round of synchronous SGD, and check for NaN and infinity only at its end.

        Returns the statistics of all aggregations. If the check fails, or after any error, the state before the round
        is restored, and the result is None. The result is also None if each step must be checked.

        Args:
            work: all workers of the round.
            mine: workers that this process trains.
        """
        check, had_last = self.aggregator.updates.deferred_check, self.server.has_last
        if check is None or not check.usable:
            return None
        before = {name: rows.clone() for name, rows in self.shared.cohort.worker_rows.items()}
        check.begin()
        try:
            stats = self.steps_of_round(work, mine)
        except Exception:
            stats = None
        if check.end(failed=stats is None):
            return stats
        self.server.has_last = had_last
        for name, rows in before.items():
            self.shared.cohort.worker_rows[name].copy_(rows)
        return None

    def pull_down(self, cohort: Sequence[int], mine: WorkItems, round: int) -> None:
        """Copy the global model and the workers' own states to the workers that this process trains.

        Args:
            cohort: IDs of all workers of the round.
            mine: workers that this process trains.
            round: number of the round.
        """
        self.load_states(cohort, mine)
        self.copy_down(self.server.sent, self.shared.server.buffers, mine, round)

    def copy_down(self, row: Tensor, buffers: Tensor, mine: WorkItems, round: int) -> None:
        """Copy parameters [d] and buffers [b] of a server to the workers `mine`, as far as they start from them."""
        task, cohort, index = self.task, self.shared.cohort, index_of(mine.slots, self.task.device)
        if task.sync_in(round) == "parameters":
            pull_down(row, cohort.rows, index)
        if task.experiment.buffers != "local":
            pull_down(buffers, cohort.buffers, index)

    def load_states(self, cohort: Sequence[int], mine: WorkItems) -> None:
        """Load the states that this process's workers have kept from earlier rounds.

        Args:
            cohort: IDs of all workers of the round.
            mine: workers that this process trains.
        """
        shared, algorithm = self.shared, self.task.algorithm
        if algorithm.starts_from_current:
            self.states.initial |= state_at_first(algorithm, shared.server.row, shared.server.buffers)
        self.states.load_cohort(cohort, mine, shared.cohort.worker_rows)

    def agree_on(self, drawn: Cohort, round: int) -> None:
        """Check that all processes have drawn the same cohort, and store the weights of its workers.

        Raises ExperimentError if the cohorts differ.
        """
        if drawn.weights is not None and self.group.computes:
            set_cohort_weights(self.shared, {worker: drawn.weights[worker] for worker in drawn.workers})
        if len(set(self.group.gather(hash(tuple(drawn.workers))))) > 1:
            raise ExperimentError(
                f"{self.draw.strategy.place}: returned different cohorts in different processes in round {round}; use "
                "the argument `rng` for random draws, or engine=serial"
            )

    def train_cohort(self, cohort: Sequence[int], mine: WorkItems, round: int) -> None:
        """Train this process's workers, each on its own samples, and compute their updates.

        Args:
            cohort: IDs of all workers of the round.
            mine: workers that this process trains.
            round: number of the round.
        """
        task, shared, algorithm = self.task, self.shared, self.task.algorithm_at(round)
        if algorithm.full_gradient:
            with self.in_precision():
                self.trainer.full_gradients(mine)
            if isinstance(algorithm, CohortGradient):
                self.group.barrier()
                if self.group.computes:
                    total = self.group.sum_of(shared.cohort.full_gradients, range(len(cohort)))
                    algorithm.receive_gradients(shared.server.algorithm, total / len(cohort))
                self.group.barrier()
        for member in mine if algorithm.clusters > 1 else ():
            with self.process.working_on(member.worker, round):
                self.worker_tests.load(member)
        for member in mine if task.experiment.rule.accepts("losses") else ():
            with self.process.working_on(member.worker, round):
                model = shared.cohort.rows[member.slot], shared.cohort.buffers[member.slot]
                shared.cohort.losses[member.slot] = self.worker_tests.training_loss(*model, member.worker, round)
        with self.in_precision():
            self.trainer.train(mine, partial(self.prepare, round + 1))
        if algorithm.clusters == 1:
            self.begin_updates(mine)

    def receive_messages(self, context: AggregationContext, excluded: Sequence[int]) -> None:
        """Pass the sum of the workers' messages to the client algorithm's method `receive`, which runs at the server.

        Messages of `excluded` workers are left out.
        """
        if self.group.computes:
            slots = [
                slot for slot, worker in zip(context.slots, context.workers, strict=True) if worker not in excluded
            ]
            sums = self.aggregator.sums_of_messages(slots)
            algorithm, workers = self.task.algorithm_at(*context.moment), len(self.shared.data.shards)
            algorithm.receive(self.shared.server.algorithm, sums, len(slots), workers)
        self.group.barrier()

    def skip_round(self, round: int, drawn: Cohort) -> Round | None:
        """Finish a round in which no worker sends an update: the global model is only tested.

        Without noise of the server, the model stays unchanged. `drawn` is the cohort of the round. For the result, see
        `run_round`.
        """
        if self.clock and not drawn.dropped and "now" in self.draw.strategy.accepts:
            raise ExperimentError(
                f"round {round}: no worker is available at {self.clock.now:g} virtual seconds, and the virtual clock "
                "does not advance without work; make workers available in sampling.*, or use mode=rounds, which skips "
                "such rounds"
            )
        self.timer = PhaseTimer()
        self.privacy.count(round)
        if (noise := self.privacy.noise_of_mean(round)) is not None:  # nobody must learn that the cohort was empty
            self.server.step(self.server.nothing().plus(noise), (round,))
            self.group.barrier()
        self.end_round(round)
        with self.phase("test"):
            self.test(round)
            self.group.barrier()
            of_workers = self.evaluate_workers(round)
        return self.record(round, drawn, AggregationStats(), of_workers) if self.group.computes else None

    def end_round(self, round: int) -> None:
        """After the last round that aggregates gradients, prepare for rounds that aggregate parameters.

        This concerns only experiments with `sync = "post_local"`.
        """
        if round == self.task.experiment.rounds_of_gradients < self.task.experiment.rounds:
            self.begin_with_parameters()

    def begin_with_parameters(self) -> None:
        """Reset the states of the aggregation rule, the attack and the server optimizer."""
        self.aggregator.state, self.attack.state = {}, {}
        self.server.begin_with_parameters()

    def pass_time(self, work: WorkItems, sent: SentUpdates) -> None:
        """Advance the virtual clock until the slowest worker of the cohort has finished. Without a clock, do nothing.

        Args:
            work: all workers of the round.
            sent: sizes of the updates.
        """
        if self.clock is None:
            return
        task = self.task
        if task.sync_in(work.round) == "gradients":
            self.clock.pass_steps(sent.sizes())
            return
        batches = task.schedule.of(work.workers, work.rounds).batches_of_all(work.sizes)
        columns = zip(work.workers.tolist(), work.steps.tolist(), batches.tolist(), strict=True)
        gradients = {worker: task.algorithm.gradients(steps, count) for worker, steps, count in columns}
        self.clock.pass_round(gradients, sent.sizes(), self.server.broadcast_bytes)

    def latest_aggregation(self) -> tuple[AggregationContext, np.ndarray | None]:
        """Return the latest aggregation, without weights, and the aggregated update before it, [d].

        The update is None if no rule or attack uses it, or if the updates of the round are not stored.
        """
        assert self.latest is not None
        return self.latest

    def evaluate_workers(self, round: int, *, now: bool = False) -> WorkerResults | None:
        """Test the models of individual workers on their own test samples, if such tests are due in this round.

        With `now`, they are always due. Returns None if there are no tests. The tests overwrite the cohort's rows.
        """
        settings = self.task.experiment.worker_evaluation
        if not (self.evaluated or self.unseen) or not (now or round % settings.every == 0):
            return None
        tested: dict[int, Tested] = {}
        for workers, mine in self.tested_at_once(round):
            for part in self.group.gather(self.test_workers(workers, mine, round, settings.fine_tune)):
                tested |= part
        owners = self.unseen[self.group.index :: self.group.count]
        unseen = {owner: self.worker_tests.of_global(owner, round) for owner in owners}
        unseen = {owner: values for part in self.group.gather(unseen) for owner, values in part.items()}
        samples = {worker: self.shared.data.worker_tests.size(worker) for worker in [*tested, *unseen]}
        names = self.task.worker_names
        results = WorkerResults.of(round, samples, tested, names)
        return replace(results, unseen=WorkerResults.of(round, samples, unseen, names)) if unseen else results

    def tested_at_once(self, round: int) -> Iterator[tuple[list[int], WorkItems]]:
        """Divide the evaluated workers into groups for which there are rows.

        Yields the worker IDs of each group, and the workers that this process tests.
        """
        if self.task.streams:
            for _, wave, mine in self.waves_of(self.work_of(self.evaluated, round)[0]):
                yield wave.workers.tolist(), mine
            return
        for start in range(0, len(self.evaluated), self.task.experiment.cohort_size):
            workers = self.evaluated[start : start + self.task.experiment.cohort_size]
            yield workers, self.work_of(workers, round)[1]

    def test_workers(self, workers: Sequence[int], mine: WorkItems, round: int, fine_tune: int) -> dict[int, Tested]:
        """Test the models of this process's share of `workers`, and return the results by worker ID.

        Args:
            workers: worker IDs, at most as many as there are rows.
            mine: workers that this process tests.
            round: number of the round.
            fine_tune: number of epochs for which each worker trains the global model before a second test; 0 for no
                second test.
        """
        task, shared, tests = self.task, self.shared, self.worker_tests
        self.load_states(workers, mine)
        members = mine[mine.workers < len(shared.data.shards)]  # without the server's own row
        tested = {}
        for member in members:
            with self.process.working_on(member.worker, round):
                tests.load(member)
                tested[member.worker] = tests.before_training(member)
        if fine_tune:
            ends = isinstance(task.algorithm, PersonalModel)  # the worker state is part of the personal model
            schedule = task.schedule.of(members.workers, members.rounds)
            members = replace(members, steps=fine_tune * schedule.batches_per_epoch(members.sizes), ends=ends)
            self.train(members)
            for member in members:
                tested[member.worker] |= tests.after_training(member)
        return tested

    def global_losses(self, workers: Sequence[int], round: int) -> np.ndarray:
        """Return the mean loss of the global model on each worker's training samples, float64 [k] for k `workers`."""
        losses, row, buffers = torch.zeros(len(workers)).double(), self.shared.server.row, self.shared.server.buffers
        mine = range(self.group.index, len(workers), self.group.count)
        for place in mine:
            with self.process.working_on(workers[place], round):
                losses[place] = self.worker_tests.training_loss(row, buffers, workers[place], round)
        return np.sum(self.group.gather(losses.numpy()), axis=0)  # each loss is 0 in all processes but one

    def prepare(self, round: int) -> None:
        """Choose the workers of the next round, and draw their batches, while a GPU still computes this round.

        Does nothing if the choice may depend on the results of this round, which are not known yet.
        """
        task, strategy = self.task, self.draw.strategy
        in_time = round <= task.experiment.rounds and not task.streams  # a wave leaves no time to draw whole rounds
        # Only a random choice, as privacy accounting assumes it, is known to be independent of the results.
        is_random = hasattr(task.experiment.sampling.registration.target, "amplifies")
        reads_results = "losses" in strategy.accepts or "now" in strategy.accepts
        if task.device.type == "cpu" or self.group.divided or not in_time or not is_random or reads_results:
            return
        with contextlib.suppress(Exception):  # the next round raises the same error
            self.prepared = round, *self.cohort_of(round)
            if task.sync_in(round) == "parameters":
                self.trainer.announce(self.prepared[-1])

    def cohort_of(self, round: int) -> tuple[Cohort, WorkItems, WorkItems]:
        """Return the workers of a round, and their work (see `work_of`)."""
        if self.prepared is not None and self.prepared[0] == round:
            return self.prepared[1:]
        now = self.clock.now if self.clock else None
        drawn = self.draw(round, now, partial(self.global_losses, round=round))
        return drawn, *self.work_of(drawn.workers, round)

    def work_of(self, cohort: Sequence[int], round: int) -> tuple[WorkItems, WorkItems]:
        """Return the work of the whole cohort, and the part that this process trains.

        The second contains the server's own row, if there is one.
        """
        workers, n, root = np.array(cohort, dtype=np.int64), len(cohort), self.batch_source.root
        slots = np.arange(n)
        if root is not None:
            workers, slots = np.append(workers, root), np.append(slots, len(self.shared.cohort.workers))
        work = self.batch_source.rounds_of(slots, workers, np.full_like(slots, round), np.zeros_like(slots))
        return work[:n], self.group.assign(work, self.trainer.width)

    def context(self, work: WorkItems) -> AggregationContext:
        """Return all workers of the cohort with their weights, for an aggregation in which all of them take part."""
        workers, samples = work.workers.tolist(), work.sizes.tolist()
        weights = weights_of(self.task, self.shared, workers, samples)
        return AggregationContext(range(len(work)), workers, samples, weights, (work.round,))

    def contexts_of_steps(self, work: WorkItems) -> Iterator[AggregationContext]:
        """Yield, for each step of a round of synchronous SGD, the workers that still have data, with their weights."""
        schedule = self.task.schedule.of(work.workers, work.rounds)
        batch_sizes = np.zeros(0)
        for step in range(int(work.steps.max())):
            if not np.array_equal(batch_sizes, batch_sizes := schedule.batch_size_at(step, work.sizes)):
                active = np.flatnonzero(batch_sizes)
                workers, samples = work.workers[active].tolist(), batch_sizes[active].tolist()
                weights = weights_of(self.task, self.shared, workers, samples)
                if weights is not None and not weights.any():
                    return  # all workers that still have data have weight 0
            yield AggregationContext(active.tolist(), workers, samples, weights, (work.round, step))

    def bytes_up(self, drawn: Cohort, sent: SentUpdates, round: int) -> int:
        """Return the number of bytes that workers send in `round`.

        Args:
            drawn: cohort of the round.
            sent: sizes of the updates.
            round: number of the round.
        """
        message = message_bytes(self.task, self.shared)[1] if self.task.sync_in(round) == "parameters" else 0
        return sent.nbytes + len(drawn.workers) * (message + buffer_bytes(self.task, self.shared))

    def bytes_down(self, drawn: Cohort, sent: SentUpdates, round: int) -> int:
        """Return the number of bytes that workers receive in `round`, including workers that send no update.

        The arguments are those of `bytes_up`.
        """
        task, row_bytes, for_buffers = self.task, self.shared.server.row.nbytes, buffer_bytes(self.task, self.shared)
        only_loss = set(drawn.candidates) - {*drawn.workers, *drawn.dropped}
        total = len(only_loss) * (row_bytes + for_buffers)
        start = for_buffers + message_bytes(task, self.shared)[0]
        if task.sync_in(round) == "gradients":
            total += sent.count * row_bytes  # global parameters, at each step
        elif not task.experiment.downlink:
            start += row_bytes - personal_bytes(task)
        elif drawn.workers:
            total += task.experiment.workers * self.server.broadcast_bytes
        return total + (len(drawn.workers) + len(drawn.dropped)) * start

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Return a context that measures the time of a phase, such as "train"."""
        with self.timer(name):
            yield
            synchronize(self.task.device)

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Tensor]]:
        """Return the state of this process for a checkpoint, as three dicts.

        The first has JSON types. The second has the arrays of the rule and of the attack. The third has the tensors of
        the server optimizer, of which each rank has a part.
        """
        clock = {"clock": self.clock.state()} if self.clock else {}
        facts = {"has_last": self.server.has_last, "syncs": list(self.shared.server.states), **clock}
        facts |= self.privacy.state()
        rule = dict[str, np.ndarray]()
        for place, level in self.levels.items():
            for kind, states in (("", level.aggregator.state), ("attack.", level.attack.state)):
                rule |= {f"{place}{kind}{name}": tensor.clone().cpu().numpy() for name, tensor in states.items()}
        return facts, rule, self.group.states_by_columns()

    def resume(
        self, facts: dict[str, Any], rule: dict[str, np.ndarray], columns: dict[str, Tensor], workers: Sequence[int]
    ) -> None:
        """Restore a state that the method `state` has returned. The shared tensors must be restored before.

        Args:
            facts, rule, columns: the three dicts that `state` has returned.
            workers: IDs of the workers that have a state, in the order in which these states are stored.
        """
        self.group.load_columns(columns)
        for level in self.levels.values():
            level.aggregator.state, level.attack.state = {}, {}
            level.server.has_last = bool(level.server.last_row.any())
        self.server.has_last = facts["has_last"]
        for key, array in rule.items() if self.group.computes else ():
            place, name = key.split("/", 1) if self.task.experiment.group_count else ("", key)
            level = self.levels[f"{place}/" if place else ""]
            state = level.attack.state if name.startswith("attack.") else level.aggregator.state
            state[name.removeprefix("attack.")] = torch.from_numpy(array).to(self.task.device, copy=True)
        self.states.follow(workers)
        if self.clock:
            self.clock.resume(facts["clock"])
        self.privacy.resume(facts)
        if len(facts["syncs"]) < len(self.shared.server.states):
            # The earlier run ended with rounds of gradients, and rounds of parameters follow.
            self.begin_with_parameters()


def cohorts_of(experiment: Experiment, shards: Shards) -> CohortSampler:
    """Return the sampler that draws the workers of each round.

    Raises ExperimentError if the sampling strategy needs numbers of samples that are not known.
    """
    return CohortSampler(
        strategy=experiment.sampling.component,
        seed=experiment.seed,
        size=experiment.cohort_size,
        shards=shards,
        dropout=experiment.sampling.dropout_rate,
        weighted=experiment.aggregate.weights == "inverse_probability",
    )


def workers_to_evaluate(task: RunTask, tests: Shards) -> tuple[list[int], list[int]]:
    """Return the IDs of the workers whose models are tested, and the numbers of the owners without training samples.

    `worker_evaluation.workers` workers are drawn at random, and as many of these owners. Byzantine workers and workers
    without test samples are left out. Both lists are empty if the experiment tests no workers.

    Raises ExperimentError if no worker with held-out test samples remains.
    """
    experiment, most, byzantine = task.experiment, task.experiment.worker_evaluation.workers, task.byzantine.fixed
    fraction = experiment.data.local_test_fraction

    def drawn(candidates: Sequence[int], purpose: str) -> list[int]:
        rng, n = numpy_generator(experiment.seed, purpose), len(candidates)
        return [candidates[place] for place in sample_workers(rng, n, min(n, most)).tolist()]

    if not fraction:
        return [], []
    if fraction == OWN:
        able = [worker for worker in range(experiment.workers) if tests.size(worker) and worker not in byzantine]
        return drawn(able, "evaluated"), drawn(range(experiment.workers, len(tests)), "unseen")
    able = [worker for worker in drawn(range(experiment.workers), "evaluated") if tests.size(worker)]
    workers = [worker for worker in able if worker not in byzantine]
    if not workers:
        raise ExperimentError(
            f"data.local_test_fraction = {fraction}: no evaluated worker has test samples; use a larger fraction"
        )
    return workers, []


def mean_loss(losses: Tensor, samples: np.ndarray) -> float:
    """Return the mean training loss per sample over all workers of a cohort.

    Args:
        losses: mean loss of each worker, float64 [n].
        samples: number of samples that each worker processed, int64 [n]. Workers with 0 samples do not count.
    """
    weights = torch.from_numpy(samples).double()
    counted = weights > 0
    return float(weights[counted] @ losses[counted] / weights.sum())


def joined(*metrics: dict[str, float]) -> dict[str, float]:
    """Return a dict with the metrics of components, of the cohort strategy and of tests.

    Raises ExperimentError if a name is in several dicts.
    """
    counts = Counter(name for part in metrics for name in part)
    if duplicates := sorted(name for name, count in counts.items() if count > 1):
        raise ExperimentError(
            f"metrics: a component also records a number named {show(duplicates[0])}; give the metric another label"
        )
    return {name: value for part in metrics for name, value in part.items()}


def means(*logs: MetricLog) -> dict[str, float]:
    """Return the mean of the numbers that components recorded in a round, by metric name.

    Raises ExperimentError if there are too many names.
    """
    log = MetricLog()
    for part in logs:
        log.extend(part)
    if len(log) > MOST_NAMES:
        raise ExperimentError(
            f"metrics: components recorded {len(log)} different names in one round; at most {MOST_NAMES} are allowed"
        )
    return log.means()
