"""A plotly figure of the page, with the choices for which the page shows it."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from fedsim.records import formatting as fmt

LONGEST_TICK = 48  # characters
FEW_ROUNDS = 50  # up to this number, charts mark points and draw bars
PALETTE = (
    *("#4269d0", "#e8a013", "#e8594b", "#3aa8a0", "#3ca951"),
    *("#e070a0", "#a463f2", "#6fa3ea", "#9c6b4e", "#8b9099"),
)

CONFIG = {
    "responsive": True,
    "displaylogo": False,
    "modeBarButtons": [["toImage", "zoom2d", "pan2d", "resetScale2d"]],  # the default buttons send charts to a server
    "plotlyServerURL": "",
    "typesetMath": False,
}


def figure(data: list[dict[str, Any]], layout: dict[str, Any], min_width: int = 0, **when: Any) -> dict[str, Any]:
    """A figure as the page's script draws it.

    Args:
        data: plotly traces. `meta` of a trace holds the choices for which the trace is shown.
        layout: plotly's layout, without the template.
        min_width: pixels; a narrower screen scrolls.
        when: for each control of the section, the value or the values for which the page shows this figure.
    """
    return {"when": when, "data": data, "layout": layout, "min_width": min_width}


def template(text: str, lines: str, background: str, ramp: Sequence[str]) -> dict[str, Any]:
    """A plotly template of these colours; `ramp` is the colour scale of heat maps."""
    axis = {"automargin": True, "gridcolor": lines, "linecolor": lines, "zerolinecolor": lines}
    clear = "rgba(0, 0, 0, 0)"
    place = {"orientation": "h", "len": 0.4, "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "ypad": 4}
    bar = {**place, "thickness": 8, "outlinewidth": 0, "nticks": 4, "tickfont": {"size": 11}}
    layout = {
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": text},
        "paper_bgcolor": clear,
        "plot_bgcolor": clear,
        "colorway": PALETTE,
        "coloraxis": {"colorscale": [[i / (len(ramp) - 1), color] for i, color in enumerate(ramp)], "colorbar": bar},
        "hoverlabel": {"bgcolor": background, "bordercolor": lines, "font": {"color": text}, "namelength": -1},
        "margin": {"l": 48, "r": 12, "t": 30, "b": 40},
        "modebar": {"bgcolor": clear, "color": text},
        "xaxis": axis,
        "yaxis": axis,
    }
    return {"layout": layout}


TEMPLATES = {
    "light": template("#1c2430", "#dde2e9", "#ffffff", ["#e3eaf4", "#6d9bd8", "#0d2c66"]),
    "dark": template("#e4e8ee", "#323b48", "#1a2029", ["#2d3848", "#3f74bd", "#c9e0ff"]),
}


def plain(text: object) -> str:
    """Text for plotly, which would read tags, entities and formulas in it."""
    return html.escape(str(text), quote=False).replace("$", "&#36;")


def tick_text(text: str) -> str:
    """Plain text for an axis, cut to leave room for the chart."""
    return plain(text if len(text) <= LONGEST_TICK else f"{text[: LONGEST_TICK - 1]}…")


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with a title."""
    return {"title": {"text": plain(title), "standoff": 8}, **more}


def round_axis(first: int, last: int, title: str = "round", **more: Any) -> dict[str, Any]:
    """An axis of rounds, with ticks at whole numbers."""
    ticks = {"dtick": 1} if last - first <= 12 else {}
    return axis(title, rangemode="nonnegative", unifiedhovertitle={"text": "round %{x}"}, **ticks, **more)


def value_axis(title: str, unit: str, **more: Any) -> dict[str, Any]:
    """An axis of values in a unit: "" (a plain number), "s" or "B"."""
    formats = {
        "s": {"ticksuffix": " s", "hoverformat": ".3g", "tickformat": "~g"},
        "B": {"ticksuffix": "B", "hoverformat": ".4s", "tickformat": "~s"},
    }
    return axis(title, **formats.get(unit, {"hoverformat": ".6~g"}), **more)


def label_axis(title: str, labels: Iterable[str], **more: Any) -> dict[str, Any]:
    """An axis with a label at 0, 1, 2, ...: two values of a grid may have the same label."""
    texts = [tick_text(label) for label in labels]
    ticks = {"tickmode": "array", "tickvals": list(range(len(texts))), "ticktext": texts}
    return axis(title, showgrid=False, zeroline=False, **ticks, **more)


def cell_trace(z: Sequence[Sequence[float | None]], hover: str, gap: int, **more: Any) -> dict[str, Any]:
    """The trace of a heat map with values z [rows, columns]."""
    hidden = {"hoverongaps": False, "hovertemplate": f"{hover}<extra></extra>"}
    return {"type": "heatmap", "z": z, "xgap": gap, "ygap": gap, **hidden, **more}


def with_color_bar(layout: dict[str, Any], title: str) -> dict[str, Any]:
    """The layout with a title on its colour bar, above the chart."""
    bar = {"title": {"text": plain(title), "side": "right"}}
    return {**layout, "coloraxis": {**layout["coloraxis"], "colorbar": bar}, "margin": {"t": 64}}


def rounded(value: float | None, unit: str = "") -> float | None:
    """A number to plot: as tables show it if it is a plain number, else to 8 digits."""
    if value is None or isinstance(value, int):
        return value
    return float(fmt.number(value)) if unit == "" else float(f"{value:.8g}")
