"""Products of pairs that several processes add up, each of some columns, are those of the whole rows."""

from __future__ import annotations

import contextlib
import threading
from functools import cached_property

import pytest
import torch

from fedsim.aggregation import AggregationInputs, Gram, make_pipeline, resolve
from fedsim.aggregation.numerics.lazy_rows import LazyRows
from fedsim.errors import ExperimentError


@pytest.fixture(autouse=True)
def properties_without_locks(monkeypatch):
    """Until Python 3.12 a cached property is computed by one thread at a time; processes know nothing of that."""
    for owner in (Gram, LazyRows):
        for each in vars(owner).values():
            if isinstance(each, cached_property) and hasattr(each, "lock"):
                monkeypatch.setattr(each, "lock", contextlib.nullcontext())


class Parts:
    """Some threads that each have a part of the columns, and reduce over them all."""

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
        """work(part of the rows, reduce) by each; the results in order."""
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

    found = Parts(len(cuts) + 1).run(work, rows, cuts)
    exact = Gram(rows)
    for distances, products in found:
        assert torch.allclose(distances, exact.distances, rtol=1e-9, atol=0)
        assert torch.equal(distances, found[0][0])
        assert torch.equal(products, found[0][1])
        assert torch.equal(distances == 0, exact.distances == 0)


@pytest.mark.parametrize(
    "rule", ["krum", "medoid", "geometric_median", "caf", "smea", ["nnm", "median"], ["bucketing", "mda"]]
)
def test_rules_of_pairs_give_each_part_its_columns(rule):
    rows, pipeline = some_rows(), make_pipeline(resolve(rule, {}, background={"f": 1}))
    assert pipeline.by_parts
    whole = pipeline(AggregationInputs(rows)).update
    found = Parts(3).run(lambda part, reduce: pipeline(AggregationInputs(part, reduce=reduce)).update, rows, [300, 301])
    assert torch.allclose(torch.cat(found), whole, rtol=0, atol=1e-9)


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


def test_all_parts_refuse_rows_whose_squared_norms_overflow():
    def work(part, reduce):
        with pytest.raises(ExperimentError, match="squared norms overflow"):
            Gram(part, reduce=reduce)
        return True

    assert Parts(2).run(work, some_rows(1e200), [400]) == [True, True]
