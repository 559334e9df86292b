from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import fedsim
from fedsim.core.randomness import numpy_generator
from fedsim.errors import ExperimentError


def sizes_of(*args, **params):
    return [len(shard) for shard in fedsim.partition(*args, **params)]


def test_contiguous_gives_equal_runs_and_the_remainder_to_the_last():
    shards = fedsim.partition(np.zeros(11), 3)
    assert [shard.tolist() for shard in shards] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9, 10]]
    assert sizes_of(np.zeros(60_000), 4) == [15_000] * 4


def test_quantity_cuts_a_shuffled_whole_by_dirichlet_shares():
    shards = fedsim.partition(np.zeros(1000), 5, "quantity", seed=4, beta=0.7)
    rng = numpy_generator(4, "partition")
    while True:
        shares, ends = rng.dirichlet([0.7] * 5), [0]
        for worker in range(4):
            ends.append(int(sum(shares[: worker + 1]) * 1000))
        ends.append(1000)
        if min(b - a for a, b in pairwise(ends)) >= 1:
            break
    order = rng.permutation(1000)
    for worker, shard in enumerate(shards):
        assert shard.tolist() == order[ends[worker] : ends[worker + 1]].tolist()


def test_quantity_in_proportion_to_lognormal_draws():
    sizes = sizes_of(np.zeros(1000), 4, "quantity", 2, distribution="lognormal", sigma=0.5)
    draws = numpy_generator(2, "partition").lognormal(0, 0.5, 4)
    ends = [int(sum(draws[: worker + 1]) / sum(draws) * 1000) for worker in range(3)]
    assert sizes == [ends[0], ends[1] - ends[0], ends[2] - ends[1], 1000 - ends[2]]
    assert sizes_of(np.zeros(1000), 8, "quantity", distribution="lognormal", sigma=0) == [125] * 8


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_size": 25}, "min_size = 25: not reached in 1000 draws with beta = 0.5 for 4 workers and 100 samples"),
        (
            {"distribution": "lognormal", "sigma": 1e12},
            "with sigma = 1000000000000.0 .*: the smallest shard had 0 at best; take .* a smaller sigma or",
        ),
    ],
)
def test_impossible_quantities_are_an_error(params, message):
    with pytest.raises(ExperimentError, match=message):
        fedsim.partition(np.zeros(100), 4, "quantity", **params)


def test_natural_gives_each_worker_one_id_in_sorted_order():
    ids = ["cy", "ann", "bob", "ann", "cy", "cy"]
    shards = fedsim.partition(np.zeros(6), 3, "natural", ids=ids)
    assert [shard.tolist() for shard in shards] == [[1, 3], [2], [0, 4, 5]]


def test_natural_assigns_whole_ids_to_the_least_loaded_worker():
    ids = np.repeat([30, 10, 20, 50, 40], [4, 3, 3, 2, 1])  # sizes 4, 3, 3, 2, 1
    shards = fedsim.partition(np.zeros(13), 2, "natural", ids=ids)
    # 30 (4) to worker 0; 10 (3) to 1; 20 (3) to 1, now 6; 50 (2) to 0, now 6; 40 (1) to 0 as the numbers are equal.
    assert [sorted(set(ids[shard].tolist())) for shard in shards] == [[30, 40, 50], [10, 20]]
    assert all(np.array_equal(shard, np.sort(shard)) for shard in shards)
