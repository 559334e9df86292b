from __future__ import annotations

import numpy as np
import pytest
import torch

import fedsim
from fedsim.aggregation import Gram
from fedsim.aggregation.numerics.gram import STRIP, stable_order


@pytest.mark.parametrize("d", [1, 256, 700])
@pytest.mark.parametrize("n", [1, 2, STRIP - 1, STRIP, STRIP + 1, 2 * STRIP + 5])
def test_products_and_distances_are_those_of_all_pairs(n, d):
    x = np.random.default_rng(n + d).standard_normal((n, d))
    gram = Gram(torch.from_numpy(x.copy()))
    products = np.array([[np.dot(a, b) for b in x] for a in x])
    distances = np.array([[np.linalg.norm(a - b) for b in x] for a in x])
    assert np.abs(gram.products.numpy() - products).max() <= 1e-12 * d
    assert np.abs(gram.distances.numpy() - distances).max() <= 1e-12 * d
    assert torch.equal(gram.distances, gram.distances.t())


@pytest.mark.parametrize("known", [1, 5, STRIP + 2])
@pytest.mark.parametrize("added", [0, 1, 3])
def test_an_extended_gram_is_that_of_all_updates(known, added):
    x = torch.randn(known + added, 700, dtype=torch.double, generator=torch.Generator().manual_seed(0)) + 1
    x[-1] = x[x[:known].norm(dim=1).argmin()]  # equals the row that the others are centred at
    extended, whole = Gram(x[:known]).extended(x), Gram(x)
    for name in ("products", "squared_distances", "offsets"):
        assert torch.allclose(getattr(extended, name), getattr(whole, name), rtol=1e-10, atol=1e-10), name


@pytest.mark.parametrize(
    ("values", "order"),
    [
        ([3.0], [0]),
        ([3.0, 1.0, 2.0], [1, 2, 0]),
        ([2.0, 1.0, 2.0, 1.0], [1, 3, 0, 2]),
        ([1.0 + 1e-15, 1.0, 0.5], [2, 0, 1]),
        ([1.0 + 1e-9, 1.0, 0.5], [2, 1, 0]),
        ([0.0, 0.0, -1.0], [2, 0, 1]),
        ([float("inf"), 1.0, float("inf")], [1, 0, 2]),
    ],
)
def test_stable_order_breaks_rounding_ties_by_index(values, order):
    assert stable_order(torch.tensor(values, dtype=torch.double)).tolist() == order


def test_a_cancelled_distance_is_recomputed():
    far = 1e6 * torch.ones(4, dtype=torch.double)
    near = far + 1e-3 * torch.tensor([1.0, -1.0, 0.0, 0.0], dtype=torch.double)
    zeros = torch.zeros(3, 4, dtype=torch.double)
    squares = Gram(torch.cat([zeros, far[None], near[None]])).squared_distances
    difference = (far - near).tolist()
    assert float(squares[3, 4]) == pytest.approx(sum(x * x for x in difference), rel=1e-12)
    assert torch.equal(squares[:3, :3], torch.zeros(3, 3, dtype=torch.double))


def test_offsets_and_distances_to_a_point_are_those_of_the_rows_and_of_their_mixtures():
    x = torch.randn(6, 50, dtype=torch.double, generator=torch.Generator().manual_seed(0)) + 3
    matrix = torch.rand(4, 6, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    for gram, rows in ((Gram(x), x), (Gram(x).mixed(matrix), matrix @ x)):
        shares = torch.arange(1.0, len(rows) + 1, dtype=torch.double)
        shares /= shares.sum()
        expected = ((rows - shares @ rows) ** 2).sum(1)
        assert torch.allclose(torch.from_numpy(gram.distances_to(shares.numpy())) ** 2, expected, rtol=1e-9)
        offsets = gram.offsets
        between = offsets.diagonal().unsqueeze(0) + offsets.diagonal().unsqueeze(1) - 2 * offsets
        assert torch.allclose(between, torch.cdist(rows, rows) ** 2, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("outlier", [0, 1])
def test_the_shorter_of_two_rows_is_the_central_row(outlier):
    updates = torch.tensor([[3.0, 4.0], [1.0, 2.0]], dtype=torch.double)
    updates[outlier] *= 1e12
    for steps in (1, 2, 3):
        point = torch.zeros(2, dtype=torch.double)
        for _ in range(steps):
            pull = [1 / float(torch.linalg.vector_norm(row - point)) for row in updates]
            point = (pull[0] * updates[0] + pull[1] * updates[1]) / sum(pull)
        found = fedsim.aggregate(updates, rule="geometric_median", start="zeros", iterations=steps, tol=0.0)
        assert torch.allclose(found, point, rtol=1e-9)
