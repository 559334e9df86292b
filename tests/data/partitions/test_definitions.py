"""Partitions compared with their definitions in plain Python loops."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

import fedsim
from fedsim.core.randomness import numpy_generator
from fedsim.data import partition_shards
from fedsim.errors import ExperimentError


def sizes_of(*args, **params):
    return [len(shard) for shard in fedsim.partition(*args, **params)]


def test_contiguous_gives_equal_runs_and_the_remainder_to_the_last():
    shards = fedsim.partition(np.zeros(11), "contiguous", 3)
    assert [shard.tolist() for shard in shards] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9, 10]]
    assert sizes_of(np.zeros(60_000), "contiguous", 4) == [15_000] * 4


def test_quantity_cuts_a_shuffled_whole_by_dirichlet_shares():
    shards = fedsim.partition(np.zeros(1000), "quantity", 5, seed=4, beta=0.7)
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
    sizes = sizes_of(np.zeros(1000), "quantity", 4, seed=2, distribution="lognormal", sigma=0.5)
    draws = numpy_generator(2, "partition").lognormal(0, 0.5, 4)
    ends = [int(sum(draws[: worker + 1]) / sum(draws) * 1000) for worker in range(3)]
    assert sizes == [ends[0], ends[1] - ends[0], ends[2] - ends[1], 1000 - ends[2]]
    assert sizes_of(np.zeros(1000), "quantity", 8, distribution="lognormal", sigma=0) == [125] * 8


def test_natural_gives_each_worker_the_samples_of_one_owner():
    owners = np.array([30, 10, 20, 30, 10, 50, 40, 30])
    shards = fedsim.partition(np.zeros(8), "natural", 5, ids={"session": np.arange(8), "writer": owners}, by="writer")
    assert [shard.tolist() for shard in shards] == [[1, 4], [2], [0, 3, 7], [6], [5]]


def test_natural_draws_owners_for_fewer_workers():
    owners = np.repeat([30, 10, 20, 50, 40], [4, 3, 3, 2, 1])
    shards = fedsim.partition(np.zeros(13), "natural", 2, seed=3, ids=owners)
    drawn = np.sort(numpy_generator(3, "partition").choice(5, 2, replace=False))
    assert [shard.tolist() for shard in shards] == [
        np.flatnonzero(owners == [10, 20, 30, 40, 50][k]).tolist() for k in drawn
    ]


def test_shards_matches_its_definition():
    labels = np.array([2, 0, 1, 0, 2, 1, 0, 1, 2, 0, 1, 2, 0])
    shards = fedsim.partition(labels, "shards", 3, seed=6)
    order = sorted(range(13), key=lambda index: labels[index])  # Python's sort is stable
    runs = [order[:3], order[3:5], order[5:7], order[7:9], order[9:11], order[11:]]  # 13 = 3 + 5 times 2
    numbers = numpy_generator(6, "partition").permutation(6)
    for worker, shard in enumerate(shards):
        assert shard.tolist() == runs[numbers[2 * worker]] + runs[numbers[2 * worker + 1]]


@pytest.mark.parametrize("workers", [12, 3])
def test_label_k_matches_its_definition(workers):
    labels, classes, k = np.arange(200) % 5, 5, 3
    shards = fedsim.partition(labels, "classes_per_worker", workers, seed=8, k=k)
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


@pytest.mark.parametrize("gamma", [0.0, 0.1, 0.37, 0.5, 1.0])
@pytest.mark.parametrize(("n", "workers"), [(100, 10), (103, 7), (10, 10)])
def test_similarity_matches_its_definition(gamma, n, workers):
    labels = np.random.default_rng(1).integers(0, 5, n)
    shards = fedsim.partition(labels, "similarity", workers, seed=3, gamma=gamma)
    drawn = numpy_generator(3, "partition").permutation(n).tolist()
    at_random = drawn[: round(gamma * n)]
    rest = sorted((index for index in range(n) if index not in at_random), key=lambda index: labels[index])
    parts = [len([index for index in shard if index in at_random]) for shard in shards]
    assert [index for shard, part in zip(shards, parts, strict=True) for index in shard[:part]] == at_random
    assert [index for shard, part in zip(shards, parts, strict=True) for index in shard[part:]] == rest
    for sizes in (parts, [len(shard) for shard in shards]):
        assert max(sizes) - min(sizes) <= 1


LABELS = np.random.default_rng(5).choice(6, 3000, p=[0.3, 0.25, 0.2, 0.15, 0.07, 0.03])


def counts_of(labels, workers, strategy, seed=0, **params):
    return fedsim.label_counts(labels, fedsim.partition(labels, strategy, workers, seed=seed, **params))


def plain_dirichlet(labels, workers, rng, alpha, min_size, balanced):
    """Return the Dirichlet shards by their definition: loops over classes, in exact arithmetic."""
    n, classes = len(labels), sorted(set(labels.tolist()))
    members = {label: [index for index in range(n) if labels[index] == label] for label in classes}
    while True:
        ends, held = {}, [0] * workers
        for label in classes:
            shares = rng.dirichlet([alpha] * workers)
            if balanced:
                shares = [0.0 if held[w] >= n / workers else shares[w] for w in range(workers)]
            running = [sum(map(Fraction, shares[:w])) for w in range(workers + 1)]
            ends[label] = [math.floor(part / running[-1] * len(members[label])) for part in running]
            for w in range(workers):
                held[w] += ends[label][w + 1] - ends[label][w]
        if min(held) >= min_size:
            break
    shards = [[] for _ in range(workers)]
    for label in classes:
        shuffled = rng.permutation(members[label]).tolist()
        for w in range(workers):
            shards[w] += shuffled[ends[label][w] : ends[label][w + 1]]
    return shards


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("alpha", [0.2, 50.0])
@pytest.mark.parametrize("min_size", [1, 40])
def test_dirichlet_matches_its_definition(alpha, min_size, balanced):
    for seed in range(2):
        params = {"alpha": alpha, "min_size": min_size, "balanced": balanced}
        shards = fedsim.partition(LABELS, "dirichlet", 8, seed=seed, **params)
        expected = plain_dirichlet(LABELS, 8, numpy_generator(seed, "partition"), **params)
        assert [shard.tolist() for shard in shards] == expected


@pytest.mark.parametrize("alpha", [0.1, 1e-300])
def test_balanced_gives_large_workers_no_more_samples(alpha):
    labels = np.random.default_rng(0).integers(0, 200, 3000)
    for seed in range(5):
        counts = counts_of(labels, 5, "dirichlet", seed, alpha=alpha, balanced=True)
        held = np.cumsum(counts, axis=1) - counts  # number of samples held before each class
        assert (counts[held >= 600] == 0).all()


def one_at_a_time(mixture, left, wanted, rng):
    """Return how many samples of each class a worker draws, one after another. The counts in `left` decrease."""
    counts = [0] * len(left)
    while sum(counts) < wanted:
        mixture = np.array([q if remaining else 0.0 for q, remaining in zip(mixture, left, strict=True)])
        mixture = mixture / mixture.sum()
        for drawn in rng.choice(len(left), wanted - sum(counts), p=mixture):
            if not left[drawn]:
                break
            counts[drawn], left[drawn] = counts[drawn] + 1, left[drawn] - 1
    return counts


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("workers", [1, 7, 50])
def test_dirichlet_workers_matches_its_definition(alpha, workers):
    for seed in range(2):
        shards = fedsim.partition(LABELS, "dirichlet_workers", workers, seed=seed, alpha=alpha)
        rng = numpy_generator(seed, "partition")
        counts, left = np.zeros((workers, 6), int), np.bincount(LABELS).tolist()
        for worker in range(workers):
            wanted = len(LABELS) // workers + (worker < len(LABELS) % workers)
            counts[worker] = one_at_a_time(rng.dirichlet([alpha] * 6), left, wanted, rng)
        assert np.array_equal(fedsim.label_counts(LABELS, shards), counts)
        expected = [[] for _ in range(workers)]
        for label in range(6):
            shuffled = rng.permutation(np.flatnonzero(label == LABELS)).tolist()
            for worker in range(workers):
                expected[worker] += [shuffled.pop(0) for _ in range(counts[worker, label])]
        assert [shard.tolist() for shard in shards] == expected


@pytest.mark.parametrize("alpha", [1e-320, 1e-5, 1e12])
def test_dirichlet_workers_get_equal_sizes_for_any_alpha(alpha):
    sizes = counts_of(LABELS, 7, "dirichlet_workers", alpha=alpha).sum(1).tolist()
    assert sizes == [429, 429, 429, 429, 428, 428, 428]


FEW_LABELS = np.random.default_rng(0).choice(4, 500, p=[0.1, 0.2, 0.3, 0.4])


def plain_shard(labels, worker, seed, samples, alpha):
    """Return one virtual shard by the documented draws, one sample after another."""
    rng = numpy_generator(seed, "partition", worker)
    if alpha is None:
        return rng.choice(len(labels), samples, replace=False, shuffle=False)
    classes = sorted(set(labels.tolist()))
    members = [[i for i, label in enumerate(labels) if label == c] for c in classes]
    mixture = rng.dirichlet([alpha * len(classes) * len(of_class) / len(labels) for of_class in members])
    counts = one_at_a_time(mixture, [len(of_class) for of_class in members], samples, rng)
    picks = [rng.choice(len(m), k, replace=False, shuffle=False) for m, k in zip(members, counts, strict=True) if k]
    wanted = [m for m, k in zip(members, counts, strict=True) if k]
    return np.array([m[place] for m, places in zip(wanted, picks, strict=True) for place in places])


@pytest.mark.parametrize("alpha", [None, 100.0, 1.0, 0.05])
@pytest.mark.parametrize("samples", [1, 60, 500])
def test_virtual_matches_its_definition(alpha, samples):
    """With 500 of 500 samples, classes run out. The number of workers and the order of the calls do not matter."""
    parameters = {} if alpha is None else {"alpha": alpha}
    shards = partition_shards(FEW_LABELS, "virtual", 10**6, seed=3, samples=samples, **parameters)
    for worker in (999_999, *reversed(range(4))):
        shard = shards.of(worker).numpy()
        assert np.array_equal(shard, plain_shard(FEW_LABELS, worker, 3, samples, alpha))
        assert len(set(shard.tolist())) == samples
        assert shard.dtype == np.int64


def test_an_infinite_alpha_means_no_skew():
    first, second = (fedsim.partition(FEW_LABELS, "virtual", 3, **skew) for skew in ({}, {"alpha": float("inf")}))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    experiment = fedsim.Experiment(workers=10**6, cohort=2, partition={"name": "virtual", "alpha": float("inf")})
    assert experiment.resolved()["partition"] == {"name": "virtual", "samples": 60}


TEN = np.arange(100) % 10
IMPOSSIBLE = [
    (np.zeros(10), 0, "iid", {}, "n_workers = 0: must be between 1 and the number of samples, 10"),
    (np.zeros(10), 11, "iid", {}, "n_workers = 11: must be between 1 and the number of samples, 10"),
    (TEN, 4, "quantity", {"min_size": 25}, "min_size = 25: could not be reached in 1000 draws with beta = 0.5, 4 "),
    (TEN, 4, "quantity", {"distribution": "lognormal", "sigma": 1e12}, ".* had at most .*; use .* a smaller sigma or"),
    (
        np.zeros(49),
        10,
        "shards",
        {"s": 5},
        "s = 5: 10 workers with 5 pieces of the sorted samples per worker need at least 50 .* 49",
    ),
    (TEN, 20, "classes_per_worker", {"k": 11}, "k = 11: must be at most the number of classes, 10"),
    (TEN, 4, "classes_per_worker", {"k": 2}, "k = 2: 4 workers with 2 classes each cover only 8 of 10 .* be lost"),
    (np.array([0, 1, 1, 1, 1]), 4, "classes_per_worker", {"k": 1}, '.*"classes_per_worker": worker 2 got no samples'),
    (LABELS, 100, "dirichlet", {"min_size": 31}, "min_size = 31: 100 workers .* each need 3100 .* 3000"),
    (
        *(LABELS, 100, "dirichlet", {"min_size": 29, "alpha": 0.1}),
        "min_size = 29: could not be reached in 1000 draws with alpha = 0.1, 100 workers and 3000 samples "
        r"\(the smallest shard had at most 0 samples\); use a smaller min_size, a larger alpha or fewer workers",
    ),
    (FEW_LABELS, 3, "virtual", {"samples": 501}, "samples = 501: must be at most the data set's size, 500$"),
    *((FEW_LABELS, 3, "virtual", {"alpha": alpha}, "alpha = ") for alpha in (0.0, -1.0, float("nan"))),
    (FEW_LABELS, 0, "virtual", {}, "n_workers = 0: must be at least 1$"),
    (np.zeros(10), 3, "feature_rotation", {"groups": 4}, "groups = 4: must be at most .* workers, 3"),
    (
        *(np.zeros(10), 3, "feature_rotation", {"groups": 3, "angles": [0.0, 90.0]}),
        r"angles = \[0.0, 90.0\]: must contain one angle for each of the 3 groups .*, not 2",
    ),
]


@pytest.mark.parametrize(("labels", "workers", "strategy", "params", "message"), IMPOSSIBLE)
def test_what_is_impossible_is_an_error(labels, workers, strategy, params, message):
    with pytest.raises(ExperimentError, match=f"^{message}"):
        fedsim.partition(labels, strategy, workers, **params)
    if strategy == "feature_rotation":
        with pytest.raises(ExperimentError, match=f"^{message}"):
            fedsim.partition_transforms(strategy, workers, **params)
