"""Rank the values of the first axis over all cells of a comparison, and test whether the mean ranks differ.

The candidates are the values of the first axis, such as rules. A cell is a combination of values on the other compared
axes, such as an attack. The tests follow Demsar 2006 ("Statistical comparisons of classifiers over multiple data
sets"). The Friedman test decides whether the mean ranks differ at all, and the critical difference of Nemenyi is the
smallest significant difference between two mean ranks. Both tests assume independent cells. The cells of a comparison
share their data and seeds, so the tests only show how consistent the order is over these cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsim.comparison.axes import label
from fedsim.comparison.rows import Group
from fedsim.core.confidence import Estimate, chi_square_tail, f_tail, studentized_range_quantile
from fedsim.core.equality import levels
from fedsim.core.text_wrapping import note
from fedsim.errors import plural
from fedsim.system.files import to_csv

FEWEST_CANDIDATES = 3
FEWEST_CELLS = 5  # ranks over fewer cells say little
ENOUGH_CELLS = 10  # from here on the chi-square distribution is a good approximation (Demsar 2006, section 3.2.2)
LEVEL = 0.05


@dataclass(frozen=True)
class Standing:
    """One candidate on the leaderboard: a value of the first compared setting, such as an aggregation rule.

    A cell is one combination of the values of the other settings, such as one attack on one data set.

    Attributes:
        name: name of the candidate.
        mean_rank: mean of the candidate's ranks in all cells. Rank 1 is best, equal results share a rank, and
            candidates without a result come last.
        best: number of cells in which the candidate has the best result.
        tied: number of cells in which the candidate is best or not significantly different from the best.
        worst_cell: the cell in which the candidate has its worst result.
        worst: mean result in `worst_cell`, or None if there is none.
    """

    name: str
    mean_rank: float
    best: int
    tied: int
    worst_cell: str
    worst: Estimate | None


@dataclass(frozen=True)
class Leaderboard:
    """The candidates sorted by mean rank, with tests of whether their ranks differ significantly.

    Attributes:
        standings: the candidates, best first.
        cells: number of cells (combinations of the other settings) in which the candidates are ranked.
        left_out: number of cells that are not ranked because results are missing.
        chi_square, p: statistic and p-value of the Friedman test.
        f, p_of_f: statistic and p-value of the Iman-Davenport test.
        critical_difference: smallest significant difference between two mean ranks (Nemenyi, 5 % level).
    """

    standings: list[Standing]
    cells: int
    left_out: int
    chi_square: float
    p: float
    f: float
    p_of_f: float
    critical_difference: float

    @property
    def groups(self) -> list[tuple[int, int]]:
        """Groups of candidates whose mean ranks are not significantly different.

        Each group is a pair: the indices of its first and its last candidate in `standings`.
        """
        ranks = [standing.mean_rank for standing in self.standings]
        groups: list[tuple[int, int]] = []
        for first, rank in enumerate(ranks):
            last = max(index for index, lower in enumerate(ranks) if lower - rank <= self.critical_difference)
            if last > first and (not groups or last > groups[-1][1]):
                groups.append((first, last))
        return groups


def leaderboard(groups: Sequence[Group], label_of: Callable[[Any], str] = label) -> Leaderboard | None:
    """Return the leaderboard of the values of the first compared setting, or None if there is too little to rank.

    `groups` are the groups of table rows of a comparison. `label_of` returns the name to show for a candidate.
    """
    if not groups or len(groups[0][0].position) < 2:
        return None
    positions = sorted({row.position[0] for group in groups for row in group})
    ranked = [group for group in groups if group.best and len(group) == len(positions)]
    if len(positions) < FEWEST_CANDIDATES or len(ranked) < FEWEST_CELLS:
        return None
    cells = [sorted(group, key=lambda row: row.position[0]) for group in ranked]
    qualities = np.array([[row.quality(row.score) for row in cell] for cell in cells])
    ranks = ranks_of(qualities)
    standings = []
    for column, rows in enumerate(zip(*cells, strict=True)):
        lowest = levels((-qualities[:, column]).tolist()).index(0)
        worst, (first, *others) = rows[lowest], rows[lowest].point.values()
        standings.append(
            Standing(
                name=label_of(first),
                mean_rank=float(ranks[:, column].mean()),
                best=sum(row.mark == "*" for row in rows),
                tied=sum(row.mark != "" for row in rows),
                worst_cell=", ".join(map(label_of, others)),
                worst=worst.score if math.isfinite(qualities[lowest, column]) else None,
            )
        )
    standings.sort(key=lambda standing: standing.mean_rank)
    left_out = len(groups) - len(cells)
    return Leaderboard(standings, len(cells), left_out, *friedman(ranks), nemenyi(*ranks.shape))


def leaderboard_notes(board: Leaderboard) -> list[str]:
    """Return the lines of text below the leaderboard, such as the results of the significance tests."""
    notes = [
        f"mean ranks over {board.cells} cells (1 is best); Friedman test: chi-square {board.chi_square:.1f}, "
        f"p = {board.p:.2g}; Iman and Davenport: F {board.f:.1f}, p = {board.p_of_f:.2g}",
        f"mean ranks that differ by less than {board.critical_difference:.2f} are not significantly different "
        "(Nemenyi, 95 %)",
    ]
    if board.cells < ENOUGH_CELLS:
        notes.append(f"with fewer than {ENOUGH_CELLS} cells, these p-values are approximate")
    if board.left_out:
        cells = f"{plural(board.left_out, 'cell')} {'is' if board.left_out == 1 else 'are'}"
        notes.append(f"{cells} not ranked, because a value is missing or every value failed")
    return notes


def ranks_of(qualities: np.ndarray) -> np.ndarray:
    """Return the rank of each number in `qualities` [cells, candidates] within its cell. Rank 1 is the highest number.

    Values that are equal up to rounding share the mean of their ranks.

    >>> ranks_of(np.array([[0.9, 0.8, 0.9], [0.1, 0.3, -np.inf]]))
    array([[1.5, 3. , 1.5],
           [2. , 1. , 3. ]])
    """
    level = np.array([levels(cell) for cell in qualities])
    better = level[:, :, None] > level[:, None, :]
    equal = level[:, :, None] == level[:, None, :]
    return np.asarray(better.sum(axis=2) + (equal.sum(axis=2) + 1) / 2)


def friedman(ranks: np.ndarray) -> tuple[float, float, float, float]:
    """Return the Friedman statistic, its p-value, the Iman-Davenport statistic F and its p-value.

    `ranks` has shape [cells, candidates].
    """
    n, k = ranks.shape
    between = n * float(((ranks.mean(axis=0) - (k + 1) / 2) ** 2).sum())
    within = float(((ranks - (k + 1) / 2) ** 2).sum()) / (k - 1) / n  # k (k + 1) / 12 without equal ranks
    if within == 0:
        return 0.0, 1.0, 0.0, 1.0
    statistic = between / within
    left = n * (k - 1) - statistic
    ratio = (n - 1) * statistic / left if left > 1e-9 else math.inf
    return statistic, chi_square_tail(statistic, k - 1), ratio, f_tail(ratio, k - 1, (k - 1) * (n - 1))


def nemenyi(cells: int, candidates: int) -> float:
    """Return the smallest significant difference between two mean ranks at the 5 % level (Nemenyi test).

    >>> round(nemenyi(14, 4), 2)  # Demsar 2006, section 3.2.2: 2.569 sqrt(4 5 / (6 14))
    1.25
    """
    q = studentized_range_quantile(candidates, 1 - LEVEL) / math.sqrt(2)
    return q * math.sqrt(candidates * (candidates + 1) / (6 * cells))


def leaderboard_text(board: Leaderboard, first: str) -> str:
    """Return the leaderboard as a text table with notes. `first` is the key of the ranked setting."""
    head = [first, "mean rank", "best in", "best or tied in", "worst in"]
    rows = [
        [
            standing.name,
            f"{standing.mean_rank:.2f}",
            f"{standing.best} of {board.cells}",
            f"{standing.tied} of {board.cells}",
            f"{standing.worst_cell}: {standing.worst.text() if standing.worst else 'no result'}",
        ]
        for standing in board.standings
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in (head, *rows)]
    return "\n".join([*lines, "", *map(note, leaderboard_notes(board))])


def leaderboard_csv(board: Leaderboard, first: str) -> str:
    """Return the leaderboard as a CSV table with one line per candidate, best first.

    `first` is the key of the ranked setting.
    """
    rows: list[list[Any]] = [
        [first, "mean_rank", "best", "best_or_tied", "cells", "worst_cell", "worst", "critical_difference"]
    ]
    for standing in board.standings:
        worst = standing.worst.mean if standing.worst else None
        counts = [standing.best, standing.tied, board.cells]
        rows.append([standing.name, standing.mean_rank, *counts, standing.worst_cell, worst, board.critical_difference])
    return to_csv(rows)
