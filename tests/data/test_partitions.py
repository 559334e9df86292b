from __future__ import annotations

import numpy as np
import pytest
import torch

import fedsim
from fedsim.errors import ExperimentError

STRATEGIES = ["contiguous", "iid"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("n", "workers"), [(1, 1), (10, 3), (60_000, 4), (7, 7), (1000, 13)])
def test_every_sample_goes_to_exactly_one_worker(strategy, n, workers):
    shards = fedsim.partition(np.zeros(n), workers, strategy)
    assert len(shards) == workers
    assert all(shard.dtype == np.int64 for shard in shards)
    assert sorted(np.concatenate(shards)) == list(range(n))


def test_contiguous_gives_equal_runs_and_the_remainder_to_the_last():
    shards = fedsim.partition(np.zeros(11), 3)
    assert [shard.tolist() for shard in shards] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9, 10]]
    assert [len(shard) for shard in fedsim.partition(np.zeros(60_000), 4)] == [15_000] * 4


def test_iid_shards_differ_by_at_most_one_and_are_shuffled():
    shards = fedsim.partition(np.zeros(1003), 10, "iid")
    assert {len(shard) for shard in shards} == {100, 101}
    assert not np.array_equal(np.concatenate(shards), np.arange(1003))


def test_a_partition_is_a_pure_function_of_the_seed():
    np.random.seed(1)
    first = fedsim.partition(np.zeros(100), 4, "iid", seed=3)
    np.random.seed(2)
    state = np.random.get_state()[1].copy()
    again = fedsim.partition(np.zeros(100), 4, "iid", seed=3)
    other = fedsim.partition(np.zeros(100), 4, "iid", seed=4)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    assert np.array_equal(state, np.random.get_state()[1])


@pytest.mark.parametrize("labels", [[0, 1, 2], np.arange(3), torch.arange(3)])
def test_labels_may_be_a_list_an_array_or_a_tensor(labels):
    assert len(fedsim.partition(labels, 3)) == 3


@pytest.mark.parametrize("workers", [0, -1, 11])
def test_an_impossible_number_of_workers_names_both_numbers(workers):
    with pytest.raises(ExperimentError, match=f"workers = {workers}: must be between 1 and the number of samples, 10"):
        fedsim.partition(np.zeros(10), workers)


def test_an_unknown_strategy_or_parameter_names_the_nearest():
    with pytest.raises(ExperimentError, match='partition.strategy = "idd": .*did you mean "iid"'):
        fedsim.partition(np.zeros(10), 2, "idd")
    with pytest.raises(ExperimentError, match=r"partition.alpha = 1: unknown key"):
        fedsim.partition(np.zeros(10), 2, "iid", alpha=1)


def test_a_users_own_strategy_is_checked_like_ours():
    sizes = [len(shard) for shard in fedsim.partition(np.zeros(60), 3, "tests.plugs:uneven")]
    assert sizes == [10, 20, 30]
    with pytest.raises(ExperimentError, match="must give each of 60 samples to exactly one worker; it gave 6, 2 of"):
        fedsim.partition(np.zeros(60), 3, "tests.plugs:lossy")
