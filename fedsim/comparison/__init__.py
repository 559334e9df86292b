"""Comparisons: a grid of runs that are paired by seed, and their statistics."""

from fedsim.comparison.grid import Grid, PlannedRun, plan_grid
from fedsim.comparison.grid_terminal import Callback
from fedsim.comparison.paper_figure import plot
from fedsim.comparison.results import RunResult
from fedsim.comparison.runner import Comparison, compare, run_grid
from fedsim.comparison.stored_comparison import load_comparison
from fedsim.comparison.summary import SummaryRow
from fedsim.records.comparison_settings import ComparisonSettings

__all__ = [
    "Callback",
    "Comparison",
    "ComparisonSettings",
    "Grid",
    "PlannedRun",
    "RunResult",
    "SummaryRow",
    "compare",
    "load_comparison",
    "plan_grid",
    "plot",
    "run_grid",
]
