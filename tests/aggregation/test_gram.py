from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim.aggregation import Gram
from fedsim.aggregation.gram import STRIP, stable_order


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


def test_products_in_float32_are_sums_in_double_precision():
    x = torch.randn(STRIP + 3, 5_000, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(Gram(x).products, x.double() @ x.double().t(), rtol=0, atol=1e-9)


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
def test_the_stable_order_puts_the_lowest_index_first_where_values_differ_by_rounding_alone(values, order):
    assert stable_order(torch.tensor(values, dtype=torch.double)).tolist() == order
