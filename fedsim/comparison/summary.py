"""Means over seeds, paired differences, and the printed table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedsim.comparison.axes import SEED, canonical, describe_point, label
from fedsim.comparison.grid import Grid
from fedsim.comparison.results import ATTACK_SUCCESS, CLOCK, TO_TARGET, RunResult, to_csv
from fedsim.intervals import Estimate, estimate, fixed
from fedsim.runs.progress import ToTarget
from fedsim.wrapping import note

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
        virtual_seconds, updates, trips, staleness: likewise, of runs on a virtual clock; None of all others.
        to_target: what it took to reach the grid's target; None where it has none.
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
    virtual_seconds: Estimate | None
    updates: Estimate | None
    trips: Estimate | None
    staleness: Estimate | None
    to_target: ToTarget | None


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
    rows = []
    for cell, mark in zip(group, _marks(group), strict=True):
        good = [run for run in cell if run.error is None]
        timed = [run for run in good if run.is_timed]
        rows.append(
            SummaryRow(
                point={key: cell[0].point[key] for key in grid.compared},
                runs=len(cell),
                failed=len(cell) - len(good),
                accuracy=estimate(list(_accuracies(cell).values())),
                difference=paired_difference(cell, group[0]) if cell is not group[0] else None,
                mark=mark,
                best_accuracy=_mean(good, lambda run: run.best_accuracy),
                test_loss=_mean(good, lambda run: run.history[-1]["test_loss"]),
                seconds=_mean(good, lambda run: run.seconds),
                attack_success=_mean(good, lambda run: run.attack_success),
                virtual_seconds=_mean(timed, lambda run: run.progress[-1].virtual_seconds),
                updates=_mean(timed, lambda run: run.progress[-1].updates),
                trips=_mean(timed, lambda run: run.progress[-1].trips),
                staleness=_mean(timed, lambda run: run.staleness),
                to_target=None if grid.target is None else ToTarget.of(run.reached(grid.target) for run in good),
            )
        )
    return rows


def _mean(runs: Sequence[RunResult], read: Callable[[RunResult], float | None]) -> Estimate | None:
    """Of those that have such a number."""
    return estimate([value for run in runs if (value := read(run)) is not None])


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
    figures = ["accuracy", "difference", "best_accuracy", "test_loss", "seconds", ATTACK_SUCCESS]
    figures += CLOCK if any(row.virtual_seconds for row in summary) else []
    asked = grid.target is not None
    names = [*figures, *(TO_TARGET if asked else [])]
    head = [column for name in names for column in (name, f"{name}_ci95")]
    rows: list[list[Any]] = [
        [*grid.compared, "runs", "failed", *(["target", "reached"] if asked else []), "mark", "pairs", *head]
    ]
    words = {BEST: "best", TIE: "tie", "": ""}
    for row in summary:
        values: list[Estimate | None] = [getattr(row, name) for name in figures]
        to = row.to_target
        values += [to.rounds, to.virtual_seconds, to.updates, to.trips] if to else []
        counts = [row.runs, row.failed, *([grid.target, to.reached] if to else [])]
        pairs = row.difference.n if row.difference else None
        cells = [cell for value in values for cell in _two_cells(value)]
        rows.append([*map(label, row.point.values()), *counts, words[row.mark], pairs, *cells])
    return to_csv(rows)


def _two_cells(value: Estimate | None) -> list[float | None]:
    if value is None:
        return [None, None]
    return [value.mean, value.half_width if value.n > 1 else None]


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
    timed = any(row.virtual_seconds for row in summary)
    paired = any(row.difference for row in summary)
    head = [*grid.compared, "", "test accuracy"]
    head += [f"difference to {label(grid.axes[grid.compared[0]][0])}"] if paired else []
    head += ["attack success"] if attacked else []
    head += ["virtual s"] if timed else []
    if grid.target is not None:
        head += [f"{'virtual s' if timed else 'rounds'} to {_percent(grid.target)}", "updates", "trips"]
    table = [[*head, "highest", "runs"]]
    for row in summary:
        cells = [*map(label, row.point.values()), row.mark, row.accuracy.text() if row.accuracy else "failed"]
        if paired:
            cells.append(row.difference.text(sign=True) if row.difference else "")
        if attacked:
            cells.append(row.attack_success.text() if row.attack_success else "")
        if timed:
            cells.append(_amount(row.virtual_seconds))
        if row.to_target is not None:
            cells += _cells_to_target(row.to_target, row.runs - row.failed, timed)
        cells.append(fixed(row.best_accuracy.mean) if row.best_accuracy else "")
        cells.append(f"{row.runs - row.failed} of {row.runs}" if row.failed else str(row.runs))
        table.append(cells)
    return table


def _cells_to_target(to: ToTarget, runs: int, timed: bool) -> list[str]:
    """Time, updates and trips; of how many of the runs, where it is not all of them."""
    if not to.reached:
        return ["not reached" if runs else "", "", ""]
    of = f" ({to.reached} of {runs})" if to.reached < runs else ""
    untimed = f"{_amount(to.rounds)} rounds" if timed else _amount(to.rounds)
    time = _amount(to.virtual_seconds) if to.virtual_seconds else untimed
    return [time + of, _amount(to.updates), _amount(to.trips)]


def _amount(value: Estimate | None) -> str:
    return value.amount() if value else ""


def _percent(target: float) -> str:
    return f"{100 * target:g} percent"


def _notes(grid: Grid, summary: Sequence[SummaryRow], runs: Sequence[RunResult]) -> list[str]:
    seeds = max(row.runs for row in summary)
    both = "the two values in brackets" if any(row.accuracy and row.accuracy.n == 2 for row in summary) else ""
    if seeds > 2:
        means = f"means over {seeds} seeds ± 95 percent intervals (Student t){both and f', of two runs with {both}'}"
    elif seeds == 2:
        means = f"means over 2 seeds{both and f', with {both}'}"
    else:
        means = "of one run each: with one seed there are no intervals, and a difference may be chance"
    paired = "; differences are paired by seed" if seeds > 1 else ""
    notes = [f"test accuracy after the last round, {means}{paired}"]
    if any(row.mark for row in summary):
        within = f" among equal {', '.join(grid.compared[1:])}" if len(grid.compared) > 1 else ""
        tie = "; ~ not significantly different from the best (95 %, paired)" if seeds > 1 else ""
        notes.append(f"* best{within}{tie}")
    failed = [run for run in runs if run.error is not None]
    if grid.target is not None:
        notes.append(
            f"to {_percent(grid.target)}: until the first test with that accuracy at least; trips are pieces of work "
            "that workers brought"
        )
        if any(row.to_target and 0 < row.to_target.reached < row.runs - row.failed for row in summary):
            notes.append("where not all reached it, the mean is over those that did, and flatters")
    if failed:
        notes.append(f"{len(failed)} of {len(runs)} runs failed: they count in no mean, and rows with one have no mark")
    return [*map(note, notes), *(f"  {describe_point(run.point)}: {run.error}" for run in failed)]


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
