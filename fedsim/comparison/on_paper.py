"""Draw the figures of a comparison with matplotlib, for files and notebooks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsim.comparison.axes import label
from fedsim.comparison.compared_runs import ComparedRuns
from fedsim.comparison.figures import (
    DROPPED,
    KEPT,
    LOST,
    TRAINS,
    UNFINISHED,
    WAITS,
    HeatCell,
    Line,
    LineChart,
    Timeline,
    best_maps,
    curves,
    curves_along,
    heat_maps,
    score_cell,
)
from fedsim.comparison.leaderboard import Leaderboard
from fedsim.comparison.rows import SEED, MeanCurve, is_numeric, validation_result
from fedsim.core.confidence import FEWEST_FOR_BAND, LOG_FROM, fixed
from fedsim.core.plotting import (
    COLOURS,
    SCREEN,
    FigureStyle,
    grid_shape,
    line_style,
    mark_values,
    prepare_axes,
    readable_on,
)
from fedsim.records.formatting import comparison_title, key_name
from fedsim.records.worker_results import LABELS, newest_table, read_csv

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# Line charts. Sizes are in inches.
MOST_PANELS, MOST_COLUMNS = 30, 6
COINCIDE = 0.01  # fraction of the panel height: curves that are closer than this hide each other
NARROWEST = 1.6  # minimum width of a panel in a figure of a fixed width
LETTER, HANDLE = 0.058, 0.55  # width of a letter in a legend, and of the line sample beside it

# A figure with a single heat map. Sizes are in inches.
CELL_WIDTH, CELL_HEIGHT = 1.15, 0.52
CHARACTER, TINY_CHARACTER = 0.09, 0.07  # width of a character in the axis labels, and in a cell
MOST_INCHES = 100
FEW_COLUMNS = 3  # maximum number of columns in the narrower of the two widths of a style
FILLED = 0.92  # maximum width of a text in a cell, as a fraction of the cell

# A figure with several heat maps. Sizes are in inches.
MOST_VALUES = 20  # maximum number of values that an axis shows
WIDEST, HIGHEST = 24, 60
TALL_CELL, SMALL_CHARACTER = 0.62, 0.085  # height of a cell with three lines, and width of a character in the cell
PAPER_CELL, PAPER_CHARACTER = 0.4, 0.062  # the same in a figure of a fixed width

LINE = 0.3  # height of a leaderboard line in inches

# A timeline. The colours and hatches also differ in greyscale.
TIMELINE_ROW = 0.16  # height in inches
SHADES = ("#9ecae1", "#4292c6", "#08519c", "#08244f")  # of training, from low to high staleness
LOOKS: dict[str, dict[str, Any]] = {
    TRAINS: {"facecolor": SHADES[1]},
    DROPPED: {"facecolor": "white", "edgecolor": COLOURS[2], "hatch": "xxxxxx", "linewidth": 0.4},
    WAITS: {"facecolor": "#e4e4e4"},
    UNFINISHED: {"facecolor": "white", "edgecolor": SHADES[1], "hatch": "//////", "linewidth": 0.4},
}
LOOKS |= {KEPT: LOOKS[TRAINS], LOST: LOOKS[DROPPED]}

# The figure of worker tests.
MOST_ROWS = 100  # maximum number of combinations
ROW = 0.22  # height in inches of the line of one model


def draw_curves(comparison: ComparedRuns, scale: str = "round", style: FigureStyle = SCREEN) -> Figure | None:
    """Draw the results of a comparison over the rounds or another x axis. Return None if no run is finished.

    The figure has one line for each value of the first compared setting, and one panel for each combination of the
    other settings. Lines are means over the seeds.

    Args:
        comparison: the comparison.
        scale: what the x axis shows, such as "round" or "seconds".
        style: style of the figure.
    """
    return _draw_lines(curves(comparison, scale), style) if any(run.finished for run in comparison.runs) else None


def draw_values(comparison: ComparedRuns, key: str, style: FigureStyle = SCREEN) -> Figure | None:
    """Draw the final results over the values of the compared setting `key`. Return None if no run is finished.

    There is one line for each combination of the other settings.
    """
    return _draw_lines(curves_along(comparison, key), style) if any(run.finished for run in comparison.runs) else None


def _draw_lines(chart: LineChart, style: FigureStyle) -> Figure:
    groups: dict[tuple[int, ...], list[Line]] = {}
    for line in chart.lines:
        groups.setdefault(tuple(line.position[key] for key in chart.keys[1:]), []).append(line)
    shown = list(groups.values())[:MOST_PANELS]
    figure, panels = _empty_panels(chart, len(shown), style)
    for panel, lines in zip(panels, shown, strict=True):
        _draw_panel(panel, chart, lines)
    first, *remarks = chart.remarks
    more = f"; the first {len(shown)} of {len(groups)} panels" if len(shown) < len(groups) else ""
    style.describe(figure, chart.title, "\n".join([first + more, *remarks]))
    return figure


def _empty_panels(chart: LineChart, count: int, style: FigureStyle) -> tuple[Figure, list[Axes]]:
    """Return a figure with a legend, and its `count` empty panels."""
    from matplotlib.lines import Line2D

    from fedsim.core.figure import Figure

    drawn = {line.position[key] for key in chart.keys[:1] for line in chart.lines if line.mean}
    names = {position: label(chart.comparison.axes[chart.keys[0]][position]) for position in sorted(drawn)}
    if style.widths:
        width = style.widths[count > 1]
        rows = math.ceil(count / max(1, int(width / NARROWEST)))
        columns, free = math.ceil(count / rows), False
        in_legend = max(1, int(width / (HANDLE + LETTER * max(map(len, names.values()), default=0))))
        above = 0.16 * (1 + math.ceil(len(names) / in_legend)) if names else 0.0
        height = rows * (0.68 if count == 1 else 0.9) * width / columns + above
    else:
        rows, columns = grid_shape(count, MOST_COLUMNS)
        width, height = (6.4, 4.2) if count == 1 else (3.5 * columns, 2.7 * rows + 0.5)
        free, in_legend = rows * columns > count, 1  # `free`: whether the legend can use an unused panel
        width = width if free else width + 1.6
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    metric = chart.comparison.metric
    for index, panel in enumerate(panels):
        if index >= count:
            panel.set_axis_off()
        elif index % columns == 0:
            panel.set_ylabel(metric.label.lower() + (f" ({metric.unit})" if metric.unit else ""))
        if count - columns <= index < count:
            panel.set_xlabel(chart.x_text)
    if names:
        location = "outside upper center" if style.widths else "center" if free else "outside right center"
        styles = [line_style(chart.comparison.style_of(chart.keys[0], value)) for value in names]
        handles = [Line2D([], [], label=name, **style) for name, style in zip(names.values(), styles, strict=True)]
        sizes: dict[str, Any] = {"fontsize": "small", "title_fontsize": "small", "handlelength": 3}
        where: Any = panels[-1] if free else figure
        where.legend(
            handles=handles, title=key_name(chart.keys[0]), loc=location, ncols=min(in_legend, len(names)), **sizes
        )
    return figure, list(panels[:count])


def _draw_panel(panel: Axes, chart: LineChart, lines: Sequence[Line]) -> None:
    from matplotlib.ticker import EngFormatter

    first = chart.keys[0] if chart.keys else None
    drawn, failures = dict[str, MeanCurve](), []
    for line in lines:
        name = label(chart.value(line, first)) if first else chart.comparison.name
        if line.failed:
            failures.append(f"{name} ({line.failed})")
        if line.mean:
            _draw_line(panel, line, line.mean, chart.comparison.style_of(first, line.position[first]) if first else 0)
            drawn[name] = line.mean
    title = ", ".join(f"{key_name(key)}: {label(chart.value(lines[0], key))}" for key in chart.keys[1:])
    panel.set_title(title, fontsize="small")
    _write_remarks(panel, drawn, failures)
    if chart.values:
        panel.grid(alpha=0.3)
        mark_values(panel, {label(value): value for value in chart.values})
        return
    prepare_axes(panel, whole_numbers=chart.scale not in ("virtual_seconds", "seconds", "epsilon"))
    if chart.scale.endswith("bytes"):
        panel.xaxis.set_major_formatter(EngFormatter("B"))
    ends = [mean.x[-1] for mean in drawn.values()]
    if chart.scale != "round" and ends and max(ends) >= LOG_FROM * min(ends) > 0:
        panel.set_xscale("log")


def _draw_line(panel: Axes, line: Line, mean: MeanCurve, index: int) -> None:
    """Draw a mean curve with its spread over the seeds. `index` chooses the line style."""
    style = line_style(index, len(mean.x))
    panel.plot(mean.x, mean.means, **style)
    if len(mean.curves) >= FEWEST_FOR_BAND:
        panel.fill_between(mean.x, *line.band, color=style["color"], alpha=0.13, linewidth=0)
    elif len(mean.curves) > 1:
        for curve in mean.curves:
            panel.plot(*curve, color=style["color"], alpha=0.4, linewidth=0.45 * style["linewidth"])


def _write_remarks(panel: Axes, drawn: Mapping[str, MeanCurve], failures: Sequence[str]) -> None:
    """Write into a corner of the panel which of the `drawn` curves hide each other, and the texts about `failures`."""
    bottom, top = panel.get_ylim()
    near = COINCIDE * (top - bottom)
    groups: list[list[str]] = []
    for name, curve in drawn.items():
        for group in groups:
            first = drawn[group[0]]
            if np.array_equal(first.x, curve.x) and np.abs(first.means - curve.means).max() <= near:
                group.append(name)
                break
        else:
            groups.append([name])
    lines = [f"coincide: {', '.join(group)}" for group in groups if len(group) > 1]
    lines += [f"failed: {', '.join(failures)}"] if failures else []
    if lines:
        box = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1}
        panel.text(0.02, 0.02, "\n".join(lines), transform=panel.transAxes, fontsize="xx-small", wrap=True, bbox=box)


def draw_heatmap(
    comparison: ComparedRuns, style: FigureStyle = SCREEN, over: tuple[str, str] | None = None
) -> Figure | None:
    """Draw heat maps of the mean results. Return None if there is nothing to draw, or too much for a figure.

    Args:
        comparison: the comparison.
        style: style of the figure.
        over: the compared settings on the vertical and the horizontal axis. Each cell names the best value of the first
            compared setting. None: one map of the results over the first two settings.
    """
    if len(comparison.compared) < 2 or all(row.score is None for row in comparison.rows):
        return None
    return _draw_one_map(comparison, style) if over is None else _draw_maps(comparison, over, style)


def draw_timeline(shown: Timeline, style: FigureStyle = SCREEN) -> Figure:
    """Draw what the workers of a run do over virtual time, or the lost updates of a race."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Patch

    from fedsim.core.figure import Figure

    rows, handles = len(shown.table), []
    height = TIMELINE_ROW * rows + (1.0 if style.widths else 1.6)
    figure = Figure(figsize=(style.widths[1] if style.widths else 9, height), layout="constrained")
    axes = figure.subplots()
    stale = max((spell.staleness for spell in shown.spells), default=0.0)
    for does, look in LOOKS.items():
        if not (spells := [spell for spell in shown.spells if spell.does == does]):
            continue
        spans = [(spell.start, spell.start + spell.length, spell.row - 0.4, spell.row + 0.4) for spell in spells]
        corners = [[(left, low), (left, high), (right, high), (right, low)] for left, right, low, high in spans]
        cells = axes.add_collection(PolyCollection(corners, **{"linewidth": 0, **look}))
        handles.append(Patch(label=does, **look))
        if does == TRAINS and stale > 0:
            cells.set(array=np.array([spell.staleness for spell in spells]), clim=(0, stale))
            cells.set_cmap(LinearSegmentedColormap.from_list("staleness", SHADES))
            figure.colorbar(cells, ax=axes, label="mean staleness", pad=0.01, aspect=5 + rows)
    axes.vlines(shown.ends, -0.5, rows - 0.5, color="0.6", linewidth=0.4, zorder=0)
    axes.set_yticks(range(rows), [row[0] for row in shown.table], parse_math=False)
    for tick in axes.get_yticklabels():
        tick.set_fontweight("bold" if tick.get_text().endswith(" (B)") else "normal")
    axes.set(xlim=(0, shown.ends[-1]), ylim=(rows - 0.5, -0.5), xlabel=shown.x_text, ylabel=shown.y_text)
    axes.tick_params(labelsize="small")
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), fontsize="small", frameon=False)
    style.describe(figure, shown.title, shown.remark)
    return figure


