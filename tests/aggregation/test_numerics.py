"""Building blocks of the rules: sums in double precision, pairwise products, sorted columns and clusters."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from functools import cached_property

import numpy as np
import pytest
import torch

import fedsim
from fedsim.aggregation import AggregationInputs, Gram, make_pipeline, resolve
from fedsim.aggregation.mean_shift import ROUNDING, bandwidth_of, mean_shift
from fedsim.aggregation.numerics.columns import bad_rows, products_with, squared_distances_to, wide_blocks
from fedsim.aggregation.numerics.gram import STRIP, stable_order
from fedsim.aggregation.numerics.lazy_rows import LazyRows
from fedsim.aggregation.numerics.sorting import map_sorted_columns, middle, middle_positions
from fedsim.aggregation.numerics.sorting import sorted_columns as sort
from fedsim.errors import ExperimentError
from tests.aggregation import reference

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
    for computed, expected in (
        (squared_distances_to(updates, None), [sum((row * row).tolist()) for row in wide]),
        (squared_distances_to(updates, point), [sum(((row - centre) ** 2).tolist()) for row in wide]),
        (products_with(updates, point), [sum((row * centre).tolist()) for row in wide]),
    ):
        expected = torch.tensor(expected, dtype=torch.double)
        assert torch.allclose(computed, expected, rtol=1e-12, atol=1e-12 * d)
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


@pytest.mark.parametrize("d", [1, 256, 700])
@pytest.mark.parametrize("n", [1, 2, STRIP - 1, STRIP, STRIP + 1, 2 * STRIP + 5])
def test_products_and_distances_equal_those_of_all_pairs(n, d):
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
    x[-1] = x[x[:known].norm(dim=1).argmin()]  # equals the row that is subtracted from all rows
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


def test_offsets_and_distances_to_a_point_equal_those_of_the_rows_and_of_their_mixtures():
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
    updates = np.array([[3.0, 4.0], [1.0, 2.0]])
    updates[outlier] *= 1e12
    for steps in (1, 2, 3):
        params = {"start": "zeros", "iterations": steps, "tol": 0.0}
        result = fedsim.aggregate(updates, "geometric_median", **params)
        assert np.allclose(result, reference.geometric_median(updates, **params), rtol=1e-9)


@pytest.mark.parametrize("n", range(1, 13))
def test_a_network_sorts_all_columns_of_zeros_and_ones(n):
    block = torch.tensor(list(itertools.product([0.0, 1.0], repeat=n))).t().contiguous()
    expected = block.sort(dim=0).values
    assert torch.equal(sort(block, tuple(range(n))), expected)
    for place in range(n):
        assert torch.equal(sort(block, (place,)), expected[place : place + 1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 17, 20, 100])
def test_sorted_columns_returns_the_needed_positions(n, dtype):
    block = normal(n, 5, dtype)
    block[n // 2] = block[0]  # ties
    before = block.clone()
    ascending = before.t().sort(dim=1).values.t()
    everything = range(n)
    for needed in (everything, middle_positions(n), everything[:1], everything[-1:], everything[n // 3 : n - n // 3]):
        sorted_rows = sort(block, tuple(needed))
        assert torch.equal(sorted_rows, ascending[list(needed)])
        sorted_rows.fill_(7.0)
        assert torch.equal(block, before)


@pytest.mark.parametrize("n", [3, 20, 33])
def test_nan_sorts_last(n):
    block = normal(n, 4)
    block[1, 0], block[0, 2], block[2, 2], block[1, 3] = math.nan, math.inf, -math.inf, math.nan
    expected = np.sort(block.numpy(), axis=0)
    assert np.array_equal(sort(block, tuple(range(n))).numpy(), expected, equal_nan=True)
    assert np.array_equal(
        fedsim.aggregate(block, "median", nonfinite="keep").numpy(),
        (expected[(n - 1) // 2] + expected[n // 2]) / 2,
        equal_nan=True,
    )


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("d", [0, 1, 255, 5_000, 60_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_map_sorted_columns_accepts_any_size(d, dtype, strided):
    updates = normal(5, 2 * d, dtype)[:, ::2] if strided else normal(5, d, dtype)
    medians = map_sorted_columns(updates, lambda ascending, _: middle(ascending), middle_positions(5))
    assert medians.dtype == dtype
    assert torch.equal(medians, updates.median(0).values)


def shares(seed):
    """Return fractions of positive, zero and negative values for 3 to 40 rows that form one to three groups."""
    rng = np.random.default_rng(seed)
    groups = [rng.dirichlet(np.full(3, 10.0 ** rng.integers(-1, 2))) for _ in range(rng.integers(1, 4))]
    counted = int(10.0 ** rng.integers(1, 4))
    rows = [rng.multinomial(counted, groups[rng.integers(len(groups))]) for _ in range(rng.integers(3, 41))]
    return np.array(rows) / counted


@pytest.mark.filterwarnings("ignore:Binning data failed")
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(25, 400, 25))])
def test_bandwidth_and_labels_equal_those_of_scikit_learn(first):
    from sklearn.cluster import MeanShift, estimate_bandwidth

    several = 0
    for seed in range(first, first + 25):
        points = shares(seed)
        bandwidth = bandwidth_of(points)
        # scikit-learn computes distances from squared norms, which loses half of the digits
        assert bandwidth == pytest.approx(estimate_bandwidth(points, quantile=0.5), abs=1e-7)
        if bandwidth > 1e-9:
            expected = (
                MeanShift(bandwidth=(1 + ROUNDING) * bandwidth, bin_seeding=True, cluster_all=False).fit(points).labels_
            )
            assert mean_shift(points, bandwidth).tolist() == expected.tolist(), seed
            several += expected.max() > 0
    assert several > 5


@pytest.fixture(autouse=True)
def properties_without_locks(monkeypatch):
    """Remove the locks of cached properties (Python < 3.12), because the threads of `Parts` stand for processes."""
    for owner in (Gram, LazyRows):
        for attribute in vars(owner).values():
            if isinstance(attribute, cached_property) and hasattr(attribute, "lock"):
                monkeypatch.setattr(attribute, "lock", contextlib.nullcontext())


class Parts:
    """Threads that each hold some of the columns and can sum over all threads."""

    def __init__(self, count):
        self._barrier, self._given, self.count = threading.Barrier(count, timeout=5), [None] * count, count

    def reduce_of(self, index):
        def reduce(values, how):
            self._given[index] = values.clone()
            self._barrier.wait()
            stacked = torch.stack(self._given)
            self._barrier.wait()
            return stacked.sum(0) if how == "sum" else stacked.amax(0)

        return reduce

    def run(self, work, rows, cuts):
        """Call `work(columns of this part, reduce)` in each thread and return the results in the order of the parts."""
        results = [None] * self.count

        def go(index, part):
            results[index] = work(part, self.reduce_of(index))

        parts = torch.tensor_split(rows, cuts, dim=1)
        threads = [threading.Thread(target=go, args=each) for each in enumerate(parts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def some_rows(scale=1.0, offset=0.0, n=7, d=1000):
    rows = torch.randn(n, d, generator=torch.Generator().manual_seed(3), dtype=torch.double)
    return rows * scale + offset


ROWS = {
    "ordinary": some_rows(),
    "far from zero": some_rows(1e-6, 1e3),
    "one outlier": torch.cat([some_rows(), some_rows(1e12, n=1)]),
    "equal rows": some_rows()[[0, 1, 0, 2, 3, 2, 4]],
    "zero": torch.zeros(4, 1000, dtype=torch.double),
}


@pytest.mark.parametrize("cuts", [[500], [1, 999], [0, 400, 1000]])
@pytest.mark.parametrize("name", ROWS)
def test_all_parts_get_the_distances_of_whole_rows(name, cuts):
    rows = ROWS[name]

    def work(part, reduce):
        gram = Gram(part, reduce=reduce)
        return gram.distances, gram.products

    results = Parts(len(cuts) + 1).run(work, rows, cuts)
    exact = Gram(rows)
    for distances, products in results:
        assert torch.allclose(distances, exact.distances, rtol=1e-9, atol=0)
        assert torch.equal(distances, results[0][0])
        assert torch.equal(products, results[0][1])
        assert torch.equal(distances == 0, exact.distances == 0)


@pytest.mark.parametrize(
    "rule", ["krum", "medoid", "geometric_median", "caf", "smea", ["nnm", "median"], ["bucketing", "mda"]]
)
def test_rules_of_pairs_give_each_part_its_columns(rule):
    rows, pipeline = some_rows(), make_pipeline(resolve(rule, {}, background={"f": 1}))
    assert pipeline.by_parts
    whole = pipeline(AggregationInputs(rows)).update
    partial_updates = Parts(3).run(
        lambda part, reduce: pipeline(AggregationInputs(part, reduce=reduce)).update, rows, [300, 301]
    )
    assert torch.allclose(torch.cat(partial_updates), whole, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("rule", "by_parts"),
    [
        ("mean", True),
        ("krum", True),
        ("bulyan", True),
        ("fltrust", False),
        ("centered_clipping", False),
        ("cge", False),
    ],
)
def test_rules_of_whole_rows_are_not_applied_by_parts(rule, by_parts):
    assert make_pipeline(resolve(rule, {}, background={"f": 1})).by_parts is by_parts
    assert make_pipeline(resolve(["arc", rule], {}, background={"f": 1})).by_parts is False


@pytest.mark.parametrize("rule", ["mean", "weighted_mean"])
def test_coefficients_of_an_average_take_no_memory_for_pairs_of_workers(rule):
    """With 8 bytes for each pair of 40,000 workers, the coefficients would need 12.8 GB."""
    weights = torch.arange(40_000).remainder(3).double()
    pipeline = make_pipeline(resolve(rule, {}))
    shares = pipeline.shares(AggregationInputs(torch.empty(len(weights), 0), weights))
    assert torch.equal(shares, weights / weights.sum())
    if rule == "mean":
        shares = pipeline.shares(AggregationInputs(torch.empty(len(weights), 0)))
        assert torch.equal(shares, torch.full_like(weights, 1 / len(weights)))


def test_all_parts_refuse_rows_whose_squared_norms_overflow():
    def work(part, reduce):
        with pytest.raises(ExperimentError, match="squared norms overflow"):
            Gram(part, reduce=reduce)
        return True

    assert Parts(2).run(work, some_rows(1e200), [400]) == [True, True]
