"""The virtual clock: a discrete-event simulation of asynchronous workers, repeatable to the bit.

What a piece of work comes to depends only on the model that it began with. So it is computed no sooner than when it
arrives, together with all others that are under way by then, by whatever engine there is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fedsim.asynchronous.calendar import Calendar
from fedsim.asynchronous.desk import Desk
from fedsim.asynchronous.roster import Roster
from fedsim.asynchronous.server import Server
from fedsim.asynchronous.standing import ClockStanding, require_below
from fedsim.engines.feed import Member
from fedsim.errors import ExperimentError

Train = Callable[[Sequence[Member]], object]
Pace = Callable[[Member, int, int], float]  # seconds for a piece of work, its number, and the models that it moves


class VirtualClock:
    """Runs a policy: who begins what, when it arrives, and in which order the server takes it.

    All that arrives at one time is taken, in the order of slots, before anybody begins anew at that time.

    Args:
        pace: how long a piece of work takes, given what it is, how many the worker has begun before, and how many
            models it sends and is sent.
        train: computes pieces of work, each from what its row holds.
        departures: when workers leave, by slot: what has not arrived by then never does.
        pieces: how many pieces of work the run ends after, if that is known: of the others nothing is computed.

    Attributes:
        desk: where work begins and comes in; its journal is begun anew by whoever reads it.
    """

    def __init__(
        self,
        server: Server,
        roster: Roster,
        pace: Pace,
        train: Train,
        departures: Mapping[int, float] | None = None,
        pieces: float = math.inf,
    ) -> None:
        self._server, self._policy, self.desk = server, server.policy, Desk(server, roster)
        self._pace, self._train, self._departures = pace, train, departures or {}
        self._calendar = Calendar()
        self._idle = list(range(server.n))  # slots where nobody is at work, and that have not been asked
        self._waiting: list[int] = []  # who may not begin,
        self._asked_at: tuple[int, int] | None = None  # at this version, when so many had left
        self._left = 0
        self._to_come = pieces
        self._under_way: dict[int, Member] = {}
        self._untrained: dict[int, Member] = {}
        self._begun: Counter[int] = Counter()  # pieces of work, by worker
        self._leaving: set[int] = set()
        self.taken = 0  # pieces of work, since the start

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._calendar.now

    @property
    def in_flight(self) -> Iterable[int]:
        """The slots whose work has begun and not arrived."""
        return self._under_way.keys()

    def play(self, round: int) -> None:
        """Go on until as many pieces of work have been taken as so many synchronous rounds have."""
        enough = round * self.desk.roster.pieces_of_a_round()
        while self.taken < enough:
            self.advance()

    def state(self) -> dict[str, Any]:
        """Where it stands between two rounds, in the types that JSON has; the tensors are the server's and engine's."""
        now, pending = self._calendar.state()
        return {
            "now": now,
            "pending": pending,
            "roster": self.desk.roster.state(),
            "under_way": list(self._under_way.values()),  # in the order in which they began
            "untrained": list(self._untrained),
            "unfit": sorted(self.desk.unfit),
            "idle": list(self._idle),
            "waiting": list(self._waiting),
            "asked_at": self._asked_at,
            "leaving": sorted(self._leaving),
            "left": self._left,
            "begun": list(self._begun.items()),
            "taken": self.taken,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state, with the server's tensors as they were. Raises ValueError where it cannot be."""
        standing = ClockStanding.model_validate(state)
        calendar = Calendar.restored(standing.now, standing.pending)
        self._check(standing, calendar)
        self._to_come += self.taken - standing.taken
        self._calendar = calendar
        self.desk.resume(standing)
        self._under_way = {member.slot: member for member in standing.members}
        self._untrained = {slot: self._under_way[slot] for slot in standing.untrained}
        self._idle, self._waiting, self._asked_at = standing.idle, standing.waiting, standing.asked_at
        self._leaving, self._left = set(standing.leaving), standing.left
        self._begun, self.taken = Counter(dict(standing.begun)), standing.taken

    def _check(self, standing: ClockStanding, calendar: Calendar) -> None:
        """Whether it is one that this clock can have."""
        n, at_work = self._server.n, {member.slot for member in standing.members}
        require_below(n, "slots", [*at_work, *standing.idle, *standing.waiting])
        require_below(self.desk.roster.n_workers, "workers", [worker for worker, _ in standing.begun])
        if len(calendar) != len(standing.pending) or set(calendar.soonest(n)) != at_work:
            raise ValueError("those who are to arrive are not those who are at work")
        if not at_work >= {*standing.untrained, *standing.unfit, *standing.leaving}:
            raise ValueError("of those who are at work it knows some who are not")
        if len(at_work) + len(standing.idle) + len(standing.waiting) + standing.left != n:
            raise ValueError("not all are at work, at rest or gone")
        if standing.taken > self.taken + self._to_come:
            raise ValueError("it has taken more work than there is in this run")

    def advance(self) -> int:
        """Go on to the next time at which something arrives; how many pieces of work were taken then."""
        self._begin_work()
        if not len(self._calendar):
            raise ExperimentError(self._standstill())
        slots, before = self._calendar.next(), self._server.version
        taken = sum([self._arrive(slot, slots) for slot in slots])
        self._to_come -= taken
        self.taken += taken
        if self._policy.cancels and self._server.version != before:
            self._cancel()
        return taken

    def _begin_work(self) -> None:
        """Everyone who is idle, and may, begins; who had to wait is asked again only where that can have changed."""
        server, policy = self._server, self._policy
        moment = server.version, self._left
        if moment != self._asked_at:
            self._idle += self._waiting
            self._waiting, self._asked_at = [], moment
        for slot in sorted(self._idle):
            if policy.may_start(server, slot):
                self._begin(slot)
            else:
                self._waiting.append(slot)
        self._idle = []

    def _begin(self, slot: int) -> None:
        member = self.desk.begin(slot)
        models = sum(self._policy.traffic(int(self._server.units[slot]) - 1))
        seconds = self._pace(member, self._begun[member.worker], models)
        self._begun[member.worker] += 1
        self._under_way[slot] = self._untrained[slot] = member
        if self._departures:
            seconds = self._until_departure(slot, seconds)
        self._calendar.add(slot, seconds)

    def _until_departure(self, slot: int, seconds: float) -> float:
        """The same time, or as much of it as passes before the worker leaves."""
        remaining = self._departures.get(slot, math.inf) - self.now
        if seconds <= remaining:
            return seconds
        self._leaving.add(slot)
        return max(0.0, remaining)

    def _arrive(self, slot: int, arriving: Sequence[int]) -> bool:
        """One of the pieces of work that arrive now comes in; whether the policy has taken it."""
        if slot in self._leaving:
            self._leave(slot)
            return False
        self._idle.append(slot)
        if self.desk.is_void(slot):  # it came at the same time as what made it void
            self._give_up(slot)
            return False
        if slot in self._untrained:
            self._compute(arriving)
        self.desk.take(self._under_way.pop(slot))
        return True

    def _compute(self, arriving: Sequence[int]) -> None:
        """Train those whose work has not been computed: the first of those that arrive, and all others that will count.

        Of work that an update, or the end of the run, may yet make void nothing is computed before it is there.
        """
        wanted = self._policy.wanted(self._server)
        coming: Iterable[int] = self._untrained
        if wanted is None and self._to_come < len(self._under_way):
            wanted = int(self._to_come)
        if wanted is not None:
            wanted = max(1, wanted)
            coming = [*(slot for slot in arriving if slot in self._under_way), *self._calendar.soonest(wanted)]
        coming = [slot for slot in coming if slot not in self._leaving][:wanted]
        members = [self._untrained.pop(slot) for slot in coming if slot in self._untrained]
        self._train(members)
        self.desk.look_at(members)

    def _cancel(self) -> None:
        """After an update, end all work that began before it."""
        for slot in [slot for slot in self._under_way if self._server.staleness(slot)]:
            self._calendar.cancel(slot)
            self._leaving.discard(slot)
            self._idle.append(slot)
            self._give_up(slot)

    def _give_up(self, slot: int) -> None:
        self.desk.give_up(self._under_way.pop(slot))
        self._untrained.pop(slot, None)

    def _leave(self, slot: int) -> None:
        self._give_up(slot)
        self._left += 1
        self._server.living[slot] = 0
        self._policy.left(self._server)

    def _standstill(self) -> str:
        gone = f"; {self._left} of {self._server.n} workers have left (clock.departures)" if self._left else ""
        return f"policy: at {self.now:g} virtual seconds nobody is at work and nobody may begin{gone}"
