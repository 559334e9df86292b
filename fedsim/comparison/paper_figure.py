"""Draw runs or a comparison: `fedsim.plot` and `fedsim plot`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from fedsim.comparison.axes import axis_called, label
from fedsim.comparison.figures import Timeline, timeline
from fedsim.comparison.on_paper import draw_curves, draw_heatmap, draw_timeline, draw_values, fit_cells
from fedsim.comparison.plan import hint_for
from fedsim.comparison.results import Comparison, comparison_of, read_records
from fedsim.comparison.rows import canonical, numeric_axes
from fedsim.comparison.stored import positions_in
from fedsim.core.plotting import STYLES, FigureStyle, save, show_dollars
from fedsim.errors import ExperimentError, RecordError, show
from fedsim.hints.attributes import hinting
from fedsim.hints.meanings import nearest
from fedsim.records.numbers import SCALES
from fedsim.records.reader import Run
from fedsim.records.record import LARGEST, metric_called, metrics_in
from fedsim.runs.result import Result
from fedsim.system.files import user_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure
else:  # for typing.get_type_hints
    Figure = Any

Source = Result | Run | Comparison | str | Path
Kind = Literal["curves", "heatmap", "timeline"]
LEAST_INCHES, MOST_INCHES = 1, 30  # limits of width and height; 30 inches are 9,000 pixels in style "paper"


@hinting
def plot(
    source: Source | Sequence[Source],
    *,
    metric: str | None = None,
    x: str = "round",
    kind: Kind = "curves",
    only: Mapping[str, Any] | None = None,
    labels: Mapping[str, str] | None = None,
    style: Literal["paper", "screen"] = "paper",
    width: float | None = None,
    height: float | None = None,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
    out: str | Path | None = None,
) -> Figure:
    """Draw the results of a comparison, or of one or more runs.

    For a comparison, the figure has one line for each value of the first compared setting, and one panel for each
    combination of the other settings. Runs that differ only in the seed share a line, which shows their mean. Thin
    lines show single seeds if there are two or three. With more seeds, a band shows the 95 percent intervals.
    `Result.plot` draws accuracy and losses of a single run.

    Args:
        source: a comparison, the result of a run, or a list of results, as `fedsim.compare` and `fedsim.run` return
            them, or their folders.
        metric: the metric to draw, such as "test_loss" or "metrics.drift". None: the metric of the comparison, or else
            the test accuracy or loss. A sign before the name says whether higher ("+") or lower ("-") is better.
        x: the x axis: "round", "virtual_seconds", "updates", "arrivals", "seconds" (computation time), "bytes" (sent in
            both directions), "top_bytes" (of these, between groups and the top level), "samples" (processed by all
            workers) or "epsilon" (of differential privacy), or the key of a compared setting with three or more
            numbers, such as "attack.scale", to draw the final results over its values.
        kind: "curves", "heatmap" for a heat map of the final results, or "timeline" for a single run on the virtual
            clock: when each worker trains and waits, how stale its results are, and which of them are dropped. For a
            race, the lost updates of each round.
        only: values to draw for some keys of a comparison, such as {"attack": ["none", "alie"]}. Lines keep the
            colours that they have in the figure of the whole comparison.
        labels: other names for keys and values, such as {"weighted_mean": "FedAvg"}, by the name that is drawn.
        style: "paper" has 8-point TrueType fonts, no title, and a width of 3.35 inches (one column of a two-column
            page), or 6.9 inches with several panels. "screen" has a title and matplotlib's default fonts.
        width: width of the figure in inches, from 1 to 30.
        height: height of the figure in inches, from 1 to 30.
        x_range: limits of the x axis for curves, such as (0, 50).
        y_range: limits of the y axis for curves, such as (0.9, 1.0).
        out: file to write. Its name must end in .png, .svg or .pdf.

    Returns the figure, whose caption is `figure.get_label()`. Raises RecordError if a folder is damaged or has no
    finished round, and ExperimentError if an argument is invalid or there is nothing to draw.

    >>> import fedsim, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     comparison = fedsim.compare({"rounds": 2, "model": "logistic"}, {"seed": [0, 1]}, folder, jobs=1)
    ...     fedsim.plot(comparison, metric="train_loss").get_label()
    'Train loss by seed. logistic-mnist5k-weighted_mean: mean over 2 seeds (thin lines: single seeds).'
    """
    _require(kind, "kind", get_args(Kind))
    _require(style, "style", STYLES)
    for name, inches in (("width", width), ("height", height)):
        if inches is not None and not LEAST_INCHES <= inches <= MOST_INCHES:
            raise ExperimentError(f"{name} = {show(inches)}: must be between {LEAST_INCHES} and {MOST_INCHES} inches")
    sources: list[Any] = [*source] if isinstance(source, (list, tuple)) else [source]
    comparison = _with_metric(metric, _only(comparison_of_sources(sources), only or {})).renamed(labels or {})
    look = STYLES[style]
    with look.applied():
        if kind == "timeline":
            figure = draw_timeline(timeline_of(comparison), look)
        else:
            figure = _heatmap(comparison, look) if kind == "heatmap" else _curves(comparison, x, look)
        _set_range(figure, kind, "x", x_range)
        _set_range(figure, kind, "y", y_range)
        own_width, own_height = figure.get_size_inches()
        figure.set_size_inches(own_width if width is None else width, own_height if height is None else height)
        show_dollars(figure)
        fit_cells(figure)
        figure.draw_without_rendering()  # creates the tick labels while the style is active
        return save(figure, out, look.dpi)


def _require(value: str, name: str, allowed: Any) -> None:
    if value not in allowed:
        raise ExperimentError(f"{name} = {show(value)}: is not an allowed value; {nearest(value, allowed)}")


def _with_metric(metric: str | None, comparison: Comparison) -> Comparison:
    """Return a comparison of the same runs by `metric`; None for the metric of the comparison."""
    if metric is None:
        return comparison
    known = [recorded.key for recorded in metrics_in(record for run in comparison.runs for record in run.history)]
    if (key := metric_called(metric).key) not in known:
        raise ExperimentError(f"metric = {show(metric)}: no run has recorded this metric; {hint_for(key, known)}")
    if metric == metric_called(comparison.settings.metric or "").key:
        return comparison  # whose settings may contain a sign, as in -NAME
    return replace(comparison, settings=replace(comparison.settings, metric=metric))


def _curves(comparison: Comparison, x: str, style: FigureStyle) -> Figure:
    keys = numeric_axes(comparison.axes, comparison.compared)
    _require(x, "x", [*SCALES, *keys])
    figure = (draw_values if x in keys else draw_curves)(comparison, x, style)
    if figure is None:
        raise RecordError(f"{comparison.folder}: no run is finished")
    if not any(panel.lines for panel in figure.axes):
        raise ExperimentError(f"x = {show(x)}: no run has recorded both this quantity and the metric; use another x")
    return figure


def _set_range(figure: Figure, kind: Kind, axis: Literal["x", "y"], ends: tuple[float, float] | None) -> None:
    if ends is None:
        return
    if kind == "heatmap":
        raise ExperimentError(f"{axis}_range = {show(list(ends))}: is only used with kind=curves; remove it")
    if len(ends) != 2 or not -LARGEST <= ends[0] < ends[1] <= LARGEST:
        raise ExperimentError(
            f"{axis}_range = {show(list(ends))}: must be two numbers, the smaller one first, "
            f"between {-LARGEST:g} and {LARGEST:g}"
        )
    for panel in figure.axes:
        if getattr(panel, f"get_{axis}scale")() == "log" and ends[0] <= 0:
            raise ExperimentError(f"{axis}_range = {show(list(ends))}: must be above 0, since the axis is logarithmic")
        panel.set(**{f"{axis}lim": ends})


def _heatmap(comparison: Comparison, style: FigureStyle) -> Figure:
    figure = draw_heatmap(comparison, style, comparison.settings.heat_axes(list(comparison.axes)))
    if figure is None:
        raise ExperimentError(
            'kind = "heatmap": needs a comparison with finished runs and at least two compared settings, not counting '
            "those of --tune and --worst"
        )
    return figure


def timeline_of(comparison: Comparison) -> Timeline:
    """Return the timeline of the only run in `comparison`.

    Raises ExperimentError if there are more runs, or if the run has neither a virtual clock nor races.
    """
    run, *others = comparison.runs
    if others:
        raise ExperimentError(
            f'kind = "timeline": shows a single run, not {len(comparison.runs)}; name the folder of one run'
        )
    if (shown := timeline(run)) is None:
        raise ExperimentError(
            f'kind = "timeline": {run.folder or run.name} has neither a virtual clock nor lost updates; run it with '
            "mode=clock or mode=race"
        )
    return shown


def timeline_table(comparison: Comparison, only: Mapping[str, Any]) -> str:
    """Return the numbers of the figure `kind="timeline"` as a text table with at most 40 lines."""
    shown = timeline_of(_only(comparison, only))
    columns = list(zip(shown.head, *shown.table, strict=True))
    widths = [max(map(len, column)) for column in columns]
    return "\n".join("  ".join(map(str.rjust, cells, widths)) for cells in zip(*columns, strict=True))


def _records_of(source: Source) -> Run | Comparison:
    """Return a run or a comparison, which may be given by its folder. Raises ExperimentError for any other object."""
    if isinstance(source, Result):
        return Run(source.folder, source.experiment.resolved(), source.history)
    if isinstance(source, (str, Path)):
        return read_records(user_path(source))
    if not isinstance(source, (Run, Comparison)):
        raise ExperimentError(
            f"source = {show(source)}: must be the result of a run, a comparison, or the folder of a run or comparison"
        )
    return source


def comparison_of_sources(sources: Sequence[Source]) -> Comparison:
    """Return the comparison in `sources`, or a comparison of the single runs in `sources`."""
    records = list(map(_records_of, sources))
    if not records:
        raise ExperimentError("source: is empty; name at least one run or comparison")
    if isinstance(records[0], Comparison) and len(records) == 1:
        return records[0]
    runs = []
    for record in records:
        if isinstance(record, Comparison):
            raise ExperimentError(
                f"{record.folder or record.name}: is a comparison, but a figure shows either one comparison or several "
                "runs; to merge comparisons, run: fedsim compare FOLDER FOLDER --out NEW"
            )
        runs.append(record)
    return comparison_of(runs)


def _only(comparison: Comparison, only: Mapping[str, Any]) -> Comparison:
    """Return the comparison with only the runs that have the values in `only`.

    For example, {"attack": ["alie"]} keeps the runs with the attack alie, whatever its parameters.
    """
    if not isinstance(only, Mapping):
        raise ExperimentError(f'only = {show(only)}: must be a table (dict), such as {{"attack": "alie"}}')
    axes, runs = dict(comparison.axes), comparison.runs
    for key, selected in only.items():
        key = axis_called(key)
        _require(key, "only", list(axes))
        wanted = [
            label(wanted_value) for wanted_value in (selected if isinstance(selected, (list, tuple)) else [selected])
        ]
        names = {label(value): {label(value), label(value).partition(",")[0]} for value in axes[key]}
        for wanted_value in wanted:
            if not any(wanted_value in accepted for accepted in names.values()):
                raise ExperimentError(
                    f"{key} = {show(wanted_value)}: is not in the comparison; {nearest(wanted_value, names)}"
                )
        chosen = [name for name, accepted in names.items() if accepted.intersection(wanted)]
        axes[key] = [value for value in axes[key] if label(value) in chosen]
        runs = [run for run in runs if label(run.point[key]) in chosen]
    positions = positions_in(axes)
    placed = [{axis: positions[axis][canonical(value)] for axis, value in run.point.items()} for run in runs]
    runs = [replace(run, position=position) for run, position in zip(runs, placed, strict=True)]
    return replace(comparison, axes=axes, runs=runs, whole=comparison.axes)
