"""Draw a partition: labels by workers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from fedsim.core.plotting import encode
from fedsim.data.heterogeneity import Heterogeneity, heterogeneity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_BARS, MOST_COLOURS = 30, 20  # beyond, a heat map is easier to read


def draw_partition(counts: np.ndarray, title: str) -> bytes:
    """Draw label counts [n_workers, C] (see `label_counts`) as a PNG.

    Up to 30 workers and 20 classes are stacked bars, one per worker; larger partitions are a heat map of the workers'
    label histograms below their sizes, with colours on a square-root scale from 0 to 1. The caption has the statistics
    of `heterogeneity`, whose errors this function raises.

    >>> png = fedsim.draw_partition(np.array([[5, 0], [0, 3]]), "two workers")
    >>> png[1:4]
    b'PNG'
    """
    # Imported here because it takes half a second. No pyplot, so no display and no state.
    from matplotlib.figure import Figure

    counts = np.asarray(counts)
    figures = heterogeneity(counts)
    n_workers, n_classes = counts.shape
    as_bars = n_workers <= MOST_BARS and n_classes <= MOST_COLOURS
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    figure.suptitle(f"{title}\n{_caption(figures, n_classes)}", fontsize="medium")
    if as_bars:
        _draw_bars(figure.subplots(), counts)
    else:
        _draw_heat_map(figure, counts)
    return encode(figure, "png", 120)


def _caption(figures: Heterogeneity, n_classes: int) -> str:
    n_workers, smallest, largest = len(figures.sizes), figures.smallest, figures.largest
    sizes = f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,} (median {figures.median:,.0f})"
    return (
        f"{n_workers} worker{'s' if n_workers > 1 else ''}, {sizes} samples each; "
        f"label entropy {figures.mean_entropy:.2f} of {math.log(n_classes):.2f}, "
        f"Hellinger distance {figures.mean_hellinger:.2f}"
    )


def _draw_bars(axes: Axes, counts: np.ndarray) -> None:
    """One bar per worker, from label 0 at the bottom to the last at the top."""
    from matplotlib import colormaps

    n_workers, n_classes = counts.shape
    colours = colormaps["tab10" if n_classes <= 10 else "tab20"].colors  # type: ignore[attr-defined]
    workers = np.arange(n_workers)
    bottoms = np.cumsum(counts, axis=1) - counts
    for label in range(n_classes):
        axes.bar(
            workers, counts[:, label], 0.85, bottoms[:, label],
            color=colours[label], edgecolor="white", linewidth=0.3, label=str(label),
        )  # fmt: skip
    axes.set(xlabel="worker", ylabel="samples", xlim=(-0.6, n_workers - 0.4), xticks=workers)
    axes.set_ylim(0, 1.04 * counts.sum(1).max())
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], title="label", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _draw_heat_map(figure: Figure, counts: np.ndarray) -> None:
    """Each worker's label histogram as a column, under the number of samples it holds."""
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

    sizes = counts.sum(1)
    top, main = figure.subplots(2, 1, sharex=True, height_ratios=[1, 4])
    top.stairs(sizes, np.arange(len(sizes) + 1) - 0.5, fill=True, color="tab:gray")
    top.set(ylabel="samples", ylim=(0, 1.04 * sizes.max()))
    top.yaxis.set_major_formatter("{x:,.0f}")
    top.spines[["top", "right"]].set_visible(False)
    scale = PowerNorm(0.5, vmin=0, vmax=1)  # one scale for all pictures; small shares are visible beside large ones
    picture = main.imshow(
        (counts / sizes[:, None]).T, norm=scale, cmap="Blues", aspect="auto", origin="lower", interpolation="nearest"
    )
    main.set(xlabel="worker", ylabel="label")
    for axis in (main.xaxis, main.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(picture, ax=main, label="share of the worker's samples")
