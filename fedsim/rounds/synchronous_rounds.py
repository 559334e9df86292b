"""The synchronous rounds of a run, as every process executes them. `parameter_round.py` has a round of FedAvg."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.core.timer import PhaseTimer
from fedsim.errors import ExperimentError, show
from fedsim.records.record import MOST_NAMES, RoundRecord
from fedsim.records.round_stats import AggregationStats, MetricLog, SentUpdates
from fedsim.records.worker_results import WorkerResults
from fedsim.rounds.cluster_round import ClusterRound
from fedsim.rounds.cohorts import Cohorts, RoundPlan
from fedsim.rounds.executor import Executor
from fedsim.rounds.gradient_round import GradientRound
from fedsim.rounds.group_round import GroupRound
from fedsim.rounds.local_tests import LocalTests
from fedsim.rounds.parameter_round import ParameterRound
from fedsim.rounds.private_rounds import PrivateRounds
from fedsim.rounds.round_clock import clock_of
from fedsim.rounds.round_kind import RoundKind
from fedsim.rounds.wave_round import WaveRound
from fedsim.training.task import RunTask
from fedsim.training.weights import AggregationContext

Round = tuple[RoundRecord, WorkerResults | None]  # record of a round, and tests of single workers, if any


def kind_of(task: RunTask, sync: str) -> type[RoundKind]:
    """Return the class of a run's rounds that aggregate `sync`, which is "parameters" or "gradients"."""
    if sync == "gradients":
        return GradientRound
    if task.streams:
        return WaveRound
    if task.algorithm.clusters > 1:
        return ClusterRound
    return ParameterRound if task.experiment.groups is None else GroupRound


