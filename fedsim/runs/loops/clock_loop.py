"""Loop of asynchronous training on a virtual clock. A round has as much work as a synchronous round."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedsim.asynchronous.dispatch import Scheduler
from fedsim.asynchronous.race.log import read_log
from fedsim.asynchronous.race.replay import LoggedOrder
from fedsim.asynchronous.round_stats import RoundStats, Train
from fedsim.asynchronous.server_state import ServerState
from fedsim.asynchronous.virtual_clock import VirtualClock
from fedsim.config.experiment import Experiment
from fedsim.core.snapshot import Snapshot
from fedsim.core.timer import PhaseTimer
from fedsim.engines import Engine, RunTask
from fedsim.records.record import AsyncRecord, RoundRecord
from fedsim.rounds.evaluation import EvaluationResult
from fedsim.rounds.executor import Executor
from fedsim.rounds.round_clock import delays_of
from fedsim.runs.loops.loop import Loop
from fedsim.training.batches import WorkItem
from fedsim.training.memory import buffer_bytes, personal_bytes
from fedsim.training.shared_state import message_bytes


class ClockLoop(Loop):
    """Runs the rounds of an asynchronous experiment on a virtual clock."""

    def __init__(self, experiment: Experiment, task: RunTask, engine: Engine) -> None:
        shared = engine.shared
        self._task, self._engine = task, engine
        self._policy, self._timer = task.experiment.policy.component, PhaseTimer()
        self._server = ServerState(task, shared, engine.states)
        model_bytes = shared.server.row.nbytes - personal_bytes(task) + buffer_bytes(task, shared)
        received, sent = message_bytes(task, shared)
        self._bytes_up, self._bytes_down = model_bytes + sent, model_bytes + received
        train = partial(_train, engine, self._timer)  # a bound method would be a reference cycle that keeps the rows
        self._source = self._source_of(experiment, Scheduler.of(task, shared), train)

    def _source_of(self, experiment: Experiment, scheduler: Scheduler, train: Train) -> VirtualClock | LoggedOrder:
        """Return the object that determines the order in which workers finish.

        It is the log of a race if `clock.replay_log` is set, otherwise a virtual clock. `scheduler` and `train` are
        arguments of both classes.
        """
        clock, algorithm, server = experiment.clock, self._task.algorithm, self._server
        bytes_up, bytes_down = self._bytes_up, self._bytes_down  # `self` would be a reference cycle
        if clock.replay_log is not None:
            log = read_log(clock.replay_log, experiment.resolved())
            return LoggedOrder(log, clock.replay_log, server, scheduler, train)
        delays = delays_of(self._task.experiment, self._task.byzantine.fixed)
        departures = {int(worker): at for worker, at in clock.departures.items()}
        if experiment.cohort_size == experiment.workers:
            server.step_seconds.copy_(torch.from_numpy(delays.base * delays.slowdowns))

        def duration(item: WorkItem, unit: int, models: tuple[int, int]) -> float:
            nbytes = models[0] * bytes_up + models[1] * bytes_down
            return delays.seconds(item.worker, unit, scheduler.gradients(item, algorithm), nbytes)

        total_items = experiment.rounds * scheduler.total_items_per_round()
        return VirtualClock(server, scheduler, duration, train, departures, total_items)

    def run_round(self, round: int) -> RoundRecord:
        timer, source, policy = self._timer, self._source, self._policy
        dispatcher = source.dispatcher
        timer.reset()
        dispatcher.start_round(round)
        with timer("aggregate"):
            source.run_round(round)
            policy.publish(self._server)
        timer.seconds["aggregate"] -= timer.seconds["train"]
        with timer("test"):
            self._engine.run(Executor.check_and_test, round)
            tested = EvaluationResult.of(self._task, self._engine.shared)
            tested.metrics.update(policy.numbers(self._server))
            tested.metrics.update(dispatcher.stats.metrics.means())
        stats = dispatcher.stats
        return RoundRecord(
            round=round,
            train_loss=stats.train_loss,
            **tested.fields(),
            seconds=timer.seconds,
            **work_of(stats, self._bytes_up, self._bytes_down),
            virtual_seconds=source.now,
            timeline=source.timeline,
            asynchronous=async_record(stats, self._server.version, dispatcher.arrivals, policy.buffered(self._server)),
        )

    def take_combination(self) -> dict[str, Tensor]:
        combination = self._server.combination
        recorded, combination.recorded = combination.recorded, {}
        return recorded

    def state(self) -> Snapshot:
        state = Snapshot(metadata={"clock": self._source.state()})
        for tensors in (self._engine.shared.state_dict(), self._server.tensors):
            state.keep(tensors)
        state.keep(self._engine.states.tensors(), "worker_state.")
        self._server.combination.keep_states(state)
        return state

    def resume(self, state: Snapshot) -> None:
        state.put_back(self._engine.shared.state_dict() | self._server.tensors)
        self._engine.states.resume(state.under("worker_state."))
        self._server.combination.resume_states(state)
        self._source.resume(state.metadata["clock"])


def work_of(stats: RoundStats, bytes_up: int, bytes_down: int) -> dict[str, Any]:
    """Return the workers, samples and bytes of an asynchronous round, as fields of a `RoundRecord`.

    Args:
        stats: statistics of the round.
        bytes_up, bytes_down: bytes that a worker sends for one update, and receives for one model.
    """
    cohort = sorted(stats.samples)
    return {
        "cohort": cohort,
        "samples": [stats.samples[worker] for worker in cohort],
        "excluded": sorted(stats.excluded),
        "weights": stats.weights(cohort),
        "bytes_up": stats.up * bytes_up,
        "bytes_down": stats.down * bytes_down,
    }


def async_record(stats: RoundStats, updates: int, arrivals: int, buffered: int) -> AsyncRecord:
    """Return the fields of a round's record that only asynchronous rounds have.

    Args:
        stats: statistics of the round.
        updates: number of updates of the global model since the start of the run.
        arrivals: number of results that have arrived at the server since the start of the run.
        buffered: number of results that have arrived but have not changed the global model yet.
    """
    staleness = {str(tau): count for tau, count in sorted(stats.staleness.items())}
    return AsyncRecord(
        updates=updates,
        arrivals=arrivals,
        staleness=staleness,
        buffered=buffered,
        discarded=stats.cancelled.total(),
        rejected={str(worker): count for worker, count in sorted(stats.rejected.items())},
    )


def _train(engine: Engine, timer: PhaseTimer, items: Sequence[WorkItem]) -> None:
    with timer("train"):
        engine.run(Executor.train_apart, items)
