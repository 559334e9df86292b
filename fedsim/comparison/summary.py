"""Means over seeds, paired differences, and the printed table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedsim.comparison.axes import SEED, canonical, describe_point, label
from fedsim.comparison.grid import Grid
from fedsim.comparison.results import ATTACK_SUCCESS, RunResult, to_csv
from fedsim.intervals import Estimate, estimate

BEST, TIE = "*", "~"
GAP = "  "


@dataclass(frozen=True)
class SummaryRow:
    """All seeds of one combination of values. What is compared is the test accuracy after the last round.

    A group are the combinations that differ in the first axis alone: rules under one attack, say.

    Attributes:
        point: the combination, without the seed.
        runs, failed: how many were run, and how many of them failed; these count nowhere else.
        accuracy: mean over seeds; None if all failed.
        difference: mean over seeds of the difference to the run of the same seed with the first value of the first
            axis; None for that value itself, and where no seed has both.
        mark: "*" for the highest mean of its group; "~" for one whose paired difference to that has an interval that
            includes 0; "" for others, and where a run failed.
        best_accuracy, test_loss, seconds, attack_success: means over seeds.
    """

    point: dict[str, Any]
    runs: int
    failed: int
    accuracy: Estimate | None
    difference: Estimate | None
    mark: str
    best_accuracy: Estimate | None
    test_loss: Estimate | None
    seconds: Estimate | None
    attack_success: Estimate | None


def groups_of(grid: Grid, runs: Sequence[RunResult]) -> list[list[list[RunResult]]]:
    """The runs in groups: those that differ in the first axis and the seed alone, and in these by the first axis."""
    groups: dict[str, dict[str, list[RunResult]]] = {}
    for run in runs:
        values = {key: run.point[key] for key in grid.compared}
        others = {key: values[key] for key in grid.compared[1:]}
        groups.setdefault(canonical(others), {}).setdefault(canonical(values), []).append(run)
    return [list(group.values()) for group in groups.values()]


def summarise(grid: Grid, runs: Sequence[RunResult]) -> list[SummaryRow]:
    """One row per combination of values other than the seed, group by group."""
    return [row for group in groups_of(grid, runs) for row in _summarise_group(grid, group)]


def paired_difference(runs: Sequence[RunResult], others: Sequence[RunResult]) -> Estimate | None:
    """The mean over seeds of (accuracy of a run - accuracy of the other run of that seed), where both succeeded."""
    theirs = _accuracies(others)
    return estimate([value - theirs[seed] for seed, value in _accuracies(runs).items() if seed in theirs])


def _summarise_group(grid: Grid, group: list[list[RunResult]]) -> list[SummaryRow]:
    marks = _marks(group)
    return [
        SummaryRow(
            point={key: cell[0].point[key] for key in grid.compared},
            runs=len(cell),
            failed=sum(run.error is not None for run in cell),
            accuracy=estimate(list(_accuracies(cell).values())),
            difference=paired_difference(cell, group[0]) if cell is not group[0] else None,
            mark=mark,
            best_accuracy=estimate([run.best_accuracy for run in cell if run.error is None]),
            test_loss=estimate([run.history[-1]["test_loss"] for run in cell if run.error is None]),
            seconds=estimate([run.seconds for run in cell if run.error is None]),
            attack_success=estimate([s for run in cell if run.error is None and (s := run.attack_success) is not None]),
        )
        for cell, mark in zip(group, marks, strict=True)
    ]


def _marks(group: list[list[RunResult]]) -> list[str]:
    whole = [cell for cell in group if all(run.error is None for run in cell)]
    means = [estimate(list(_accuracies(cell).values())).mean for cell in whole]
    if len(group) < 2 or not whole:
        return [""] * len(group)
    best = whole[means.index(max(means))]
    marks = []
    for cell in group:
        tied = cell in whole and paired_difference(cell, best).includes(0.0)
        marks.append(BEST if cell is best else TIE if tied else "")
    return marks


def _accuracies(runs: Sequence[RunResult]) -> dict[str, float]:
    """By seed, of those that succeeded."""
    return {canonical(run.point.get(SEED)): run.test_accuracy for run in runs if run.error is None}


def summary_csv(grid: Grid, summary: Sequence[SummaryRow]) -> str:
    """The summary as CSV; `..._ci95` are half widths of 95 percent intervals."""
    figures = ("accuracy", "difference", "best_accuracy", "test_loss", "seconds", ATTACK_SUCCESS)
    head = [column for name in figures for column in (name, f"{name}_ci95")]
    rows: list[list[Any]] = [[*grid.compared, "runs", "failed", "mark", "pairs", *head]]
    words = {BEST: "best", TIE: "tie", "": ""}
    for row in summary:
        cells: list[Any] = []
        for name in figures:
            value: Estimate | None = getattr(row, name)
            cells += [value.mean, value.half_width if value.n > 1 else None] if value else [None, None]
        pairs = row.difference.n if row.difference else None
        rows.append([*map(label, row.point.values()), row.runs, row.failed, words[row.mark], pairs, *cells])
    return to_csv(rows)


def summary_table(grid: Grid, summary: Sequence[SummaryRow], runs: Sequence[RunResult]) -> str:
    """The summary as aligned text, with what its marks mean, and the runs that failed."""
    lines = _aligned(_cells(grid, summary))
    blocks: list[str] = [lines[0]]
    group = None
    for row, line in zip(summary, lines[1:], strict=True):
        others = [row.point[key] for key in grid.compared[1:]]
        if group is not None and others != group:
            blocks.append("")
        group = others
        blocks.append(line)
    return "\n".join([*blocks, "", *_notes(grid, summary, runs)])


def _cells(grid: Grid, summary: Sequence[SummaryRow]) -> list[list[str]]:
    attacked = any(row.attack_success for row in summary)
    paired = any(row.difference for row in summary)
    head = [*grid.compared, "", "test accuracy"]
    head += [f"difference to {label(grid.axes[grid.compared[0]][0])}"] if paired else []
    head += ["attack success"] if attacked else []
    table = [[*head, "highest", "runs"]]
    for row in summary:
        cells = [*map(label, row.point.values()), row.mark, row.accuracy.text() if row.accuracy else "failed"]
        if paired:
            cells.append(row.difference.text(sign=True) if row.difference else "")
        if attacked:
            cells.append(row.attack_success.text() if row.attack_success else "")
        cells.append(f"{row.best_accuracy.mean:.4f}" if row.best_accuracy else "")
        cells.append(f"{row.runs - row.failed} of {row.runs}" if row.failed else str(row.runs))
        table.append(cells)
    return table


def _notes(grid: Grid, summary: Sequence[SummaryRow], runs: Sequence[RunResult]) -> list[str]:
    seeds = max(row.runs for row in summary)
    if seeds > 1:
        means = f"means over {seeds} seeds ± 95 percent intervals (Student t); differences are paired by seed"
    else:
        means = "of one run each: with one seed there are no intervals, and a difference may be chance"
    notes = [f"test accuracy after the last round, {means}"]
    if any(row.mark for row in summary):
        within = f" among equal {', '.join(grid.compared[1:])}" if len(grid.compared) > 1 else ""
        tie = "; ~ not told apart from it: the interval of the paired difference includes 0" if seeds > 1 else ""
        notes.append(f"* best{within}{tie}")
    failed = [run for run in runs if run.error is not None]
    if failed:
        notes.append(f"{len(failed)} of {len(runs)} runs failed: they count in no mean, and rows with one have no mark")
        notes += [f"  {describe_point(run.point)}: {run.error}" for run in failed]
    return notes


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
