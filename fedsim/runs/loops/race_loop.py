"""Loop of a race, in which processes train on shared tensors at the same time.

A race is not reproducible, so it is run several times. All runs execute round 1, each from its own state, then all
runs execute round 2, and so on. The record of a round contains means over the runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.asynchronous.race.hogwild import HogwildWorker
from fedsim.asynchronous.race.log import to_csv
from fedsim.asynchronous.race.state import Measures, RaceState
from fedsim.asynchronous.race.worker import LockedRaceWorker, ProcessResult, RaceWorker
from fedsim.asynchronous.server_state import ServerState, tables_of
from fedsim.config.experiment import Experiment
from fedsim.core.confidence import estimate
from fedsim.core.snapshot import Snapshot
from fedsim.core.timer import PhaseTimer
from fedsim.engines import Engine, RunTask
from fedsim.errors import ExperimentError
from fedsim.processes.team import balance_load
from fedsim.records.record import AsyncRecord, RaceRecord, RoundRecord
from fedsim.rounds.evaluation import EvaluationResult
from fedsim.rounds.executor import Executor
from fedsim.runs.loops.clock_loop import async_record, work_of
from fedsim.runs.loops.loop import Loop
from fedsim.system.devices import synchronize
from fedsim.training.memory import buffer_bytes

KeepLog = Callable[[bytes], object]


@dataclass(frozen=True)
class RaceRoundResult:
    """Result of one round in one repetition of a race.

    Attributes:
        sums: losses, times and counts, summed over the processes.
        lost: estimated number of updates that were lost because other processes have overwritten them.
        asynchronous: fields of the round's record that only asynchronous rounds have.
        test: test result of the global model.
    """

    sums: ProcessResult
    lost: float
    asynchronous: AsyncRecord
    test: EvaluationResult


class RaceLoop(Loop):
    """Runs the rounds of a race, in which processes train at the same time.

    A race is repeated `race.runs` times. In each round, all repetitions are run one after another.

    Args:
        experiment: experiment with `mode = "race"`, which the log names.
        task: description of the run.
        engine: engine that is ready for the first round.
        keep_log: function that receives the contents of the log, a CSV file, after the last round; None to keep no log.
    """

    def __init__(self, experiment: Experiment, task: RunTask, engine: Engine, keep_log: KeepLog | None = None) -> None:
        self._experiment, self._task, self._engine, self._shared = experiment, task, engine, engine.shared
        self._policy, self._timer = task.experiment.policy.component, PhaseTimer()
        self._server = ServerState(task, engine.shared, engine.states)
        if self._policy.locking == "nothing":
            self._server.tables = tables_of(task.new_module(), self._server.stepper)
        self._server.share()
        self._race_state = RaceState(self._server.n, engine.shared.server.row.device)
        self._runs = task.experiment.race.runs
        copies = self._runs if self._runs > 1 else 0
        self._states = [[tensor.clone() for tensor in self._tensors().values()] for _ in range(copies)]
        self._current = 0  # index of the run whose state the shared tensors contain
        self._arrivals = [0] * self._runs
        self._keep_log = keep_log if self._policy.locking == "server" else None
        self._log: list[tuple[int, int, np.ndarray]] = []  # (run, round, log entries)

    def prepare(self) -> None:
        """Create the `RaceWorker` of each process."""
        self._engine.run(_set_up, self._server, self._race_state)

    def run_round(self, round: int) -> RoundRecord:
        self._timer.reset()
        results = [self._run_round(run, round) for run in range(self._runs)]
        if self._keep_log:
            self._log.extend(
                (run, round, np.array(result.sums.entries, dtype=np.int64)) for run, result in enumerate(results, 1)
            )
        first = results[0]
        nbytes = self._shared.server.row.nbytes + buffer_bytes(self._task, self._shared)
        return RoundRecord(
            round=round,
            **EvaluationResult.mean([result.test for result in results]).fields(),
            train_loss=statistics.fmean(result.sums.stats.train_loss for result in results),
            seconds=self._timer.seconds,
            **work_of(first.sums.stats, nbytes, nbytes),
            asynchronous=first.asynchronous,
            race=_race_record(results),
        )

    def state(self) -> Snapshot:
        state = Snapshot(metadata={"arrivals": list(self._arrivals), "schedulers": self._call(RaceWorker.progress)})
        for run in range(self._runs):
            self._switch_to(run)
            state.keep(self._tensors(), f"{run}.")
        state.metadata["log"] = [(run, round) for run, round, _ in self._log]
        state.tensors |= {f"log.{k}": torch.from_numpy(entries) for k, (*_, entries) in enumerate(self._log)}
        return state

    def resume(self, state: Snapshot) -> None:
        for run in range(self._runs):
            self._switch_to(run)
            state.put_back(self._tensors(), f"{run}.")
        self._arrivals = list(state.metadata["arrivals"])
        progress = [item for of_process in state.metadata["schedulers"] for item in of_process]
        self._call(RaceWorker.resume, progress)
        entries = state.under("log.")
        self._log = [(run, round, entries[str(k)].numpy()) for k, (run, round) in enumerate(state.metadata["log"])]

    def finish(self) -> None:
        """Load the result of the race's first repetition, and pass the log to `keep_log`."""
        self._switch_to(0)
        if self._keep_log:
            self._keep_log(to_csv(self._experiment.resolved(), self._log))

    def _run_round(self, run: int, round: int) -> RaceRoundResult:
        """Run round number `round` (from 1) of one repetition of the race, and return its result.

        `run` is the index of the repetition (from 0), because a race is run `race.runs` times.
        """
        self._switch_to(run)
        server, timer, sums = self._server, self._timer, ProcessResult()
        server.start_round(round, sums.stats)
        self._race_state.clear()
        with timer("train"):
            for of_process in self._call(RaceWorker.race, run, round):
                sums.add(of_process)
        if not sums.measures.updates:
            raise ExperimentError(
                f"policy: the race cannot continue in round {round}, because no worker is busy and the policy lets no "
                "worker start; use another policy"
            )
        self._arrivals[run] += sums.measures.updates
        with timer("aggregate"):
            server.revive_all()
            if self._policy.locking != "server":  # without a lock, processes overwrite each other's version
                server.version = self._arrivals[run]
            self._policy.publish(server)
            synchronize(self._shared.server.row.device)
        with timer("test"):
            self._engine.run(Executor.check_and_test, round)
            tested = EvaluationResult.of(self._task, self._shared)
            tested.metrics.update(self._policy.numbers(server) | sums.stats.metrics.means())
        counts = async_record(sums.stats, server.version, self._arrivals[run], self._policy.buffered(server))
        return RaceRoundResult(sums, self._race_state.lost(), counts, tested)

    def _call(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a method of `RaceWorker` in each process, and return the results of all processes."""
        return self._engine.run(_call_worker, method, *arguments)

    def _switch_to(self, run: int) -> None:
        """Save the state of the current repetition of the race, and load the state of repetition `run`."""
        if run == self._current:
            return
        tensors = self._tensors().values()
        for saved, next_state, tensor in zip(self._states[self._current], self._states[run], tensors, strict=True):
            saved.copy_(tensor)
            tensor.copy_(next_state)
        self._current = run

    def _tensors(self) -> dict[str, Tensor]:
        of_workers = {f"worker_state.{name}": rows for name, rows in self._server.worker_states.rows.items()}
        return {**self._shared.state_dict(), **self._server.tensors, **of_workers}


def _race_record(results: Sequence[RaceRoundResult]) -> RaceRecord:
    total = Measures()
    for result in results:
        total.add(result.sums.measures)
    accuracies, lost = [result.test.test_accuracy for result in results], sum(result.lost for result in results)
    spread = estimate([accuracy for accuracy in accuracies if accuracy is not None])
    return RaceRecord(
        runs=len(results),
        test_accuracies=accuracies,
        test_accuracy_half_width=spread.half_width if spread and len(results) > 1 else None,
        test_losses=[result.test.test_loss for result in results],
        train_losses=[result.sums.stats.train_loss for result in results],
        samples_per_second=[result.sums.stats.samples.total() / result.sums.measures.seconds for result in results],
        updates=total.updates,
        updates_lost=lost,
        lost_fraction=lost / total.updates,
        overlapped_gradients=total.overlapped / total.updates,
        locks_taken=total.locks_taken,
        lock_contention=total.locks_waited / total.locks_taken if total.locks_taken else 0.0,
        lock_seconds=total.lock_seconds,
        held_back=total.held_back,
    )


def _set_up(executor: Executor, server: ServerState, race_state: RaceState) -> None:
    """Create the `RaceWorker` of this process. Every process calls this function before the race."""
    server.attach(executor.shared)
    kind: type[RaceWorker] = HogwildWorker if server.policy.locking == "nothing" else LockedRaceWorker
    steps = [executor.batch_source.steps(worker, 1) for worker in range(server.n)]
    slots = balance_load(steps, executor.team.count)[executor.team.index]
    executor.process.state["racer"] = kind(executor, server, race_state, slots)


def _call_worker(executor: Executor, method: Callable[..., Any], *arguments: Any) -> Any:
    return method(executor.process.state["racer"], *arguments)
