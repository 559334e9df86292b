"""Comparisons: a grid of runs that are paired by seed, and what they come to."""

from fedsim.comparison.comparing import Comparison, Watcher, compare, run_grid
from fedsim.comparison.grid import Grid, PlannedRun, load_grid
from fedsim.comparison.results import RunResult
from fedsim.comparison.summary import SummaryRow

__all__ = [
    "Comparison",
    "Grid",
    "PlannedRun",
    "RunResult",
    "SummaryRow",
    "Watcher",
    "compare",
    "load_grid",
    "run_grid",
]
