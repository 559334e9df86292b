"""Which value of the first axis is best over all cells of a comparison: mean ranks and their significance.

A cell is a combination of the values on the other compared axes, such as an attack; the candidates are the values of
the first axis, such as rules. Demsar 2006 ("Statistical comparisons of classifiers over multiple data sets"): the
Friedman test asks whether the mean ranks differ at all, and Nemenyi's critical difference by how much two mean ranks
must differ. Both regard the cells as independent. Cells of one comparison share their data and their seeds, so the
tests say how consistent the order is over these cells, not what holds for other data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsim.core.confidence import Estimate, chi_square_tail, f_tail, studentized_range_quantile
from fedsim.core.text_wrapping import note
from fedsim.records.axes import label
from fedsim.system.files import to_csv

if TYPE_CHECKING:
    from fedsim.comparison.results import Comparison

FEWEST_CANDIDATES = 3
FEWEST_CELLS = 5  # ranks over fewer cells say little
ENOUGH_CELLS = 10  # from here on the chi-square distribution is a good approximation (Demsar 2006, section 3.2.2)
LEVEL = 0.05


@dataclass(frozen=True)
class Standing:
    """The place of one candidate.

    Attributes:
        name: the label of the value.
        mean_rank: over the cells, 1 the best; equal candidates of a cell share the mean of their ranks, and all that
            failed, diverged or lack a result share the last ranks.
        best: the number of cells in which it is the best, or equal to the best.
        tied: the number of cells in which it is the best, or not significantly different from the best.
        worst_cell: the labels of the cell in which it has the worst result, or a run failed, diverged or has no result.
        worst: its mean result there; None without a result of every run.
    """

    name: str
    mean_rank: float
    best: int
    tied: int
    worst_cell: str
    worst: Estimate | None


@dataclass(frozen=True)
class Leaderboard:
    """The candidates by their mean rank.

    Attributes:
        standings: the best first.
        cells: the number of cells that were ranked.
        left_out: the number of cells that were not, since they lack a candidate, or all candidates failed there.
        chi_square, p: of the Friedman test, with its correction for equal ranks.
        f, p_of_f: of Iman and Davenport, which rejects more often, and rightly so, with few cells.
        critical_difference: of two mean ranks, by Nemenyi, at a level of 5 percent.
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
        """The largest groups of neighbours, as first and last index, whose ranks are within the critical difference."""
        ranks = [each.mean_rank for each in self.standings]
        found: list[tuple[int, int]] = []
        for first, rank in enumerate(ranks):
            last = max(index for index, other in enumerate(ranks) if other - rank <= self.critical_difference)
            if last > first and (not found or last > found[-1][1]):
                found.append((first, last))
        return found


def leaderboard(comparison: Comparison, label_of: Callable[[Any], str] = label) -> Leaderboard | None:
    """The leaderboard of the first axis; None with fewer than `FEWEST_CANDIDATES` or `FEWEST_CELLS`.

    `label_of` returns the label of a value.
    """
    if len(comparison.compared) < 2:
        return None
    places = list(dict.fromkeys(row.place[0] for row in comparison.rows))
    ranked = [group for group in comparison.groups if group.best and len(group) == len(places)]
    if len(places) < FEWEST_CANDIDATES or len(ranked) < FEWEST_CELLS:
        return None
    cells = [sorted(group, key=lambda row: places.index(row.place[0])) for group in ranked]
    qualities = np.array([[row.quality(row.score) for row in cell] for cell in cells])
    ranks = ranks_of(qualities)
    is_best = np.isfinite(qualities) & (qualities == qualities.max(axis=1, keepdims=True))
    standings = []
    for column, rows in enumerate(zip(*cells, strict=True)):
        lowest = int(np.argmin(qualities[:, column]))
        worst, (first, *others) = rows[lowest], rows[lowest].point.values()
        standings.append(
            Standing(
                name=label_of(first),
                mean_rank=float(ranks[:, column].mean()),
                best=int(is_best[:, column].sum()),
                tied=sum(row.mark != "" for row in rows),
                worst_cell=", ".join(map(label_of, others)),
                worst=worst.score if math.isfinite(qualities[lowest, column]) else None,
            )
        )
    standings.sort(key=lambda standing: standing.mean_rank)
    left_out = len(comparison.groups) - len(cells)
    return Leaderboard(standings, len(cells), left_out, *friedman(ranks), nemenyi(*ranks.shape))


def leaderboard_notes(board: Leaderboard) -> list[str]:
    """Return what the ranks are of, and whether they differ."""
    notes = [
        f"mean ranks over {board.cells} cells, 1 the best; Friedman test: chi-square {board.chi_square:.1f}, "
        f"p = {board.p:.2g}; Iman and Davenport: F {board.f:.1f}, p = {board.p_of_f:.2g}",
        f"mean ranks that differ by less than {board.critical_difference:.2f} are not significantly different "
        "(Nemenyi, 95 %)",
    ]
    if board.cells < ENOUGH_CELLS:
        notes.append(f"with fewer than {ENOUGH_CELLS} cells these p are approximate")
    if board.left_out:
        notes.append(f"cells that lack a value or in which every value failed, and are not ranked: {board.left_out}")
    return notes


def ranks_of(qualities: np.ndarray) -> np.ndarray:
    """The ranks of the candidates in each cell [cells, candidates]: 1 the highest quality, equal ones share a rank.

    >>> ranks_of(np.array([[0.9, 0.8, 0.9], [0.1, 0.3, -np.inf]]))
    array([[1.5, 3. , 1.5],
           [2. , 1. , 3. ]])
    """
    better = qualities[:, :, None] < qualities[:, None, :]
    equal = qualities[:, :, None] == qualities[:, None, :]
    return np.asarray(better.sum(axis=2) + (equal.sum(axis=2) + 1) / 2)


def friedman(ranks: np.ndarray) -> tuple[float, float, float, float]:
    """The Friedman statistic and its p, and the F of Iman and Davenport and its p, of ranks [cells, candidates].

    All candidates have equal ranks in every cell: 0, 1, 0, 1.
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
    """The critical difference of two mean ranks at a level of 5 percent.

    >>> round(nemenyi(14, 4), 2)  # Demsar 2006, section 3.2.2: 2.569 sqrt(4 5 / (6 14))
    1.25
    """
    q = studentized_range_quantile(candidates, 1 - LEVEL) / math.sqrt(2)
    return q * math.sqrt(candidates * (candidates + 1) / (6 * cells))


def leaderboard_text(board: Leaderboard, first: str) -> str:
    """Return the leaderboard as aligned text, with the tests of its ranks."""
    head = [first, "mean rank", "best in", "best or tied in", "worst in"]
    rows = [
        [
            each.name,
            f"{each.mean_rank:.2f}",
            f"{each.best} of {board.cells}",
            f"{each.tied} of {board.cells}",
            f"{each.worst_cell}: {each.worst.text() if each.worst else 'no result'}",
        ]
        for each in board.standings
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in (head, *rows)]
    return "\n".join([*lines, "", *map(note, leaderboard_notes(board))])


def leaderboard_csv(board: Leaderboard, first: str) -> str:
    """Return one row per candidate, the best first; `first` is the key that they are values of."""
    rows: list[list[Any]] = [
        [first, "mean_rank", "best", "best_or_tied", "cells", "worst_cell", "worst", "critical_difference"]
    ]
    for each in board.standings:
        worst = each.worst.mean if each.worst else None
        counts = [each.best, each.tied, board.cells]
        rows.append([each.name, each.mean_rank, *counts, each.worst_cell, worst, board.critical_difference])
    return to_csv(rows)
