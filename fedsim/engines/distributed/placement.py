"""Who of several ranks has which columns and which rows; and the first one's work with rows that it was given whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedsim.core.rows import ALIGNMENT
from fedsim.engines.aggregator import Aggregator
from fedsim.engines.round_stats import AggregationContext, AggregationStats


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
class RowPlacement:
    """Which rank has which slots of a cohort: `assignments[rank]`, ascending, in the order of the rank's own rows."""

    assignments: list[list[int]]

    @cached_property
    def rows(self) -> dict[int, tuple[int, int]]:
        """By slot: the rank that has it, and which of that rank's rows it is."""
        return {
            slot: (rank, row) for rank, assignment in enumerate(self.assignments) for row, slot in enumerate(assignment)
        }

    def places(self, slots: Sequence[int]) -> list[list[int]]:
        """For each rank the places, among these slots, of those that it has."""
        found: list[list[int]] = [[] for _ in self.assignments]
        for place, slot in enumerate(slots):
            found[self.rows[slot][0]].append(place)
        return found


class RootAggregator(Aggregator):
    """The first rank's work with whole rows, all of which the others have sent it."""

    @property
    def update(self) -> Tensor:
        """The aggregated update [d], which moves nothing here: each rank gets its columns of it."""
        ((_, update),) = self._result
        return update

    @property
    def rows(self) -> Tensor:
        """All rows, by slot, to be filled by the caller."""
        return self._shared.rows

    @property
    def losses(self) -> Tensor:
        """The losses of all rows, by slot, to be filled by the caller."""
        return self._shared.losses

    def attack_rows(self, context: AggregationContext, *, has_last: bool) -> None:
        """Replace the rows of the Byzantine workers."""
        self._has_last = has_last
        self._attack(context)

    def aggregate_rows(self, context: AggregationContext, bad: list[int], *, has_last: bool) -> AggregationStats:
        """Apply the rule to the rows, without those at the places `bad`; see `update`."""
        self._number += 1
        self._has_last = has_last
        self._shared.unfit[[context.slots[place] for place in bad]] = self._number
        return self._aggregate_rows(context, *self._screened(context)).on_host()

    def forget(self) -> None:
        """Begin again, as before the first aggregation."""
        self._state = {}