def _draw_one_map(comparison: ComparedRuns, style: FigureStyle) -> Figure | None:
    from fedsim.core.figure import Figure

    first, second, *others = comparison.compared
    down, across = ([label(value) for value in comparison.axes[axis]] for axis in (first, second))
    best = [] if others else [row for group in comparison.groups for row in group.winners]
    (shown,) = heat_maps(comparison, (first, second), [], lambda rows: score_cell(rows, best))
    longest = max(len(text) for line in shown.cells for cell in line for text in cell.lines)
    width, height = max(CELL_WIDTH, TINY_CHARACTER * longest) * len(across), CELL_HEIGHT * len(down)
    if max(width, height) > MOST_INCHES:
        return None
    size = (2.2 + width, 1.5 + height)
    if style.widths:
        needed = 1.0 + LETTER * max(map(len, down)) + (0.1 + 0.045 * longest) * len(across)
        wide = len(across) > FEW_COLUMNS or needed > style.widths[0]
        size = (style.widths[wide], max(2.4, 0.36 * len(down) + 0.9))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    image = _draw_cells(axes, shown.cells)
    fits = max(map(len, across)) * CHARACTER < 0.7 * size[0] / len(across)
    axes.set_xticks(range(len(across)), across, rotation=0 if fits else 30, ha="center" if fits else "right")
    axes.set_yticks(range(len(down)), down)
    axes.set(xlabel=key_name(second), ylabel=key_name(first))
    figure.colorbar(image, ax=axes, label=comparison.metric.label.lower())
    over, better = "".join(f" and {key_name(key)}" for key in others), comparison.metric.better
    remark = f"{comparison.name}: mean over seeds{over}" if SEED in comparison.axes or others else comparison.name
    remark += "" if others or better is None else f"; bold: best of its column ({better} is better)"
    remark += f"\n{comparison.settings.remark}" if comparison.settings.remark else ""
    style.describe(figure, comparison_title([first, second], comparison.metric.label), remark, fontsize="small")
    return figure


