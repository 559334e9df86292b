"""The command `fedsim plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedsim.cli.program import errors_as_lines
from fedsim.cli.words import is_folder
from fedsim.errors import ExperimentError, show


def plot(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="FOLDER... [KEY=VALUE,...]...",
            help="The folder of a comparison, or those of one or more runs; and for keys of a comparison, the values "
            "that are drawn: attack.name=none,alie.",
            show_default=False,
        ),
    ],
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The number, such as test_loss or metrics.drift.",
            show_default="that of the comparison",
        ),
    ] = None,
    x: Annotated[
        str,
        typer.Option(
            "--x",
            metavar="SCALE",
            help="round, virtual_seconds, updates, arrivals, seconds or bytes; or a compared key with three or more "
            "numbers, such as attack.scale.",
        ),
    ] = "round",
    kind: Annotated[str, typer.Option(help="curves or heatmap.")] = "curves",
    style: Annotated[
        str, typer.Option(help="paper (8 points, TrueType fonts, no title) or screen (with a title).")
    ] = "paper",
    width: Annotated[float | None, typer.Option(help="Inches.", show_default="3.35; several panels 6.9")] = None,
    height: Annotated[float | None, typer.Option(help="Inches.", show_default="by content")] = None,
    x_range: Annotated[
        tuple[float, float] | None, typer.Option(metavar="LOW HIGH", help="The ends of the x axis: --x-range 0 50.")
    ] = None,
    y_range: Annotated[
        tuple[float, float] | None, typer.Option(metavar="LOW HIGH", help="The ends of the y axis: --y-range 0.9 1.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The file: .pdf, .svg or .png.")] = Path("figure.pdf"),
) -> None:
    """Draw a figure for a paper of runs or of a comparison, and print a caption for it."""
    with errors_as_lines():
        from fedsim.comparison.paper_figure import plot as draw
        from fedsim.records.axes import split_at_commas

        folders, only = [], {}
        for word in words:
            key, equals, values = word.partition("=")
            if equals and not is_folder(word):
                only[key] = split_at_commas(values)
            else:
                folders.append(Path(word))
        if not folders:
            raise ExperimentError(f"{show(words[0])}: is no folder; give that of a run or of a comparison first")
        choices: Any = {"kind": kind, "style": style, "metric": metric, "x": x, "only": only}  # checked there
        sizes: Any = {"width": width, "height": height, "x_range": x_range, "y_range": y_range}
        print(draw(folders, out=out, **choices, **sizes).get_label())
        print(out)
