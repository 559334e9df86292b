"""The style and the files of all matplotlib figures."""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Those of Okabe and Ito, which differ for colour-blind readers; dashes and markers differ in grey too.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
MARKS = 8  # about this number of markers on a line; lines have them at different points
DPI = 130
LOG_FROM = 10  # an axis of values is logarithmic if the largest is so many times the smallest
UNDATED = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}  # the same figure is the same file


@dataclass(frozen=True)
class FigureStyle:
    """How a figure is laid out.

    Attributes:
        file: matplotlib's style file; None: the settings of the user.
        titled: whether it has a title; a figure of a paper has a caption instead.
        dpi: of a PNG.
        widths: in inches, of a figure of one panel and of several, whose legend is then above the panels; None: as
            wide as the panels and the legend beside them.
    """

    file: Path | None = None
    titled: bool = True
    dpi: int = DPI
    widths: tuple[float, float] | None = None

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Figures that the block draws and saves have the fonts and lines of the style."""
        import matplotlib.style

        with matplotlib.style.context(self.file) if self.file else contextlib.nullcontext():
            yield

    def describe(self, figure: Figure, title: str, remark: str, fontsize: str = "medium") -> None:
        """Put the title over the figure; its label is the caption."""
        figure.set_label(f"{title}. {remark}.".replace("\n", "; "))
        if self.titled:
            figure.suptitle(f"{title}\n{remark}", fontsize=fontsize, wrap=True)


SCREEN = FigureStyle()
PAPER = FigureStyle(Path(__file__).with_name("styles") / "paper.mplstyle", titled=False, dpi=300, widths=(3.35, 6.9))
STYLES = {"paper": PAPER, "screen": SCREEN}


def line_style(index: int, points: int = 1) -> dict[str, Any]:
    """Colour, dashes and markers of line `index` with so many points, as keywords of `Axes.plot`."""
    from matplotlib import rcParams

    every = -(-points // MARKS)
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[(index + index // len(COLOURS)) % len(DASHES)],
        "linewidth": rcParams["lines.linewidth"],
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": rcParams["lines.markersize"] * 2 / 3,
        "markevery": (index % every, every),
    }


def prepare_axes(axes: Axes, *, whole_numbers: bool) -> None:
    """Grid and ticks; on an x axis of rounds or updates, ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axes.grid(alpha=0.3)
    axes.tick_params(labelsize="small")
    axes.xaxis.set_major_locator(MaxNLocator(integer=whole_numbers, nbins=6))


def far_apart(values: Collection[float]) -> bool:
    """Whether an axis of these values is logarithmic."""
    return min(values) > 0 and max(values) >= LOG_FROM * min(values)


def mark_values(axes: Axes, places: Mapping[str, float]) -> None:
    """Ticks on the x axis at the values of a setting, by their labels; logarithmic if they are positive and far apart.

    >>> from matplotlib.figure import Figure
    >>> axes = Figure().subplots()
    >>> mark_values(axes, {"0.1": 0.1, "10.0": 10.0})
    >>> axes.get_xscale()
    'log'
    """
    if far_apart(places.values()):
        axes.set_xscale("log")
    axes.set_xticks(list(places.values()), list(places))
    axes.minorticks_off()


def grid_shape(count: int, most: int) -> tuple[int, int]:
    """Rows and columns, at most `most`, of a nearly square grid for `count` panels that leaves few places empty.

    >>> [grid_shape(count, 5) for count in (1, 2, 3, 4, 5, 6, 7, 8)]
    [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (2, 3), (2, 4), (2, 4)]
    """
    square = math.ceil(math.sqrt(count))
    columns = min((min(square, most), min(square + 1, count, most)), key=lambda columns: -count % columns)
    return math.ceil(count / columns), columns


def show_dollars(figure: Figure) -> None:
    """Let the texts of a figure show dollar signs, between which matplotlib would read a formula.

    Labels and names are the user's, and matplotlib raises an error for what is no formula, such as `$x^{$`.
    """
    from matplotlib.axis import Axis
    from matplotlib.text import Text
    from matplotlib.ticker import FuncFormatter

    for text in figure.findobj(Text):
        if re.search(r"(?<!\\)\$", text.get_text()):  # those of ticks are made again
            text.set_text(re.sub(r"(?<!\\)\$", r"\$", text.get_text()))
    for axis in figure.findobj(Axis):
        if isinstance(axis.get_major_formatter(), FuncFormatter):  # given labels, no numbers such as 10^3
            for tick in axis.get_majorticklabels():
                tick.set_parse_math(False)


def encode(figure: Figure, format: str, dpi: int = DPI) -> bytes:
    """A figure as the bytes of a file: "png", "svg" or "pdf"."""
    import matplotlib

    show_dollars(figure)
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "fedsim"}):  # else the ids in an SVG are drawn at random
        figure.savefig(buffer, format=format, dpi=dpi, metadata=UNDATED[format])
    return buffer.getvalue()
