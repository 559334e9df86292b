from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

import fedsim
from fedsim.core.randomness import numpy_generator
from fedsim.errors import ExperimentError

LABELS = np.random.default_rng(5).choice(6, 3000, p=[0.3, 0.25, 0.2, 0.15, 0.07, 0.03])


def counts_of(labels, workers, strategy, seed=0, **params):
    return fedsim.label_counts(labels, fedsim.partition(labels, workers, strategy, seed, **params))


def plain_dirichlet(labels, workers, rng, alpha, min_size, balanced):
    """The definition in loops, class by class, in exact arithmetic."""
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
def test_dirichlet_is_its_definition(alpha, min_size, balanced):
    for seed in range(2):
        params = {"alpha": alpha, "min_size": min_size, "balanced": balanced}
        shards = fedsim.partition(LABELS, 8, "dirichlet", seed, **params)
        expected = plain_dirichlet(LABELS, 8, numpy_generator(seed, "partition"), **params)
        assert [shard.tolist() for shard in shards] == expected


@pytest.mark.parametrize("alpha", [0.1, 1e-300])
def test_balanced_gives_large_workers_no_more_samples(alpha):
    labels = np.random.default_rng(0).integers(0, 200, 3000)
    for seed in range(5):
        counts = counts_of(labels, 5, "dirichlet", seed, alpha=alpha, balanced=True)
        held = np.cumsum(counts, axis=1) - counts  # before each class
        assert (counts[held >= 600] == 0).all()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"min_size": 31},
            "partition.min_size = 31: 100 workers with that many samples each need 3100, and .* are 3000",
        ),
        (
            {"min_size": 29, "alpha": 0.1},
            "partition.min_size = 29: not reached in 1000 draws with alpha = 0.1 for 100 workers and 3000 samples: "
            "the smallest shard had 0 at best; take a smaller min_size, a larger alpha or fewer workers",
        ),
    ],
)
def test_impossible_parameters_are_an_error(params, message):
    with pytest.raises(ExperimentError, match=message):
        fedsim.partition(LABELS, 100, "dirichlet", **params)


def one_at_a_time(labels, workers, rng, alpha):
    """How many samples of each class every worker draws, looking at each draw by itself."""
    classes = sorted(set(labels.tolist()))
    left = [int((labels == label).sum()) for label in classes]
    counts = np.zeros((workers, len(classes)), int)
    for worker in range(workers):
        mixture = rng.dirichlet([alpha] * len(classes))
        wanted = len(labels) // workers + (worker < len(labels) % workers)
        while wanted:
            mixture = np.array([q if remaining else 0.0 for q, remaining in zip(mixture, left, strict=True)])
            mixture = mixture / mixture.sum()
            for drawn in rng.choice(len(classes), wanted, p=mixture):
                if not left[drawn]:
                    break
                left[drawn] -= 1
                counts[worker, drawn] += 1
                wanted -= 1
    return counts


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("workers", [1, 7, 50])
def test_dirichlet_workers_is_its_definition(alpha, workers):
    for seed in range(2):
        shards = fedsim.partition(LABELS, workers, "dirichlet_workers", seed, alpha=alpha)
        rng = numpy_generator(seed, "partition")
        counts = one_at_a_time(LABELS, workers, rng, alpha)
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
