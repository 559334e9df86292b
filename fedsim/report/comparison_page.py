"""Content of the HTML report of a comparison: texts, tables and figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fedsim.comparison.leaderboard import leaderboard, leaderboard_notes
from fedsim.comparison.results import Comparison
from fedsim.comparison.rows import SEED, numeric_axes
from fedsim.comparison.tables import Cell, answer, breaking_points, columns, filled, target_text, undecided
from fedsim.core.confidence import FEWEST_FOR_BAND
from fedsim.records import formatting as fmt
from fedsim.records.reader import Run, StoredPartition
from fedsim.report import on_page
from fedsim.report.run_page import weights_note

MINUS = "\N{MINUS SIGN}"
NOT_SHOWN = ("difference", "best_accuracy", "best_loss")  # columns that the report leaves out
FEW_LINES = 4  # with at most this number of lines, the spread of curves is shown by default


def comparison_page(comparison: Comparison) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the variables of the HTML page of a comparison, and the lists of figures of its charts."""
    compared, runs = comparison.compared, [run for run in comparison.runs if run.history]
    over = comparison.settings.heat_axes(list(comparison.axes))
    first_two = over or compared[:2]
    heat_keys = [*first_two, *(axis for axis in compared if axis not in first_two)]
    charts = {
        "curves-chart": on_page.curves_by_run(comparison),
        "time-chart": [on_page.time_by_run(comparison.rows)],
        "values-chart": on_page.value_charts(comparison),
        "weights-chart": weights_of_runs(runs),
        "partition-chart": partitions_of_runs(runs),
    }
    charts = {name: figures for name, figures in charts.items() if figures}
    if len(compared) >= 2:
        charts["heat-map-chart"] = on_page.final_heat_maps(comparison, heat_keys)
    if over:
        charts["best-map-chart"] = on_page.best_heat_maps(comparison, heat_keys)
    values = [figure["when"]["value"] for figure in charts.get("heat-map-chart", ())]
    context = {
        **_summary(comparison),
        **_menus(comparison, runs, heat_keys),
        "values": _first(values, f"Final {comparison.metric.label.lower()}"),
        "experiment": shared_settings(runs),
        "environment": fmt.flatten(runs[0].environment),
        "unfinished": [(run.id, run.state) for run in comparison.failed],
        "fewest_for_band": FEWEST_FOR_BAND,
        "weights_note": weights_note(runs),
    }
    return context, charts


def _summary(comparison: Comparison) -> dict[str, Any]:
    """Return the template variables of the page heading, the table of results and the notes on the table."""
    settings, score, test = comparison.settings, comparison.metric, comparison.test
    board = leaderboard(comparison.groups, fmt.label)
    return {
        "name": comparison.name,
        "title": fmt.comparison_title(comparison.compared, score.label),
        "score": score.label.lower(),
        "better": score.better,
        "answer": answer(comparison, fmt.label, fmt.key_name),
        "table": comparison_table(comparison),
        "notes": notes(comparison),
        "leaderboard": board,
        "leaderboard_notes": leaderboard_notes(board) if board else [],
        "tune": settings.tune,
        "worst": settings.worst,
        "target": None if settings.target is None else target_text(comparison),
        "bound": "at least that accuracy" if test.share else "at most that loss",
        "breaking": breaking_texts(comparison),
        "misses": f"the mean {test.label.lower()} is {'below' if test.sign > 0 else 'above'}",
    }


def _menus(comparison: Comparison, runs: Sequence[Run], heat_keys: Sequence[str]) -> dict[str, Any]:
    """Return the template variables with the names of the compared settings, and with the entries of the menus.

    `heat_keys`: compared settings, in the order in which heat maps use them.
    """
    compared, against = comparison.compared, numeric_axes(comparison.axes, comparison.compared)
    labels = {axis: [fmt.label(value) for value in values] for axis, values in comparison.axes.items()}
    return {
        "axes": [(fmt.key_name(axis), labels[axis]) for axis in compared],
        "all_axes": [(axis, fmt.key_name(axis), values) for axis, values in labels.items()],
        "heat_axes": [(fmt.key_name(axis), labels[axis]) for axis in heat_keys],
        "against": [(key, fmt.key_name(key), key == against[0]) for key in against],
        "value_menus": _value_menus(compared, against),
        "run_names": [run_name(run) for run in runs],
        "metrics": _first([chart.label for chart in on_page.charts_of(runs)], comparison.metric.label),
        "scales": on_page.scale_choices(runs),
        "spread_shown": not compared or len(labels[compared[0]]) <= FEW_LINES,
    }


