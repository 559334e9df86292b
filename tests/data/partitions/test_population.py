from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from fedsim.data import ListedShards, hold_out, partition_shards
from fedsim.data.partitions import population
from fedsim.errors import ExperimentError

LABELS = torch.arange(203) % 10


def test_listed_shards_are_their_arrays():
    arrays = [np.array([4, 2]), np.array([0]), np.array([1, 3, 5])]
    shards = ListedShards.of_arrays(arrays)
    for listed in (shards, pickle.loads(pickle.dumps(shards))):
        assert len(listed) == 3
        assert [listed.size(worker) for worker in range(3)] == [2, 1, 3]
        assert [listed.of(worker).tolist() for worker in range(3)] == [[4, 2], [0], [1, 3, 5]]


def test_a_strategy_that_accepts_a_worker_is_virtual():
    shards = partition_shards(LABELS, "tests.components:neighbours", 10**6, seed=1, most=5, ids=np.arange(203))
    assert not shards.listed
    for worker in (0, 77, 999_999):
        positions = shards.of(worker)
        assert 1 <= len(positions) == shards.size(worker) <= 5
        assert set(LABELS[positions].tolist()) == {worker % 10}


def test_drawn_shards_are_pickled_without_their_cache():
    shards = partition_shards(LABELS, "virtual", 10**6, seed=1, alpha=0.5)
    before = len(pickle.dumps(shards))
    drawn = [shards.of(worker) for worker in range(50)]
    again = pickle.loads(pickle.dumps(shards))
    assert len(pickle.dumps(shards)) == before
    assert all(torch.equal(shard, again.of(worker)) for worker, shard in enumerate(drawn))


def test_the_cache_of_drawn_shards_is_bounded(monkeypatch):
    monkeypatch.setattr(population, "KEPT", 3)
    shards = partition_shards(LABELS, "virtual", 10**6, samples=20)
    first = [shards.of(worker).clone() for worker in range(10)]
    assert sorted(shards._kept) == [7, 8, 9]
    assert shards.of(9) is shards.of(9)
    assert all(torch.equal(shards.of(worker), shard) for worker, shard in enumerate(first))


def test_shards_can_be_drawn_before_and_after_labels_move_to_shared_memory():
    labels = LABELS.clone()
    shards = partition_shards(labels, "virtual", 100, alpha=0.5)
    before = shards.of(3).clone()
    assert any(tensor is labels for tensor in shards.tensors)  # no copy was made
    for tensor in shards.tensors:
        tensor.share_memory_()
    shards._kept.clear()
    assert torch.equal(shards.of(3), before)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            "tests.components:nothing",
            r"must return a non-empty .* for each worker; the array for worker 4 has shape \(0,\)$",
        ),
        ("tests.components:beyond", r"the strategy returned index 203 for worker 4; valid indices are 0 to 202$"),
        ("tests.components:Boasting", r"returned 2 samples for worker 4, but .* size\(4\) is 7; both must be equal$"),
    ],
)
def test_errors_of_virtual_strategies_give_a_one_line_error(strategy, message):
    with pytest.raises(ExperimentError, match=f'^partition.name = "{strategy}": {message}'):
        partition_shards(LABELS, strategy, 10**6).of(4)


def test_shards_are_split_into_training_and_test_samples():
    """Each worker with two samples keeps at least one sample of each kind, and virtual shards stay virtual."""
    sizes = {1: (1, 0), 2: (1, 1), 10: (8, 2), 100: (80, 20)}
    listed = ListedShards.of_arrays(np.split(np.arange(113), np.cumsum(list(sizes))[:-1]))
    train, test = hold_out(listed, 0.2, seed=3)
    assert [(train.size(worker), test.size(worker)) for worker in range(4)] == list(sizes.values())
    for worker in range(4):
        both = [*train.of(worker).tolist(), *test.of(worker).tolist()]
        assert sorted(both) == listed.of(worker).tolist()
    assert hold_out(listed, 0.9, seed=3)[1].size(1) == 1
    drawn = partition_shards(LABELS, "virtual", 10**6, samples=10)
    parts = hold_out(drawn, 0.2, seed=3)
    assert [len(part.of(999)) for part in parts] == [8, 2]
    assert {*parts[0].of(999).tolist(), *parts[1].of(999).tolist()} == set(drawn.of(999).tolist())
