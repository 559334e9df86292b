"""Who works on what: the workers in their slots, and how far each has come in its own rounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from fedsim.asynchronous.policy import Work
from fedsim.asynchronous.standing import RosterStanding, require_below
from fedsim.engines.feed import Member
from fedsim.engines.job import Schedule
from fedsim.randomness import numpy_generator


class Roster:
    """The workers at work, each in a slot, and what each of them does next.

    Where there are as many slots as workers, everyone has a slot of its own. Else whoever is free is drawn for a slot
    that is free, all of them alike, by (seed, how many have been drawn before).

    Args:
        slots: how many are at work at a time.
        work: what a piece of work is, one step or a round.
        sizes: how many samples a worker has, by its number.
    """

    def __init__(
        self, seed: int, n_workers: int, slots: int, work: Work, schedule: Schedule, sizes: Callable[[int], int]
    ) -> None:
        self._seed, self.n_workers, self._schedule, self._sizes = seed, n_workers, schedule, sizes
        self._slots, self._by_step = slots, work == "gradient"
        self._done: defaultdict[int, int] = defaultdict(int)  # pieces of work, by worker
        self._busy: set[int] = set()
        self._drawn = 0

    def next(self, slot: int, steps: int | None = None) -> Member:
        """The next piece of work in a slot; of so many steps, where that is not for the schedule to say."""
        worker = slot if self._slots == self.n_workers else self._draw()
        self._busy.add(worker)
        done = self._done[worker]
        if not self._by_step:
            return Member(slot, worker, done + 1, steps)
        laps, step = divmod(done, self._schedule.steps_for(self._sizes(worker)))
        return Member(slot, worker, laps + 1, None, step)

    def done(self, member: Member) -> None:
        """A piece of work has come in; the worker is free."""
        self._done[member.worker] += 1
        self._busy.discard(member.worker)

    def given_up(self, member: Member) -> None:
        """A piece of work will not be ended; the worker is free, and begins it anew when its turn comes."""
        self._busy.discard(member.worker)

    def steps(self, member: Member) -> int:
        """How many steps a piece of work has."""
        if member.step is not None:
            return 1
        return self._schedule.steps_for(self._sizes(member.worker)) if member.steps is None else member.steps

    def samples(self, member: Member) -> int:
        """How many samples it goes through, repetitions counted."""
        size = self._sizes(member.worker)
        if member.step is not None:
            return self._schedule.batch_size_at(member.step, size)
        return self._schedule.samples_in(self.steps(member), size)

    def pieces(self, worker: int) -> int:
        """How many pieces of work are a round of a worker's: one, or all its steps."""
        return self._schedule.steps_for(self._sizes(worker)) if self._by_step else 1

    def pieces_of_a_round(self) -> int:
        """How many pieces of work are what a synchronous round would have: one of everybody, or all steps of theirs."""
        if not self._by_step:
            return self._slots
        return sum(map(self.pieces, range(self.n_workers)))

    def pieces_done(self, worker: int) -> int:
        """How many pieces of a worker's work have come in."""
        return self._done[worker]

    def state(self) -> dict[str, Any]:
        """How far it has come, in the types that JSON has."""
        return {"done": list(self._done.items()), "busy": sorted(self._busy), "drawn": self._drawn}

    def resume(self, state: RosterStanding, under_way: Sequence[Member]) -> None:
        """Go on from such a state, with this work under way. Raises ValueError where that is none of this run."""
        require_below(self.n_workers, "workers", [worker for worker, _ in state.done])
        require_below(self.n_workers, "workers", [member.worker for member in under_way])
        if sorted(state.busy) != sorted(member.worker for member in under_way):
            raise ValueError("those who are busy are not those who are at work")
        if not all(self._is_work(member) for member in under_way):
            raise ValueError("what is under way is no work of this run")
        self._done = defaultdict(int, dict(state.done))
        self._busy, self._drawn = set(state.busy), state.drawn

    def _is_work(self, member: Member) -> bool:
        steps = self._schedule.steps_for(self._sizes(member.worker))
        if self._slots == self.n_workers and member.slot != member.worker:
            return False
        if self._by_step:
            return member.steps is None and member.step is not None and member.step < steps and member.round > 0
        return member.step is None and (member.steps is None or 0 < member.steps <= steps) and member.round > 0

    def _draw(self) -> int:
        rng = numpy_generator(self._seed, "dispatch", self._drawn)
        self._drawn += 1
        while (worker := int(rng.integers(self.n_workers))) in self._busy:
            pass
        return worker
