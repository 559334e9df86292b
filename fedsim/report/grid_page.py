"""The page about a grid of runs: its texts and tables, and the numbers for its charts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedsim.intervals import FEWEST_FOR_BAND, Estimate, decimals_of, fixed, student_quantile
from fedsim.report import words
from fedsim.report.comparison import (
    Combination,
    Line,
    best_accuracy,
    combinations,
    compare,
    final_accuracy,
    final_attack_success,
    final_loss,
    final_virtual_seconds,
    other_axes,
)
from fedsim.report.figures import (
    BOTH_LOSSES,
    MOST_CELLS,
    MOST_COLUMNS,
    Metric,
    has_weights,
    mean_time,
    metrics_of,
    partition_picture,
    phases_of,
    rounds_of,
    scales_of,
    scales_to_choose,
    short,
    weights_picture,
)
from fedsim.report.reading import SEED, Grid, GridRun, Run

FEWEST_COLUMNS = 25

# What the heat map over two axes can show, and with how many decimals; None: with those of an amount.
FINAL_VALUES = (
    ("Final test accuracy", final_accuracy, 4),
    ("Best test accuracy", best_accuracy, 4),
    ("Final test loss", final_loss, 4),
    ("Final attack success", final_attack_success, 4),
    ("Virtual seconds", final_virtual_seconds, None),
)


def grid_context(grid: Grid) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the template shows, and what the scripts draw."""
    axes = other_axes(grid)
    labels = {axis: [words.label(value) for value in values] for axis, values in grid.axes.items()}
    combined = combinations(grid)
    named = [(words.key_name(axis), labels[axis]) for axis in axes]
    begun = [(entry, entry.run) for entry in grid.runs if entry.run and entry.run.rounds]
    context = {
        "name": grid.name,
        "title": words.comparison_title(axes),
        "axes": named,
        "all_axes": [(axis, words.key_name(axis), values) for axis, values in labels.items()],
        "fewest_for_band": FEWEST_FOR_BAND,
        "notes": notes(grid),
        "settings": shared_settings([run for _, run in begun]),
        "environment": list(words.flatten(begun[0][1].environment)),
        "table": comparison_table(
            compare(combined, grid.target), [(words.key_name(axis), labels[axis]) for axis in axes]
        ),
        "unfinished": unfinished(grid),
        "run_names": [run_name(entry, labels) for entry, _ in begun],
        "target": words.percent(grid.target),
        "scales": bool(scales_of(run for _, run in begun)),
        "seconds": words.seconds,
        "percent": words.percent,
        "has_heat_map": len(axes) >= 2,
        "has_weights": any(has_weights(run) for _, run in begun),
        "has_partition": any(run.partition.counts for _, run in begun),
    }
    data = {
        "kind": "grid",
        "axes": [{"name": name, "values": values} for name, values in named],
        "combinations": [list(combination.place) for combination in combined],
        **grid_curves(grid, combined),
        "final": final_values(combined),
        "time": grid_time(combined),
        **grid_runs(begun),
    }
    return context, data


def run_name(entry: GridRun, labels: dict[str, list[str]]) -> str:
    """A run by its values on the axes."""
    values = {axis: labels[axis][position] for axis, position in entry.place.items()}
    seed = [f"seed {values.pop(SEED)}"] if SEED in values else []
    return " · ".join([*values.values(), *seed]) or entry.id


def notes(grid: Grid) -> list[str]:
    """What a reader has to know before believing the figures."""
    missing = [entry for entry in grid.runs if not entry.finished]
    if not missing:
        return []
    return [
        f"Not finished: {len(missing)} of {len(grid.runs)} runs. The table counts finished runs alone, and the curves "
        "show unfinished ones as far as they are."
    ]


def unfinished(grid: Grid) -> list[tuple[str, str]]:
    """Runs that are not finished, and how that comes."""
    return [(entry.id, entry.state) for entry in grid.runs if not entry.finished]


def shared_settings(runs: list[Run]) -> list[tuple[str, str]]:
    """The settings that all runs of the grid have: the experiment on which it was built."""
    flat = [dict(words.flatten(run.experiment)) for run in runs]
    return [(key, value) for key, value in flat[0].items() if all(other.get(key) == value for other in flat)]