def _draw_maps(comparison: ComparedRuns, over: tuple[str, str], style: FigureStyle) -> Figure:
    from fedsim.core.figure import Figure

    maps, first = best_maps(comparison, over), comparison.compared[0]
    means = [mean for _, heat_map in maps for mean in heat_map.means]
    down, across = ([label(value) for value in comparison.axes[axis][:MOST_VALUES]] for axis in over)
    texts = [text for _, heat_map in maps for line in heat_map.cells for cell in line for text in cell.lines]
    cell, character = (PAPER_CELL, PAPER_CHARACTER) if style.widths else (TALL_CELL, SMALL_CHARACTER)
    width = max(1.0, character * max(map(len, texts)) + 0.2) * len(across) + 0.3
    height, widest = cell * len(down) + 0.5, style.widths[1] if style.widths else WIDEST
    fitting, per_combination = max(1, int(widest / width)), len(comparison.axes[first]) + 1
    in_rows = per_combination < len(maps) and per_combination <= fitting  # all maps of a combination fit in one row
    columns = per_combination if in_rows else grid_shape(len(maps), fitting)[1]
    if not in_rows:  # maps of the best values come first
        maps.sort(key=lambda item: first in item[1].position)
    shown = maps[: min(MOST_PANELS, columns * max(1, int(HIGHEST / height)))]
    rows = math.ceil(len(shown) / columns)
    size = (widest, 0.3 + rows * height) if style.widths else (2.4 + columns * width, 1.4 + rows * height)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel in panels[len(shown) :]:
        panel.set_axis_off()
    for position, (panel, (title, heat_map)) in enumerate(zip(panels, shown, strict=False)):
        cells = [line[:MOST_VALUES] for line in heat_map.cells[:MOST_VALUES]]
        image = _draw_cells(panel, cells, (min(means), max(means)))
        panel.set_title(title, fontsize="small")
        panel.set_xticks(range(len(across)), across, fontsize="small")
        panel.set_yticks(range(len(down)), down, fontsize="small")
        if position % columns == 0:
            panel.set_ylabel(key_name(over[0]))
        if position + columns >= len(shown):
            panel.set_xlabel(key_name(over[1]))
    figure.colorbar(image, ax=panels, label=comparison.metric.label.lower(), fraction=0.04, aspect=30)
    of_all = f"the first {len(shown)} of {len(maps)} panels" if len(shown) < len(maps) else ""
    remarks = _remarks_on_maps(comparison, over, of_all)
    style.describe(figure, comparison_title(over, comparison.metric.label), remarks, fontsize="small")
    return figure


