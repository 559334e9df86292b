from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

from fedsim.asynchronous import delays
from fedsim.asynchronous.calendar import Calendar
from fedsim.asynchronous.delays import BLOCK, Delays, noise, speed
from fedsim.errors import ExperimentError
from fedsim.randomness import numpy_generator
from fedsim.sections import Noise, Speed
from tests.asynchronous.timing import delays_of, noise_of


def test_a_unit_takes_what_the_formula_says():
    """Twice as slow, 10 steps of 0.25 s, latency 0.5 s, 3,000 bytes at 1,000 a second."""
    unit = Delays(np.array([1.0, 2.0]), noise_of("constant"), base=0.25, latency=0.5, bandwidth=1000.0)
    assert unit.seconds(0, 0, 10) == 2.5  # nothing is sent
    assert unit.seconds(1, 0, 10, 0) == 5.0
    assert unit.seconds(1, 7, 10, 3000) == 8.5
    assert isinstance(unit.seconds(1, 0, 10), float)
    unlimited = Delays(np.array([1.0, 2.0]), noise_of("constant"))
    assert unlimited.seconds(1, 0, 3, 10**15) == 6.0


@pytest.mark.parametrize("name", ["shifted_exponential", "lognormal", "pareto"])
def test_a_unit_takes_what_the_documented_draws_give(name):
    params = noise.get(name).check({})
    unit = Delays(np.array([3.0, 0.5]), noise_of(name), seed=4, base=0.1, latency=0.2, bandwidth=50.0)
    for worker, k in ((0, 0), (1, 0), (1, BLOCK - 1), (1, BLOCK), (0, 10 * BLOCK + 3)):
        rng, size = numpy_generator(4, "delay", worker, k // BLOCK), BLOCK
        if name == "shifted_exponential":
            factor = rng.standard_exponential(size)[k % BLOCK]
        elif name == "lognormal":
            sigma = params["sigma"]
            factor = math.exp(sigma * rng.standard_normal(size)[k % BLOCK] - sigma * sigma / 2)
        else:
            alpha = params["alpha"]
            factor = (rng.pareto(alpha, size)[k % BLOCK] + 1) * (alpha - 1) / alpha
        expected = 7 * 0.1 * [3.0, 0.5][worker] * factor + 0.2 + 20 / 50.0
        assert unit.seconds(worker, k, 7, 20) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["constant", "shifted_exponential", "lognormal", "pareto"])
def test_a_unit_takes_as_long_whenever_it_is_asked_for(name):
    asked = [(worker, k) for worker in range(4) for k in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK)]
    in_order = {each: delays_of(4, name, 1).seconds(*each, 1) for each in asked}
    kept = delays_of(4, name, 1)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(asked).tolist()
        assert all(kept.seconds(worker, k, 1) == in_order[worker, k] for worker, k in order)
    if name != "constant":
        assert len(set(in_order.values())) == len(asked)
        assert delays_of(4, name, 2).seconds(0, 0, 1) != in_order[0, 0]


def test_a_unit_takes_as_long_however_many_workers_there_are():
    few, many = delays_of(3, "lognormal"), delays_of(1000, "lognormal")
    assert [few.seconds(worker, 5, 1) for worker in range(3)] == [many.seconds(worker, 5, 1) for worker in range(3)]


def test_numbers_may_be_numpys():
    unit = delays_of(3, "lognormal")
    assert unit.seconds(np.int64(2), np.int64(BLOCK), 1) == delays_of(3, "lognormal").seconds(2, BLOCK, 1)


def test_a_pickled_one_gives_the_same():
    unit = Delays(np.array([1.0, 2.0]), noise_of("pareto"), 3, 0.5, 0.1, 100.0)
    unit.seconds(0, 0, 1)
    again = pickle.loads(pickle.dumps(unit))
    assert [again.seconds(worker, k, 2, 5) for worker in (0, 1) for k in (0, BLOCK)] == [
        unit.seconds(worker, k, 2, 5) for worker in (0, 1) for k in (0, BLOCK)
    ]


def test_speeds_are_left_as_they_are():
    speeds = np.array([1.0, 2.0])
    Delays(speeds, noise_of("lognormal"), base=3.0).seconds(1, 0, 1)
    assert speeds.tolist() == [1.0, 2.0]


