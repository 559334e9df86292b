"""Who of several ranks has which columns and which rows; and the first one's work with rows that it was given whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedsim.engines.averaging import Account, Averaging, Meeting
from fedsim.rows import ALIGNMENT


@dataclass(frozen=True)
class Columns:
    """Who has which columns of the global row: parts of one width, of which the last may lack some, or all.

    Attributes:
        d: how many there are.
        width: of a part, a multiple of a cache line.
    """

    d: int
    width: int
    count: int

    @classmethod
    def of(cls, d: int, count: int, dtype: torch.dtype) -> Columns:
        line = ALIGNMENT // dtype.itemsize
        return cls(d, line * math.ceil(d / count / line), count)

    def part(self, rank: int) -> slice:
        """The columns of a rank."""
        return slice(min(self.d, rank * self.width), min(self.d, (rank + 1) * self.width))

    def parts(self, rows: Tensor) -> list[Tensor]:
        """The columns [..., d] of each rank."""
        return [rows[..., self.part(rank)] for rank in range(self.count)]

    def size(self, rank: int) -> int:
        return self.part(rank).stop - self.part(rank).start

    def room(self, row: Tensor) -> Tensor:
        """A copy of a row [d] at the beginning of a tensor of as many parts as there are ranks."""
        room = row.new_zeros(self.width * self.count)
        room[: self.d] = row
        return room


@dataclass(frozen=True)
class Seating:
    """Which rank has which slots of a cohort: `hands[rank]`, ascending, in the order of the rank's own rows."""

    hands: list[list[int]]

    @cached_property
    def rows(self) -> dict[int, tuple[int, int]]:
        """By slot: the rank that has it, and which of that rank's rows it is."""
        return {slot: (rank, row) for rank, hand in enumerate(self.hands) for row, slot in enumerate(hand)}

    def places(self, slots: Sequence[int]) -> list[list[int]]:
        """For each rank the places, among these slots, of those that it has."""
        found: list[list[int]] = [[] for _ in self.hands]
        for place, slot in enumerate(slots):
            found[self.rows[slot][0]].append(place)
        return found


class Collector(Averaging):
    """The first rank's work with whole rows, all of which it has been given: as in other engines' first process.

    The update is put aside instead of moving the global row.
    """

    update: Tensor

    @property
    def rows(self) -> Tensor:
        """All rows, by slot, for those who bring them."""
        return self._memory.rows

    @property
    def losses(self) -> Tensor:
        """The same for losses."""
        return self._memory.losses

    def attack(self, meeting: Meeting, *, has_last: bool) -> None:
        """Put the Byzantine rows in place of what those workers computed."""
        self._has_last = has_last
        self._attack(meeting)

    def collect(self, meeting: Meeting, bad: list[int], *, has_last: bool) -> Account:
        """Apply the rule to the rows, without those at the places `bad`; see `update`."""
        self._number += 1
        self._has_last = has_last
        self._memory.unfit[[meeting.slots[place] for place in bad]] = self._number
        return self._move_by_rows(meeting)

    def _step(self, block: slice, update: Tensor) -> None:
        self.update = update

    def forget(self) -> None:
        """Begin anew, as before the first aggregation."""
        self._state = {}
