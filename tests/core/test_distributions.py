"""Quantiles and tail probabilities are those of SciPy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special, stats

from fedsim.core.confidence import (
    beta_share,
    chi_square_tail,
    f_tail,
    student_quantile,
    studentized_range_quantile,
)


@pytest.mark.parametrize("degrees", [*range(1, 31), 50, 99, 1000, 100_000])
def test_students_quantile(degrees):
    assert student_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-11)


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


def test_the_incomplete_beta_function():
    rng = np.random.default_rng(0)
    for a, b, x in zip(
        10 ** rng.uniform(-1, 4, 300), 10 ** rng.uniform(-1, 4, 300), rng.uniform(0, 1, 300), strict=True
    ):
        assert beta_share(a, b, x) == pytest.approx(special.betainc(a, b, x), rel=1e-9, abs=1e-13)
