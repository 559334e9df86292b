"""Statistics and pictures of partitions."""

from __future__ import annotations

import io
import math
from itertools import combinations

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

import fedsim
from fedsim.errors import ExperimentError


def test_label_counts():
    labels = [0, 2, 2, 0, 1, 2]
    counts = fedsim.label_counts(labels, [np.array([0, 3, 4]), np.array([1, 2, 5])])
    assert counts.tolist() == [[2, 1, 0], [0, 0, 3]]
    assert counts.dtype == np.int64
    assert fedsim.label_counts(labels, [[0], [1, 2]], classes=5).tolist() == [[1, 0, 0, 0, 0], [0, 0, 2, 0, 0]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fedsim.label_counts([0, 5], [[0], [1]], 5), "classes = 5: must be greater than the highest label, 5"),
        (lambda: fedsim.label_counts([0, 0.5], [[0], [1]]), "labels: must be whole numbers >= 0"),
        (lambda: fedsim.heterogeneity(np.array([[1, 2], [0, 0]])), "counts: worker 1 has no samples"),
        (lambda: fedsim.heterogeneity(np.array([1, 2])), r"counts: must be .* \[n_workers, .*; got shape \(2,\)"),
    ],
)
def test_impossible_labels_and_counts_are_an_error(call, message):
    with pytest.raises(ExperimentError, match=message):
        call()


@pytest.mark.parametrize("n_workers", [1, 9])
def test_heterogeneity_matches_its_definition(n_workers):
    counts = np.random.default_rng(n_workers).integers(0, 30, (n_workers, 6)) + np.eye(n_workers, 6, dtype=int)
    counts[:, 3] = 0
    counts[0] = [7, 0, 0, 0, 0, 0]
    figures = fedsim.heterogeneity(counts)
    histograms = [[count / sum(row) for count in row] for row in counts.tolist()]
    entropies = [-sum(p * math.log(p) for p in histogram if p) for histogram in histograms]
    distances = [
        math.sqrt(sum((math.sqrt(a) - math.sqrt(b)) ** 2 for a, b in zip(p, q, strict=True)) / 2)
        for p, q in combinations(histograms, 2)
    ]
    assert figures.entropies == pytest.approx(entropies, abs=1e-12)
    assert figures.mean_entropy == pytest.approx(sum(entropies) / n_workers, abs=1e-12)
    assert figures.mean_hellinger == pytest.approx(sum(distances) / max(1, len(distances)), abs=1e-12)


def test_the_distance_of_nearly_equal_histograms_is_exact():
    figures = fedsim.heterogeneity(np.array([[10**9, 10**9], [10**9 + 1, 10**9 - 1]]))
    assert figures.mean_hellinger == pytest.approx(1e-9 / math.sqrt(8), rel=1e-6)


@pytest.fixture
def drawn(monkeypatch):
    """Return a list that collects the saved figures, so that a test can inspect them."""
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (figures.append(self), save(self, *args, **kw)))
    return figures


@pytest.mark.parametrize(("n_workers", "n_classes", "as_bars"), [(2, 2, True), (31, 10, False), (5, 21, False)])
def test_few_workers_are_bars_and_many_are_a_heat_map(n_workers, n_classes, as_bars, drawn):
    counts = np.random.default_rng(0).integers(0, 50, (n_workers, n_classes)) + 1
    png = fedsim.plot_partition(counts, "a title")
    picture = Image.open(io.BytesIO(png))
    assert picture.format == "PNG"
    assert picture.width > picture.height > 300
    (figure,) = drawn
    assert figure.get_suptitle().startswith("a title\n")
    if as_bars:
        (axes,) = figure.axes
        heights = [[bar.get_height() for bar in bars] for bars in axes.containers]
        assert np.array_equal(np.array(heights).T, counts)
        assert max(bar.get_y() + bar.get_height() for bar in axes.patches) == counts.sum(1).max()
    else:
        (image,) = figure.axes[1].images
        assert np.allclose(image.get_array(), (counts / counts.sum(1, keepdims=True)).T)
