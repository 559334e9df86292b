"""A figure of run folders, or of the folder of a comparison: `fedsim.plot` and `fedsim plot`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from fedsim.comparison.on_paper import draw_curves, draw_heatmap, draw_values
from fedsim.comparison.results import Comparison, comparison_of, read_records
from fedsim.core.plotting import STYLES, UNDATED, FigureStyle, encode, show_dollars
from fedsim.core.suggestions import nearest
from fedsim.errors import ExperimentError, RecordError, show
from fedsim.records.axes import axis_called, label
from fedsim.records.numbers import SCALES
from fedsim.records.reader import places_in
from fedsim.records.record import LARGEST, metric_called, metrics_in
from fedsim.records.rows import canonical, numeric_axes
from fedsim.system.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["curves", "heatmap"]
LEAST_INCHES, MOST_INCHES = 1, 30  # of a side of a figure; 30 are 9,000 pixels at the 300 of "paper"


def plot(
    folders: str | Path | Sequence[str | Path],
    *,
    metric: str | None = None,
    x: str = "round",
    kind: Kind = "curves",
    only: Mapping[str, Any] | None = None,
    style: Literal["paper", "screen"] = "paper",
    width: float | None = None,
    height: float | None = None,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
    out: str | Path | None = None,
) -> Figure:
    """Draw the runs in some folders, or a comparison.

    Of a comparison, there is a line for each value of its first key, and a panel for each combination of the others. Of
    several runs there is a line for each group of runs that differ in the seed only. A line is the mean over the
    seeds; a band shows the 95 percent intervals of four or more, thin lines show two or three single seeds.

    Args:
        folders: the folder of a comparison, or those of one or more runs.
        metric: the number that is drawn, such as "test_loss" or "metrics.drift"; None: what the comparison compares, or
            the test accuracy, or of a task without accuracy the test loss. A sign says which value is better, as of
            `by` of `compare`; without it, the sign of the comparison's own number remains.
        x: the x axis: "round", "virtual_seconds", "updates", "arrivals", "seconds" (of computation), "bytes" (in both
            directions) or "samples" (of all workers, with repetitions); or a compared key with three or more numbers,
            such as "attack.scale", against which the number after the last round is drawn.
        kind: "curves", or "heatmap": the number after the last round over the first two compared keys, or over those
            that the comparison names.
        only: for keys of a comparison, the values that are drawn, or one value: {"attack": ["none", "alie"]}.
        style: "paper": 8 points, TrueType fonts, 3.35 inches wide (a column of two) or, with several panels, 6.9
            inches; no title. "screen": with a title, and with matplotlib's own settings.
        width: of the figure, in inches, from 1 to 30.
        height: of the figure, in inches, from 1 to 30.
        x_range: the ends of the x axes of curves, such as (0, 50).
        y_range: the ends of their y axes, such as (0.9, 1.0).
        out: a file to write, whose name ends in .png, .svg or .pdf.

    Returns the figure; `get_label()` is a caption for it. Raises RecordError if a folder holds no finished round or
    damaged files, and ExperimentError if it has nothing to draw for these arguments.

    >>> import fedsim, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     comparison = fedsim.compare({"rounds": 2, "model": "logistic"}, {"seed": [0, 1]}, folder, jobs=1)
    ...     fedsim.plot(folder, metric="train_loss").get_label()
    'Train loss by seed. logistic-mnist5k-weighted_mean: mean over 2 seeds (thin lines: single seeds).'
    """
    _require(kind, "kind", get_args(Kind))
    _require(style, "style", STYLES)
    for name, inches in (("width", width), ("height", height)):
        if inches is not None and not LEAST_INCHES <= inches <= MOST_INCHES:
            raise ExperimentError(f"{name} = {show(inches)}: must be from {LEAST_INCHES} to {MOST_INCHES} inches")
    format = "" if out is None else Path(out).suffix.removeprefix(".").lower()
    if out is not None and format not in UNDATED:
        raise ExperimentError(f"out = {show(str(out))}: must end in .{', .'.join(UNDATED)}")
    paths = [Path(each) for each in ([folders] if isinstance(folders, (str, Path)) else folders)]
    comparison = _only(_comparison_in(paths), only or {})
    if metric is not None:
        known = [each.key for each in metrics_in(record for run in comparison.runs for record in run.history)]
        _require(metric_called(metric).key, "metric", known)
        if metric != metric_called(comparison.settings.metric or "").key:  # else keep the stored sign
            comparison = replace(comparison, settings=replace(comparison.settings, metric=metric))
    look = STYLES[style]
    with look.applied():
        figure = _heatmap(comparison, look) if kind == "heatmap" else _curves(comparison, x, look)
        _set_range(figure, kind, "x", x_range)
        _set_range(figure, kind, "y", y_range)
        own_width, own_height = figure.get_size_inches()
        figure.set_size_inches(own_width if width is None else width, own_height if height is None else height)
        show_dollars(figure)
        figure.draw_without_rendering()  # makes the ticks, in the fonts of the style
        if out is not None:
            write_atomically(Path(out), encode(figure, format, look.dpi))
    return figure


def _require(value: str, name: str, allowed: Any) -> None:
    if value not in allowed:
        raise ExperimentError(f"{name} = {show(value)}: is not one of those; {nearest(value, allowed)}")


def _curves(comparison: Comparison, x: str, style: FigureStyle) -> Figure:
    keys = numeric_axes(comparison.axes, comparison.compared)
    _require(x, "x", [*SCALES, *keys])
    figure = (draw_values if x in keys else draw_curves)(comparison, x, style)
    if figure is None:
        raise RecordError(f"{comparison.folder}: no run is finished")
    if not any(panel.lines for panel in figure.axes):
        raise ExperimentError(f"x = {show(x)}: no run has recorded that together with the metric")
    return figure


def _set_range(figure: Figure, kind: Kind, axis: Literal["x", "y"], ends: tuple[float, float] | None) -> None:
    if ends is None:
        return
    if kind == "heatmap":
        raise ExperimentError(f"{axis}_range = {show(list(ends))}: is for curves; a heat map has none")
    if not -LARGEST <= ends[0] < ends[1] <= LARGEST:
        raise ExperimentError(
            f"{axis}_range = {show(list(ends))}: must be two numbers, the smaller one first, of at most {LARGEST:g}"
        )
    for panel in figure.axes:
        if getattr(panel, f"get_{axis}scale")() == "log" and ends[0] <= 0:
            raise ExperimentError(f"{axis}_range = {show(list(ends))}: must be above 0, since the axis is logarithmic")
        panel.set(**{f"{axis}lim": ends})


def _heatmap(comparison: Comparison, style: FigureStyle) -> Figure:
    figure = draw_heatmap(comparison, style, comparison.settings.heat_axes(list(comparison.axes)))
    if figure is None:
        raise ExperimentError(
            'kind = "heatmap": needs a comparison of two keys or more beside worst and tune, with finished runs'
        )
    return figure


def _comparison_in(folders: Sequence[Path]) -> Comparison:
    """Return the comparison in a folder, or the runs in several folders as one."""
    records = [read_records(folder) for folder in folders]
    if not records:
        raise ExperimentError("folders: must be one or more")
    if isinstance(records[0], Comparison) and len(records) == 1:
        return records[0]
    runs = []
    for record in records:
        if isinstance(record, Comparison):
            raise ExperimentError(
                f"{record.folder}: is a comparison; draw one comparison, or several runs; fedsim compare FOLDER FOLDER "
                "--out NEW makes one comparison of several"
            )
        runs.append(record)
    return comparison_of(runs)


def _only(comparison: Comparison, only: Mapping[str, Any]) -> Comparison:
    """Return the runs with these values on some axes; `alie` selects all its settings, such as `alie,z=1.5`."""
    axes, runs = dict(comparison.axes), comparison.runs
    for key, selected in only.items():
        key = axis_called(key)
        _require(key, "only", list(axes))
        wanted = [
            label(wanted_value) for wanted_value in (selected if isinstance(selected, (list, tuple)) else [selected])
        ]
        names = {label(value): {label(value), label(value).partition(",")[0]} for value in axes[key]}
        for wanted_value in wanted:
            if not any(wanted_value in own for own in names.values()):
                raise ExperimentError(
                    f"{key} = {show(wanted_value)}: is not in the comparison; {nearest(wanted_value, names)}"
                )
        chosen = [name for name, own in names.items() if own.intersection(wanted)]
        axes[key] = [value for value in axes[key] if label(value) in chosen]
        runs = [run for run in runs if label(run.point[key]) in chosen]
    places = places_in(axes)
    placed = [{axis: places[axis][canonical(value)] for axis, value in run.point.items()} for run in runs]
    runs = [replace(run, place=place) for run, place in zip(runs, placed, strict=True)]
    return replace(comparison, axes=axes, runs=runs)
