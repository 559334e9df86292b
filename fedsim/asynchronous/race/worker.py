"""Training of one process's workers during a round of a race."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedsim.asynchronous.dispatch import Dispatcher, Scheduler, SchedulerState
from fedsim.asynchronous.race.log import CANCELLED, LEFT, TAKEN, LogEntry
from fedsim.asynchronous.race.state import BUSY, FINISHED, HELD_BACK, IDLE, STATUS, WRITES_ENDED, Measures, RaceState
from fedsim.asynchronous.round_stats import RoundStats
from fedsim.asynchronous.server_state import ServerState
from fedsim.processes.process_context import LOCK
from fedsim.rounds.executor import Executor
from fedsim.system.devices import synchronize
from fedsim.training.batches import WorkItem

SERVER_LOCK = 0  # number of the server's lock; the lock of slot i has number 1 + i
FIRST_SLEEP, LONGEST_SLEEP = 0.00005, 0.005  # seconds between attempts, while no worker of the process may start
Progress = list[tuple[int, dict[str, Any]]]  # (run, state of its scheduler)


@dataclass
class ProcessResult:
    """Results of one process in one round of a race.

    Attributes:
        stats: training statistics.
        measures: measurements of locks and time.
        entries: log entries; empty unless the policy locks the server.
    """

    stats: RoundStats = field(default_factory=RoundStats)
    measures: Measures = field(default_factory=Measures)
    entries: list[LogEntry] = field(default_factory=list)

    def add(self, result: ProcessResult) -> None:
        """Add the results of another process to this object."""
        self.stats.add(result.stats)
        self.measures.add(result.measures)
        self.entries += result.entries


class RaceWorker(ABC):
    """Trains some of the workers of a race (asynchronous training in real time) in one process, one after another.

    Args:
        executor: object that trains workers in this process.
        server: state of the server, in shared memory.
        race_state: locks and counters that all processes share.
        slots: positions of this process's workers among the workers of all processes.
    """

    def __init__(self, executor: Executor, server: ServerState, race_state: RaceState, slots: Sequence[int]) -> None:
        self._process, self._executor, self._slots = executor.process, executor, slots
        self._server, self._policy, self._race_state = server, server.policy, race_state
        self._writes_ended = race_state.column(WRITES_ENDED)
        self._schedulers: dict[int, Scheduler] = {}  # by run
        self._set_up()

    def race(self, run: int, round: int) -> ProcessResult:
        """Wait until all processes are ready, then train this process's workers for one round. Returns the results.

        `run` is the number of the race's repetition.
        """
        result, locks = ProcessResult(), self._race_state.locks
        measures = result.measures
        locks.reset_counts()
        self._process.barrier.wait()
        start = time.perf_counter()
        self._run_round(run, round, result)
        measures.seconds = time.perf_counter() - start
        measures.locks_taken, measures.locks_waited, measures.lock_seconds = locks.taken, locks.waited, locks.seconds
        return result

    def progress(self) -> Progress:
        """Return how much work each worker has finished: a pair (run, scheduler state) per repetition of the race."""
        return [(run, scheduler.state()) for run, scheduler in self._schedulers.items()]

    def resume(self, progress: Progress) -> None:
        """Restore the progress of this process's workers. `progress` contains the workers of all processes."""
        self._schedulers.clear()
        for run, state in progress:
            done = [(worker, count) for worker, count in state["done"] if worker in self._slots]
            if done:
                self._scheduler(run).resume(SchedulerState(done=done, drawn=0), [])

    def _scheduler(self, run: int) -> Scheduler:
        if run not in self._schedulers:
            self._schedulers[run] = Scheduler.of(self._executor.task, self._executor.shared)
        return self._schedulers[run]

    @abstractmethod
    def _set_up(self) -> None:
        """Prepare the first round."""

    @abstractmethod
    def _run_round(self, run: int, round: int, result: ProcessResult) -> None:
        """Train this process's workers for one round, and add their statistics to `result`.

        `run` is the number of the race's repetition.
        """


