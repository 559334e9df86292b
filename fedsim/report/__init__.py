"""The HTML report of a run or of a comparison."""

from fedsim.report.page import write_report

__all__ = ["write_report"]
