"""The page of a grid of runs: its texts and tables, and its figures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedsim.core.confidence import FEWEST_FOR_BAND, Estimate, fixed
from fedsim.records import formatting as fmt
from fedsim.records.progress import ToTarget
from fedsim.records.reader import SEED, GridRun, Run, StoredGrid
from fedsim.report.combinations import (
    CombinationSummary,
    combinations,
    other_axes,
    summarise_combinations,
)
from fedsim.report.curves import charts_of, grid_curves, grid_time, scale_choices, scales_of
from fedsim.report.heat_maps import columns_for, final_heat_maps, has_weights, partition_heat_map, weights_heat_map

MINUS = "\N{MINUS SIGN}"
FEW_LINES = 4  # up to this number, the page shows the spread of curves at first


def grid_page(grid: StoredGrid) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values for the template, and the figures of each chart."""
    labels = {axis: [fmt.label(value) for value in values] for axis, values in grid.axes.items()}
    axes = [(fmt.key_name(axis), labels[axis]) for axis in other_axes(grid)]
    combined = combinations(grid)
    names = [" · ".join(_labels_at(axes, combination.place)) or "all runs" for combination in combined]
    begun = [(entry, entry.run) for entry in grid.runs if entry.run and entry.run.rounds]
    runs = [run for _, run in begun]
    charts = {"curves-chart": grid_curves(combined, names), "time-chart": [grid_time(combined, names)]}
    if len(axes) >= 2:
        charts["heat-map-chart"] = final_heat_maps(combined, axes)
    if any(map(has_weights, runs)):
        charts["weights-chart"] = weights_of_runs(runs)
    if any(run.partition.counts for run in runs):
        charts["partition-chart"] = partitions_of_runs(runs)
    context = {
        "name": grid.name,
        "title": fmt.comparison_title(other_axes(grid)),
        "axes": axes,
        "all_axes": [(axis, fmt.key_name(axis), values) for axis, values in labels.items()],
        "fewest_for_band": FEWEST_FOR_BAND,
        "notes": notes(grid),
        "experiment": shared_settings(runs),
        "environment": list(fmt.flatten(runs[0].environment)),
        "table": comparison_table(summarise_combinations(combined, grid.target), axes, grid.target),
        "target": None if grid.target is None else fmt.percent(grid.target),
        "unfinished": [(entry.id, entry.state) for entry in grid.runs if not entry.finished],
        "run_names": [run_name(entry, labels) for entry, _ in begun],
        "metrics": [chart.label for chart in charts_of(runs)],
        "scales": scale_choices(runs) if scales_of(runs) else [],
        "spread_shown": not axes or len(axes[0][1]) <= FEW_LINES,
        "values": list(dict.fromkeys(figure["when"]["value"] for figure in charts.get("heat-map-chart", ()))),
        "has_weights": "weights-chart" in charts,
        "has_partition": "partition-chart" in charts,
    }
    return context, charts


def _labels_at(axes: Sequence[tuple[str, Sequence[str]]], place: Sequence[int]) -> list[str]:
    return [labels[index] for (_, labels), index in zip(axes, place, strict=True)]


