"""Cohort strategies: which workers they draw and how often, and weights by inverse probability."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import fedsim
from fedsim.config.schema import Sampling
from fedsim.core.randomness import sample_cohort
from fedsim.data import ListedShards, partition_shards
from fedsim.errors import ExperimentError
from fedsim.server import CohortSampler, CohortStrategy
from fedsim.server.cohort import Poisson, inclusion_probabilities

SIZES = (30, 1, 9, 5, 5, 10)
ROUNDS = 800


def shards_of(sizes):
    return ListedShards.of_arrays(np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]))


def sampler(size, sizes=SIZES, dropout=0.0, weighted=False, shards=None, **sampling):
    return CohortSampler(Sampling(**sampling).component, size, shards or shards_of(sizes), dropout, weighted, seed=0)


def frequencies(draw, n_workers):
    counts = np.zeros(n_workers)
    for round in range(1, ROUNDS + 1):
        counts[draw(round).workers] += 1
    return counts / ROUNDS


def assert_probabilities(observed, expected):
    """Check that frequencies are within five standard deviations of their probabilities."""
    expected = np.asarray(expected)
    assert (np.abs(observed - expected) <= 5 * np.sqrt(expected * (1 - expected) / ROUNDS) + 1e-12).all()


def test_uniform_cohorts_equal_those_of_earlier_versions():
    draw = sampler(3, name="uniform")
    assert [draw(round).workers for round in (1, 2, 9)] == [sample_cohort(0, r, 6, 3).tolist() for r in (1, 2, 9)]


@pytest.mark.parametrize("size", [1, 10, 100, 5000])
def test_memory_for_poisson_cohorts_is_the_smallest_by_bernsteins_inequality(size):
    def bound(cohort):  # on the probability of at least `cohort` workers
        excess = cohort - size
        return math.exp(-(excess**2) / 2 / (size + excess / 3))

    largest = Poisson().largest(10**9, size)
    assert bound(largest) <= 1e-12 < bound(largest - 1)
    assert Poisson().largest(size + 3, size) == size + 3


@pytest.mark.parametrize("size", [1, 3, 6])
def test_by_size_draws_each_worker_with_its_probability(size):
    draw = sampler(size, name="by_size")
    assert all(len(draw(round).workers) == size for round in range(1, 50))
    assert_probabilities(frequencies(draw, 6), inclusion_probabilities(np.array(SIZES), size))


def test_probabilities_by_size_are_proportional_up_to_one():
    assert inclusion_probabilities(np.array(SIZES), 1) == pytest.approx(np.array(SIZES) / 60)
    assert inclusion_probabilities(np.array(SIZES), 3) == pytest.approx([1, 2 / 30, 18 / 30, 10 / 30, 10 / 30, 20 / 30])
    assert inclusion_probabilities(np.array(SIZES), 6) == pytest.approx(np.ones(6))


@pytest.mark.parametrize("weights", [False, True])
def test_sizes_that_are_not_known_are_refused(weights):
    shards = partition_shards(np.arange(100) % 10, "tests.components:some", 50)
    with pytest.raises(ExperimentError, match="needs the number of samples of every worker"):
        sampler(3, shards=shards, name="uniform" if weights else "by_size", weighted=weights)


def test_round_robin_takes_every_worker_equally_often():
    draw = sampler(4, name="round_robin")
    assert [draw(round).workers for round in (1, 2, 3)] == [[0, 1, 2, 3], [0, 1, 4, 5], [2, 3, 4, 5]]


def test_power_of_choice_takes_the_highest_losses_of_its_candidates():
    asked = []

    def losses(workers):
        asked.append(workers)
        return np.array([0.5, np.nan, 0.7, 0.1, 0.7, 0.7])[workers]

    cohort = sampler(2, name="power_of_choice", candidates=6)(1, losses=losses)
    assert (cohort.workers, cohort.candidates) == ([1, 2], list(range(6)))
    for round in range(1, 20):
        cohort = sampler(2, name="power_of_choice", candidates=4)(round, losses=losses)
        assert len(asked[-1]) == 4
        best = sorted(asked[-1], key=[1, 2, 4, 5, 0, 3].index)[:2]
        assert cohort.workers == sorted(best)
    assert_probabilities(
        frequencies(lambda r: sampler(1, name="power_of_choice", candidates=1)(r, losses=losses), 6),
        np.array(SIZES) / 60,
    )


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("worker,from,to\n0,1,4\n2,1,2.5\n0,6,inf\n5,2,3\n\n3,2,3\n")
    return str(path)


def test_only_available_workers_are_drawn(trace):
    draw = sampler(2, name="available", trace=trace)
    assert [draw(round).workers for round in (1, 3, 4, 6)] == [[0, 2], [0], [], [0]]
    assert [draw(round).metrics["available_workers"] for round in (1, 2, 3, 4)] == [2, 4, 1, 0]
    assert {tuple(sampler(2, name="available", trace=trace)(9, now=now).workers) for now in (4.5, 2.4)} > {()}
    drawn = {tuple(draw(9 + extra, now=2.0).workers) for extra in range(100)}
    assert drawn == set(itertools.combinations([0, 2, 3, 5], 2))


def test_daily_workers_are_on_for_the_same_part_of_each_period():
    draw = sampler(2000, sizes=[1] * 2000, name="daily", period=8.0, online=0.25)
    on = np.array([np.isin(np.arange(2000), draw(round).workers) for round in range(1, 17)])
    assert (on[:8].sum(0) == 2).all()
    assert (on[:8] == on[8:]).all()
    assert 400 < on[0].sum() < 600
    few = sampler(10, sizes=[1] * 2000, name="daily", period=8.0, online=0.25)
    assert all(np.isin(few(round).workers, np.flatnonzero(on[round - 1])).all() for round in range(1, 9))


@pytest.mark.parametrize(
    ("sampling", "size", "dropout"),
    [
        *(("uniform", 2, 0.3), ("by_size", 3, 0.0), ("by_size", 2, 0.3), ("round_robin", 2, 0.0)),
        ({"name": "fixed", "workers": [0, 1, 2, 3, 4, 5]}, 6, 0.3),
    ],
)
def test_weights_by_inverse_probability_are_unbiased(sampling, size, dropout):
    sampling = sampling if isinstance(sampling, dict) else {"name": sampling}
    draw = sampler(size, dropout=dropout, weighted=True, **sampling)
    totals = np.zeros((ROUNDS, 6))
    for round in range(ROUNDS):
        for worker, weight in draw(round + 1).weights.items():
            totals[round, worker] = weight * (1 - dropout)  # a worker drops out independently of everything else
    share = np.array(SIZES) / 60
    assert (np.abs(totals.mean(0) - share) <= 5 * totals.std(0) / np.sqrt(ROUNDS) + 1e-9).all()


def test_weights_by_inverse_probability_need_the_probabilities():
    draw = sampler(2, name="power_of_choice", candidates=4, weighted=True)
    with pytest.raises(ExperimentError, match="which .*power_of_choice.* does not provide"):
        draw(1, losses=lambda workers: np.zeros(len(workers)))


def test_workers_drop_out_independently_and_not_from_the_choice():
    plain, dropping = sampler(3, name="uniform"), sampler(3, dropout=0.25, name="uniform")
    cohorts = [dropping(round) for round in range(1, ROUNDS + 1)]
    assert all(sorted(c.workers + c.dropped) == plain(r).workers for r, c in enumerate(cohorts[:100], 1))
    assert_probabilities(np.array([sum(len(c.dropped) for c in cohorts) / 3 / ROUNDS]), [0.25])
    assert_probabilities(np.array([np.mean([len(c.dropped) == 3 for c in cohorts])]), [0.25**3])


@pytest.mark.parametrize(
    ("result", "line"),
    [
        ([1, 1], "must return at most 2 workers without duplicates"),
        ([6], "must return workers from 0 to 5"),
        (([1], [0.0]), "must return a probability > 0"),
    ],
)
def test_a_wrong_result_of_a_strategy_is_refused(result, line):
    with pytest.raises(ExperimentError, match=line):
        CohortStrategy(lambda: result, "own", {})(n_workers=6, size=2)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("worker;from;to\n", "the first line must be worker,from,to"),
        ("worker,from,to\n", "no worker is ever available"),
        ("worker,from,to\n1,3,2\n", "line 2, "),
        ("worker,from,to\n1\r2,1,2\n", "cannot be read: "),
        ("worker,from,to\n9,1,2\n", "contains worker 9; workers are 0 to 5"),
    ],
)
def test_a_wrong_trace_gives_one_line(text, line, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(text, newline="")
    with pytest.raises(ExperimentError) as caught:
        fedsim.Experiment(workers=6, cohort=3, sampling={"name": "available", "trace": str(path)})
    assert len(caught.value.lines) == 1
    assert line in caught.value.lines[0]
