from __future__ import annotations

import numpy as np
import pytest

import fedsim
from fedsim.data.partitions import partition_strategy, transforms_of_workers
from fedsim.errors import ExperimentError

STRATEGIES = [registration.name for registration in partition_strategy if registration.name != "given"]
COVERS = sorted(set(STRATEGIES) - {"virtual"})  # each of these assigns every sample to exactly one worker


@pytest.mark.parametrize("strategy", COVERS)
@pytest.mark.parametrize(("n", "workers", "classes"), [(100, 5, 2), (1003, 13, 10), (5000, 100, 3)])
def test_every_sample_goes_to_exactly_one_worker(strategy, n, workers, classes):
    rng = np.random.default_rng(n)
    labels, ids = rng.integers(0, classes, n), rng.permutation(n) % workers
    params = {"alpha": 2.0} if strategy == "dirichlet" else {"beta": 2.0} if strategy == "quantity" else {}
    shards = fedsim.partition(labels, strategy, workers, ids=ids, **params)
    assert len(shards) == workers
    assert all(shard.dtype == np.int64 and len(shard) for shard in shards)
    assert sorted(np.concatenate(shards)) == list(range(n))


@pytest.mark.parametrize("strategy", COVERS)
def test_one_worker_holds_everything(strategy):
    params = {"classes_per_worker": {"k": 3}, "feature_rotation": {"groups": 1}}.get(strategy, {})
    (shard,) = fedsim.partition(np.arange(12) % 3, strategy, 1, ids=np.zeros(12), **params)
    assert sorted(shard) == list(range(12))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_is_a_pure_function(strategy):
    labels, ids = np.arange(300) % 7, np.arange(300) % 5
    labels.flags.writeable = ids.flags.writeable = False
    first, again = (fedsim.partition(labels, strategy, 4, seed=3, ids=ids) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_labels_may_have_any_type(strategy):
    labels, ids = np.array(["cat", "dog", "owl"]).repeat(40), np.array(["ann", "bob", "cy", "di"] * 30)
    shards = fedsim.partition(labels, strategy, 4, ids=ids)
    numbered = fedsim.partition(np.array([-5, 7, 1000]).repeat(40), strategy, 4, ids=ids)
    assert all(np.array_equal(a, b) for a, b in zip(shards, numbered, strict=True))


def test_an_imported_strategy_is_checked():
    sizes = [len(shard) for shard in fedsim.partition(np.zeros(60), "tests.components:uneven", 3)]
    assert sizes == [10, 20, 30]
    with pytest.raises(ExperimentError, match="must assign each of the 60 samples .* returned 6 indices, 2 of"):
        fedsim.partition(np.zeros(60), "tests.components:lossy", 3)


def test_ids_are_required_only_if_needed():
    message = '^name = "natural": needs the writer or user of each sample.* pass `ids`'
    with pytest.raises(ExperimentError, match=message):
        fedsim.partition(np.zeros(10), "natural", 2)
    assert len(fedsim.partition(np.zeros(10), "iid", 2, ids=np.zeros(10))) == 2
    with pytest.raises(ExperimentError, match=r"ids: must be .* one id per sample, \[10\]; got shape \(9,\)"):
        fedsim.partition(np.zeros(10), "natural", 2, ids=np.zeros(9))


def test_targets_of_several_numbers_cannot_be_sorted():
    assert [len(shard) for shard in fedsim.partition(np.zeros((10, 2)), "contiguous", 2)] == [5, 5]
    for strategy in ("shards", "similarity"):
        with pytest.raises(
            ExperimentError, match="each target has 2 numbers .*; use a strategy that ignores the targets, such as iid"
        ):
            fedsim.partition(np.zeros((10, 2)), strategy, 2)
    with pytest.raises(ExperimentError, match=r"labels: must be .* one label per sample, \[n\]; got a single number"):
        fedsim.partition(np.zeros(()), "contiguous", 2)


def test_strategies_without_transforms_change_nothing():
    assert fedsim.partition_transforms("dirichlet", 3, alpha=0.1) == [None] * 3
    assert fedsim.partition_transforms("tests.components:uneven", 3) == [None] * 3
    assert transforms_of_workers("virtual", 10**9) is None  # no list over all workers is built
    with pytest.raises(ExperimentError, match=r"^sigma = 1: unknown key"):
        fedsim.partition_transforms("iid", 3, sigma=1)
