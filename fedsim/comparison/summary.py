"""Means over seeds, paired differences, and the printed table."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedsim.comparison.grid import Grid
from fedsim.comparison.results import RunResult, names_in
from fedsim.core.confidence import Estimate, fixed
from fedsim.core.text_wrapping import note
from fedsim.errors import plural
from fedsim.records.axes import describe_point, label
from fedsim.records.best import answer, best_of
from fedsim.records.combinations import Combination, canonical, groups_of, score_of, time_to_target
from fedsim.records.metric import Metric
from fedsim.records.value_curves import breaking_lines, breaking_points
from fedsim.system.files import to_csv

BEST, TIE = "*", "~"
MARK_WORDS = {BEST: "best", TIE: "tie", "": ""}
GAP = "  "
TABLE_COLUMNS = 120  # of the printed table
PLUG = "metrics."  # before the name of a plug's metric


@dataclass(frozen=True)
class SummaryRow:
    """All seeds of one combination of values. What is compared is a number of the last round.

    It is the test accuracy, or the test loss of a task without accuracy, unless the grid names another. A group has
    the combinations that differ in the first axis only, such as all rules under one attack.

    Attributes:
        point: the combination, without the seed and the axes along which values are chosen.
        chosen: the values that were chosen along these axes.
        runs: how many runs it has.
        failed: how many of them failed; failed runs count in no mean.
        diverged: how many of them diverged; they count with the results of their last finite model.
        metric: the number that is compared.
        score: its mean over seeds; None if all runs failed, or the number is not finite.
        difference: mean over seeds of the paired difference to the first value of the first axis; None for that value
            itself, and if no seed has both.
        mark: "*" for the best mean of its group; "~" if not significantly different from the best (the interval of
            the paired difference includes 0); "" otherwise, and if a run failed, diverged or has no finite number.
        metrics: mean over seeds of each of the runs' metrics, by name; None if no run has it. See `RunResult.metrics`.
    """

    point: dict[str, Any]
    chosen: dict[str, Any]
    runs: int
    failed: int
    diverged: int
    metric: Metric
    score: Estimate | None
    difference: Estimate | None
    mark: str
    metrics: dict[str, Estimate | None]

    @property
    def accuracy(self) -> Estimate | None:
        """The mean test accuracy; None if all runs failed, and if another number is compared."""
        return self.score if self.metric.key == "test_accuracy" else None

    @property
    def reached(self) -> int:
        """How many runs reached the target."""
        rounds = self.metrics.get("rounds_to_target")
        return rounds.n if rounds else 0


Column = tuple[str, Callable[[SummaryRow], str]]  # the heading, and the text of a row


def summarise(grid: Grid, runs: Sequence[RunResult]) -> list[SummaryRow]:
    """Return one row per combination of the compared values, group by group."""
    rows = []
    first = canonical(grid.axes[grid.compared[0]][0]) if grid.compared else None
    for group in groups_of(grid.settings.combined(runs, list(grid.axes))):
        baseline = group[0] if group[0].place[:1] == (first,) else None  # None: an invalid combination
        for each, mark in zip(group, _marks(group), strict=True):
            rows.append(
                SummaryRow(
                    point={key: each.runs[0].point[key] for key in grid.compared},
                    chosen={key: each.runs[0].point[key] for key in grid.settings.headings},
                    runs=len(each.runs),
                    failed=len(each.runs) - len(each.finished),
                    diverged=each.diverged,
                    metric=each.metric,
                    score=each.score,
                    difference=each.difference_to(baseline) if baseline and each is not baseline else None,
                    mark=mark,
                    metrics={name: value for name, value in each.metrics.items() if name != each.metric.key},
                )
            )
    return rows


def _marks(group: Sequence[Combination]) -> list[str]:
    found = best_of(group) if len(group) > 1 else None
    if found is None:
        return [""] * len(group)
    return [BEST if each is found.combination else TIE if each in found.tied else "" for each in group]


def answer_text(grid: Grid, runs: Sequence[RunResult]) -> str:
    """Return the best value of the first axis in words, see `answer`; empty if nothing is compared."""
    combined = grid.settings.combined(runs, list(grid.axes))
    found = answer(combined, grid.compared, grid.settings, lambda each, axis: label(each.runs[0].point[axis]))
    if found is None:
        return ""
    lines = [found.sentence, *(f"  {case}" for case in found.cases), *found.remarks]
    return "\n".join(textwrap.fill(line, TABLE_COLUMNS, subsequent_indent="    ") for line in lines)


def summary_csv(grid: Grid, summary: Sequence[SummaryRow]) -> str:
    """Return the summary as CSV; `..._ci95` are half widths of 95 percent intervals."""
    names, score = names_in(row.metrics for row in summary), summary[0].metric
    first = "accuracy" if score.key == "test_accuracy" else score.key
    columns = [column for name in (first, "difference", *names) for column in (name, f"{name}_ci95")]
    asked = grid.settings.target is not None
    head = [*grid.compared, *grid.settings.headings.values(), "runs", "failed"]
    rows: list[list[Any]] = [[*head, *(["target", "reached"] if asked else []), "mark", "pairs", *columns]]
    for row in summary:
        cells = [*map(label, (*row.point.values(), *row.chosen.values())), row.runs, row.failed]
        cells += [grid.settings.target, row.reached] if asked else []
        cells += [MARK_WORDS[row.mark], row.difference.n if row.difference else None]
        for value in (row.score, row.difference, *map(row.metrics.get, names)):
            cells += [value.mean, value.half_width if value.n > 1 else None] if value else [None, None]
        rows.append(cells)
    return to_csv(rows)


def summary_table(grid: Grid, summary: Sequence[SummaryRow], runs: Sequence[RunResult]) -> str:
    """Return the summary as aligned text, with the meaning of its marks and the runs that failed.

    Further columns are left out, and named, if the table would be wider than `TABLE_COLUMNS`.
    """
    shown, further = _texts(_columns(grid, summary), summary), _texts(_further(grid, summary, score_of(runs)), summary)
    left, left_out = TABLE_COLUMNS - sum(map(_width, shown)), []
    for column in further:
        if _width(column) <= left:
            left -= _width(column)
            shown.insert(-1, column)
        else:
            left_out.append(column[0])
    head, *lines = (
        "".join(cell.ljust(_width(column)) for cell, column in zip(cells, shown, strict=True)).rstrip()
        for cells in zip(*shown, strict=True)
    )
    pairs = itertools.groupby(zip(summary, lines, strict=True), key=lambda pair: list(pair[0].point.values())[1:])
    groups = ["\n".join(line for _, line in group) for _, group in pairs]
    if left_out:
        text = f"summary.csv has {plural(len(left_out), 'more column')}: {', '.join(left_out)}"
        groups[-1] += f"\n\n{textwrap.shorten(text, TABLE_COLUMNS, placeholder=' ...')}"
    return "\n".join([head, "\n\n".join(groups), "", *_notes(grid, summary, runs)])


def _texts(columns: Sequence[Column], summary: Sequence[SummaryRow]) -> list[list[str]]:
    """Return the heading and the cells of each column that holds something."""
    table = [[heading, *map(text, summary)] for heading, text in columns]
    return [column for column in table if any(column[1:])]


def _width(column: Sequence[str]) -> int:
    return max(map(len, column)) + len(GAP)


def _columns(grid: Grid, summary: Sequence[SummaryRow]) -> list[Column]:
    """Return the columns that every table has: the number that is compared, and last the number of runs."""
    columns: list[Column] = [
        *((key, lambda row, key=key: label(row.point[key])) for key in grid.compared),
        *((text, lambda row, key=key: label(row.chosen[key])) for key, text in grid.settings.headings.items()),
        ("", lambda row: row.mark),
        (summary[0].metric.label.lower(), _score_text),
    ]
    if grid.compared:
        first = label(grid.axes[grid.compared[0]][0])
        columns.append((f"difference to {first}", _difference_text))
    return [*columns, ("runs", _runs_text)]


def _further(grid: Grid, summary: Sequence[SummaryRow], test: Metric) -> list[Column]:
    """Return the columns that are shown if they fit, the more important first; `test` is the test result."""

    def metric(name: str, text: Callable[[Estimate], str] = Estimate.amount) -> Callable[[SummaryRow], str]:
        return lambda row: text(value) if (value := row.metrics.get(name)) else ""

    timed = any("virtual_seconds" in row.metrics for row in summary)
    columns: list[Column] = [(test.label.lower(), metric(test.key, Estimate.text))]  # empty if it is compared
    if grid.settings.target is not None:
        columns += [
            (
                f"{'virtual s' if timed else 'rounds'} to {_target_text(test, grid.settings.target)}",
                lambda row: time_to_target(row.metrics, row.runs - row.failed, timed)[0],
            ),
            ("updates", metric("updates_to_target")),
            ("arrivals", metric("arrivals_to_target")),
        ]
    columns += [("attack success", metric("attack_success", Estimate.text)), ("virtual s", metric("virtual_seconds"))]
    of_plugs = [name for name in names_in(row.metrics for row in summary) if name.startswith(PLUG)]
    means_first = sorted(of_plugs, key=lambda name: not name.endswith("_mean"))  # those of single workers
    return [
        *columns,
        *((name.removeprefix(PLUG), metric(name)) for name in means_first),
        ("highest", metric("best_accuracy", lambda best: fixed(best.mean))),
        ("lowest", metric("best_loss", lambda best: fixed(best.mean, test.decimals_for(best.mean)))),
    ]


def _target_text(score: Metric, target: float) -> str:
    return f"{100 * target:g} percent" if score.share else f"{target:g}"


def _score_text(row: SummaryRow) -> str:
    if row.score is None:
        return "failed" if row.failed == row.runs else "no finite value"
    return row.score.text(row.metric.decimals_for(row.score.mean))


def _runs_text(row: SummaryRow) -> str:
    """How many runs count in the mean, and how many of these diverged: `3`, `2 of 3`, `3, 1 diverged`."""
    counted = row.score.n if row.score else 0
    text = str(row.runs) if counted == row.runs else f"{counted} of {row.runs}"
    return f"{text}, {row.diverged} diverged" if row.diverged else text


def _difference_text(row: SummaryRow) -> str:
    return row.difference.text(row.metric.decimals_for(row.difference.mean), sign=True) if row.difference else ""


def _notes(grid: Grid, summary: Sequence[SummaryRow], runs: Sequence[RunResult]) -> list[str]:
    """The lines below the table."""
    seeds, score, test = max(row.runs for row in summary), summary[0].metric, score_of(runs)
    both = "the two values in brackets" if any(row.score and row.score.n == 2 for row in summary) else ""
    if seeds > 2:
        means = f"means over {seeds} seeds ± 95 percent intervals (Student t){both and f', of two runs with {both}'}"
    elif seeds == 2:
        means = f"means over 2 seeds{both and f', with {both}'}"
    else:
        means = "of one run each: with one seed there are no intervals, and a difference may be chance"
    paired = "; differences are paired by seed" if seeds > 1 else ""
    better = f" ({score.better} is better)" if grid.settings.by is not None and score.better else ""
    notes = [f"{score.label.lower()} after the last round{better}, {means}{paired}"]
    if any(row.mark for row in summary):
        within = f" among equal {', '.join(grid.compared[1:])}" if len(grid.compared) > 1 else ""
        tie = "; ~ not significantly different from the best (95 %, paired)" if seeds > 1 else ""
        notes.append(f"* best{within}{tie}")
    tune, worst = grid.settings.tune, grid.settings.worst
    if tune is not None:
        case = f", in its worst case of {worst}" if worst else ""
        notes.append(f"{tune}: the value with the best result on validation samples{case}; tuning.csv has all")
        notes += grid.settings.undecided(grid.settings.of(runs, list(grid.axes))[1])
    if worst is not None:
        notes.append(f"{worst}: the worst case by {score.label.lower()}; results.csv has all")
    if grid.settings.target is not None:
        bound = f"{test.key.removeprefix('test_')} at {'least' if test.sign > 0 else 'most'}"
        notes.append(
            f"to {_target_text(test, grid.settings.target)}: until the first test with that {bound}; arrivals are "
            "models or gradients that the server has taken"
        )
        if any(0 < row.reached < row.runs - row.failed for row in summary):
            notes.append("if not all runs reached the target, the mean is over those that did, so it is too low")
        notes += _breaking_notes(grid, runs, _target_text(test, grid.settings.target))
    notes += [f"left out: {line}" for line in grid.left_out]
    if diverged := sum(run.finished and run.history[-1].diverged is not None for run in runs):
        notes.append(
            f"{diverged} of {len(runs)} runs diverged: their results are those of the last finite model, and rows with "
            "one have no mark"
        )
    failed = [run for run in runs if run.error is not None]
    if failed:
        notes.append(f"{len(failed)} of {len(runs)} runs failed: they count in no mean, and rows with one have no mark")
    return [*map(note, notes), *(f"  {describe_point(run.point)}: {run.error}" for run in failed)]


def _breaking_notes(grid: Grid, runs: Sequence[RunResult], target: str) -> list[str]:
    """From which value of each axis of numbers on the target is missed."""
    notes, test = [], score_of(runs)
    for key, found in breaking_points(grid, runs).items():
        misses = (
            f"the mean {test.label.lower()} after the last round is {'below' if test.sign > 0 else 'above'} {target}"
        )
        notes += [f"{key} from which on {misses} (breaking_points.csv):", *breaking_lines(grid, found)]
    return notes
