"""The leaderboard of a comparison: text below the table, `leaderboard.csv`, and the figure of critical differences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedsim.core.confidence import fixed
from fedsim.core.text_wrapping import note
from fedsim.records.leaderboard import Leaderboard, leaderboard_notes
from fedsim.system.files import to_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINE = 0.3  # inches for each candidate


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
    head = [first, "mean_rank", "best", "best_or_tied", "cells", "worst_cell", "worst", "critical_difference"]
    return to_csv(
        [
            head,
            *(
                [
                    each.name,
                    each.mean_rank,
                    each.best,
                    each.tied,
                    board.cells,
                    each.worst_cell,
                    each.worst.mean if each.worst else None,
                    board.critical_difference,
                ]
                for each in board.standings
            ),
        ]
    )


def draw_leaderboard(board: Leaderboard, title: str) -> Figure:
    """Draw the mean ranks, with a bar over each group that is not significantly different (Demsar 2006, figure 1)."""
    from matplotlib.figure import Figure

    count = len(board.standings)
    figure = Figure(figsize=(7.5, 1.6 + LINE * (count + len(board.groups))), layout="constrained")
    axes = figure.subplots()
    for place, each in enumerate(board.standings):
        y = -place
        axes.plot([1, each.mean_rank], [y, y], color="#cccccc", linewidth=1, zorder=1)
        axes.plot(each.mean_rank, y, "o", color="#1f4e79", zorder=2)
        axes.annotate(fixed(each.mean_rank, 2), (each.mean_rank, y), (8, 0), textcoords="offset points", va="center")
    for index, (first, last) in enumerate(board.groups):
        height = -count - 0.6 * index
        ends = [board.standings[first].mean_rank, board.standings[last].mean_rank]
        axes.plot(ends, [height, height], color="black", linewidth=4, solid_capstyle="butt")
    axes.set_yticks([-place for place in range(count)], [each.name for each in board.standings])
    axes.set_xlim(0.8, count + 0.5)
    axes.set_xlabel(
        f"mean rank over {board.cells} cells, 1 the best\n"
        f"bars join ranks within the critical difference, {board.critical_difference:.2f}"
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.suptitle(title, fontsize="medium")
    return figure
