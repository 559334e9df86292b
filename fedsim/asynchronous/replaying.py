"""A race done again: pieces of work begin and come in as its log has them, and come to the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import merge
from typing import Any, NamedTuple

from fedsim.asynchronous.clock import Train
from fedsim.asynchronous.desk import Desk
from fedsim.asynchronous.racelog import GIVEN_UP, LEFT, Entry
from fedsim.asynchronous.roster import Roster
from fedsim.asynchronous.server import Server
from fedsim.asynchronous.standing import WorkStanding
from fedsim.engines.feed import Member
from fedsim.errors import ExperimentError, show

MOST_STEPS = 1_000  # times as many as are scheduled


class Event(NamedTuple):
    """That a piece of work begins, or comes in; by its number in the log."""

    number: int
    begins: bool
    entry: Entry


class LoggedOrder:
    """Runs a policy in the order of a race.

    Args:
        log: its entries by round, each in the order in which they came in.
        path: of the log, for what goes wrong.
        train: computes pieces of work, each from what its row holds.

    Raises ExperimentError as soon as what happens is not what the log says.
    """

    now = None  # nothing takes any time

    def __init__(
        self, log: Mapping[int, Sequence[Entry]], path: str, server: Server, roster: Roster, train: Train
    ) -> None:
        self._log, self._path, self._train = log, path, train
        self._server, self.desk = server, Desk(server, roster)
        self.taken = 0  # pieces of work, since the start
        self._under_way: dict[int, Member] = {}
        self._untrained: dict[int, Member] = {}

    def play(self, round: int) -> None:
        """A round of it."""
        if round not in self._log:
            raise ExperimentError(f"clock.log = {show(self._path)}: has {len(self._log)} rounds, not {round}")
        for number, begins, entry in events_of(self._log[round]):
            slot = entry.worker
            if not 0 <= slot < self._server.n:
                raise self._misfit(number, f"there is no worker {slot}")
            if entry.kind == LEFT:
                self._server.living[slot] = 0
                self._server.policy.left(self._server)
            elif begins:
                self._begin(number, entry)
            else:
                self._come_in(number, entry)
        self._server.come_back()

    def state(self) -> dict[str, Any]:
        """Where it stands between two rounds, in the types that JSON has."""
        return {
            "roster": self.desk.roster.state(),
            "under_way": list(self._under_way.values()),
            "untrained": list(self._untrained),
            "unfit": sorted(self.desk.unfit),
            "taken": self.taken,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state, with the server's tensors as they were. Raises ValueError where it cannot be."""
        standing = WorkStanding.model_validate(state)
        self.desk.resume(standing)
        self._under_way = {member.slot: member for member in standing.members}
        self._untrained = {slot: self._under_way[slot] for slot in standing.untrained}
        self.taken = standing.taken

    def _begin(self, number: int, entry: Entry) -> None:
        slot = entry.worker
        if slot in self._under_way:
            raise self._misfit(number, f"worker {slot} begins while it is at work")
        member = self.desk.begin(slot, entry.steps or None)
        if entry.steps > MOST_STEPS * self.desk.roster.steps(member._replace(steps=None)):
            raise self._misfit(number, f"worker {slot} takes {entry.steps} steps, more than any policy asks for")
        self._under_way[slot] = self._untrained[slot] = member
        self._compare(number, f"worker {slot} reads", entry.read, int(self._server.read[slot]))

    def _come_in(self, number: int, entry: Entry) -> None:
        slot = entry.worker
        if slot not in self._under_way:
            raise self._misfit(number, f"worker {slot} has not begun what comes in")
        member = self._under_way.pop(slot)
        if slot in self._untrained:
            members = list(self._untrained.values())  # all of them can be, so they may as well be together
            self._train(members)
            self.desk.look_at(members)
            self._untrained.clear()
        self._compare(number, f"the work of worker {slot} finds", entry.applied, self._server.version)
        if self.desk.is_void(member.slot) != (entry.kind == GIVEN_UP):
            raise self._misfit(number, f"whether the work of worker {slot} is void is not as it was")
        if entry.kind == GIVEN_UP:
            self.desk.give_up(member)
        else:
            self.desk.take(member)
            self.taken += 1

    def _compare(self, number: int, what: str, version: int, here: int) -> None:
        if version != here:
            raise self._misfit(number, f"{what} version {version}, and here it is {here}")

    def _misfit(self, number: int, what: str) -> ExperimentError:
        return ExperimentError(f"clock.log = {show(self._path)}: does not fit: at event {number} {what}")


def events_of(entries: Sequence[Entry]) -> Iterator[Event]:
    """All that happened in a round, in order."""
    begun = sorted(Event(entry.begun, True, entry) for entry in entries if entry.kind != LEFT)
    return merge(begun, sorted(Event(entry.taken, False, entry) for entry in entries))
