"""A race: processes that train on shared tensors at the same time, told in rounds, and run several times.

A race is never the same twice. So there are several runs of it, which take turns: each round is raced by all of them,
one after another, each from where it stood itself, and its record tells of all.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.asynchronous.desk import Journal
from fedsim.asynchronous.live import LiveRacer
from fedsim.asynchronous.policy import Policy
from fedsim.asynchronous.racelog import to_csv
from fedsim.asynchronous.racer import Leg, LockedRacer, Racer
from fedsim.asynchronous.server import Server
from fedsim.asynchronous.sparse import tables_of
from fedsim.asynchronous.track import Measures, Track
from fedsim.engines.crew import Seat
from fedsim.engines.job import FiniteCheck
from fedsim.engines.spawn import SpawnEngine
from fedsim.engines.station import Station, deal
from fedsim.errors import ExperimentError
from fedsim.intervals import estimate
from fedsim.preparation import Setting
from fedsim.records import AsyncRecord, RaceRecord, RoundRecord
from fedsim.snapshot import Snapshot
from fedsim.stopwatch import Stopwatch
from fedsim.system.devices import synchronize
from fedsim.system.precision import full_precision

KeepLog = Callable[[bytes], object]


@dataclass
class Heat:
    """What a round of one run came to.

    Attributes:
        journal, measures: of all its processes.
        entries: of the log.
        lost: how many updates have been overwritten, as far as the canary tells.
        updates, trips: of the global row, and pieces of work taken, since the start.
        held: pieces of work that wait for an update.
        test: loss, accuracy, and the attacker's success.
    """

    journal: Journal = field(default_factory=Journal)
    measures: Measures = field(default_factory=Measures)
    entries: list[np.ndarray] = field(default_factory=list)
    lost: float = 0.0
    updates: int = 0
    trips: int = 0
    held: int = 0
    test: tuple[float, float, float | None] = (0.0, 0.0, None)

    def add(self, leg: Leg) -> None:
        """Add what one process has done."""
        self.journal.add(leg.journal)
        self.measures.add(leg.measures)
        self.entries.append(leg.entries)

    @property
    def samples(self) -> int:
        return sum(self.journal.samples.values())


class Course:
    """Several runs of one race on one set of shared tensors, which hold the state of one of them at a time."""

    def __init__(self, setting: Setting, engine: SpawnEngine) -> None:
        experiment = setting.experiment
        self._engine, self._memory, self._policy = engine, engine.memory, experiment.policy.bind()
        self._check_finite = FiniteCheck(setting.task, engine.memory)
        solver = experiment.local.bind()
        self._server = Server.of(self._policy, solver, setting.task, engine.memory)
        if self._policy.locking == "nothing":
            self._server = replace(self._server, tables=tables_of(setting.task.new_module(), solver))
        self._server.share()
        self._track = Track.of(self._server.n, engine.memory.global_row.device)
        engine.call(_come_to_start, self._server, self._track)
        self._runs = experiment.race.runs
        several = self._runs > 1
        states = [[tensor.clone() for tensor in self._tensors().values()] for _ in range(self._runs if several else 0)]
        self._states = states
        self._present = 0  # the run whose state the tensors hold
        self._taken = [0] * self._runs

    def heat(self, run: int, round: int, stopwatch: Stopwatch) -> Heat:
        """Race one round of one run."""
        self.turn_to(run)
        server, heat = self._server, Heat()
        self._track.clear()
        with stopwatch("train"):
            for leg in self._engine.call(_race, run, round):
                heat.add(leg)
        if not heat.measures.updates:
            raise ExperimentError(f"policy: in round {round} of the race nobody is at work and nobody may begin")
        self._taken[run] += heat.measures.updates
        with stopwatch("aggregate"), full_precision(self._memory.global_row.device):
            server.come_back()
            if self._policy.locking != "server":  # who counts without a lock miscounts
                server.version = self._taken[run]
            self._policy.publish(server)
            synchronize(self._memory.global_row.device)
        self._check_finite(round)
        with stopwatch("test"):
            heat.test = self._engine.test(round)
        heat.lost, heat.held = self._track.lost(), self._policy.held(server)
        heat.updates, heat.trips = server.version, self._taken[run]
        return heat

    def turn_to(self, run: int) -> None:
        """Put the state of another run into the shared tensors, where that of the present one is kept."""
        if run == self._present:
            return
        present = self._tensors().values()
        for kept, other, tensor in zip(self._states[self._present], self._states[run], present, strict=True):
            kept.copy_(tensor)
            tensor.copy_(other)
        self._present = run

    def state(self) -> Snapshot:
        """Where all runs stand, between two rounds."""
        state = Snapshot(facts={"taken": list(self._taken), "rosters": self._engine.call(_rosters)})
        for run in range(self._runs):
            self.turn_to(run)
            state.keep(self._tensors(), f"{run}.")
        return state

    def resume(self, state: Snapshot) -> None:
        """Go back, or on, to such a state; in processes that may have been started since."""
        self._engine.call(_come_to_start, self._server, self._track)
        for run in range(self._runs):
            self.turn_to(run)
            state.put_back(self._tensors(), f"{run}.")
        self._taken = list(state.facts["taken"])
        done = [item for of_one in state.facts["rosters"] for item in of_one]
        self._engine.call(_resume_rosters, done)

    def _tensors(self) -> dict[str, Tensor]:
        """What a run goes by, and leaves to its next round."""
        return {**self._memory.lasting, **self._server.tensors}


class RaceLoop:
    """The rounds of a race, on an engine that has begun; after the last the engine's memory is that of the first run.

    keep_log: is given the log as a file, at the end, where the policy locks the server.

    A state of it is no less exact than others; but what a race comes to from there is never the same twice.
    """

    def __init__(self, setting: Setting, engine: SpawnEngine, keep_log: KeepLog | None = None) -> None:
        self._setting, self._keep_log, self._stopwatch = setting, keep_log, Stopwatch()
        self._course = Course(setting, engine)
        self._logs = keep_log is not None and setting.experiment.policy.bind().locking == "server"
        self._log: list[tuple[int, int, np.ndarray]] = []  # run, round, entries

    def play(self, round: int) -> RoundRecord:
        setting, stopwatch = self._setting, self._stopwatch
        stopwatch.start_again()
        heats = [self._course.heat(run, round, stopwatch) for run in range(setting.experiment.race.runs)]
        if self._logs:
            self._log.extend((run, round, np.concatenate(heat.entries)) for run, heat in enumerate(heats, 1))
        return record_of(round, heats, stopwatch.seconds, setting.row_bytes + setting.buffer_bytes)

    def state(self) -> Snapshot:
        state = self._course.state()
        state.facts["log"] = [(run, round) for run, round, _ in self._log]
        logged = enumerate(self._log)  # of which no copies are needed: entries never change
        state.tensors |= {f"log.{number}": torch.from_numpy(entries) for number, (*_, entries) in logged}
        return state

    def resume(self, state: Snapshot) -> None:
        self._course.resume(state)
        entries = state.under("log.")
        self._log = [
            (run, round, entries[str(number)].numpy()) for number, (run, round) in enumerate(state.facts["log"])
        ]

    def finish(self) -> None:
        """Put the first run's state into the engine's memory, and give the log away."""
        self._course.turn_to(0)
        if self._logs:
            assert self._keep_log is not None
            self._keep_log(to_csv(self._setting.experiment.resolved(), self._log))


def caveat(runs: int) -> str:
    """What has to be said before any number of a race."""
    if runs == 1:
        return "a race is not repeatable, and one run of it (race.runs) tells no spread"
    return f"a race is not repeatable: it is run {runs} times, numbers are means, and the model kept is the first run's"


def record_of(round: int, heats: Sequence[Heat], seconds: dict[str, float], model_bytes: int) -> RoundRecord:
    """The record of a round: means over the runs, and of what is no mean, such as who did how much, the first run's."""
    first, journal = heats[0], heats[0].journal
    losses, accuracies, successes = zip(*(heat.test for heat in heats), strict=True)
    cohort = sorted(journal.samples)
    return RoundRecord(
        round=round,
        test_loss=statistics.fmean(losses),
        test_accuracy=statistics.fmean(accuracies),
        train_loss=statistics.fmean(heat.journal.train_loss for heat in heats),
        seconds=seconds,
        cohort=cohort,
        coefficients=None,
        excluded=sorted(journal.excluded),
        lost=[],
        attack_success=None if None in successes else statistics.fmean(successes),
        bytes_up=journal.up * model_bytes,
        bytes_down=journal.down * model_bytes,
        samples=[journal.samples[worker] for worker in cohort],
        virtual_seconds=None,
        asynchronous=AsyncRecord(
            updates=first.updates,
            trips=first.trips,
            staleness={str(tau): count for tau, count in sorted(journal.staleness.items())},
            held=first.held,
            wasted=journal.wasted,
        ),
        race=_measured(heats),
    )


