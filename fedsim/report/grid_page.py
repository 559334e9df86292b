"""The page of a grid of runs: its texts and tables, and its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedsim.core.confidence import FEWEST_FOR_BAND, Estimate, fixed
from fedsim.records import formatting as fmt
from fedsim.records.best import answer, best_of
from fedsim.records.combinations import SEED, Combination, groups_of, score_of, time_to_target
from fedsim.records.figures import table_of
from fedsim.records.leaderboard import leaderboard, leaderboard_notes
from fedsim.records.metric import Metric
from fedsim.records.reader import GridRun, Run, StoredGrid, StoredPartition
from fedsim.records.run_metrics import mean_or_none
from fedsim.records.value_curves import breaking_points, numeric_axes
from fedsim.report import on_page

MINUS = "\N{MINUS SIGN}"
PLUG = "metrics."  # before the name of a plug's metric
FEW_LINES = 4  # up to this number, the page shows the spread of curves at first


def grid_page(grid: StoredGrid) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the variables of the HTML template, and the figures of each chart."""
    labels = {axis: [fmt.label(value) for value in values] for axis, values in grid.axes.items()}
    compared = grid.settings.compared(list(grid.axes))
    axes = [(fmt.key_name(axis), labels[axis]) for axis in compared]
    table = table_of(grid, grid.runs)
    combined = table.rows
    chosen = [(text, axis, labels[axis]) for axis, text in grid.settings.headings.items()]
    label_of = lambda each, axis: labels[axis][each.runs[0].place[axis]]  # noqa: E731
    score, test, target = combined[0].metric, score_of(grid.runs), grid.settings.target
    names = [" · ".join(_labels_of(axes, combination)) or "all runs" for combination in combined]
    runs = [run for run in grid.runs if run.history]
    charts = {"curves-chart": on_page.grid_curves(table), "time-chart": [on_page.grid_time(combined, names)]}
    over = grid.settings.heat_axes(list(grid.axes))
    first_two = over or compared[:2]
    heat_keys = [*first_two, *(axis for axis in compared if axis not in first_two)]
    if len(axes) >= 2:
        charts["heat-map-chart"] = on_page.final_heat_maps(table, heat_keys)
    if over:
        charts["best-map-chart"] = on_page.best_heat_maps(table, heat_keys)
    if against := numeric_axes(grid.axes, compared):
        charts["values-chart"] = on_page.value_charts(table)
    if any(map(on_page.has_weights, runs)):
        charts["weights-chart"] = weights_of_runs(runs)
    if any(run.partition.counts for run in runs):
        charts["partition-chart"] = partitions_of_runs(runs)
    board = leaderboard(combined, compared, label_of)
    context = {
        "name": grid.name,
        "title": fmt.comparison_title(compared, score.label),
        "score": score.label.lower(),
        "better": score.better,
        "answer": answer(combined, compared, grid.settings, label_of, fmt.key_name),
        "bound": "at least that accuracy" if test.share else "at most that loss",
        "axes": axes,
        "heat_axes": [(fmt.key_name(axis), labels[axis]) for axis in heat_keys],
        "has_best_map": over is not None,
        "all_axes": [(axis, fmt.key_name(axis), values) for axis, values in labels.items()],
        "fewest_for_band": FEWEST_FOR_BAND,
        "against": [(key, fmt.key_name(key), key == against[0]) for key in against],
        "leaderboard": board,
        "leaderboard_notes": leaderboard_notes(board) if board else [],
        "breaking": [
            (fmt.key_name(key), [(on_page.name_of_values(others.values()), point.text) for others, point in points])
            for key, points in breaking_points(grid, grid.runs).items()
        ],
        "misses": f"the mean {test.label.lower()} is {'below' if test.sign > 0 else 'above'}",
        "value_menus": _value_menus(compared, against),
        "notes": notes(grid),
        "experiment": shared_settings(runs),
        "environment": fmt.flatten(runs[0].environment),
        "table": comparison_table([compare(group) for group in groups_of(combined)], axes, test, target, chosen),
        "tune": grid.settings.tune,
        "worst": grid.settings.worst,
        "target": None if target is None else _target_text(test, target),
        "unfinished": [(run.id, run.state) for run in grid.runs if not run.finished],
        "run_names": [run_name(run, labels) for run in runs],
        "metrics": _first([chart.label for chart in on_page.charts_of(runs)], score.label),
        "scales": on_page.scale_choices(runs),
        "spread_shown": not axes or len(axes[0][1]) <= FEW_LINES,
        "values": _first(
            [figure["when"]["value"] for figure in charts.get("heat-map-chart", ())], f"Final {score.label.lower()}"
        ),
        "has_weights": "weights-chart" in charts,
        "has_partition": "partition-chart" in charts,
    }
    return context, charts


