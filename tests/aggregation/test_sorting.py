from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import fedsim
from fedsim.aggregation.numerics.sorting import mean_nearest, sorted_columns


def normal(n, d, dtype=torch.double):
    return torch.randn(n, d, dtype=torch.double, generator=torch.Generator().manual_seed(n + d)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 17, 100])
def test_sorted_columns_are_a_new_tensor(n, dtype):
    block = normal(n, 5, dtype)
    block[n // 2] = block[0]  # ties
    before = block.clone()
    found = sorted_columns(block)
    assert torch.equal(found, before.sort(dim=0).values)
    found.fill_(7.0)
    assert torch.equal(block, before)


@pytest.mark.parametrize("n", [3, 20])
def test_nan_sorts_last(n):
    block = normal(n, 4)
    block[1, 0], block[0, 2], block[2, 2], block[1, 3] = math.nan, math.inf, -math.inf, math.nan
    expected = np.sort(block.numpy(), axis=0)
    assert np.array_equal(sorted_columns(block).numpy(), expected, equal_nan=True)
    assert np.array_equal(
        fedsim.aggregate(block, rule="median", nonfinite="keep").numpy(),
        (expected[(n - 1) // 2] + expected[n // 2]) / 2,
        equal_nan=True,
    )


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("d", [0, 1, 255, 5_000, 60_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_median_accepts_any_size(d, dtype, strided):
    updates = normal(5, 2 * d, dtype)[:, ::2] if strided else normal(5, d, dtype)
    found = fedsim.aggregate(updates, rule="median")
    assert found.dtype == dtype
    assert torch.equal(found, updates.median(0).values)


def test_mean_nearest_breaks_ties_by_row():
    block = torch.tensor([[3.0, 1.0], [1.0, 3.0], [2.0, 2.0]])
    for keep, expected in ((1, [2.0, 2.0]), (2, [2.5, 1.5]), (3, [2.0, 2.0])):
        found = mean_nearest(sorted_columns(block), block, torch.tensor([2.0, 2.0]), keep)
        assert found.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bulyan_computes_half_precision_in_float32(dtype):
    updates = normal(11, 300, dtype)
    assert torch.equal(
        fedsim.aggregate(updates, rule="bulyan", f=2), fedsim.aggregate(updates.float(), rule="bulyan", f=2).to(dtype)
    )