def test_only_so_many_blocks_are_kept_and_none_is_needed(monkeypatch):
    monkeypatch.setattr(delays, "KEPT", 3)
    unit, reference = delays_of(10, "lognormal"), delays_of(10, "lognormal")
    expected = {worker: reference.seconds(worker, 0, 1) for worker in (0, 1, 2)}
    for worker in (0, 1, 2, 0, 9, 1, 5, 0, 7, 2):
        seconds = unit.seconds(worker, 0, 1)
        assert seconds == expected.get(worker, seconds)
        assert len(unit._blocks) <= 3


def test_of_a_million_workers_only_those_asked_for_cost_anything():
    unit = delays_of(10**6, "lognormal")
    assert len(unit._blocks) == 0
    for worker in range(0, 10**6, 10_000):
        unit.seconds(worker, 0, 1)
    assert len(unit._blocks) == 100


@pytest.mark.parametrize(
    ("worker", "unit", "message"),
    [
        (-1, 0, "worker = -1: must be between 0 and 2"),
        (3, 0, "worker = 3: must be between 0 and 2"),
        (0, -1, "unit = -1: must be at least 0"),
    ],
)
def test_there_is_no_other_worker_or_unit(worker, unit, message):
    with pytest.raises(ValueError, match=message):
        delays_of(3, "lognormal").seconds(worker, unit, 1)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"base": 0.0}, "clock.base = 0.0: must be a finite number of seconds, greater than 0"),
        ({"base": math.nan}, "clock.base = nan"),
        ({"latency": -1.0}, "clock.latency = -1.0: must be a finite number of seconds, at least 0"),
        ({"latency": math.inf}, "clock.latency = inf"),
        ({"bandwidth": 0.0}, "clock.bandwidth = 0.0: must be greater than 0, in bytes per second"),
        ({"bandwidth": math.nan}, "clock.bandwidth = nan"),
    ],
)
def test_impossible_clocks_are_refused(params, message):
    with pytest.raises(ExperimentError, match=message):
        delays_of(2, "constant", **params)


def test_tables_of_an_experiment_hold_them():
    assert Speed.model_validate("equal").params == {}
    table = Speed.model_validate({"name": "lognormal", "sigma": 1})
    assert table.model_dump(mode="json") == {"name": "lognormal", "sigma": 1.0}
    table = Noise.model_validate({"name": "trace", "path": "later.csv"})  # read when it is needed, and not before
    assert table.model_dump(mode="json") == {"name": "trace", "path": "later.csv"}


@pytest.mark.parametrize("plug", [*speed, *noise], ids=lambda plug: f"{plug.kind}-{plug.name}")
def test_every_plug_says_in_a_line_what_it_is(plug):
    assert plug.summary.endswith(".")


@pytest.mark.parametrize(("n", "k", "rate"), [(10, 1, 2.0), (10, 6, 0.5), (10, 10, 1.0)])
def test_the_kth_of_n_exponential_arrivals_comes_when_theory_says(n, k, rate):
    """E[T] = (H_n - H_(n-k)) / rate, and the variance is the sum of 1 / (j rate)^2 over j = n-k+1, ..., n."""
    unit, rounds, times = delays_of(n, "shifted_exponential", base=1 / rate), 3000, []
    for round in range(rounds):
        calendar = Calendar()
        for worker in range(n):
            calendar.add(worker, unit.seconds(worker, round, 1))
        arrived = []
        while len(arrived) < k:
            arrived += calendar.next()
        times.append(calendar.now)
    expected = sum(1 / j for j in range(n - k + 1, n + 1)) / rate
    variance = sum(1 / j**2 for j in range(n - k + 1, n + 1)) / rate**2
    assert np.mean(times) == pytest.approx(expected, abs=4 * math.sqrt(variance / rounds))


def test_noise_is_drawn_once_for_a_block_of_units(monkeypatch):
    drawn = []
    monkeypatch.setattr(delays, "numpy_generator", lambda *key: drawn.append(key) or numpy_generator(*key))
    unit = delays_of(10, "lognormal", latency=0.1, bandwidth=1e6)
    drawn.clear()
    for k in range(3 * BLOCK):
        for worker in range(10):
            unit.seconds(worker, k, 10, 1000)
    assert len(drawn) == 3 * 10