def _first(choices: Iterable[str], first: str) -> list[str]:
    """Return the choices without duplicates, with the choice `first`, if present, at the front."""
    return sorted(dict.fromkeys(choices), key=lambda choice: choice != first)


def _value_menus(compared: Sequence[str], against: Sequence[str]) -> list[tuple[int, bool]]:
    """Return the menus with which readers choose values of the compared settings.

    Args:
        compared: keys of the compared settings.
        against: keys of the numeric settings, each of which has its own chart.

    A menu is a pair: the index of its setting, and whether a single value is selected at first instead of all.
    """
    if not against:
        return []
    remaining = [key for key in compared if key != against[0]]
    shown = [key for key in compared if list(against) != [key]]
    return [(compared.index(key), key in remaining[1:]) for key in shown]


def weights_of_runs(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a heat map of the workers' aggregation weights for each run that recorded weights."""
    columns = on_page.columns_for(runs)
    figures = [on_page.weights_heat_map(run, columns, run=str(index)) for index, run in enumerate(runs)]
    return [figure for figure in figures if figure]


def partitions_of_runs(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return heat maps of the samples per worker and class, one for each different partition of the data."""
    sharing: list[tuple[StoredPartition, list[str]]] = []
    for index, run in enumerate(runs):
        shared = next((indices for partition, indices in sharing if partition == run.partition), None)
        if shared is None:
            sharing.append((run.partition, shared := []))
        shared.append(str(index))
    figures = [on_page.partition_heat_map(partition, run=indices) for partition, indices in sharing]
    return [figure for figure in figures if figure]


def run_name(run: Run) -> str:
    """Return the name of a run: its compared values, with the seed last."""
    values = {axis: fmt.label(value) for axis, value in run.point.items()}
    seed = [f"seed {values.pop(SEED)}"] if SEED in values else []
    return " · ".join([*values.values(), *seed]) or run.id


def notes(comparison: Comparison) -> list[str]:
    """Return warnings about settings, unfinished and diverged runs, races, and values that `tune` could not choose."""
    total, lines = len(comparison.runs), [f"{line[:1].upper()}{line[1:]}." for line in comparison.warnings]
    if missing := len(comparison.failed):
        lines.append(f"Not finished: {missing} of {total} runs. The table counts only finished runs.")
    if diverged := comparison.diverged:
        lines.append(f"Diverged: {diverged} of {total} runs. Their results are those of the last finite model.")
    if any(run.history and run.history[-1].race is not None for run in comparison.runs):
        lines.append("A race is not repeatable: another run with the same seed has different results.")
    return [*lines, *undecided(comparison)]


def breaking_texts(comparison: Comparison) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the breaking points as text: the values of numeric settings from which on the target is missed.

    Each item is a pair: the name of a setting, and a list of pairs (name of a line in its chart, breaking point).
    """
    texts = []
    for key, points in breaking_points(comparison).items():
        lines = [(on_page.name_of_values(others.values()), point.text) for others, point in points]
        texts.append((fmt.key_name(key), lines))
    return texts


def shared_settings(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return the settings that all runs share, as pairs of dotted key and text."""
    first, *remaining = [dict(fmt.flatten(run.experiment)) for run in runs]
    return [(key, value) for key, value in first.items() if all(table.get(key) == value for table in remaining)]


def comparison_table(comparison: Comparison) -> dict[str, Any]:
    """Return the table of results as variables of the HTML page."""
    rows, available, headings = comparison.summary, columns(comparison), comparison.settings.headings
    shown = filled(available, [name for name in available if name not in NOT_SHOWN], rows)
    keys, lines = [*comparison.compared[1:], *comparison.compared[:1]], []
    for index, row in enumerate(rows):
        best = row.mark == "*"
        values = [*(row.point[key] for key in keys), *(row.chosen[axis] for axis in headings)]
        cells = [_shown(name, cells[index], best=best) for name, cells in shown.items()]
        starts_group = index > 0 and len(keys) > 1 and row.group is not None and row is row.group[0]
        lines.append({"labels": [*map(fmt.label, values)], "cells": cells, "best": best, "starts_group": starts_group})
    return {
        "axes": [*map(fmt.key_name, keys), *headings.values()],
        "head": [available[name].heading for name in shown],
        "rows": lines,
        "differences": "to_best" in shown,
    }


def _shown(name: str, cell: Cell, *, best: bool) -> Cell:
    """Return a cell of column `name` as the report shows it, for example with a star if it is the best."""
    if name == "to_best":
        return cell._replace(text=cell.text.replace("-", MINUS), spread=cell.spread.replace("-", MINUS))
    return cell._replace(text=cell.text or fmt.MISSING, mark="★" if best and name == "score" else cell.mark)