class LockedRaceWorker(RaceWorker):
    """Trains some workers in one process of a race (asynchronous training in real time) with locks.

    The locks protect the global model when a worker reads it and when a result arrives. A worker that may not start
    waits for other workers. If no worker can make progress, the round ends early. The remaining work is then done in
    the next round.
    """

    def _set_up(self) -> None:
        self._status, self._events = self._race_state.column(STATUS), self._race_state.events.numpy()
        self._pair = self._policy.locking == "pair"
        self._begun: dict[int, int] = {}  # by slot: event number of the work item's start

    def _run_round(self, run: int, round: int, result: ProcessResult) -> None:
        self._round, self._measures, self._entries = round, result.measures, result.entries
        self._dispatcher = Dispatcher(self._server, self._scheduler(run), self._executor.train)
        self._dispatcher.start_round(round)
        result.stats = self._dispatcher.stats
        active, sleep = list(self._slots), FIRST_SLEEP
        while active:
            worked = [slot for slot in active if self._work(slot)]
            active = [slot for slot in active if self._status[slot] == IDLE]
            if worked:
                sleep = FIRST_SLEEP
            elif active:
                with self._process.waiting():
                    time.sleep(sleep)
                sleep = min(2 * sleep, LONGEST_SLEEP)

    def _work(self, slot: int) -> bool:
        """Run one step or round of the worker in `slot`. Returns False if its round is over or it may not start yet."""
        with self._locked(slot):
            if not self._may_start(slot):
                return False
            item = self._start(slot)
        began = time.perf_counter()
        self._dispatcher.train([slot])
        self._server.step_seconds[slot] = (time.perf_counter() - began) / self._dispatcher.scheduler.steps(item)
        with self._process.working_on(slot, self._round):
            partner = self._partner(slot)
            with self._locked(slot, *partner):
                self._arrive(item, partner)
        return True

    def _may_start(self, slot: int) -> bool:
        """Whether the worker in `slot` may start to train now."""
        scheduler, server, policy, status = self._dispatcher.scheduler, self._server, self._policy, self._status
        if scheduler.items_done(slot) >= self._round * scheduler.items_per_round(slot):
            status[slot] = FINISHED
            return False
        if policy.may_start(server, slot):
            return True
        if self._any_progress():
            return False
        for finished in np.flatnonzero((status == FINISHED) & (server.alive_mask == 1)).tolist():
            if policy.may_start(server, finished):  # otherwise the others do not wait for this worker
                server.alive_mask[finished] = 0
                policy.on_departure(server)
                self._log(LEFT, WorkItem(finished, finished, self._round), self._event())
        if not self._any_progress():
            status[slot] = HELD_BACK
            self._measures.held_back += 1
            return False
        return policy.may_start(server, slot)

    def _any_progress(self) -> bool:
        """Whether any worker is training or may start."""
        idle = np.flatnonzero(self._status == IDLE).tolist()
        return bool((self._status == BUSY).any()) or any(self._policy.may_start(self._server, slot) for slot in idle)

    def _start(self, slot: int) -> WorkItem:
        item = self._dispatcher.dispatch(slot)
        self._status[slot] = BUSY
        self._begun[slot] = int(self._writes_ended.sum()) if self._pair else self._event()
        synchronize(self._executor.task.device)
        return item

    def _arrive(self, item: WorkItem, partner: Sequence[int]) -> None:
        slot, dispatcher = item.slot, self._dispatcher
        if dispatcher.is_stale(slot):
            self._log(CANCELLED, item, self._begun[slot])
            dispatcher.cancel(slot)
        else:
            if not self._pair:
                self._log(TAKEN, item, self._begun[slot])
            dispatcher.receive(slot, int(self._writes_ended.sum()) - self._begun[slot] if self._pair else None)
            self._race_state.add(slot, (slot, *partner) if self._pair else (0,))
            self._writes_ended[slot] += 1
            self._measures.updates += 1
        self._status[slot] = IDLE
        synchronize(self._executor.task.device)

    def _partner(self, slot: int) -> tuple[int, ...]:
        """Return a tuple with the slot of the second worker whose model changes, or () if there is none."""
        partner = self._policy.partner(self._server, slot, int(self._server.units[slot]) - 1) if self._pair else None
        return () if partner is None else (partner,)

    @contextlib.contextmanager
    def _locked(self, *slots: int) -> Iterator[None]:
        """Return a context manager that holds the locks the policy needs: the server's, or those of the `slots`."""
        numbers, locks = [1 + slot for slot in slots] if self._pair else [SERVER_LOCK], self._race_state.locks
        try:
            with self._process.waiting():
                locks.acquire(numbers)
            with self._process.holding(LOCK):
                yield
        finally:
            locks.release(numbers)

    def _log(self, kind: int, item: WorkItem, begun: int) -> None:
        """Add an entry to the log.

        Args:
            kind: kind of the entry (see `LogEntry`).
            item: the worker's step or round.
            begun: event number of its start.
        """
        taken = begun if kind == LEFT else self._event()
        read, version = int(self._server.read[item.slot]), self._server.version
        self._entries.append(LogEntry(kind, item.worker, item.steps or 0, begun, taken, read, version))

    def _event(self) -> int:
        """Count a new event (a start or arrival), and return its number. The caller must hold the server's lock."""
        self._events[0] += 1
        return int(self._events[0])
