"""Measure how much the workers' shards differ: label counts, statistics and a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from fedsim.core.plotting import encode
from fedsim.data.partitions.allocation import label_array
from fedsim.errors import ExperimentError, called, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_BARS, MOST_COLOURS = 30, 20  # a heat map is easier to read for more workers or classes


@dataclass(frozen=True)
class Heterogeneity:
    """Statistics that describe how unevenly a partition distributes labels and samples among workers.

    `dataclasses.asdict` converts them to a dict of plain numbers.

    Attributes:
        sizes: number of samples of each worker.
        entropies: entropy of each worker's label histogram, in nats: 0 for a single class, at most ln C for C classes.
        mean_hellinger: Hellinger distance between two workers' label histograms, averaged over all pairs of workers: 0
            if all histograms are equal, 1 if no two workers share a class. 0 for a single worker.

    >>> fedsim.heterogeneity(np.array([[5, 0], [0, 3]]))
    Heterogeneity(sizes=(5, 3), entropies=(0.0, 0.0), mean_hellinger=1.0)
    """

    sizes: tuple[int, ...]
    entropies: tuple[float, ...]
    mean_hellinger: float

    @property
    def smallest(self) -> int:
        """The number of samples of the worker with the fewest samples."""
        return min(self.sizes)

    @property
    def median(self) -> float:
        """The median number of samples per worker."""
        return float(np.median(self.sizes))

    @property
    def largest(self) -> int:
        """The number of samples of the worker with the most samples."""
        return max(self.sizes)

    @property
    def mean_entropy(self) -> float:
        """The unweighted mean of the workers' label entropies, in nats."""
        return float(np.mean(self.entropies))


def label_counts(
    labels: Sequence[int] | np.ndarray | Tensor,
    shards: Sequence[Sequence[int] | np.ndarray],
    classes: int | None = None,
) -> np.ndarray:
    """Count how many samples of each class every worker holds.

    Args:
        labels: class label of every sample, [n], whole numbers >= 0, on any device.
        shards: one index array per worker, as returned by `partition`.
        classes: the number of classes C, for labels 0, ..., C - 1. None: one more than the highest label.

    Returns the counts, int64 [n_workers, C]. Raises ExperimentError if a label is not a whole number from 0 to C - 1.

    >>> fedsim.label_counts([0, 1, 1, 0], [[0, 1], [2, 3]])
    array([[1, 1],
           [1, 1]])
    """
    if not isinstance(shards, (Sequence, np.ndarray)):
        raise ExperimentError(f"shards = {show(shards)}: must be a list of index arrays, as fedsim.partition returns")
    labels = label_array(labels)
    numbers = labels.astype(np.int64)
    if not np.array_equal(numbers, labels) or (numbers < 0).any():
        raise ExperimentError("labels: must be whole numbers >= 0")
    highest = int(numbers.max(initial=-1))
    classes = highest + 1 if classes is None else classes
    if highest >= classes:
        raise ExperimentError(f"classes = {classes}: must be greater than the highest label, {highest}")
    return np.array([np.bincount(numbers[np.asarray(shard)], minlength=classes) for shard in shards], dtype=np.int64)


def heterogeneity(counts: np.ndarray) -> Heterogeneity:
    """Compute statistics of a partition from its label counts [n_workers, C] (see `label_counts`).

    Worker i has the label histogram p_i = counts_i / sum counts_i. Its entropy is H_i = -sum_c p_ic ln p_ic. The
    Hellinger distance between workers i and j is h_ij = sqrt(sum_c (sqrt p_ic - sqrt p_jc)^2 / 2), averaged over all
    pairs i < j. Cost: O(n_workers^2 C) time, O(n_workers C) memory.

    Raises ExperimentError if a worker has no samples.

    >>> fedsim.heterogeneity(np.array([[2, 2], [4, 0]])).mean_entropy
    0.34657359027997264
    """
    counts = np.asarray(counts)
    if counts.ndim != 2 or not counts.size or (counts < 0).any():
        raise ExperimentError(
            f"counts: must be a non-empty array [n_workers, classes] without negative numbers; got shape {counts.shape}"
        )
    sizes = counts.sum(1)
    if not sizes.all():
        raise ExperimentError(f"counts: worker {int(np.argmin(sizes))} has no samples; every worker needs at least one")
    histograms = counts / sizes[:, None]
    logs = np.log(histograms, out=np.zeros_like(histograms), where=histograms > 0)
    return Heterogeneity(
        sizes=tuple(sizes.tolist()),
        entropies=tuple((-(histograms * logs).sum(1) + 0.0).tolist()),  # + 0.0 turns -0.0 into 0.0
        mean_hellinger=_mean_hellinger(np.sqrt(histograms)),
    )


