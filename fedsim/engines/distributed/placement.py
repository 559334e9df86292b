"""Which rank has which columns of the global row, and which rows of a cohort."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedsim.core.rows import ALIGNMENT
from fedsim.engines.distributed.process_group import RankGroup


@dataclass(frozen=True)
class Columns:
    """Parts of the columns of the global row, one for each rank; the last ones may have fewer columns, or none.

    Attributes:
        d: number of columns.
        width: of a part, a multiple of a cache line.
        count: number of parts.
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
        """The columns [..., width] of each rank, of rows [..., d]."""
        return [rows[..., self.part(rank)] for rank in range(self.count)]

    def size(self, rank: int) -> int:
        return self.part(rank).stop - self.part(rank).start

    def padded(self, row: Tensor) -> Tensor:
        """A copy of a row [d], padded with zeros to parts of one width."""
        padded = row.new_zeros(self.width * self.count)
        padded[: self.d] = row
        return padded

    def whole(self, group: RankGroup, row: Tensor) -> Tensor:
        """A row [d] with the columns of every rank, from rows in which each rank has set its own columns."""
        padded = self.padded(row)
        group.all_gather(padded)
        return padded[: self.d]


@dataclass(frozen=True)
class RowPlacement:
    """Which rank has which slots of a cohort: `assignments[rank]`, ascending, in the order of the rank's own rows."""

    assignments: list[list[int]]

    @cached_property
    def rows(self) -> dict[int, tuple[int, int]]:
        """For each slot, its rank and the number of its row there."""
        return {
            slot: (rank, row) for rank, assignment in enumerate(self.assignments) for row, slot in enumerate(assignment)
        }

    def rows_of(self, slots: Sequence[int]) -> list[int]:
        """The numbers of the rows of these slots, each in its own rank."""
        return [self.rows[slot][1] for slot in slots]

    def places(self, slots: Sequence[int]) -> list[list[int]]:
        """For each rank, the positions in `slots` of the slots that it has."""
        found: list[list[int]] = [[] for _ in self.assignments]
        for place, slot in enumerate(slots):
            found[self.rows[slot][0]].append(place)
        return found
