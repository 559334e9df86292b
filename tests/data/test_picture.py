from __future__ import annotations

import io

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

import fedsim


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved, to look at what is in them."""
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (figures.append(self), save(self, *args, **kw)))
    return figures


@pytest.mark.parametrize(
    ("n_workers", "n_classes", "as_bars"),
    [(2, 2, True), (31, 10, False), (5, 21, False)],
)
def test_few_workers_are_bars_and_many_are_a_heat_map(n_workers, n_classes, as_bars, drawn):
    counts = np.random.default_rng(0).integers(0, 50, (n_workers, n_classes)) + 1
    png = fedsim.draw_partition(counts, "a title")
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
