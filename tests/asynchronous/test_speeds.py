from __future__ import annotations

import math

import numpy as np
import pytest

from fedsim.asynchronous.clock.speeds import draw_speeds, speed
from fedsim.core.randomness import numpy_generator
from fedsim.errors import ExperimentError
from tests.asynchronous.clock_tables import speeds_of


def test_deterministic_speeds_are_their_formulas():
    assert speeds_of(3, "equal").tolist() == [1.0, 1.0, 1.0]
    assert speeds_of(3, "list", values=[1, 2.5, 0.5]).tolist() == [1.0, 2.5, 0.5]
    assert speeds_of(4, "linear", ratio=7.0).tolist() == pytest.approx([1, 3, 5, 7], abs=1e-12)
    assert speeds_of(4, "geometric", ratio=8.0).tolist() == pytest.approx([1, 2, 4, 8], abs=1e-12)
    assert speeds_of(1, "linear").tolist() == speeds_of(1, "geometric").tolist() == [1.0]


@pytest.mark.parametrize("name", ["linear", "geometric"])
def test_shuffle_permutes_the_factors(name):
    in_order, shuffled = speeds_of(50, name), speeds_of(50, name, shuffle=True)
    assert (in_order[0], in_order[-1]) == (1, 8)
    assert sorted(shuffled) == in_order.tolist()
    assert shuffled.tolist() != in_order.tolist() != speeds_of(50, name, seed=1, shuffle=True).tolist()


def test_stragglers_are_a_drawn_fraction():
    assert sorted(speeds_of(10, "stragglers", fraction=0.3, factor=5.0)) == [1.0] * 7 + [5.0] * 3
    assert len({tuple(speeds_of(10, "stragglers", seed, fraction=0.3)) for seed in range(20)}) > 10
    assert speeds_of(4, "stragglers", fraction=0.0).tolist() == [1.0] * 4
    assert speeds_of(4, "stragglers", fraction=1.0, factor=2.0).tolist() == [2.0] * 4


def test_lognormal_speeds_have_median_1_and_logarithms_of_deviation_sigma():
    logs = np.log(speeds_of(100_000, "lognormal", sigma=0.7))
    assert np.median(logs) == pytest.approx(0, abs=0.015)  # four standard errors: 1.2533 * 0.7 / sqrt(100,000) each
    assert logs.mean() == pytest.approx(0, abs=0.009)
    assert logs.std() == pytest.approx(0.7, rel=0.01)


def test_pareto_speeds_have_mean_1_and_the_quantiles_of_the_formula():
    factors = speeds_of(200_000, "pareto", alpha=3.0)  # standard deviation 1 / sqrt(alpha (alpha - 2)) = 0.58
    assert factors.mean() == pytest.approx(1, abs=0.006)
    factors = speeds_of(200_000, "pareto", alpha=1.5)
    assert factors.min() == pytest.approx(1 / 3, rel=1e-3)
    for share in (0.25, 0.5, 0.9):
        assert np.quantile(factors, share) == pytest.approx(1 / 3 * (1 - share) ** (-1 / 1.5), rel=0.02)


@pytest.mark.parametrize("plug", [plug for plug in speed if plug.name != "list"], ids=lambda plug: plug.name)
def test_speeds_are_positive_and_a_pure_function_of_the_seed(plug):
    first, again = (draw_speeds(plug, plug.check({}), 1000, 3) for _ in range(2))
    assert np.array_equal(first, again)
    assert first.dtype == np.float64
    assert first.min() > 0


def test_speeds_are_drawn_as_documented():
    drawn = numpy_generator(5, "speed").standard_normal(4)
    assert speeds_of(4, "lognormal", 5, sigma=0.5).tolist() == [math.exp(0.5 * z) for z in drawn]


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("list", {"values": [1.0, 2.0]}, r"clock.speed.values: 2 values for 3 workers; give one for each worker"),
        ("list", {"values": [1.0, 0.0, 2.0]}, r"clock.speed.values\[1\] = 0.0: must be greater than 0"),
        ("list", {"values": [1.0, math.inf, 2.0]}, r"clock.speed.values\[1\] = inf: must be a finite number"),
        ("lognormal", {"sigma": 11.0}, "clock.speed.sigma = 11.0: must be less than or equal to 10"),
        ("pareto", {"alpha": 1.0}, "clock.speed.alpha = 1.0: must be greater than 1"),
        ("geometric", {"ratio": 0.5}, "clock.speed.ratio = 0.5: must be greater than or equal to 1"),
        ("stragglers", {"fraction": 1.5}, "clock.speed.fraction = 1.5: must be less than or equal to 1"),
    ],
)
def test_impossible_speeds_are_refused(name, params, message):
    with pytest.raises(ValueError, match=message):
        speeds_of(3, name, **params)


def too_few(n_workers):
    return np.ones(n_workers - 1)


def not_a_number(n_workers):
    return np.array([1.0, math.nan, 0.0])


def zero(n_workers):
    return np.array([1.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_few", r"must return factors of shape \[3\], not \[2\]"),
        ("not_a_number", "returned factor nan for worker 1; it must be finite"),
        ("zero", "returned a factor of 0; factors must be positive"),
    ],
)
def test_the_factors_of_an_imported_speed_are_checked(name, message):
    with pytest.raises(ExperimentError, match=f'clock.speed.name = ".*": {message}'):
        speeds_of(3, f"{__name__}:{name}")
