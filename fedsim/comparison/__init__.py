"""Comparisons: a grid of runs that are paired by seed, and their statistics."""

from fedsim.comparison.displays import Callback
from fedsim.comparison.folder import load_comparison
from fedsim.comparison.grid import Grid, PlannedRun, plan_grid
from fedsim.comparison.paper_figure import plot
from fedsim.comparison.results import Comparison
from fedsim.comparison.runner import compare, run_grid
from fedsim.records.reader import Run
from fedsim.records.rows import ComparisonSettings, Row

__all__ = [
    "Callback",
    "Comparison",
    "ComparisonSettings",
    "Grid",
    "PlannedRun",
    "Row",
    "Run",
    "compare",
    "load_comparison",
    "plan_grid",
    "plot",
    "run_grid",
]
