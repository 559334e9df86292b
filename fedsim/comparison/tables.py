"""Tables of a comparison: columns, the answer in words, printed text and CSV files."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fedsim.comparison.axes import describe_point, label
from fedsim.comparison.compared_runs import ComparedRuns
from fedsim.comparison.leaderboard import leaderboard_text
from fedsim.comparison.rows import (
    BreakingPoint,
    Group,
    Row,
    breaking_point,
    numeric_axes,
    validation_result,
    value_curves,
)
from fedsim.core.confidence import Estimate, decimals_of, fixed
from fedsim.core.text_wrapping import note
from fedsim.errors import plural
from fedsim.records import formatting as fmt
from fedsim.records.numbers import LAST_ROUND, Progress, component_metrics, mean_or_none
from fedsim.records.record import Metric, metric_called
from fedsim.system.files import to_csv

TABLE_COLUMNS = 120  # maximum width of the printed table in characters
GAP = "  "
COMPONENT = "metrics."  # prefix of the metrics of metric components
MARK_WORDS = {"*": "best", "~": "tie", "": ""}
MOST_CASES = 6  # with more groups, the answer counts best values instead of listing groups
MOST_NAMES = 6  # maximum number of names in a sentence
MOST_LINES = 12  # maximum number of breaking points per axis below the table

LabelOf = Callable[[Any], str]  # maps a value on an axis to its label


class Cell(NamedTuple):
    """One cell of a table.

    Attributes:
        text: text of the cell.
        sort: number by which the column can be sorted in an HTML report.
        mark: mark before the cell's text, such as "≈".
        spread: text after the cell's text, such as "± 0.01".
    """

    text: str = ""
    sort: float | None = None
    mark: str = ""
    spread: str = ""

    def __str__(self) -> str:
        return f"{self.text} {self.spread}".rstrip()


class Column(NamedTuple):
    """One column of a table: its heading, and the function that returns its cell in a given table row."""

    heading: str
    cell_of: Callable[[Row], Cell]


def columns(comparison: ComparedRuns) -> dict[str, Column]:
    """Return the possible columns of the table of results by name, the most important first."""
    metric, test, rows = comparison.metric, comparison.test, comparison.summary
    names = [name for name in metric_names(rows) if name != metric.key]
    timed = "virtual_seconds" in names
    totals = {total.mean for row in rows if (total := row.metrics.get("bytes"))}
    by_bytes = len(totals) > 1

    def mean(name: str, show: Callable[[float], str]) -> Callable[[Row], Cell]:
        return lambda row: Cell(show(value.mean), value.mean) if (value := row.metrics.get(name)) else Cell()

    def mean_of(name: str) -> Callable[[Row], Cell]:
        return lambda row: estimate_cell(row.metrics.get(name), metric_called(name))

    def amount(name: str) -> Callable[[Row], Cell]:
        return lambda row: estimate_cell(row.metrics.get(name))

    by_name = {"score": Column(metric.label.lower(), lambda row: estimate_cell(row.score, metric))}
    if comparison.compared:
        first = label(comparison.axes[comparison.compared[0]][0])
        by_name["difference"] = Column(f"difference to {first}", lambda row: _difference(row, row.difference))
        by_name["to_best"] = Column("difference to best", _to_best)
    if test.key != metric.key:
        by_name[test.key] = Column(test.label.lower(), mean_of(test.key))
    if comparison.settings.target is not None:
        target = target_text(comparison)
        by_name["to_target"] = Column(
            f"{'virtual s' if timed else 'rounds'} to {target}", lambda row: _to_target(row, timed)
        )
        of_bytes = Column(f"MB to {target}", mean("bytes_to_target", _megabytes))
        by_name |= {"bytes_to_target": of_bytes} if by_bytes and not timed else {}
        by_name["updates_to_target"] = Column("updates to target", amount("updates_to_target"))
        by_name["arrivals_to_target"] = Column("arrivals to target", amount("arrivals_to_target"))
        by_name |= {"bytes_to_target": of_bytes} if by_bytes else {}
    of_workers = test.key.replace("test_", "worker_")
    by_name[of_workers] = Column(of_workers.replace("_", " "), mean_of(of_workers))
    if by_bytes:
        by_name["bytes"] = Column("MB sent", mean("bytes", _megabytes))
    by_name["top_bytes"] = Column("MB at the top", mean("top_bytes", _megabytes))
    by_name |= {
        "attack_success": Column("attack success", mean_of("attack_success")),
        "byzantine_weight": Column("Byzantine weight", _byzantine_weight),
    }
    by_name["virtual_seconds"] = Column("virtual s", amount("virtual_seconds"))
    by_name["lost_fraction"] = Column("updates lost", mean("lost_fraction", fmt.percent))
    components = [name for name in names if name.startswith(COMPONENT)]
    means_first = sorted(components, key=lambda name: not name.endswith("_mean"))  # "_mean": means over workers
    by_name |= {name: Column(name.removeprefix(COMPONENT), amount(name)) for name in means_first}
    by_name["best_accuracy"] = Column("highest", mean("best_accuracy", fixed))
    by_name["best_loss"] = Column("lowest", mean("best_loss", lambda loss: fixed(loss, test.decimals_for(loss))))
    by_name |= {"seconds": Column("time of a run", mean("seconds", fmt.seconds)), "runs": Column("runs", _runs)}
    return {name: column for name, column in by_name.items() if name != metric.key}


def filled(by_name: Mapping[str, Column], names: Iterable[str], rows: Sequence[Row]) -> dict[str, list[Cell]]:
    """Return the cells of the columns called `names` for the table rows. Empty and unknown columns are left out."""
    cells = {name: [by_name[name].cell_of(row) for row in rows] for name in names if name in by_name}
    return {name: column for name, column in cells.items() if name == "score" or any(cell.text for cell in column)}


def metric_names(holders: Iterable[Any]) -> list[str]:
    """Return the names of all metrics that occur in these table rows or runs."""
    return list(dict.fromkeys(name for holder in holders for name in holder.metrics))


def target_text(comparison: ComparedRuns) -> str:
    """Return the target as text, such as "93 percent", or "0.5" for a task without accuracy."""
    target = comparison.settings.target
    assert target is not None
    return f"{100 * target:g} percent" if comparison.test.share else f"{target:g}"


def estimate_cell(value: Estimate | None, metric: Metric | None = None, *, sign: bool = False, mark: str = "") -> Cell:
    """Return a table cell that shows a mean and its spread, or an empty cell if `value` is None.

    Args:
        value: the mean with its confidence interval.
        metric: the metric whose mean or difference `value` is. None: the decimals fit the mean's magnitude.
        sign: whether `value` is a difference, which has a plus sign if it is positive.
        mark: mark before the cell's text, such as "≈".
    """
    if value is None:
        return Cell()
    digits = decimals_of(value.mean) if metric is None else decimals_for(value, metric, difference=sign)
    return Cell(fixed(value.mean, digits, sign=sign), value.mean, mark, value.spread(digits, sign=sign))


def decimals_for(value: Estimate, metric: Metric, *, difference: bool = False) -> int:
    """Return the number of decimals to show for a mean of a metric, or for a mean difference, and its interval."""
    unknown = abs(value.mean) if difference else math.inf  # so a difference without interval has two digits
    return metric.decimals_for(value.mean, value.half_width if value.n > 1 else unknown)


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.4g}"


def _difference(row: Row, value: Estimate | None) -> Cell:
    mark = "≈" if value and value.n > 1 and value.includes(0) else ""
    return estimate_cell(value, row.metric, sign=True, mark=mark)


def _to_best(row: Row) -> Cell:
    best = row.group.best if row.group else None
    return _difference(row, row.difference_to(best) if best and best is not row else None)


def _byzantine_weight(row: Row) -> Cell:
    """Return a table cell with the mean share of the Byzantine workers in the aggregation weights."""
    share = mean_or_none(run.byzantine_weight for run in row.runs)
    return Cell() if share is None else Cell(fmt.percent(share), share)


def _to_target(row: Row, timed: bool) -> Cell:
    """Return a table cell with the mean time, or number of rounds, until the runs reach the target.

    `timed`: whether the table also contains times, so that the text must say "rounds".
    """
    rounds, seconds = row.metrics.get("rounds_to_target"), row.metrics.get("virtual_seconds_to_target")
    if not rounds:
        return Cell("not reached" if row.finished else "")
    time = seconds or rounds
    unit = " rounds" if timed and not seconds else ""
    share = f" ({rounds.n} of {len(row.finished)})" if rounds.n < len(row.finished) else ""
    return Cell(f"{time.amount()}{unit}{share}", time.mean)


def _runs(row: Row) -> Cell:
    """Return a table cell that says how many runs are included in the means: "3", "2 of 3" or "3, 1 diverged"."""
    text = str(len(row.runs)) if row.counted == len(row.runs) else f"{row.counted} of {len(row.runs)}"
    return Cell(f"{text}, {row.diverged} diverged" if row.diverged else text, row.counted)


# -- The answer in words


class Answer(NamedTuple):
    """The answer to the question which value of the first compared setting is best.

    Attributes:
        sentence: the answer in one sentence.
        cases: one line of text for each combination of the other settings. Empty if there are many.
        remarks: limits of the answer.
    """

    sentence: str
    cases: list[str]
    remarks: list[str]


def answer(comparison: ComparedRuns, label_of: LabelOf = label, name_of: Callable[[str], str] = str) -> Answer | None:
    """Return which value of the first compared setting is best, or None if nothing is compared.

    Args:
        comparison: the comparison.
        label_of: function that returns the text to show for a value.
        name_of: function that returns the name to show for a setting.
    """
    groups, worst, cases = comparison.groups, comparison.settings.worst, list[str]()
    if max(map(len, groups), default=0) < 2:
        return None
    first, *others = comparison.compared
    case = "" if worst is None else f" in its worst case over {name_of(worst)}"
    subject = f"{name_of(first)} by {comparison.metric.label.lower()}{case}"
    if len(groups) == 1:
        sentence = f"Best {subject}: {_line(comparison, groups[0], label_of)}."
    elif len(groups) <= MOST_CASES:
        sentence = f"Best {subject}, for each {_joined(map(name_of, others))}:"
        for group in groups:
            keys = [f"{name_of(axis)} " if len(others) > 1 else "" for axis in others]
            values = ", ".join(key + label_of(group[0].point[axis]) for key, axis in zip(keys, others, strict=True))
            cases.append(f"{values}: {_line(comparison, group, label_of)}")
    else:
        named = f"{'values' if len(others) == 1 else 'combinations'} of {_joined(map(name_of, others))}"
        sentence = f"Most often the best {subject}: {_most_often(groups, first, label_of)} {named}."
    return Answer(sentence, cases, _remarks(comparison.rows))


def answer_text(comparison: ComparedRuns) -> str:
    """Return which value of the first compared setting is best, as text. Empty if nothing is compared."""
    if (result := answer(comparison)) is None:
        return ""
    lines = [result.sentence, *(f"  {case}" for case in result.cases), *result.remarks]
    return "\n".join(textwrap.fill(line, TABLE_COLUMNS, subsequent_indent="    ") for line in lines)


def _line(comparison: ComparedRuns, group: Group, label_of: LabelOf) -> str:
    """Return the best value in a group of table rows as text, and how much better it is than the next value.

    Example: "caf 0.9231 ± 0.0040, with the same mean as median, not significantly different from krum".
    """
    best, first, settings = group.best, comparison.compared[0], comparison.settings
    if best is None or best.score is None:
        return "none is ranked"
    texts = settings.headings | ({settings.worst: "worst"} if settings.worst else {})
    chosen = ", ".join(f"{text}: {label_of(best.chosen[axis])}" for axis, text in texts.items())
    mean = best.score.text(decimals_for(best.score, best.metric))
    line = f"{label_of(best.point[first])}{f' ({chosen})' if chosen else ''} {mean}"
    winners, tied = ([label_of(row.point[first]) for row in rows] for rows in (group.winners, group.tied))
    if len(winners) > 1:
        line += f", with the same mean as {listed(winners[1:])}"
    if tied:
        return f"{line}, not significantly different from {listed(tied)}"
    if len(group.ranked) == 1:  # all other values failed or are invalid
        return f"{line}, the only one that is ranked"
    if group.next is None:
        return line
    if (gap := group.next.difference_to(best)) is None:
        return line
    size = Estimate(abs(gap.mean), gap.half_width, tuple(map(abs, gap.values)))
    side = "lower" if gap.mean < 0 else "higher"
    text = size.text(decimals_for(size, best.metric, difference=True))
    return f"{line}; the next, {label_of(group.next.point[first])}, is {text} {side}"


def _most_often(groups: Sequence[Group], first: str, label_of: LabelOf) -> str:
    """Return, as text, which values of the setting `first` are best most often, such as "caf, for 9 of 12" groups."""
    count = Counter(label_of(row.point[first]) for group in groups for row in group.winners)
    if not count:
        return "none is ranked"
    most = max(count.values())
    names = [name for name, times in count.items() if times == most]
    ranked = sum(group.best is not None for group in groups)
    return f"{listed(names)}{', each' if len(names) > 1 else ','} for {most} of {ranked}"


def _remarks(rows: Sequence[Row]) -> list[str]:
    remarks = []
    if max(len(row.runs) for row in rows) == 1:
        remarks.append("With one seed there is no interval, and a difference may be chance.")
    if missing := sum(not row.is_complete(row.score) for row in rows):
        runs = sum(row.failed + row.diverged for row in rows)
        failed = f"{plural(runs, 'run')} failed, did not finish or diverged"
        why = failed if runs else "a run has no finite value"
        are = "is" if missing == 1 else "are"
        remarks.append(f"{missing} of {plural(len(rows), 'combination')} {are} not ranked: {why}.")
    return remarks


def _joined(names: Iterable[str]) -> str:
    """Return the names as an English list, such as "a, b and c"."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def listed(names: Sequence[str], most: int = MOST_NAMES) -> str:
    """Return the names as text. If there are more than `most`, only the first are named and the others counted."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# -- The printed text


def comparison_text(comparison: ComparedRuns) -> str:
    """Return the results of a comparison as text: the best values, the table, and the leaderboard."""
    board = comparison.leaderboard
    ranks = leaderboard_text(board, comparison.compared[0]) if board else ""
    return f"{answer_text(comparison)}\n\n{summary_text(comparison)}\n\n{ranks}".strip()


def shown_columns(comparison: ComparedRuns) -> dict[str, list[str]]:
    """Return the columns of the table of results as lists of text: the heading, and one text for each table row.

    Columns are named "axis KEY" for a compared key, "mark", or as in `columns`. Empty columns are left out.
    """
    rows, by_name = comparison.summary, columns(comparison)
    names = [name for name in by_name if name not in ("to_best", "byzantine_weight", "seconds")]
    texts = {name: [by_name[name].heading, *map(str, cells)] for name, cells in filled(by_name, names, rows).items()}
    texts["score"][1:] = [
        text or ("no finite value" if row.finished else "failed")
        for text, row in zip(texts["score"][1:], rows, strict=True)
    ]
    shown = {f"axis {axis}": [axis, *(label(row.point[axis]) for row in rows)] for axis in comparison.compared}
    shown |= {
        f"axis {axis}": [text, *(label(row.chosen[axis]) for row in rows)]
        for axis, text in comparison.settings.headings.items()
    }
    shown["mark"] = ["", *(row.mark for row in rows)]
    first = {name: texts.pop(name) for name in ("score", "difference") if name in texts}
    last = {name: texts.pop(name) for name in ("runs",) if name in texts}
    return {name: column for name, column in (shown | first | texts | last).items() if any(column[1:])}


def summary_text(comparison: ComparedRuns) -> str:
    """Return the table of results as text, followed by notes and the failed runs.

    Columns that do not fit the width are left out.
    """
    shown, by_name = shown_columns(comparison), columns(comparison)
    optional = [name for name in by_name if name in shown and name not in ("score", "difference", "runs")]
    left, left_out = TABLE_COLUMNS - sum(_width(shown[name]) for name in shown if name not in optional), []
    for name in optional:
        if _width(shown[name]) <= left:
            left -= _width(shown[name])
        else:
            left_out.append(shown.pop(name)[0])
    head, *lines = (
        "".join(cell.ljust(_width(column)) for cell, column in zip(cells, shown.values(), strict=True)).rstrip()
        for cells in zip(*shown.values(), strict=True)
    )
    remaining = iter(lines)
    groups = ["\n".join(next(remaining) for _ in group) for group in comparison.groups]
    if left_out:
        text = f"summary.csv has {plural(len(left_out), 'more column')}: {', '.join(left_out)}"
        groups[-1] += f"\n\n{textwrap.shorten(text, TABLE_COLUMNS, placeholder=' ...')}"
    problems = [f"  {describe_point(run.point)}: {run.error}" for run in comparison.failed]
    return "\n".join([head, "\n\n".join(groups), "", *map(note, table_notes(comparison)), *problems])


def _width(column: Sequence[str]) -> int:
    return max(map(len, column)) + len(GAP)


def undecided(comparison: ComparedRuns) -> list[str]:
    """Return a note on how often `tune` could not choose a value, as a list. Empty if it always could."""
    if not (count := sum(not choice.decided for choice in comparison.choices)):
        return []
    return [
        f"{comparison.settings.tune}: for {count} of {plural(len(comparison.choices), 'combination')} no value was "
        "chosen, because none has a validation result for every seed; the first value is shown"
    ]


def table_notes(comparison: ComparedRuns, best: str = "*", tied: str = "~") -> list[str]:
    """Return the notes below the table. `best` and `tied`: marks of the best rows, and of rows tied with them."""
    settings, runs, score = comparison.settings, len(comparison.runs), comparison.metric
    notes = _notes_on_means(comparison, best, tied)
    if settings.tune is not None:
        case = f", in its worst case of {settings.worst}" if settings.worst else ""
        notes.append(
            f"{settings.tune}: the value with the best result on validation samples{case}; all values: tuning.csv"
        )
        notes += undecided(comparison)
    if settings.worst is not None:
        notes.append(f"{settings.worst}: the worst case by {score.label.lower()}; all cases: results.csv")
    if settings.target is not None:
        notes += _notes_on_target(comparison)
    notes += [f"left out: {line}" for line in comparison.left_out]
    notes += [f"warning: {line}" for line in comparison.warnings]
    if comparison.diverged:
        notes.append(
            f"{comparison.diverged} of {runs} runs diverged: their results are those of the last finite model, and "
            "rows with a diverged run have no mark"
        )
    failed = sum(run.failure is not None for run in comparison.failed)
    for count, state in ((failed, "failed"), (len(comparison.failed) - failed, "are missing or not finished")):
        if count:
            notes.append(
                f"{count} of {runs} runs {state}: they are not in any mean, and rows with such a run have no mark"
            )
    return notes


def _notes_on_means(comparison: ComparedRuns, best: str, tied: str) -> list[str]:
    rows, score = comparison.summary, comparison.metric
    seeds = max(len(row.runs) for row in rows)
    both = "the two values in brackets" if any(row.score and row.score.n == 2 for row in rows) else ""
    if seeds > 2:
        means = f"means over {seeds} seeds ± 95 percent intervals (Student t){both and f', for two runs {both}'}"
    elif seeds == 2:
        means = f"means over 2 seeds{both and f', with {both}'}"
    else:
        means = "one run each: with one seed there are no intervals, and a difference may be chance"
    paired = "; differences are paired by seed" if seeds > 1 else ""
    better = f" ({score.better} is better)" if comparison.settings.metric is not None and score.better else ""
    notes = [f"{score.label.lower()} after the last round{better}, {means}{paired}"]
    if any(row.mark for row in rows):
        within = f" among equal {', '.join(comparison.compared[1:])}" if len(comparison.compared) > 1 else ""
        tie = f"; {tied} not significantly different from the best (95 %, paired)" if seeds > 1 else ""
        notes.append(f"{best} best{within}{tie}")
    return notes


def _notes_on_target(comparison: ComparedRuns) -> list[str]:
    test, target = comparison.test, target_text(comparison)
    bound = f"{test.key.removeprefix('test_')} of at {'least' if test.sign > 0 else 'most'}"
    notes = [
        f"to {target}: until the first test with {bound} {target}; arrivals are models or gradients that the "
        "server has accepted"
    ]
    if any(0 < row.reached < len(row.finished) for row in comparison.summary):
        notes.append("where only some runs reached the target, the mean is over these runs and therefore too low")
    misses = f"the mean {test.label.lower()} after the last round is {'below' if test.sign > 0 else 'above'} {target}"
    for key, points in breaking_points(comparison).items():
        notes.append(f"{key}: smallest value from which on {misses} (breaking_points.csv):")
        notes += _breaking_lines(comparison, points)
    return notes


# -- Breaking points

Breaking = tuple[dict[str, Any], BreakingPoint]  # values on the other compared axes, and the breaking point there


def breaking_points(comparison: ComparedRuns) -> dict[str, list[Breaking]]:
    """Return, for each numeric setting, the value from which the test result misses the target.

    The dict maps the key of a setting to a list of pairs: a combination of the other settings, and the breaking point.
    Without a target, the dict is empty.
    """
    target, points = comparison.settings.target, dict[str, list[Breaking]]()
    if target is None:
        return {}
    for key in numeric_axes(comparison.axes, comparison.compared):
        points[key] = []
        for curve in value_curves(comparison.rows, key):
            others = {axis: value for axis, value in curve[0].point.items() if axis != key}
            points[key].append((others, breaking_point(curve, key, comparison.test, target)))
    return points


def _breaking_lines(comparison: ComparedRuns, points: Sequence[Breaking]) -> list[str]:
    """Return one line of text for each breaking point. If there are many, the last line counts the rest."""
    lines = [f"  {', '.join(map(label, others.values())) or comparison.name}: {point.text}" for others, point in points]
    more = len(lines) - MOST_LINES
    return lines if more <= 0 else [*lines[:MOST_LINES], f"  {more} more"]


# -- The files


def results_csv(comparison: ComparedRuns) -> str:
    """Return a CSV table with one line per run: its compared values and results. Missing numbers are empty."""
    names = metric_names(comparison.runs)
    rows: list[list[Any]] = [["id", *comparison.axes, *names, "error"]]
    for run in comparison.runs:
        rows.append([run.id, *map(label, run.point.values()), *map(run.metrics.get, names), run.error])
    return to_csv(rows)


def curves_csv(comparison: ComparedRuns) -> str:
    """Return a CSV table with one line per run and round. Missing numbers are empty."""
    declared = dict.fromkeys(
        name for run in comparison.runs for record in run.history for name in component_metrics(record)
    )
    names = ["test_accuracy", *LAST_ROUND, *declared]
    rows: list[list[Any]] = [["id", *comparison.axes, *Progress._fields, *names, "seconds"]]
    for run in comparison.runs:
        point = [run.id, *map(label, run.point.values())]
        for progress, record in zip(run.progress, run.history, strict=True):
            values = {**record, **component_metrics(record)}
            rows.append([*point, *progress, *map(values.get, names), record.total_seconds])
    return to_csv(rows)


def summary_csv(comparison: ComparedRuns) -> str:
    """Return a CSV table with one line for each combination of compared values: the means over the seeds.

    Columns named `..._ci95` are half widths of 95 percent intervals.
    """
    score, target, headings = comparison.metric, comparison.settings.target, comparison.settings.headings
    names = [name for name in metric_names(comparison.summary) if name != score.key]
    first = "accuracy" if score.key == "test_accuracy" else score.key
    numbers = [column for name in (first, "difference", *names) for column in (name, f"{name}_ci95")]
    asked = [] if target is None else ["target", "reached"]
    rows: list[list[Any]] = [
        [*comparison.compared, *headings.values(), "runs", "failed", *asked, "mark", "pairs", *numbers]
    ]
    for row in comparison.summary:
        difference = row.difference
        cells = [*map(label, (*row.point.values(), *row.chosen.values())), len(row.runs), row.failed]
        cells += [target, row.reached] if asked else []
        cells += [MARK_WORDS[row.mark], difference.n if difference else None]
        for value in (row.score, difference, *map(row.metrics.get, names)):
            cells += mean_cells(value)
        rows.append(cells)
    return to_csv(rows)


def pairs_csv(comparison: ComparedRuns) -> str:
    """Return a CSV table with one line for each pair of values of the first compared setting.

    Each line has the second value's result minus the first's, paired by seed, and the p-value of the paired t test.
    """
    first, *others = comparison.compared
    rows: list[list[Any]] = [[*others, first, f"{first}_2", "pairs", "difference", "difference_ci95", "p_value"]]
    for pair in comparison.pairs:
        values = [*(pair.first.point[key] for key in others), pair.first.point[first], pair.second.point[first]]
        gap = pair.difference
        rows.append([*map(label, values), gap.n, *mean_cells(gap), gap.p_value])
    return to_csv(rows)


def breaking_points_csv(comparison: ComparedRuns) -> str:
    """Return a CSV table of breaking points, with one line for each combination of the other settings.

    A breaking point is the value of a numeric setting from which the test result misses the target.
    """
    columns = ["breaks_at", "reached_at", "missed_below", "no_result"]
    rows: list[list[Any]] = [["key", *comparison.compared, "target", *columns]]
    for key, points in breaking_points(comparison).items():
        for others, point in points:
            values = [label(others[axis]) if axis in others else None for axis in comparison.compared]
            lists = [" ".join(map(str, values)) for values in (point.missed_below, point.no_result)]
            rows.append([key, *values, comparison.settings.target, point.breaks_at, point.reached_at, *lists])
    return to_csv(rows)


def tuning_csv(comparison: ComparedRuns) -> str:
    """Return a CSV table with one line for each candidate value of the tuned setting, and its validation result.

    The column `chosen` says whether `tune` chose the value. If `worst` (such as "attack.name") is set, the result is
    the worst one among the values of this setting.
    """
    keys = [*comparison.compared, *comparison.settings.headings]
    rows: list[list[Any]] = [[*keys, "validation", "validation_ci95", "failed", "chosen"]]
    for choice in comparison.choices:
        for candidate in choice.candidates:
            counted = comparison.settings.validated(candidate)
            chosen = "yes" if candidate is choice.chosen and choice.decided else ""
            values = [label(counted.runs[0].point[key]) for key in keys]
            rows.append([*values, *mean_cells(validation_result(counted)), candidate.failed, chosen])
    return to_csv(rows)


def mean_cells(value: Estimate | None) -> list[float | None]:
    """Return two CSV cells: a mean, and the half width of its 95 percent interval."""
    return [value.mean, value.half_width if value.n > 1 else None] if value else [None, None]