def _remarks_on_maps(comparison: ComparedRuns, over: tuple[str, str], of_all: str) -> str:
    """Return the text below the title of heat maps. `of_all` says how many of all maps are shown."""
    if SEED in comparison.axes:
        first, tied = ": mean over seeds", "not significantly different from the best (95 %, paired)"
    else:
        first, tied = "", "equal to the best"
    shortened = [
        f"the first {MOST_VALUES} of {len(comparison.axes[axis])} values of {key_name(axis)}"
        for axis in over
        if len(comparison.axes[axis]) > MOST_VALUES
    ]
    remarks = [f"{comparison.name}{first}", f"~ tied: {tied}", of_all, *shortened, comparison.settings.remark]
    return "; ".join(filter(None, remarks))


def _draw_cells(
    axes: Axes, cells: Sequence[Sequence[HeatCell]], limits: tuple[float | None, float | None] = (None, None)
) -> AxesImage:
    """Draw the cells of a heat map, indexed [row][column], and return the image, which is needed for a colour bar.

    `limits` are the lowest and the highest value of the colour scale. Default: those of the cells.
    """
    means = np.array([[cell.mean for cell in line] for line in cells])
    low, high = limits
    image = axes.imshow(np.ma.masked_invalid(means), cmap="cividis", aspect="auto", vmin=low, vmax=high)
    axes.set_facecolor("#dddddd")  # background of cells without a result
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    for (i, j), mean in np.ndenumerate(means):
        cell = cells[i][j]
        if not cell.lines:
            continue
        colour = "black" if math.isnan(mean) else readable_on(list(image.to_rgba(mean)[:3]))
        style: dict[str, Any] = {"ha": "center", "color": colour, "fontweight": "bold" if cell.bold else "normal"}
        text, below = cell.lines[0], "\n".join(filter(None, cell.lines[1:]))
        middle = i - 0.13 * below.count("\n")
        axes.text(j, middle, text, va="bottom" if below else "center", fontsize="small", **style)
        axes.text(j, middle + 0.05, below, va="top", fontsize="x-small", **style)
    return image


