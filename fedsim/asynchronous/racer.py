"""One process's part of a race: what its workers do, freely, from the start of a round to its end."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedsim.asynchronous.desk import Desk, Journal
from fedsim.asynchronous.racelog import GIVEN_UP, LEFT, TAKEN, Entry
from fedsim.asynchronous.roster import Roster
from fedsim.asynchronous.server import Server
from fedsim.asynchronous.standing import RosterStanding
from fedsim.asynchronous.track import ENDED, FINISHED, HELD_BACK, IDLE, STATUS, WORKING, Measures, Track
from fedsim.engines.barrier import LOCK
from fedsim.engines.crew import Seat
from fedsim.engines.feed import Member
from fedsim.engines.station import Station
from fedsim.system.devices import synchronize
from fedsim.system.precision import full_precision

SERVER = 0  # number of the server's lock; that of slot i is 1 + i
NAPS = 0.00005, 0.005  # seconds that a process sleeps whose workers may not begin: at first, and at most


@dataclass
class Leg:
    """What comes of one process's part of a round.

    Attributes:
        journal: what was done.
        measures: how that went.
        entries: of the log, [pieces of work, fields], where the server was locked.
    """

    journal: Journal = field(default_factory=Journal)
    measures: Measures = field(default_factory=Measures)
    entries: np.ndarray = field(default_factory=lambda: np.zeros((0, len(Entry._fields)), dtype=np.int64))


class Racer(ABC):
    """The workers of one process, who take turns, a piece of work at a time.

    Args:
        slots: of these workers.
    """

    def __init__(self, seat: Seat, station: Station, server: Server, track: Track, slots: Sequence[int]) -> None:
        self._seat, self._station, self._slots = seat, station, slots
        self._server, self._policy, self._track = server, server.policy, track
        self._ended = track.column(ENDED)
        self._rosters: dict[int, Roster] = {}  # by run, where workers begin one piece of work after another

    def race(self, run: int, round: int) -> Leg:
        """This process's part of a round of one of the runs, from a common start."""
        leg, locks = Leg(), self._track.locks
        locks.start_count()
        with full_precision(self._station.task.device):
            self._seat.barrier.wait()
            began = time.perf_counter()
            self._go(run, round, leg)
        measures = leg.measures
        measures.began, measures.ended = began, time.perf_counter()
        measures.locks_taken, measures.locks_waited, measures.lock_seconds = locks.taken, locks.waited, locks.seconds
        return leg

    def progress(self) -> list[tuple[int, dict[str, Any]]]:
        """How far its workers have come, by run, beyond what the server's tensors tell; see `Roster.state`."""
        return [(run, roster.state()) for run, roster in self._rosters.items()]

    def resume(self, progress: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """Go on from there; what is said of workers of other processes is for those."""
        self._rosters.clear()
        for run, state in progress:
            done = [(worker, count) for worker, count in state["done"] if worker in self._slots]
            if done:
                self._roster(run).resume(RosterStanding(done=done, busy=[], drawn=state["drawn"]), [])

    def _roster(self, run: int) -> Roster:
        if run not in self._rosters:
            task, n = self._station.task, self._server.n
            sizes = self._station.memory.shards.size
            self._rosters[run] = Roster(task.seed, n, n, self._policy.work, task.schedule, sizes)
        return self._rosters[run]

    @abstractmethod
    def _go(self, run: int, round: int, leg: Leg) -> None:
        """All that the workers of this process do in a round."""


class LockedRacer(Racer):
    """Workers whose model is read, and whose work is taken, under a lock; in between each computes on its own row.

    A worker that the policy holds back waits for others. Where nobody is at work and nobody may begin, those who have
    ended their round count as gone, and if that does not help, the round is over for all who wait: what they have not
    done is due in the next.
    """

    def __init__(self, seat: Seat, station: Station, server: Server, track: Track, slots: Sequence[int]) -> None:
        super().__init__(seat, station, server, track, slots)
        self._status, self._events = track.column(STATUS), track.events.numpy()
        self._pair = self._policy.locking == "pair"
        self._begun: dict[int, int] = {}  # by slot: the event with which its work under way began

    def _go(self, run: int, round: int, leg: Leg) -> None:
        self._round, self._measures, self._entries = round, leg.measures, list[Entry]()
        self._desk = Desk(self._server, self._roster(run))
        self._desk.begin_round(round)
        self._take_turns()
        leg.journal = self._desk.journal
        leg.entries = np.array(self._entries, dtype=np.int64).reshape(-1, len(Entry._fields))

    def _take_turns(self) -> None:
        active, nap = list(self._slots), NAPS[0]
        while active:
            went_on = [slot for slot in active if self._go_on(slot)]
            active = [slot for slot in active if self._status[slot] == IDLE]
            if went_on:
                nap = NAPS[0]
            elif active:
                with self._seat.waiting():
                    time.sleep(nap)
                nap = min(2 * nap, NAPS[1])

    def _go_on(self, slot: int) -> bool:
        """One piece of work, if one is due and the worker may begin it."""
        with self._locked(slot):
            if not self._may_go_on(slot):
                return False
            member = self._begin(slot)
        began = time.perf_counter()
        self._station.train_mine([member])
        self._desk.look_at([member])
        self._server.step_seconds[slot] = (time.perf_counter() - began) / self._desk.roster.steps(member)
        with self._seat.working_on(slot, self._round):
            partner = self._partner(slot)
            with self._locked(slot, *partner):
                self._come_in(member, partner)
        return True

    def _may_go_on(self, slot: int) -> bool:
        """Whether a worker begins its next piece of work now; notes it where its round is over."""
        roster, server, policy, status = self._desk.roster, self._server, self._policy, self._status
        if roster.pieces_done(slot) >= self._round * roster.pieces(slot):
            status[slot] = FINISHED
            return False
        if policy.may_start(server, slot):
            return True
        if self._anybody_moves():
            return False
        for other in np.flatnonzero((status == FINISHED) & (server.living == 1)).tolist():
            if policy.may_start(server, other):  # else it is no more waited for than this one
                server.living[other] = 0
                policy.left(server)
                self._log(LEFT, Member(other, other, self._round), self._event())
        if not self._anybody_moves():
            status[slot] = HELD_BACK
            self._measures.held_back += 1
            return False
        return policy.may_start(server, slot)

    def _anybody_moves(self) -> bool:
        """Whether anybody is at work, or may begin, whether or not it has noticed."""
        idle = np.flatnonzero(self._status == IDLE).tolist()
        return bool((self._status == WORKING).any()) or any(self._policy.may_start(self._server, slot) for slot in idle)

    def _begin(self, slot: int) -> Member:
        member = self._desk.begin(slot)
        self._status[slot] = WORKING
        self._begun[slot] = int(self._ended.sum()) if self._pair else self._event()
        synchronize(self._station.task.device)
        return member

    def _come_in(self, member: Member, partner: Sequence[int]) -> None:
        slot, desk = member.slot, self._desk
        if desk.is_void(member.slot):
            self._log(GIVEN_UP, member, self._begun[slot])
            desk.give_up(member)
        else:
            if not self._pair:
                self._log(TAKEN, member, self._begun[slot])
            desk.take(member, int(self._ended.sum()) - self._begun[slot] if self._pair else None)
            self._track.add(slot, (slot, *partner) if self._pair else (0,))
            self._ended[slot] += 1
            self._measures.updates += 1
        self._status[slot] = IDLE
        synchronize(self._station.task.device)

    def _partner(self, slot: int) -> tuple[int, ...]:
        """Whose model a worker's work changes beside its own, if one has to be locked."""
        partner = self._policy.partner(self._server, slot, int(self._server.units[slot]) - 1) if self._pair else None
        return () if partner is None else (partner,)

    @contextlib.contextmanager
    def _locked(self, *slots: int) -> Iterator[None]:
        """Lock the server or, for policies that do with less, these workers."""
        numbers, locks = [1 + slot for slot in slots] if self._pair else [SERVER], self._track.locks
        try:
            with self._seat.waiting():
                locks.take(numbers)
            with self._seat.holding(LOCK):
                yield
        finally:  # also of those that have not been taken, which does nothing
            locks.give_back(numbers)

    def _log(self, kind: int, member: Member, begun: int) -> None:
        """One more entry, before anything comes of it."""
        slot = member.slot
        taken = begun if kind == LEFT else self._event()
        read, version = int(self._server.read[slot]), self._server.version
        self._entries.append(Entry(kind, member.worker, member.steps or 0, begun, taken, read, version))

    def _event(self) -> int:
        """The number of what happens now, under the server's lock."""
        self._events[0] += 1
        return int(self._events[0])