def _first(choices: Iterable[str], first: str) -> list[str]:
    """Return the choices of a menu, each once, with the first one in front."""
    return sorted(dict.fromkeys(choices), key=lambda choice: choice != first)


def _value_menus(compared: Sequence[str], against: Sequence[str]) -> list[tuple[int, bool]]:
    """The number of each axis that has a menu beside the curves over values, and whether one value is chosen at first.

    Not at first: of the axis that the curves begin with, and of the first other one.
    """
    if not against:
        return []
    others = [key for key in compared if key != against[0]]
    shown = [key for key in compared if list(against) != [key]]
    return [(compared.index(key), key in others[1:]) for key in shown]


def _labels_of(axes: Sequence[tuple[str, Sequence[str]]], combination: Combination) -> list[str]:
    return [labels[index] for (_, labels), index in zip(axes, combination.place, strict=True)]


def weights_of_runs(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The heat map of the weights of every run that has weights."""
    columns = on_page.columns_for(runs)
    figures = [on_page.weights_heat_map(run, columns, run=str(index)) for index, run in enumerate(runs)]
    return [figure for figure in figures if figure]


def partitions_of_runs(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the heat map of every partition, with the runs that share it."""
    sharing: list[tuple[StoredPartition, list[str]]] = []
    for index, run in enumerate(runs):
        shared = next((indices for partition, indices in sharing if partition == run.partition), None)
        if shared is None:
            sharing.append((run.partition, shared := []))
        shared.append(str(index))
    figures = [on_page.partition_heat_map(partition, run=indices) for partition, indices in sharing]
    return [figure for figure in figures if figure]


def run_name(run: GridRun, labels: dict[str, list[str]]) -> str:
    """A run by its values on the axes."""
    values = {axis: labels[axis][position] for axis, position in run.place.items()}
    seed = [f"seed {values.pop(SEED)}"] if SEED in values else []
    return " · ".join([*values.values(), *seed]) or run.id


def notes(grid: StoredGrid) -> list[str]:
    """Warnings: runs that are not finished or diverged, and values that could not be chosen."""
    total, missing = len(grid.runs), sum(not run.finished for run in grid.runs)
    lines = [f"Not finished: {missing} of {total} runs. The table counts only finished runs."] if missing else []
    if diverged := sum(run.finished and run.history[-1].diverged is not None for run in grid.runs):
        lines.append(f"Diverged: {diverged} of {total} runs. Their results are those of the last finite model.")
    return [*lines, *grid.settings.undecided(grid.settings.of(grid.runs, list(grid.axes))[1])]


def shared_settings(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """The settings that are the same in all runs."""
    first, *others = [dict(fmt.flatten(run.experiment)) for run in runs]
    return [(key, value) for key, value in first.items() if all(other.get(key) == value for other in others)]


@dataclass(frozen=True)
class ComparedCombination:
    """A combination beside the others of its group.

    Attributes:
        combination: the combination.
        best: whether it has the best mean score of its group; true for several if they are equal.
        difference: its score minus that of the best, paired by seed; None for the best itself.
    """

    combination: Combination
    best: bool = False
    difference: Estimate | None = None

    @cached_property
    def byzantine_weight(self) -> float | None:
        """The mean over its runs, finished or not."""
        return mean_or_none(run.byzantine_weight for run in self.combination.runs)


def compare(group: Sequence[Combination]) -> list[ComparedCombination]:
    """Return the combinations of a group, each compared with the best one.

    Without a best one, or with a single combination, none is compared.
    """
    found = best_of(group)
    if found is None or len(group) < 2:
        return list(map(ComparedCombination, group))
    best = [each.quality(each.score) == found.combination.quality(found.score) for each in group]
    return [
        ComparedCombination(each, equal, None if equal else each.difference_to(found.combination))
        for each, equal in zip(group, best, strict=True)
    ]


@dataclass(frozen=True)
class Cell:
    """A cell of the table: `text` between a mark and a spread, and the number by which the table sorts."""

    text: str = ""
    sort: float | None = None
    mark: str = ""
    spread: str = ""


def comparison_table(
    groups: Sequence[Sequence[ComparedCombination]],
    axes: Sequence[tuple[str, Sequence[str]]],
    test: Metric,
    target: float | None,
    chosen: Sequence[tuple[str, str, Sequence[str]]] = (),
) -> dict[str, Any]:
    """Return the head of the table and its rows group by group, with the first axis after the others.

    Args:
        test: the test result, to which the target belongs.
        chosen: the heading, the key and the labels of each axis along which values are chosen.
    """
    everything = [each for group in groups for each in group]
    columns = _columns(everything, test, target)
    rows = []
    for group in groups:
        for compared in group:
            labels = _labels_of(axes, compared.combination)
            rows.append(
                {
                    "labels": [
                        *(*labels[1:], *labels[:1]),
                        *(texts[compared.combination.runs[0].place[axis]] for _, axis, texts in chosen),
                    ],
                    "cells": [cell_of(compared) for _, cell_of in columns],
                    "best": compared.best,
                    "starts_group": compared is group[0] is not everything[0] and len(axes) > 1,
                }
            )
    names = [name for name, _ in axes]
    return {
        "axes": [*names[1:], *names[:1], *(heading for heading, _, _ in chosen)],
        "head": [name for name, _ in columns],
        "rows": rows,
        "differences": any(each.difference for each in everything),
    }


def _columns(
    compared: Sequence[ComparedCombination], test: Metric, target: float | None
) -> list[tuple[str, Callable[[ComparedCombination], Cell]]]:
    """Return the name of each column that holds something, and the function that makes its cells."""
    score = compared[0].combination.metric
    metrics = dict.fromkeys(name for each in compared for name, value in each.combination.metrics.items() if value)
    metrics.pop(score.key, None)
    heading = score.key.removeprefix("test_").removeprefix(PLUG)
    columns: list[tuple[str, Callable[[ComparedCombination], Cell]]] = [(heading, _score)]
    if any(each.difference for each in compared):
        columns.append(("difference to best", _difference))
    if test != score:
        columns.append((test.label.lower(), lambda each: _interval(each.combination.metrics.get(test.key))))
    if "attack_success" in metrics:
        columns.append(("attack success", lambda each: _interval(each.combination.metrics.get("attack_success"))))
    if any(each.byzantine_weight is not None for each in compared):
        columns.append(("Byzantine weight", lambda each: _number(each.byzantine_weight, fmt.percent)))
    columns += [(name.removeprefix(PLUG), _amount(name)) for name in metrics if name.startswith(PLUG)]
    timed = "virtual_seconds" in metrics
    if timed:
        columns.append(("virtual s", _amount("virtual_seconds")))
    if target is not None:
        columns += [
            (
                f"{'virtual s' if timed else 'rounds'} to {_target_text(test, target)}",
                lambda each: _to_target(each, timed),
            ),
            ("updates", _amount("updates_to_target")),
            ("arrivals", _amount("arrivals_to_target")),
        ]
    return [*columns, ("time of a run", _seconds), ("seeds", _seeds)]


def _target_text(score: Metric, target: float) -> str:
    return fmt.percent(target) if score.share else f"{target:g}"


def _interval(value: Estimate | None, mark: str = "", decimals: int = 4) -> Cell:
    return Cell(fixed(value.mean, decimals), value.mean, mark, value.spread(decimals)) if value else Cell(fmt.MISSING)


def _score(compared: ComparedCombination) -> Cell:
    score, metric = compared.combination.score, compared.combination.metric
    return _interval(score, "★" if compared.best else "", metric.decimals_for(score.mean) if score else 4)


def _difference(compared: ComparedCombination) -> Cell:
    value = compared.difference
    if value is None:
        return Cell()
    mark, decimals = (
        "≈" if value.n > 1 and value.includes(0) else "",
        compared.combination.metric.decimals_for(value.mean),
    )
    texts = fixed(value.mean, decimals, sign=True), value.spread(decimals, sign=True)
    text, spread = (text.replace("-", MINUS) for text in texts)
    return Cell(text, value.mean, mark, spread)


def _amount(name: str) -> Callable[[ComparedCombination], Cell]:
    def cell_of(compared: ComparedCombination) -> Cell:
        value = compared.combination.metrics.get(name)
        return Cell(value.amount(), value.mean) if value else Cell()

    return cell_of


def _number(value: float | None, show: Callable[[float | None], str]) -> Cell:
    return Cell(show(value), value)


def _seconds(compared: ComparedCombination) -> Cell:
    value = compared.combination.metrics.get("seconds")
    return _number(value.mean if value else None, fmt.seconds)


def _to_target(compared: ComparedCombination, timed: bool) -> Cell:
    combination = compared.combination
    text, sort = time_to_target(combination.metrics, len(combination.finished), timed)
    return Cell(text or fmt.MISSING, sort)


def _seeds(compared: ComparedCombination) -> Cell:
    counted, planned = compared.combination.counted, len(compared.combination.runs)
    return Cell(str(counted) if counted == planned else f"{counted} of {planned}", counted)
