"""The round of federated averaging and of synchronous SGD. Read this first.

Each line of `SynchronousLoop.run_round` is a method of `fedsim.engines.engine.Engine`, which calls the method of the
same name of `fedsim.engines.executor.Executor` in every process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial

from fedsim.core.randomness import numpy_generator, sample_workers
from fedsim.core.snapshot import Snapshot
from fedsim.core.timer import PhaseTimer
from fedsim.data import Shards
from fedsim.engines import Engine
from fedsim.engines.aggregator import set_cohort_weights
from fedsim.engines.finite_check import FiniteCheck
from fedsim.engines.round_stats import MetricLog
from fedsim.engines.worker_evaluation import WorkerResults
from fedsim.errors import ExperimentError, FedsimWarning, show
from fedsim.records.record import MOST_NAMES, RoundRecord
from fedsim.runs.loops.round_clock import RoundClock
from fedsim.runs.samples import ReportCheck, cohorts_of
from fedsim.runs.setup import PreparedRun
from fedsim.server import Cohort


class SynchronousLoop:
    """Federated averaging and synchronous SGD: a cohort trains, and the server aggregates what it sends."""

    def __init__(
        self, prepared: PreparedRun, engine: Engine, keep_results: Callable[[WorkerResults], object] | None = None
    ) -> None:
        self._keep_results = keep_results
        self._evaluated = workers_to_evaluate(prepared, engine.shared.worker_tests)
        self._prepared, self._engine = prepared, engine
        self._check_reports = ReportCheck(prepared.task, prepared.experiment.worker_dropout)
        self._check_finite = FiniteCheck(prepared.task, engine.shared)
        self._virtual = RoundClock.of(prepared) if prepared.experiment.mode == "clock" else None
        self._warned = False
        self._sampler = cohorts_of(prepared.experiment, engine.shared.shards)

    def run_round(self, round: int) -> RoundRecord:
        """Run one round, counted from 1."""
        engine, task, timer = self._engine, self._prepared.task, PhaseTimer()
        with timer("pull_down"):
            now = self._virtual.now if self._virtual else None
            drawn = self._sampler(round, now, partial(engine.global_losses, round=round))
            cohort = drawn.workers
            if not cohort:
                return self._skip_round(round, drawn)
            self._check_reports(round, drawn)
            if drawn.weights is not None:
                set_cohort_weights(engine.shared, {worker: drawn.weights[worker] for worker in cohort})
            bytes_down = engine.pull_down(cohort, round) + self._bytes_to_others(round, drawn)
        if task.sync_in(round) == "parameters":
            with timer("train"):
                engine.full_gradients(cohort, round)
                engine.train(cohort, round)
            with timer("aggregate"):
                if task.byzantine.in_round(round):
                    engine.attack(cohort, round)
                sent = engine.process_updates(cohort, round)
                stats = engine.aggregate(cohort, round)
                message_bytes = engine.receive(cohort, round, stats.excluded)
                engine.server_step()
        else:  # every step ends with the same lines, see `Executor.train_on_averaged_gradients`
            with timer("train"):
                stats = engine.train_on_averaged_gradients(cohort, round)
            sent, message_bytes = stats.sent, 0
            bytes_down += sent.count * self._prepared.row_bytes  # the global row, for each step
        bytes_up = sent.nbytes + message_bytes + engine.combine_buffers(cohort, round, stats.excluded)
        engine.keep_worker_state(cohort, round, stats.excluded)
        self._check_finite(round)
        with timer("test"):
            tested = engine.test(round)
        sizes = [engine.shared.shards.size(worker) for worker in cohort]
        work = [task.schedule.of(worker, round) for worker in cohort]
        steps = {k: each.steps_for(size) for k, each, size in zip(cohort, work, sizes, strict=True)}
        samples = [each.samples_for(size) for each, size in zip(work, sizes, strict=True)]
        if self._virtual:
            in_step = task.sync_in(round) == "gradients"
            batches = map(task.schedule.batches_of_all, sizes)
            gradients = {k: task.solver.gradients(steps[k], n) for k, n in zip(cohort, batches, strict=True)}
            self._virtual.pass_round(
                steps if in_step else gradients, update_bytes=sent.nbytes / sent.count, in_step=in_step
            )
        self._warn_of_attack_without_honest_rows(round, steps)
        counted = [0 if worker in stats.excluded else n for worker, n in zip(cohort, samples, strict=True)]
        train_loss = engine.train_loss(counted)
        with timer("test"):
            of_workers = self._evaluate_workers(round)
        metrics = _joined(_means(sent.metrics, stats.metrics), drawn.metrics | tested.metrics | of_workers)
        return RoundRecord(
            round=round,
            train_loss=train_loss,
            seconds=timer.seconds,
            cohort=cohort,
            coefficients=stats.shares,
            excluded=stats.excluded,
            lost=drawn.dropped,
            bytes_up=bytes_up,
            bytes_down=bytes_down,
            samples=samples,
            virtual_seconds=self._virtual.now if self._virtual else None,
            **tested.fields() | {"metrics": metrics},
        )

    def _evaluate_workers(self, round: int) -> dict[str, float]:
        """Test the models of single workers, in the rounds in which that is due; figures of their accuracies."""
        experiment, settings = self._prepared.experiment, self._prepared.experiment.evaluation
        if round % settings.every and round != experiment.rounds:
            return {}
        return self.test_workers(round)

    def test_workers(self, round: int) -> dict[str, float]:
        """Test the models of single workers after a round; figures of their accuracies. Overwrites the rows."""
        if not self._evaluated:
            return {}
        experiment, engine, settings = self._prepared.experiment, self._engine, self._prepared.experiment.evaluation
        samples = {worker: engine.shared.worker_tests.size(worker) for worker in self._evaluated}
        tested = engine.evaluate_workers(
            self._evaluated, round, fine_tune=settings.fine_tune, at_once=experiment.cohort_size
        )
        found = WorkerResults.of(round, samples, tested)
        if self._keep_results:
            self._keep_results(found)
        return found.metrics()

    def _skip_round(self, round: int, drawn: Cohort) -> RoundRecord:
        """A round in which no worker reports: the global model stays."""
        if self._virtual and not drawn.dropped:
            raise ExperimentError(
                f"round {round}: no worker is available at {self._virtual.now:g} virtual seconds, and without work no "
                "time passes; let workers be available in sampling.*, or use mode=rounds, which skips such rounds"
            )
        timer = PhaseTimer()
        self._engine.skip_round(round)
        with timer("test"):
            tested = self._engine.test(round)
            metrics = _joined(drawn.metrics, tested.metrics | self._evaluate_workers(round))
        return RoundRecord(
            round=round,
            seconds=timer.seconds,
            lost=drawn.dropped,
            bytes_up=0,
            bytes_down=self._bytes_to_others(round, drawn),
            virtual_seconds=self._virtual.now if self._virtual else None,
            **tested.fields() | {"metrics": metrics},
        )

    def _bytes_to_others(self, round: int, drawn: Cohort) -> int:
        """The bytes that workers receive that send no update: they drop out, or only compute a loss."""
        only_loss = set(drawn.candidates) - {*drawn.workers, *drawn.dropped}
        model_bytes = self._prepared.row_bytes + self._prepared.buffer_bytes
        return len(drawn.dropped) * self._engine.received_bytes(round) + len(only_loss) * model_bytes

    def _warn_of_attack_without_honest_rows(self, round: int, steps: Mapping[int, int]) -> None:
        """Warn, once in a run, if an aggregation had Byzantine workers only, and their attack needs honest rows."""
        task = self._prepared.task
        byzantine = task.byzantine.in_round(round)
        if self._warned or not byzantine or not task.attack.needs_honest:
            return
        aggregations = steps if task.sync_in(round) == "gradients" else dict.fromkeys(steps, 1)
        honest = [count for worker, count in aggregations.items() if worker not in byzantine]
        if max(aggregations.values()) > max(honest, default=0):
            self._warned = True
            where = "worker has data left in the last steps" if honest else "worker is in the cohort"
            warnings.warn(
                f"round {round}: no honest {where}, and attack.name = {show(task.attack.name)} is computed from honest "
                "rows; there, and wherever this happens again, the Byzantine workers send what they have trained",
                FedsimWarning,
                stacklevel=3,
            )

    def state(self) -> Snapshot:
        state = self._engine.state()
        if self._virtual:
            state.facts["clock"] = self._virtual.state()
        return state

    def resume(self, state: Snapshot) -> None:
        self._engine.resume(state)
        if self._virtual:
            self._virtual.resume(state.facts["clock"])

    def finish(self) -> None:
        """Do nothing."""


def workers_to_evaluate(prepared: PreparedRun, tests: Shards) -> list[int]:
    """The workers whose models are tested: those that have test samples and are not Byzantine, or a sample of them.

    Raises ExperimentError if there is none.
    """
    experiment, byzantine = prepared.experiment, prepared.task.byzantine.fixed
    if not experiment.data.worker_test:
        return []
    size = min(experiment.workers, experiment.evaluation.workers)
    drawn = sample_workers(numpy_generator(experiment.seed, "evaluated"), experiment.workers, size).tolist()
    found = [worker for worker in drawn if tests.size(worker) and worker not in byzantine]
    if not found:
        raise ExperimentError(f"data.worker_test = {experiment.data.worker_test}: no worker has samples to test on")
    return found


def _joined(of_plugs: dict[str, float], of_test: dict[str, float]) -> dict[str, float]:
    """The numbers that plugs recorded, and the metrics of the test. Raises ExperimentError if a name is in both."""
    if twice := sorted(of_plugs.keys() & of_test.keys()):
        raise ExperimentError(f"metrics: {show(twice[0])} is also recorded by a plug; give the metric another label")
    return of_plugs | of_test


def _means(*logs: MetricLog) -> dict[str, float]:
    """The mean of each number that plugs have recorded. Raises ExperimentError if they have too many names."""
    joined = MetricLog()
    for log in logs:
        joined.extend(log)
    if len(joined) > MOST_NAMES:
        raise ExperimentError(f"metrics: plugs recorded {len(joined)} names in a round; must be at most {MOST_NAMES}")
    return joined.means()
