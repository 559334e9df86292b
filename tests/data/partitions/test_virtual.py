from __future__ import annotations

import numpy as np
import pytest

import fedsim
from fedsim.core.randomness import numpy_generator
from fedsim.data import partition_shards
from fedsim.errors import ExperimentError

LABELS = np.random.default_rng(0).choice(4, 500, p=[0.1, 0.2, 0.3, 0.4])


def plain_shard(labels, worker, seed, samples, alpha):
    """The documented draws, one sample after another."""
    rng = numpy_generator(seed, "partition", worker)
    if alpha is None:
        return rng.choice(len(labels), samples, replace=False, shuffle=False)
    classes = sorted(set(labels.tolist()))
    members = [[i for i, label in enumerate(labels) if label == c] for c in classes]
    left = [len(of_class) for of_class in members]
    mixture = rng.dirichlet([alpha * len(classes) * len(of_class) / len(labels) for of_class in members])
    counts = [0] * len(classes)
    while sum(counts) < samples:
        mixture = np.array([q if rest else 0.0 for q, rest in zip(mixture, left, strict=True)])
        mixture /= mixture.sum()
        for c in rng.choice(len(classes), samples - sum(counts), p=mixture):
            if not left[c]:
                break
            counts[c], left[c] = counts[c] + 1, left[c] - 1
    picks = [rng.choice(len(m), k, replace=False, shuffle=False) for m, k in zip(members, counts, strict=True) if k]
    wanted = [m for m, k in zip(members, counts, strict=True) if k]
    return np.array([m[place] for m, places in zip(wanted, picks, strict=True) for place in places])


@pytest.mark.parametrize("alpha", [None, 100.0, 1.0, 0.05])
@pytest.mark.parametrize("samples", [1, 60, 500])
def test_virtual_is_its_definition(alpha, samples):
    """500 of 500: classes run out."""
    given = {} if alpha is None else {"alpha": alpha}
    shards = fedsim.partition(LABELS, 5, "virtual", seed=3, samples=samples, **given)
    for worker, shard in enumerate(shards):
        assert np.array_equal(shard, plain_shard(LABELS, worker, 3, samples, alpha))
        assert len(set(shard.tolist())) == samples
        assert shard.dtype == np.int64


def test_a_shard_depends_only_on_seed_and_worker():
    few, many = (partition_shards(LABELS, n, "virtual", seed=1, alpha=0.5) for n in (10, 10**6))
    assert all(np.array_equal(few.of(worker), many.of(worker)) for worker in reversed(range(10)))
    assert not np.array_equal(few.of(0), few.of(1))
    assert not np.array_equal(few.of(0), partition_shards(LABELS, 10, "virtual", seed=2, alpha=0.5).of(0))


def test_an_infinite_alpha_is_no_skew():
    first, second = (fedsim.partition(LABELS, 3, "virtual", **skew) for skew in ({}, {"alpha": float("inf")}))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    experiment = fedsim.Experiment(workers=10**6, cohort=2, partition={"strategy": "virtual", "alpha": float("inf")})
    assert experiment.resolved()["partition"] == {"strategy": "virtual", "samples": 60}


def test_impossible_parameters_are_an_error():
    with pytest.raises(ExperimentError, match=r"^partition.samples = 501: more than the 500 samples there are$"):
        fedsim.partition(LABELS, 3, "virtual", samples=501)
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ExperimentError, match=r"^partition.alpha = "):
            fedsim.partition(LABELS, 3, "virtual", alpha=wrong)
    with pytest.raises(ExperimentError, match=r"^workers = 0: must be at least 1$"):
        fedsim.partition(LABELS, 0, "virtual")
