"""Style and file formats of all matplotlib figures."""

from __future__ import annotations

import contextlib
import io
import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.errors import ExperimentError, show
from fedsim.system.files import user_path, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours of Okabe and Ito, which colour-blind readers can distinguish. Dashes and markers also differ in greyscale.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
MARKS = 8  # approximate number of markers per line; their positions differ between lines
DPI = 130
LOG_FROM = 10  # an axis is logarithmic if its largest value is at least this many times its smallest
UNDATED = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}  # gives reproducible files


@dataclass(frozen=True)
class FigureStyle:
    """Layout of a figure.

    Attributes:
        file: matplotlib style file. None: the user's settings.
        titled: whether the figure has a title. Figures in papers have a caption instead.
        dpi: resolution of PNG files.
        widths: figure width in inches for one panel, and for several panels. The legend is above the panels. None:
            the figure is wide enough for its panels, with the legend beside them.
    """

    file: Path | None = None
    titled: bool = True
    dpi: int = DPI
    widths: tuple[float, float] | None = None

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the fonts and lines of the style to figures drawn and saved inside the block."""
        import matplotlib.style

        with matplotlib.style.context(self.file) if self.file else contextlib.nullcontext():
            yield

    def describe(self, figure: Figure, title: str, remark: str, fontsize: str = "medium") -> None:
        """Store `title` and `remark` as the figure's label, and show them above the figure if `self.titled` is true."""
        figure.set_label(f"{title}. {remark}.".replace("\n", "; "))
        if self.titled:
            figure.suptitle(f"{title}\n{remark}", fontsize=fontsize)


SCREEN = FigureStyle()
PAPER = FigureStyle(Path(__file__).with_name("styles") / "paper.mplstyle", titled=False, dpi=300, widths=(3.35, 6.9))
STYLES = {"paper": PAPER, "screen": SCREEN}


def line_style(index: int, points: int = 1) -> dict[str, Any]:
    """Return colour, dashes and markers of line number `index` as keyword arguments of `Axes.plot`.

    `points`: number of points in the line. In long lines, only some points get a marker.
    """
    from matplotlib import rcParams

    spacing = -(-points // MARKS)  # number of points between two markers
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[(index + index // len(COLOURS)) % len(DASHES)],
        "linewidth": rcParams["lines.linewidth"],
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": rcParams["lines.markersize"] * 2 / 3,
        "markevery": (index % spacing, spacing),
    }


def prepare_axes(axes: Axes, *, whole_numbers: bool) -> None:
    """Draw the grid and set the ticks. If `whole_numbers` is true, x ticks are integers."""
    from matplotlib.ticker import MaxNLocator

    axes.grid(alpha=0.3)
    axes.tick_params(labelsize="small")
    axes.xaxis.set_major_locator(MaxNLocator(integer=whole_numbers, nbins=6, min_n_ticks=1 if whole_numbers else 2))


def far_apart(values: Collection[float]) -> bool:
    """Whether the values suit a logarithmic axis: all are > 0, and they differ by a factor of 10 or more."""
    return min(values) > 0 and max(values) >= LOG_FROM * min(values)


def mark_values(axes: Axes, positions: Mapping[str, float]) -> None:
    """Label the x axis with the keys of `positions`, each at its value.

    The axis becomes logarithmic if the values are far apart (see `far_apart`).

    >>> from fedsim.core.figure import Figure
    >>> axes = Figure().subplots()
    >>> mark_values(axes, {"0.1": 0.1, "10.0": 10.0})
    >>> axes.get_xscale()
    'log'
    """
    if far_apart(positions.values()):
        axes.set_xscale("log")
    axes.set_xticks(list(positions.values()), list(positions))
    axes.minorticks_off()


def grid_shape(count: int, most: int) -> tuple[int, int]:
    """Return the numbers of rows and columns (at most `most` columns) of a nearly square grid for `count` panels.

    >>> [grid_shape(count, 5) for count in (1, 2, 3, 4, 5, 6, 7, 8)]
    [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (2, 3), (2, 4), (2, 4)]
    """
    square = math.ceil(math.sqrt(count))
    columns = min((min(square, most), min(square + 1, count, most)), key=lambda columns: -count % columns)
    return math.ceil(count / columns), columns


def show_dollars(figure: Figure) -> None:
    """Escape dollar signs in the texts of a figure, because matplotlib typesets text between them as formulas."""
    from matplotlib.axis import Axis
    from matplotlib.text import Text
    from matplotlib.ticker import FuncFormatter

    for text in figure.findobj(Text):
        text.set_usetex(False)  # may be set in the user's matplotlibrc; our texts are not written for LaTeX
        if re.search(r"(?<!\\)\$", text.get_text()):  # tick labels are created again, see below
            text.set_text(re.sub(r"(?<!\\)\$", r"\$", text.get_text()))
    for axis in figure.findobj(Axis):
        if isinstance(axis.get_major_formatter(), FuncFormatter):  # fixed labels, not numbers such as 10^3
            for tick in axis.get_majorticklabels():
                tick.set_parse_math(False)


def luminance(rgb: Sequence[float]) -> float:
    """Return the relative luminance of a colour, as WCAG 2.2 defines it. `rgb` has three numbers from 0 to 1.

    >>> luminance([1, 1, 1]), luminance([0, 0, 0])
    (1.0, 0.0)
    """
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in map(float, rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: float, second: float) -> float:
    """Return the contrast ratio of two colours, given their luminances."""
    low, high = sorted((first, second))
    return (high + 0.05) / (low + 0.05)


def readable_on(rgb: Sequence[float]) -> str:
    """Return "black" or "white", the colour of a text that has the higher contrast to the background `rgb`."""
    return "black" if contrast(luminance(rgb), 0) >= contrast(luminance(rgb), 1) else "white"


def save(figure: Figure, out: str | Path | None, dpi: int = DPI) -> Figure:
    """Write a figure to the file `out`, unless `out` is None, and return the figure.

    Raises ExperimentError if the name of the file does not end in .png, .svg or .pdf.
    """
    if out is not None:
        format = Path(out).suffix.removeprefix(".").lower()
        if format not in UNDATED:
            raise ExperimentError(f"out = {show(str(out))}: must end in .{', .'.join(UNDATED)}")
        write_atomically(user_path(out), encode(figure, format, dpi))
    return figure


def encode(figure: Figure, format: str, dpi: int = DPI) -> bytes:
    """Return the figure as the content of a "png", "svg" or "pdf" file."""
    import matplotlib

    show_dollars(figure)
    buffer = io.BytesIO()
    # otherwise the ids in an SVG are random, and a name in another script is a warning
    with matplotlib.rc_context({"svg.hashsalt": "fedsim", "text.usetex": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(buffer, format=format, dpi=dpi, metadata=UNDATED[format])
    return buffer.getvalue()