def weights_of_runs(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The heat map of the weights of every run that has weights."""
    columns = columns_for(runs)
    figures = [weights_heat_map(run, columns, run=str(index)) for index, run in enumerate(runs)]
    return [figure for figure in figures if figure]


def partitions_of_runs(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The heat map of every partition, with the runs that share it."""
    partitions: list[Any] = []
    sharing: list[list[str]] = []
    for index, run in enumerate(runs):
        if run.partition not in partitions:
            partitions.append(run.partition)
            sharing.append([])
        sharing[partitions.index(run.partition)].append(str(index))
    figures = [partition_heat_map(each, run=indices) for each, indices in zip(partitions, sharing, strict=True)]
    return [figure for figure in figures if figure]


def run_name(entry: GridRun, labels: dict[str, list[str]]) -> str:
    """A run by its values on the axes."""
    values = {axis: labels[axis][position] for axis, position in entry.place.items()}
    seed = [f"seed {values.pop(SEED)}"] if SEED in values else []
    return " · ".join([*values.values(), *seed]) or entry.id


def notes(grid: StoredGrid) -> list[str]:
    """Warnings: runs that are not finished."""
    missing = sum(not entry.finished for entry in grid.runs)
    if not missing:
        return []
    return [f"Not finished: {missing} of {len(grid.runs)} runs. The table counts only finished runs."]


def shared_settings(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """The settings that are the same in all runs."""
    first, *others = [dict(fmt.flatten(run.experiment)) for run in runs]
    return [(key, value) for key, value in first.items() if all(other.get(key) == value for other in others)]


@dataclass(frozen=True)
class Cell:
    """A cell of the table: `text` between a mark and a spread, and the number by which the table sorts."""

    text: str = ""
    sort: float | None = None
    mark: str = ""
    spread: str = ""


def comparison_table(
    summaries: Sequence[CombinationSummary],
    axes: Sequence[tuple[str, Sequence[str]]],
    target: float | None,
) -> dict[str, Any]:
    """The table: its head, and its rows group by group, with the first axis after the others."""
    columns = _columns(summaries, target)
    ordered = sorted(summaries, key=lambda each: (each.combination.group, each.combination.place))
    rows = []
    for group, members in itertools.groupby(ordered, key=lambda each: each.combination.group):
        for index, summary in enumerate(members):
            first, *others = _labels_at(axes, summary.combination.place) or [None]
            rows.append(
                {
                    "labels": [*others, *([first] if axes else [])],
                    "cells": [cell_of(summary) for _, cell_of in columns],
                    "best": summary.best,
                    "starts_group": index == 0 and bool(rows) and bool(group),
                }
            )
    names = [name for name, _ in axes]
    return {
        "axes": [*names[1:], *names[:1]],
        "head": [name for name, _ in columns],
        "rows": rows,
        "differences": any(summary.difference for summary in summaries),
    }


def _columns(
    summaries: Sequence[CombinationSummary], target: float | None
) -> list[tuple[str, Callable[[CombinationSummary], Cell]]]:
    """The name of each column that holds something, and the function that makes its cells."""
    timed = any(each.virtual_seconds for each in summaries)
    columns: list[tuple[str, Callable[[CombinationSummary], Cell]]] = [
        ("accuracy", lambda each: _interval(each.accuracy, "★" if each.best else ""))
    ]
    if any(each.difference for each in summaries):
        columns.append(("difference", lambda each: _difference(each.difference)))
    if any(each.attack_success for each in summaries):
        columns.append(("attack success", lambda each: _interval(each.attack_success)))
    if any(each.byzantine_weight is not None for each in summaries):
        columns.append(("Byzantine weight", lambda each: _number(each.byzantine_weight, fmt.percent)))
    for name in summaries[0].metrics:
        columns.append((name, lambda each, name=name: _amount(each.metrics[name])))
    if timed:
        columns.append(("virtual s", lambda each: _amount(each.virtual_seconds)))
    if target is not None:
        time = f"{'virtual s' if timed else 'rounds'} to {fmt.percent(target)}"
        columns.append((time, lambda each: _to_target(each.to_target, len(each.combination.finished_runs), timed)))
        columns.append(("updates", lambda each: _amount(each.to_target.updates)))
        columns.append(("arrivals", lambda each: _amount(each.to_target.arrivals)))
    columns.append(("time of a run", lambda each: _number(each.seconds, fmt.seconds)))
    columns.append(("seeds", _seeds))
    return columns


def _interval(value: Estimate | None, mark: str = "") -> Cell:
    return Cell(fixed(value.mean), value.mean, mark, value.spread()) if value else Cell(fmt.MISSING)


def _difference(value: Estimate | None) -> Cell:
    if value is None:
        return Cell()
    mark = "≈" if value.n > 1 and value.includes(0) else ""
    text, spread = (text.replace("-", MINUS) for text in (fixed(value.mean, sign=True), value.spread(sign=True)))
    return Cell(text, value.mean, mark, spread)


def _amount(value: Estimate | None) -> Cell:
    return Cell(value.amount(), value.mean) if value else Cell()


def _number(value: float | None, show: Callable[[float | None], str]) -> Cell:
    return Cell(show(value), value)


def _to_target(effort: ToTarget, finished: int, timed: bool) -> Cell:
    if not effort.reached:
        return Cell("not reached" if finished else fmt.MISSING)
    time = effort.virtual_seconds or effort.rounds
    unit = " rounds" if timed and not effort.virtual_seconds else ""
    share = f" ({effort.reached} of {finished})" if effort.reached < finished else ""
    return Cell(f"{time.amount()}{unit}{share}", time.mean)


def _seeds(summary: CombinationSummary) -> Cell:
    finished, planned = len(summary.combination.finished_runs), len(summary.combination.runs)
    return Cell(str(finished) if finished == planned else f"{finished} of {planned}", finished)