def fit_cells(figure: Figure) -> None:
    """Shrink the texts of heat map cells that are wider than their cell. The figure has its final size already."""
    figure.draw_without_rendering()  # places the panels
    for axes in (axes for axes in figure.axes if axes.images):
        room = FILLED * axes.bbox.width / axes.images[0].get_size()[1]
        widths = [(text, float(text.get_fontsize()), text.get_window_extent().width) for text in axes.texts]
        widest: dict[float, float] = {}  # by font size, so that all cells of a panel look alike
        for _, size, width in widths:
            widest[size] = max(room, widest.get(size, 0.0), width)
        for text, size, _ in widths:
            text.set_fontsize(size * room / widest[size])


def draw_worker_comparison(comparison: ComparedRuns) -> Figure | None:
    """Draw how the final test accuracies (or losses) differ between workers. Return None if no worker was tested.

    The figure has one line for each combination of compared values and each tested model. Each stroke on a line is a
    worker, the bar covers the middle half of the workers, and the dot is the mean.
    """
    from fedsim.core.figure import Figure

    tested = []
    for row in comparison.rows:
        folders = [(run.folder, len(run.history)) for run in row.finished if run.folder is not None]
        files = [newest_table(folder, rounds) for folder, rounds in folders]
        if results := [read_csv(file) for file in files if file]:
            tested.append((row, results))
    if not tested:
        return None
    del tested[MOST_ROWS:]
    colours = dict(zip(LABELS, COLOURS[1:], strict=False))
    models = [model for model in LABELS if any(model in seed.scores for _, results in tested for seed in results)]
    figure = Figure(figsize=(7.5, 1.6 + ROW * len(tested) * (len(models) + 0.5)), layout="constrained")
    axes, names = figure.subplots(), []
    for position, (row, results) in enumerate(tested):
        names.append(", ".join(map(label, row.point.values())) or comparison.name)
        for index, model in enumerate(models):
            values = [value for seed in results for value in seed.scores.get(model, ())]
            if values:
                y, color = position + (index - (len(models) - 1) / 2) / (len(models) + 0.5), colours[model]
                axes.plot(values, [y] * len(values), "|", color=color, alpha=0.5, markersize=8)
                axes.plot(np.quantile(values, [0.25, 0.75]), [y, y], color=color, linewidth=5, alpha=0.4)
                axes.plot(np.mean(values), y, "o", color=color, markeredgecolor="white")
    for model in models:
        axes.plot([], [], "o", color=colours[model], label=LABELS[model])
    axes.set_yticks(range(len(names)), names, fontsize="small")
    score = tested[0][1][0].score_name
    axes.set(xlabel=f"{score} on the worker's own test samples", ylim=(len(names) - 0.5, -0.5))
    axes.grid(axis="x", alpha=0.3)
    for position in range(1, len(names)):
        axes.axhline(position - 0.5, color="black", alpha=0.15, linewidth=0.8)
    remarks = ["stroke: a worker, of any seed; bar: the middle half; dot: the mean", comparison.settings.remark]
    title = comparison_title(comparison.compared, "Single workers")
    figure.suptitle(f"{title}\n{comparison.name}: {'; '.join(filter(None, remarks))}", fontsize="small")
    figure.legend(loc="outside lower center", ncols=len(models), fontsize="small")
    return figure


