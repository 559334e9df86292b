"""Write HTML reports of runs and comparisons."""

from fedsim.report.page import write_report

__all__ = ["write_report"]