def _measured(heats: Sequence[Heat]) -> RaceRecord:
    measures, total = [heat.measures for heat in heats], Measures()
    for each in measures:
        total.add(each)
    accuracies, lost = [heat.test[1] for heat in heats], sum(heat.lost for heat in heats)
    spread = estimate(accuracies)
    return RaceRecord(
        runs=len(heats),
        test_accuracies=accuracies,
        test_accuracy_half_width=spread.half_width if spread and len(heats) > 1 else None,
        test_losses=[heat.test[0] for heat in heats],
        train_losses=[heat.journal.train_loss for heat in heats],
        samples_per_second=[heat.samples / each.seconds for heat, each in zip(heats, measures, strict=True)],
        updates=total.updates,
        updates_lost=lost,
        lost_fraction=lost / total.updates,
        torn_reads=total.overlapped / total.updates,
        locks_taken=total.locks_taken,
        lock_contention=total.locks_waited / total.locks_taken if total.locks_taken else 0.0,
        lock_seconds=total.lock_seconds,
        held_back=total.held_back,
    )


def _come_to_start(seat: Seat, station: Station, server: Server, track: Track) -> None:
    """In each process: get ready to race."""
    server.settle(station.memory)
    policy: Policy = server.policy
    kind: type[Racer] = LiveRacer if policy.locking == "nothing" else LockedRacer
    steps = [station.feed.steps(worker, 1) for worker in range(server.n)]
    seat.belongings["racer"] = kind(seat, station, server, track, deal(steps, seat.count)[seat.index])


def _race(seat: Seat, station: Station, run: int, round: int) -> Leg:
    racer: Racer = seat.belongings["racer"]
    return racer.race(run, round)


Progress = list[tuple[int, dict[str, Any]]]  # of the workers of a process: a run, and how far its roster has come


def _rosters(seat: Seat, station: Station) -> Progress:
    racer: Racer = seat.belongings["racer"]
    return racer.progress()


def _resume_rosters(seat: Seat, station: Station, progress: Progress) -> None:
    """All that any process's workers had done, of which each takes what is its own workers'."""
    racer: Racer = seat.belongings["racer"]
    racer.resume(progress)
