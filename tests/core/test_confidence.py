"""Intervals, quantiles and tail probabilities equal SciPy's, and numbers are rounded as decimal text."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy
from scipy import stats

from fedsim.core.confidence import (
    chi_square_tail,
    estimate,
    f_tail,
    fixed,
    student_quantile,
    studentized_range_quantile,
)


@pytest.mark.parametrize("n", [2, 3, 5, 30])
def test_the_interval_is_that_of_scipy(n):
    values = np.random.default_rng(n).normal(size=n)
    low, high = scipy.stats.t.interval(0.95, n - 1, loc=values.mean(), scale=scipy.stats.sem(values))
    got = estimate(values)
    assert got.mean - got.half_width == pytest.approx(low, abs=1e-9)
    assert got.mean + got.half_width == pytest.approx(high, abs=1e-9)


def test_one_value_has_no_interval_and_includes_itself_alone():
    single = estimate([0.5])
    assert (single.mean, single.half_width, single.n) == (0.5, math.inf, 1)
    assert single.includes(0.5)
    assert not single.includes(0.4)
    assert single.text() == "0.5000"


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
        (0.03125, "0.0313"),  # exact in binary, where Python's formatting would round to even
        (0.1 + 0.2 - 0.17995, "0.1201"),  # in binary 0.12004999999999999
        (-0.82345, "-0.8235"),
        (1e300, f"{10**300}.0000"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_halves_are_rounded_away_from_zero(value, text):
    assert fixed(value) == text


@pytest.mark.parametrize("degrees", [*range(1, 31), 50, 99, 1000, 100_000])
def test_students_quantile(degrees):
    expected = stats.t.ppf(0.975, degrees)
    assert student_quantile(degrees) == pytest.approx(expected, rel=1e-10)  # the accuracy of old versions of SciPy


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9, 10, 30, 101])
def test_the_tail_of_chi_square(degrees):
    for x in (0.0, 0.01, 0.5, 1.0, 5.0, 30.0, 200.0):
        assert chi_square_tail(x, degrees) == pytest.approx(stats.chi2.sf(x, degrees), rel=1e-11, abs=1e-300)


@pytest.mark.parametrize(("numerator", "denominator"), [(1, 1), (2, 8), (3, 27), (9, 63), (20, 2000)])
def test_the_tail_of_fishers_distribution(numerator, denominator):
    for x in (0.0, 0.1, 1.0, 3.3, 40.0, 1000.0, np.inf):
        expected = stats.f.sf(x, numerator, denominator)
        assert f_tail(x, numerator, denominator) == pytest.approx(expected, rel=1e-8, abs=1e-14)


@pytest.mark.parametrize("candidates", [2, 3, 4, 5, 10, 50, 100])
def test_the_quantile_of_the_range(candidates):
    expected = stats.studentized_range.ppf(0.95, candidates, np.inf)
    assert studentized_range_quantile(candidates) == pytest.approx(expected, rel=1e-6)
