"""The style and the files of all matplotlib figures."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Black, then Paul Tol's "muted" colours: they differ for colour-blind readers; dashes and markers differ in grey too.
COLOURS = (
    *("#000000", "#CC6677", "#332288", "#DDAA33", "#117733", "#88CCEE", "#882255", "#44AA99", "#AA4499", "#999933"),
)
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
MARKS = 8  # about this number of markers on a line; lines have them at different points
DPI = 130
LOG_FROM = 10  # an axis of values is logarithmic if the largest is so many times the smallest
UNDATED = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}  # the same figure is the same file


def line_style(index: int, points: int = 1) -> dict[str, Any]:
    """Colour, dashes and markers of line `index` with so many points, as keywords of `Axes.plot`."""
    every = -(-points // MARKS)
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[(index + index // len(COLOURS)) % len(DASHES)],
        "linewidth": 1.6,
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 4,
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


def encode(figure: Figure, format: str) -> bytes:
    """A figure as the bytes of a file: "png", "svg" or "pdf"."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "fedsim"}):  # else the ids in an SVG are drawn at random
        figure.savefig(buffer, format=format, dpi=DPI, metadata=UNDATED[format])
    return buffer.getvalue()
