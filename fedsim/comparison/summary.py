"""Means over seeds, paired differences, and the printed table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fedsim.comparison.axes import SEED, canonical, describe_point, label
from fedsim.comparison.grid import Grid
from fedsim.comparison.results import RunResult, names_in, to_csv
from fedsim.core.confidence import Estimate, fixed
from fedsim.core.text_wrapping import note
from fedsim.records.run_metrics import mean_metrics, paired_difference

BEST, TIE = "*", "~"
MARK_WORDS = {BEST: "best", TIE: "tie", "": ""}
GAP = "  "


@dataclass(frozen=True)
class SummaryRow:
    """All seeds of one combination of values. The test accuracy after the last round is compared.

    A group has the combinations that differ in the first axis only, such as all rules under one attack.

    Attributes:
        point: the combination, without the seed.
        runs: how many runs it has.
        failed: how many of them failed; failed runs count in no mean.
        accuracy: mean over seeds; None if all runs failed.
        difference: mean over seeds of the paired difference to the first value of the first axis; None for that value
            itself, and if no seed has both.
        mark: "*" for the highest mean of its group; "~" if not significantly different from the best (the interval of
            the paired difference includes 0); "" otherwise, and if a run failed.
        metrics: mean over seeds of each of the runs' metrics, by name; None if no run has it. See `RunResult.metrics`.
    """

    point: dict[str, Any]
    runs: int
    failed: int
    accuracy: Estimate | None
    difference: Estimate | None
    mark: str
    metrics: dict[str, Estimate | None]

    @property
    def reached(self) -> int:
        """How many runs reached the target."""
        rounds = self.metrics.get("rounds_to_target")
        return rounds.n if rounds else 0


def groups_of(grid: Grid, runs: Sequence[RunResult]) -> list[list[list[RunResult]]]:
    """Return the runs as groups of cells: groups differ in the axes after the first, cells of a group in the first."""
    groups: dict[str, dict[str, list[RunResult]]] = {}
    for run in runs:
        values = {key: run.point[key] for key in grid.compared}
        others = {key: values[key] for key in grid.compared[1:]}
        groups.setdefault(canonical(others), {}).setdefault(canonical(values), []).append(run)
    return [list(group.values()) for group in groups.values()]


def summarise(grid: Grid, runs: Sequence[RunResult]) -> list[SummaryRow]:
    """Return one row per combination of values other than the seed, group by group."""
    rows = []
    for group in groups_of(grid, runs):
        for cell, mark in zip(group, _marks(group), strict=True):
            metrics = mean_metrics([run.metrics for run in cell])
            rows.append(
                SummaryRow(
                    point={key: cell[0].point[key] for key in grid.compared},
                    runs=len(cell),
                    failed=sum(run.error is not None for run in cell),
                    accuracy=metrics.pop("test_accuracy", None),
                    difference=_difference(cell, group[0]) if cell is not group[0] else None,
                    mark=mark,
                    metrics=metrics,
                )
            )
    return rows


def _difference(cell: Sequence[RunResult], other: Sequence[RunResult]) -> Estimate | None:
    return paired_difference(_accuracies(cell), _accuracies(other))


def _marks(group: list[list[RunResult]]) -> list[str]:
    complete = [cell for cell in group if all(run.error is None for run in cell)]
    if len(group) < 2 or not complete:
        return [""] * len(group)
    best = max(complete, key=lambda cell: fmean(_accuracies(cell).values()))
    ties = [cell for cell in complete if (gap := _difference(cell, best)) and gap.includes(0.0)]
    return [BEST if cell is best else TIE if cell in ties else "" for cell in group]


def _accuracies(runs: Sequence[RunResult]) -> dict[Hashable, float]:
    """Return the accuracies of the runs that did not fail, by seed."""
    return {canonical(run.point.get(SEED)): run.test_accuracy for run in runs if run.error is None}


def summary_csv(grid: Grid, summary: Sequence[SummaryRow]) -> str:
    """Return the summary as CSV; `..._ci95` are half widths of 95 percent intervals."""
    names = names_in(row.metrics for row in summary)
    columns = [column for name in ("accuracy", "difference", *names) for column in (name, f"{name}_ci95")]
    asked = grid.target is not None
    rows: list[list[Any]] = [
        [*grid.compared, "runs", "failed", *(["target", "reached"] if asked else []), "mark", "pairs", *columns]
    ]
    for row in summary:
        cells = [*map(label, row.point.values()), row.runs, row.failed]
        cells += [grid.target, row.reached] if asked else []
        cells += [MARK_WORDS[row.mark], row.difference.n if row.difference else None]
        for value in (row.accuracy, row.difference, *map(row.metrics.get, names)):
            cells += [value.mean, value.half_width if value.n > 1 else None] if value else [None, None]
        rows.append(cells)
    return to_csv(rows)


def summary_table(grid: Grid, summary: Sequence[SummaryRow], runs: Sequence[RunResult]) -> str:
    """Return the summary as aligned text, with the meaning of its marks and the runs that failed."""
    columns = _columns(grid, summary)
    table = [[heading for heading, _ in columns], *([text(row) for _, text in columns] for row in summary)]
    shown = [column for column in zip(*table, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in shown]
    head, *lines = (
        GAP.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in zip(*shown, strict=True)
    )
    pairs = itertools.groupby(zip(summary, lines, strict=True), key=lambda pair: list(pair[0].point.values())[1:])
    groups = ["\n".join(line for _, line in group) for _, group in pairs]
    return "\n".join([head, "\n\n".join(groups), "", *_notes(grid, summary, runs)])


def _columns(grid: Grid, summary: Sequence[SummaryRow]) -> list[tuple[str, Callable[[SummaryRow], str]]]:
    """Return the heading of each column and the function that gives its text in a row."""

    def metric(name: str, text: Callable[[Estimate], str] = Estimate.amount) -> Callable[[SummaryRow], str]:
        return lambda row: text(value) if (value := row.metrics.get(name)) else ""

    timed = any("virtual_seconds" in row.metrics for row in summary)
    columns: list[tuple[str, Callable[[SummaryRow], str]]] = [
        *((key, lambda row, key=key: label(row.point[key])) for key in grid.compared),
        ("", lambda row: row.mark),
        ("test accuracy", lambda row: row.accuracy.text() if row.accuracy else "failed"),
    ]
    if grid.compared:
        first = label(grid.axes[grid.compared[0]][0])
        columns.append((f"difference to {first}", lambda row: row.difference.text(sign=True) if row.difference else ""))
    columns += [("attack success", metric("attack_success", Estimate.text)), ("virtual s", metric("virtual_seconds"))]
    if grid.target is not None:
        columns += [
            (
                f"{'virtual s' if timed else 'rounds'} to {_percent(grid.target)}",
                lambda row: _time_to_target(row, timed),
            ),
            ("updates", metric("updates_to_target")),
            ("arrivals", metric("arrivals_to_target")),
        ]
    of_plugs = [name for name in names_in(row.metrics for row in summary) if name.startswith("metrics.")]
    return [
        *columns,
        *((name, metric(name)) for name in of_plugs),
        ("highest", metric("best_accuracy", lambda best: fixed(best.mean))),
        ("runs", lambda row: f"{row.runs - row.failed} of {row.runs}" if row.failed else str(row.runs)),
    ]


def _time_to_target(row: SummaryRow, timed: bool) -> str:
    """The time to the target, and how many of the runs reached it if not all did."""
    finished = row.runs - row.failed
    seconds, rounds = row.metrics.get("virtual_seconds_to_target"), row.metrics.get("rounds_to_target")
    if not rounds:
        return "not reached" if finished else ""
    time = (seconds or rounds).amount() + (" rounds" if timed and not seconds else "")
    return f"{time} ({rounds.n} of {finished})" if rounds.n < finished else time


def _percent(target: float) -> str:
    return f"{100 * target:g} percent"


def _notes(grid: Grid, summary: Sequence[SummaryRow], runs: Sequence[RunResult]) -> list[str]:
    """The lines below the table."""
    seeds = max(row.runs for row in summary)
    both = "the two values in brackets" if any(row.accuracy and row.accuracy.n == 2 for row in summary) else ""
    if seeds > 2:
        means = f"means over {seeds} seeds ± 95 percent intervals (Student t){both and f', of two runs with {both}'}"
    elif seeds == 2:
        means = f"means over 2 seeds{both and f', with {both}'}"
    else:
        means = "of one run each: with one seed there are no intervals, and a difference may be chance"
    notes = [f"test accuracy after the last round, {means}{'; differences are paired by seed' if seeds > 1 else ''}"]
    if any(row.mark for row in summary):
        within = f" among equal {', '.join(grid.compared[1:])}" if len(grid.compared) > 1 else ""
        tie = "; ~ not significantly different from the best (95 %, paired)" if seeds > 1 else ""
        notes.append(f"* best{within}{tie}")
    if grid.target is not None:
        notes.append(
            f"to {_percent(grid.target)}: until the first test with that accuracy at least; arrivals are models or "
            "gradients that the server has taken"
        )
        if any(0 < row.reached < row.runs - row.failed for row in summary):
            notes.append("if not all runs reached the target, the mean is over those that did, so it is too low")
    failed = [run for run in runs if run.error is not None]
    if failed:
        notes.append(f"{len(failed)} of {len(runs)} runs failed: they count in no mean, and rows with one have no mark")
    return [*map(note, notes), *(f"  {describe_point(run.point)}: {run.error}" for run in failed)]
