from __future__ import annotations

import pytest
import torch

import fedsim
from fedsim.aggregation.numerics.columns import (
    bad_rows,
    products_with,
    squared_distances_to,
    wide_blocks,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def normal(n, d, dtype=torch.double):
    return torch.randn(n, d, dtype=torch.double, generator=torch.Generator().manual_seed(n + d)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_blocks_are_copies_that_cover_every_column_once(dtype):
    for d in (0, 1, 255, 256, 257, 700, 50_000):
        updates = normal(3, d, dtype)
        before, blocks = updates.clone(), []
        for block, rows in wide_blocks(updates):
            assert torch.equal(rows, before[:, block].double())
            rows.fill_(7.0)
            blocks.append(block)
        assert torch.equal(updates, before)
        assert [column for block in blocks for column in range(d)[block]] == list(range(d)), d


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1, 257, 50_000])
def test_distances_and_products_are_sums_in_double_precision(d, dtype):
    updates, point = normal(5, d, dtype), normal(1, d, dtype)[0]
    before = updates.clone()
    wide, centre = updates.double(), point.double()
    for found, expected in (
        (squared_distances_to(updates, None), [sum((row * row).tolist()) for row in wide]),
        (squared_distances_to(updates, point), [sum(((row - centre) ** 2).tolist()) for row in wide]),
        (products_with(updates, point), [sum((row * centre).tolist()) for row in wide]),
    ):
        expected = torch.tensor(expected, dtype=torch.double)
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12 * d)
    assert torch.equal(updates, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 5), (7, 1), (20, 3_000), (100, 40_000)], ids=str)
def test_the_mean_is_as_exact_as_its_dtype(shape, dtype):
    updates = normal(*shape, dtype)
    expected = updates.double().mean(0)
    away = (fedsim.aggregate(updates).double() - expected).abs().max()
    assert away <= 2 * torch.finfo(dtype).eps * updates.double().abs().max()


def test_bad_rows_finds_nan_and_infinity():
    updates = torch.ones(6, 4)
    assert bad_rows(updates) == []
    updates[1] = 3e38
    updates[2, 0], updates[3, 3], updates[5, 1] = float("nan"), float("inf"), -float("inf")
    assert bad_rows(updates) == [2, 3, 5]
    assert bad_rows(updates[[0, 1, 4]]) == []
    assert bad_rows(torch.tensor([[3e38], [-3e38], [3e38], [3e38]])) == []