def comparison_table(lines: list[Line], axes: list[tuple[str, list[str]]]) -> dict[str, Any]:
    """The rows of the table, group by group, the first axis last; and which of its columns have anything in them."""
    rows = []
    group: tuple[int, ...] = ()
    for line in sorted(lines, key=lambda line: (line.combination.group, line.combination.place)):
        starts_group = bool(rows) and line.combination.group != group
        group = line.combination.group
        rows.append({"line": line, **_row(line, [values for _, values in axes]), "starts_group": starts_group})
    return {
        "axes": _first_last([axis for axis, _ in axes]),
        "rows": rows,
        "attack_success": any(line.attack_success for line in lines),
        "byzantine_weight": any(line.byzantine_weight is not None for line in lines),
        "behind": any(line.behind for line in lines),
        "virtual_seconds": any(line.virtual_seconds for line in lines),
        "to_target": any(line.to_target for line in lines),
    }


def _row(line: Line, labels: list[list[str]]) -> dict[str, Any]:
    done, wanted = len(line.combination.finished), len(line.combination.runs)
    return {
        "place": _first_last([values[index] for values, index in zip(labels, line.combination.place, strict=True)]),
        "seeds": str(done) if done == wanted else f"{done} of {wanted}",
    }


def _first_last(items: list[str]) -> list[str]:
    return [*items[1:], *items[:1]]


def grid_curves(grid: Grid, combined: list[Combination]) -> dict[str, Any]:
    """The metrics of every run, and what a band over seeds needs: Student's t by degrees of freedom, from 1."""
    most = max(len(combination.runs) for combination in combined)
    begun = [run for combination in combined for run in combination.begun]
    metrics, scales = metrics_of(begun), scales_of(begun)
    curves = [
        {
            "combination": index,
            "rounds": rounds_of(run),
            "scales": [scale.values(run) for scale in scales],
            "values": [[short(metric.read(record)) for record in run.rounds] for metric in metrics],
        }
        for index, combination in enumerate(combined)
        for run in combination.begun
    ]
    return {
        "metrics": metrics_to_choose(metrics),
        "scales": scales_to_choose(begun),
        "curves": curves,
        "student_t": [student_quantile(dof) for dof in range(1, most)],
        "fewest_for_band": FEWEST_FOR_BAND,
    }


def metrics_to_choose(metrics: Sequence[Metric]) -> list[dict[str, Any]]:
    """What a chart can show: a metric, or both losses, as parts with their name and their place in a run's values."""
    place = {metric.label: index for index, metric in enumerate(metrics)}
    choices = [
        {"label": m.label, "unit": m.unit, "share": m.share, "parts": [{"name": "", "values": place[m.label]}]}
        for m in metrics
    ]
    if {"Test loss", "Train loss"} <= place.keys():
        parts = [{"name": name, "values": place[f"{name.capitalize()} loss"]} for name in ("test", "train")]
        both = {"label": BOTH_LOSSES, "unit": "", "share": False, "parts": parts}
        choices.insert(place["Train loss"] + 1, both)
    return choices


def final_values(combined: list[Combination]) -> list[dict[str, Any]]:
    """What the heat map can show: for each choice, mean, its text, what stands below it, and n of every combination."""
    choices = []
    for name, read, decimals in FINAL_VALUES:
        cells = [_cell(combination.interval(read), decimals) for combination in combined]
        if any(cells):
            choices.append({"label": name, "cells": cells})
    return choices


def _cell(interval: Estimate | None, decimals: int | None) -> list[Any] | None:
    if interval is None:
        return None
    digits = decimals_of(interval.mean) if decimals is None else decimals
    return [short(interval.mean), fixed(interval.mean, digits), interval.spread(digits), interval.n]


def grid_time(combined: list[Combination]) -> dict[str, Any]:
    """Mean seconds of a round, by phase, of every combination."""
    phases = phases_of(run for combination in combined for run in combination.begun)
    return {"phases": phases, "seconds": [mean_time(combination.begun, phases) for combination in combined]}


def grid_runs(begun: list[tuple[GridRun, Run]]) -> dict[str, Any]:
    """Weights and partition of every run that has begun; runs that share a partition share its picture."""
    rows = sum(len({worker for record in run.rounds for worker in record.cohort}) for _, run in begun)
    columns = max(FEWEST_COLUMNS, min(MOST_COLUMNS, MOST_CELLS // max(rows, 1)))
    pictures: list[Any] = []
    runs = []
    for _, run in begun:
        picture = partition_picture(run.partition)
        if picture not in pictures:
            pictures.append(picture)
        runs.append({"weights": weights_picture(run, columns), "partition": pictures.index(picture)})
    return {"partitions": pictures, "runs": runs}
