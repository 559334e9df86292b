from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import fedsim
from fedsim.aggregation.numerics.sorting import map_sorted_columns, middle, middle_places
from fedsim.aggregation.numerics.sorting import sorted_columns as sort


def normal(n, d, dtype=torch.double):
    return torch.randn(n, d, dtype=torch.double, generator=torch.Generator().manual_seed(n + d)).to(dtype)


@pytest.mark.parametrize("n", range(1, 13))
def test_a_network_sorts_all_columns_of_zeros_and_ones(n):
    block = torch.tensor(list(itertools.product([0.0, 1.0], repeat=n))).t().contiguous()
    expected = block.sort(dim=0).values
    assert torch.equal(sort(block, tuple(range(n))), expected)
    for place in range(n):
        assert torch.equal(sort(block, (place,)), expected[place : place + 1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 17, 20, 100])
def test_sorted_columns_returns_the_needed_places(n, dtype):
    block = normal(n, 5, dtype)
    block[n // 2] = block[0]  # ties
    before = block.clone()
    ascending = before.t().sort(dim=1).values.t()
    everything = range(n)
    for needed in (everything, middle_places(n), everything[:1], everything[-1:], everything[n // 3 : n - n // 3]):
        found = sort(block, tuple(needed))
        assert torch.equal(found, ascending[list(needed)])
        found.fill_(7.0)
        assert torch.equal(block, before)


@pytest.mark.parametrize("n", [3, 20, 33])
def test_nan_sorts_last(n):
    block = normal(n, 4)
    block[1, 0], block[0, 2], block[2, 2], block[1, 3] = math.nan, math.inf, -math.inf, math.nan
    expected = np.sort(block.numpy(), axis=0)
    assert np.array_equal(sort(block, tuple(range(n))).numpy(), expected, equal_nan=True)
    assert np.array_equal(
        fedsim.aggregate(block, rule="median", nonfinite="keep").numpy(),
        (expected[(n - 1) // 2] + expected[n // 2]) / 2,
        equal_nan=True,
    )


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("d", [0, 1, 255, 5_000, 60_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_map_sorted_columns_accepts_any_size(d, dtype, strided):
    updates = normal(5, 2 * d, dtype)[:, ::2] if strided else normal(5, d, dtype)
    found = map_sorted_columns(updates, lambda ascending, _: middle(ascending), middle_places(5))
    assert found.dtype == dtype
    assert torch.equal(found, updates.median(0).values)