def _mean_hellinger(roots: np.ndarray) -> float:
    """Return the mean pairwise Hellinger distance. `roots` are the square roots of the histograms, [n_workers, C].

    The formula 1 - roots @ roots.T would be faster, but loses half of the digits to cancellation.
    """
    n = len(roots)
    total = sum(np.sqrt(((roots[i + 1 :] - roots[i]) ** 2).sum(1) / 2).sum() for i in range(n - 1))
    return float(total / (n * (n - 1) / 2)) if n > 1 else 0.0


def plot_partition(counts: np.ndarray, title: str, names: Sequence[str | None] = ()) -> bytes:
    """Plot label counts [n_workers, C] (see `label_counts`), and return the content of a PNG file.

    With at most 30 workers and 20 classes, each worker is one stacked bar. Larger partitions are drawn as a heat map of
    the workers' label histograms (square-root colour scale from 0 to 1), with the workers' sizes above it. The title
    contains the statistics computed by `heterogeneity`. Bars are labelled with the `names` of the workers, such as
    `Result.worker_names`, if there are any. Raises ExperimentError if a worker has no samples.

    >>> png = fedsim.plot_partition(np.array([[5, 0], [0, 3]]), "two workers")
    >>> png[1:4]
    b'PNG'
    """
    from fedsim.core.figure import Figure

    counts = np.asarray(counts)
    statistics = heterogeneity(counts)
    n_workers, n_classes = counts.shape
    as_bars = n_workers <= MOST_BARS and n_classes <= MOST_COLOURS
    labels = [called(worker, names) for worker in range(n_workers)] if as_bars and any(names) else []
    figure = Figure(figsize=(9, 4.2 + 0.07 * max(map(len, labels), default=0)), layout="constrained")
    figure.suptitle(f"{title}\n{_caption(statistics, n_classes)}", fontsize="medium")
    if as_bars:
        _draw_bars(figure.subplots(), counts, labels)
    else:
        _draw_heat_map(figure, counts)
    return encode(figure, "png", 120)


def _caption(statistics: Heterogeneity, n_classes: int) -> str:
    n_workers, smallest, largest = len(statistics.sizes), statistics.smallest, statistics.largest
    sizes = f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,} (median {statistics.median:,.0f})"
    return (
        f"{n_workers} worker{'s' if n_workers > 1 else ''}, {sizes} samples each; "
        f"label entropy {statistics.mean_entropy:.2f} of {math.log(n_classes):.2f}, "
        f"Hellinger distance {statistics.mean_hellinger:.2f}"
    )


def _draw_bars(axes: Axes, counts: np.ndarray, workers_called: list[str]) -> None:
    """Draw one stacked bar per worker, with label 0 at the bottom. `workers_called`: their names, or empty."""
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
    if workers_called:
        axes.set_xticks(workers, workers_called, rotation=90, fontsize="small", parse_math=False)
    axes.set_ylim(0, 1.04 * counts.sum(1).max())
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], title="label", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _draw_heat_map(figure: Figure, counts: np.ndarray) -> None:
    """Draw each worker's label histogram as a column of a heat map, with the workers' sample counts above it."""
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

    sizes = counts.sum(1)
    top, main = figure.subplots(2, 1, sharex=True, height_ratios=[1, 4])
    top.stairs(sizes, np.arange(len(sizes) + 1) - 0.5, fill=True, color="tab:gray")
    top.set(ylabel="samples", ylim=(0, 1.04 * sizes.max()))
    top.yaxis.set_major_formatter("{x:,.0f}")
    top.spines[["top", "right"]].set_visible(False)
    scale = PowerNorm(0.5, vmin=0, vmax=1)  # fixed, so that plots are comparable; keeps small shares visible
    heat_map = main.imshow(
        (counts / sizes[:, None]).T, norm=scale, cmap="Blues", aspect="auto", origin="lower", interpolation="nearest"
    )
    main.set(xlabel="worker", ylabel="label")
    for axis in (main.xaxis, main.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(heat_map, ax=main, label="share of the worker's samples")
