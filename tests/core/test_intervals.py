from __future__ import annotations

import math

import numpy as np
import pytest
import scipy

from fedsim.core.confidence import estimate, fixed


@pytest.mark.parametrize("n", [2, 3, 5, 30])
def test_the_interval_is_that_of_scipy(n):
    values = np.random.default_rng(n).normal(size=n)
    low, high = scipy.stats.t.interval(0.95, n - 1, loc=values.mean(), scale=scipy.stats.sem(values))
    got = estimate(values)
    assert got.mean - got.half_width == pytest.approx(low, abs=1e-9)
    assert got.mean + got.half_width == pytest.approx(high, abs=1e-9)


def test_one_value_has_no_interval_and_includes_itself_alone():
    one = estimate([0.5])
    assert (one.mean, one.half_width, one.n) == (0.5, math.inf, 1)
    assert one.includes(0.5)
    assert not one.includes(0.4)
    assert one.text() == "0.5000"


def test_two_values_are_shown_and_more_have_an_interval():
    assert estimate([0.1]).text(sign=True) == "+0.1000"
    assert estimate([0.9, 0.92]).text() == "0.9100 (0.9000, 0.9200)"
    assert estimate([0.01, -0.02]).text(sign=True) == "-0.0050 (+0.0100, -0.0200)"
    assert estimate([0.9, 0.92, 0.91]).text() == "0.9100 ± 0.0248"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.82345, "0.8235"),
        (0.82355, "0.8236"),
        (0.03125, "0.0313"),  # exact in binary: formatted by itself, Python would round it to even
        (0.1 + 0.2 - 0.17995, "0.1201"),  # 0.12004999999999999
        (-0.82345, "-0.8235"),
        (1e300, f"{10**300}.0000"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_halves_are_rounded_away_from_zero(value, text):
    assert fixed(value) == text
