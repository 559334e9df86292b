"""Compare experiments over seeds: plan the runs, run them, and evaluate the results."""

from fedsim.comparison.displays import Callback
from fedsim.comparison.folder import load_comparison
from fedsim.comparison.paper_figure import plot
from fedsim.comparison.plan import ComparisonPlan, PlannedRun, plan_comparison
from fedsim.comparison.results import Comparison
from fedsim.comparison.rows import ComparisonSettings, Row
from fedsim.comparison.runner import compare, run_comparison
from fedsim.records.reader import Run

__all__ = [
    "Callback",
    "Comparison",
    "ComparisonPlan",
    "ComparisonSettings",
    "PlannedRun",
    "Row",
    "Run",
    "compare",
    "load_comparison",
    "plan_comparison",
    "plot",
    "run_comparison",
]
