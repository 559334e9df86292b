"""How a run is shown: lines as it goes, a curve when it is over, and a page to look at and to send."""

from fedsim.report.page import write_report
from fedsim.report.text import PHASES, columns_of, draw_curve, headline, table_header, table_line

__all__ = ["PHASES", "columns_of", "draw_curve", "headline", "table_header", "table_line", "write_report"]