class SynchronousRounds:
    """Rounds in which some workers (the cohort) train, and the server aggregates their updates.

    Every process of a run has one instance. All processes call the same methods at the same time.

    Args:
        executor: executor of this process.

    Attributes:
        kinds: kinds of the run's rounds, by what they aggregate. A run of post-local SGD has two kinds.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor, self.team, self.task, self.shared = executor, executor.team, executor.task, executor.shared
        self.clock, self.privacy = clock_of(self.task, self.shared), PrivateRounds(self.team, self.task, self.shared)
        self.cohorts, self.local_tests = Cohorts(executor, self.clock), LocalTests(executor)
        kinds = {sync: kind_of(self.task, sync) for sync in self.shared.server.states}
        self.level = kinds[self.task.sync_in(self.task.experiment.rounds)].new_level(executor, self.privacy)
        self.kinds = {sync: kind(executor, self.cohorts, self.level) for sync, kind in kinds.items()}

    def run_round(self, round: int) -> Round | None:
        """Run one round, counted from 1. Return (record of the round, test results of single workers).

        The test results are None if no workers are tested. Processes that keep no records return None instead of the
        pair.
        """
        executor, team, kind = self.executor, self.team, self.begin(round)
        with executor.phase("broadcast"):
            plan = self.cohorts.plan(round)
        if not plan.cohort.workers:
            return self.skip_round(plan, kind)
        kind.check(plan)
        stats = kind.aggregate_at_top(plan, kind.run(plan))
        stats = self.of_all_processes(stats)  # also a barrier: all processes have written the buffers
        kind.combine_buffers(plan, stats)
        team.barrier()
        executor.require_finite(round)
        team.barrier()  # no process saves states of a round that diverges
        kind.save_states(plan, stats.excluded)
        with executor.phase("test"):
            executor.test(round)
        kind.pass_time(self.clock, plan, stats.sent)
        work = plan.work
        samples = self.task.schedule.of(work.workers, work.rounds).samples_in(work.steps, work.sizes)
        losses = kind.train_losses(plan)
        train_loss = mean_loss(losses, np.where(np.isin(work.workers, stats.excluded), 0, samples))
        of_each = [
            loss if n and math.isfinite(loss) else None for loss, n in zip(losses.tolist(), samples, strict=True)
        ]
        team.barrier()  # all processes have used the rows, which the tests of single workers overwrite
        of_workers = self.test_workers(round) if self.local_tests.are_due(round) else None
        trained = samples.tolist(), of_each, train_loss
        return self.record(plan, stats, of_workers, *trained) if team.computes else None

    def begin(self, round: int) -> RoundKind:
        """Return the object that runs `round`.

        In the first round that aggregates parameters after rounds that aggregated gradients, reset the states of the
        rule, the attack and the server optimizer, but keep the global model.
        """
        self.executor.timer, kind = PhaseTimer(), self.kind(round)
        if round > 1 and kind is not self.kind(round - 1):
            self.level.begin_with_parameters()
        return kind

    def kind(self, round: int) -> RoundKind:
        """Return the object that runs `round`."""
        return self.kinds[self.task.sync_in(round)]

    def skip_round(self, plan: RoundPlan, kind: RoundKind) -> Round | None:
        """Finish a round in which no worker sends an update: the global model is only tested.

        Without noise of the server, the model stays unchanged. For the result, see `run_round`.
        """
        round, self.executor.timer = plan.round, PhaseTimer()
        self.clock.require_workers(plan.cohort, self.cohorts.draw.strategy, round)
        if (noise := self.privacy.finish(round)) is not None:  # nobody must learn that the cohort was empty
            kind.server.step(kind.server.nothing().plus(noise), (round,))
            self.team.barrier()
        stats = kind.aggregate_at_top(plan, AggregationStats())
        with self.executor.phase("test"):
            self.executor.test(round)
            self.team.barrier()
        of_workers = self.test_workers(round) if self.local_tests.are_due(round) else None
        return self.record(plan, stats, of_workers) if self.team.computes else None

    def of_all_processes(self, stats: AggregationStats) -> AggregationStats:
        """Combine the statistics that each process has of a round, and return them in all processes."""
        sent = stats.sent
        if self.task.experiment.chain:
            sent = SentUpdates.total(self.team.gather(sent.on_host()))
        return replace(self.team.from_first(replace(stats, sent=SentUpdates()).on_host()), sent=sent)

    def test_workers(self, round: int) -> WorkerResults | None:
        """Test the models of single workers after `round`. Return None if the experiment tests no workers."""
        with self.executor.phase("test"):
            return self.local_tests(round, self.kind(round))

    def record(
        self,
        plan: RoundPlan,
        stats: AggregationStats,
        of_workers: WorkerResults | None,
        samples: Sequence[int] = (),
        losses: Sequence[float | None] = (),
        train_loss: float | None = None,
    ) -> Round:
        """Return (record of a round, test results of single workers).

        Args:
            plan: workers of the round.
            stats: statistics of all aggregations of the round.
            of_workers: test results of single workers; None if no workers are tested.
            samples: number of samples that each worker of the cohort processed.
            losses: mean training loss of each worker of the cohort.
            train_loss: mean training loss per sample; None if no worker has trained.
        """
        tested, kind, cohort = self.executor.tested(), self.kind(plan.round), plan.cohort
        metrics, means_of_workers = (of_workers.metrics(), of_workers.means()) if of_workers else ({}, {})
        of_tests = tested.metrics | metrics | self.privacy.metrics(plan.round)
        record = RoundRecord(
            round=plan.round,
            train_loss=train_loss,
            seconds=self.executor.timer.seconds,
            cohort=cohort.workers,
            weights=stats.shares,
            clusters=stats.clusters,
            excluded=stats.excluded,
            dropped=cohort.dropped,
            bytes_up=kind.bytes_up(plan, stats.sent),
            bytes_down=kind.bytes_down(plan, stats.sent),
            samples=list(samples),
            train_losses=list(losses),
            virtual_seconds=self.clock.now,
            timeline=self.clock.timeline(cohort.workers, stats.excluded),
            **means_of_workers,
            **tested.fields() | {"metrics": joined(means(stats.sent.metrics, stats.metrics), cohort.metrics, of_tests)},
        )
        return kind.complete(record), of_workers

    def latest_aggregation(self) -> tuple[AggregationContext, np.ndarray | None]:
        """Return the context of the latest aggregation, without weights, and the result [d] of the one before it.

        This result is None if no rule or attack uses it, or if the updates of the round are not stored.
        """
        assert self.level.latest is not None
        return self.level.latest

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Tensor]]:
        """Return the state of this process for a checkpoint, as three dicts.

        The first has JSON types. The second has the arrays of the rule and of the attack. The third has the tensors of
        the server optimizer, of which each rank has a part.
        """
        metadata = {"has_last": self.level.server.has_last, "syncs": list(self.kinds)}
        metadata |= self.clock.state() | self.privacy.state()
        rule = {
            f"{name}{key}": tensor.clone().cpu().numpy()
            for name, state in self._states().items()
            for key, tensor in state.items()
        }
        return metadata, rule, self.team.states_by_columns()

    def resume(
        self, metadata: dict[str, Any], rule: dict[str, np.ndarray], columns: dict[str, Tensor], workers: Sequence[int]
    ) -> None:
        """Restore a state that the method `state` has returned. The shared tensors must be restored before.

        Args:
            metadata, rule, columns: the three dicts that `state` has returned.
            workers: IDs of the workers that have a state, in the order in which these states are stored.
        """
        self.team.load_columns(columns)
        levels = [level for kind in self.kinds.values() for level in kind.levels.values()]
        for level in levels:
            level.aggregator.state, level.attack.state = {}, {}
            level.server.has_last = bool(level.server.last_row.any())
        self.level.server.has_last = metadata["has_last"]
        states = self._states()
        for key, array in rule.items() if self.team.computes else ():
            name = max((name for name in states if key.startswith(name)), key=len)
            states[name][key.removeprefix(name)] = torch.from_numpy(array).to(self.task.device, copy=True)
        self.executor.states.follow(workers)
        self.clock.resume(metadata)
        self.privacy.resume(metadata)

    def _states(self) -> dict[str, dict[str, Tensor]]:
        """Return the states of all rules and attacks, by their prefix in a checkpoint."""
        levels = {prefix: level for kind in self.kinds.values() for prefix, level in kind.levels.items()}
        rules = {prefix: level.aggregator.state for prefix, level in levels.items()}
        return rules | {f"{prefix}attack.": level.attack.state for prefix, level in levels.items()}


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
