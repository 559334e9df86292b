"""Which value of the first axis is best over all cells of a comparison: mean ranks and their significance.

A cell is a combination of the values on the other compared axes, such as an attack; the candidates are the values of
the first axis, such as rules. Demsar 2006 ("Statistical comparisons of classifiers over multiple data sets"): the
Friedman test asks whether the mean ranks differ at all, and Nemenyi's critical difference by how much two mean ranks
must differ. Both regard the cells as independent. Cells of one comparison share their data and their seeds, so the
tests say how consistent the order is over these cells, not what holds for other data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedsim.core.confidence import Estimate, chi_square_tail, f_tail, studentized_range_quantile
from fedsim.records.best import best_of
from fedsim.records.combinations import Combination, groups_of

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


def leaderboard(
    combined: Sequence[Combination],
    axes: Sequence[str],
    label_of: Callable[[Combination, str], str],
) -> Leaderboard | None:
    """The leaderboard of the first axis; None with fewer than `FEWEST_CANDIDATES` or `FEWEST_CELLS`.

    Args:
        combined: the combinations of the compared axes.
        axes: the keys of these axes.
        label_of: the label of a combination's value on an axis.
    """
    if len(axes) < 2:
        return None
    first, *others = axes
    names = list(dict.fromkeys(label_of(each, first) for each in combined))
    groups = groups_of(combined)
    in_order = [sorted(group, key=lambda each: names.index(label_of(each, first))) for group in groups]
    ranked = [any(each.quality(each.score) > -math.inf for each in group) for group in in_order]
    cells = [group for group, some in zip(in_order, ranked, strict=True) if some and len(group) == len(names)]
    if len(names) < FEWEST_CANDIDATES or len(cells) < FEWEST_CELLS:
        return None
    qualities = np.array([[each.quality(each.score) for each in cell] for cell in cells])
    ranks = ranks_of(qualities)
    is_best = np.isfinite(qualities) & (qualities == qualities.max(axis=1, keepdims=True))
    bests = [found for cell in cells if (found := best_of(cell))]
    standings = []
    for column, name in enumerate(names):
        own = [cell[column] for cell in cells]
        row = int(np.argmin(qualities[:, column]))
        best = int(is_best[:, column].sum())
        standings.append(
            Standing(
                name=name,
                mean_rank=float(ranks[:, column].mean()),
                best=best,
                tied=sum(each is found.combination or each in found.tied for each in own for found in bests),
                worst_cell=", ".join(label_of(own[row], axis) for axis in others),
                worst=own[row].score if math.isfinite(qualities[row, column]) else None,
            )
        )
    standings.sort(key=lambda each: each.mean_rank)
    return Leaderboard(standings, len(cells), len(groups) - len(cells), *friedman(ranks), nemenyi(*ranks.shape))


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
