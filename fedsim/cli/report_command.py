"""`fedsim report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsim.cli.program import errors_as_lines


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN_OR_GRID", help="The folder of a run or of a comparison.", show_default=False)
    ],
    out: Annotated[Path | None, typer.Option(help="The HTML file.", show_default="report.html in that folder")] = None,
) -> None:
    """Write a self-contained HTML report of a run or a comparison."""
    with errors_as_lines():
        from fedsim.report import write_report

        print(write_report(folder, out))
