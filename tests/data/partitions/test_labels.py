from __future__ import annotations

import numpy as np
import pytest

import fedsim
from fedsim.core.randomness import numpy_generator
from fedsim.errors import ExperimentError


def test_shards_is_its_definition():
    labels = np.array([2, 0, 1, 0, 2, 1, 0, 1, 2, 0, 1, 2, 0])
    shards = fedsim.partition(labels, 3, "shards", seed=6)
    order = sorted(range(13), key=lambda index: labels[index])  # Python's sort is stable
    runs = [order[:3], order[3:5], order[5:7], order[7:9], order[9:11], order[11:]]  # 13 = 3 + 5 times 2
    numbers = numpy_generator(6, "partition").permutation(6)
    for worker, shard in enumerate(shards):
        assert shard.tolist() == runs[numbers[2 * worker]] + runs[numbers[2 * worker + 1]]


def test_more_shards_than_samples_are_an_error():
    assert sum(map(len, fedsim.partition(np.zeros(40), 10, "shards", s=4))) == 40
    message = "partition.s = 5: 5 shards for each of 10 workers are 50, more than the 49 samples"
    with pytest.raises(ExperimentError, match=message):
        fedsim.partition(np.zeros(49), 10, "shards", s=5)


@pytest.mark.parametrize("workers", [12, 3])
def test_label_k_is_its_definition(workers):
    labels, classes, k = np.arange(200) % 5, 5, 3
    shards = fedsim.partition(labels, workers, "label_k", seed=8, k=k)
    rng = numpy_generator(8, "partition")
    held = [{worker % classes} for worker in range(workers)]
    if workers < classes:
        places = rng.permutation([worker for worker in range(workers) for _ in range(k - 1)])
        for label, worker in zip(range(workers, classes), places, strict=False):
            held[worker].add(label)
    for mine in held:
        others = [label for label in range(classes) if label not in mine]
        mine |= set(rng.choice(others, k - len(mine), replace=False).tolist())
    expected = [[] for _ in range(workers)]
    for label in range(classes):
        samples = rng.permutation([index for index in range(200) if labels[index] == label]).tolist()
        holders = [worker for worker in range(workers) if label in held[worker]]
        for place, worker in enumerate(holders):
            size = len(samples) // len(holders) + (place < len(samples) % len(holders))
            start = sum(len(samples) // len(holders) + (p < len(samples) % len(holders)) for p in range(place))
            expected[worker] += samples[start : start + size]
    assert [shard.tolist() for shard in shards] == expected


@pytest.mark.parametrize(
    ("workers", "k", "message"),
    [
        (20, 11, "partition.k = 11: must be at most the number of classes, 10"),
        (4, 2, "partition.k = 2: 4 workers with 2 classes each hold at most 8 of 10 classes, and samples .* be lost"),
    ],
)
def test_impossible_numbers_of_classes_are_an_error(workers, k, message):
    with pytest.raises(ExperimentError, match=message):
        fedsim.partition(np.arange(100) % 10, workers, "label_k", k=k)


def test_a_worker_without_samples_is_an_error():
    with pytest.raises(ExperimentError, match='"label_k": leaves worker 2 without a sample'):
        fedsim.partition(np.array([0, 1, 1, 1, 1]), 4, "label_k", k=1)


@pytest.mark.parametrize("gamma", [0.0, 0.1, 0.37, 0.5, 1.0])
@pytest.mark.parametrize(("n", "workers"), [(100, 10), (103, 7), (10, 10)])
def test_similarity_is_its_definition(gamma, n, workers):
    labels = np.random.default_rng(1).integers(0, 5, n)
    shards = fedsim.partition(labels, workers, "similarity", seed=3, gamma=gamma)
    drawn = numpy_generator(3, "partition").permutation(n).tolist()
    at_random = drawn[: round(gamma * n)]
    rest = sorted((index for index in range(n) if index not in at_random), key=lambda index: labels[index])
    parts = [len([index for index in shard if index in at_random]) for shard in shards]
    assert [index for shard, part in zip(shards, parts, strict=True) for index in shard[:part]] == at_random
    assert [index for shard, part in zip(shards, parts, strict=True) for index in shard[part:]] == rest
    for sizes in (parts, [len(shard) for shard in shards]):
        assert max(sizes) - min(sizes) <= 1