def draw_tuning(comparison: ComparedRuns) -> Figure | None:
    """Draw the validation results over the values of the tuned setting. Return None if there are no such results.

    There is one line for each combination of the other settings. Larger markers show the chosen values.
    """
    from fedsim.core.figure import Figure

    settings, tuned = comparison.settings, comparison.choices
    assert settings.tune is not None
    values = comparison.axes[settings.tune]
    positions = {label(value): value if is_numeric(values) else index for index, value in enumerate(values)}
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes, metric = figure.subplots(), None
    for index, choice in enumerate(tuned):
        style = line_style(index)
        points = []
        for candidate in choice.candidates:
            counted = settings.validated(candidate)
            value = validation_result(counted)
            if value is None or not counted.is_complete(value):
                continue
            metric = candidate.metric
            x = positions[label(counted.runs[0].point[settings.tune])]
            points.append((x, value.mean))
            if candidate is choice.chosen:
                axes.plot(x, value.mean, "o", color=style["color"], markersize=9)
        point = choice.chosen.runs[0].point
        name = ", ".join(label(point[key]) for key in comparison.compared) or comparison.name
        axes.plot(*zip(*sorted(points), strict=True) if points else ([], []), label=name, **style)
    if metric is None:
        return None
    mark_values(axes, positions)
    worst = f", worst {settings.worst}" if settings.worst else ""
    axes.set(xlabel=key_name(settings.tune), ylabel=metric.label.replace("Test", "Validation").lower() + worst)
    axes.grid(alpha=0.3)
    figure.suptitle(f"Tuning of the {key_name(settings.tune)}\n{comparison.name}", fontsize="small")
    columns = math.ceil(len(tuned) / 20)
    figure.legend(loc="outside right center", fontsize="x-small", ncols=columns, handlelength=3)
    return figure


def draw_leaderboard(board: Leaderboard, title: str) -> Figure:
    """Draw the mean ranks. A bar connects ranks that are not significantly different (Demsar 2006, figure 1)."""
    from fedsim.core.figure import Figure

    count = len(board.standings)
    figure = Figure(figsize=(7.5, 1.6 + LINE * (count + len(board.groups))), layout="constrained")
    axes = figure.subplots()
    for position, standing in enumerate(board.standings):
        y = -position
        axes.plot([1, standing.mean_rank], [y, y], color="#cccccc", linewidth=1, zorder=1)
        axes.plot(standing.mean_rank, y, "o", color="#1f4e79", zorder=2)
        axes.annotate(
            fixed(standing.mean_rank, 2), (standing.mean_rank, y), (8, 0), textcoords="offset points", va="center"
        )
    for index, (first, last) in enumerate(board.groups):
        height = -count - 0.6 * index
        ends = [board.standings[first].mean_rank, board.standings[last].mean_rank]
        axes.plot(ends, [height, height], color="black", linewidth=4, solid_capstyle="butt")
    axes.set_yticks([-position for position in range(count)], [standing.name for standing in board.standings])
    axes.set_xlim(0.8, count + 0.5)
    axes.set_xlabel(
        f"mean rank over {board.cells} cells (1 is best)\n"
        f"bars join ranks within the critical difference, {board.critical_difference:.2f}"
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.suptitle(title, fontsize="medium")
    return figure
