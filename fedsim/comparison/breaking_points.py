"""From which value of an axis of numbers on the target is missed: lines below the table, and `breaking_points.csv`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedsim.comparison.grid import Grid
from fedsim.comparison.results import RunResult
from fedsim.comparison.value_figure import curves_along
from fedsim.records.axes import label
from fedsim.records.combinations import score_of
from fedsim.records.value_curves import BreakingPoint, breaking_point, numeric_axes
from fedsim.system.files import to_csv

MOST_LINES = 12  # below the table, of an axis

Found = tuple[dict[str, Any], BreakingPoint]  # the values on the other compared axes, and the breaking point


def breaking_points(grid: Grid, runs: Sequence[RunResult]) -> dict[str, list[Found]]:
    """Return the breaking points along each axis of numbers, by its key; empty without a target."""
    if grid.settings.target is None:
        return {}
    test, found = score_of(runs), dict[str, list[Found]]()
    for key in numeric_axes(grid.axes, grid.compared):
        found[key] = []
        for curve in curves_along(grid, runs, key):
            point = curve.combinations[0].runs[0].point
            others = {other: point[other] for other in grid.compared if other != key}
            found[key].append((others, breaking_point(curve, test, grid.settings.target)))
    return found


def breaking_lines(grid: Grid, found: Sequence[Found]) -> list[str]:
    """Return a line for each of the first breaking points along an axis."""
    lines = [f"  {', '.join(map(label, others.values())) or grid.name}: {point.text}" for others, point in found]
    more = len(lines) - MOST_LINES
    return lines if more <= 0 else [*lines[:MOST_LINES], f"  {more} more"]


def breaking_points_csv(grid: Grid, points: dict[str, list[Found]]) -> str:
    """Return one row per axis of numbers and combination of the values on the others."""
    own = ["breaks_at", "reached_at", "missed_below", "no_result"]
    rows: list[list[Any]] = [["key", *grid.compared, "target", *own]]
    for key, found in points.items():
        for others, point in found:
            values = [label(others[other]) if other in others else None for other in grid.compared]
            lists = [" ".join(map(str, each)) for each in (point.missed_below, point.no_result)]
            rows.append([key, *values, grid.settings.target, point.breaks_at, point.reached_at, *lists])
    return to_csv(rows)
