from __future__ import annotations

import math

import numpy as np
import pytest

from fedsim.report.intervals import Interval, mean_interval, student_t


@pytest.mark.parametrize(
    ("dof", "quantile"),
    # Tables of the 97.5 percent point.
    [(1, 12.706205), (2, 4.302653), (3, 3.182446), (4, 2.776445), (9, 2.262157), (30, 2.042272), (120, 1.979930)],
)
def test_students_quantile_is_that_of_the_tables(dof, quantile):
    assert student_t(dof) == pytest.approx(quantile, abs=5e-7)


@pytest.mark.parametrize("dof", [1, 2, 5, 8, 19, 200])
def test_students_density_integrates_to_the_confidence(dof):
    for confidence in (0.5, 0.95, 0.99):
        t = student_t(dof, confidence)
        x = np.linspace(0, t, 200_001)
        scale = math.exp(math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2)) / math.sqrt(dof * math.pi)
        density = scale * (1 + x**2 / dof) ** (-(dof + 1) / 2)
        integral = ((density[1:] + density[:-1]) / 2).sum() * (x[1] - x[0])
        assert 2 * integral == pytest.approx(confidence, abs=1e-7)


def test_an_interval_by_hand():
    # Mean 2, deviations -1, 0, 1: s = 1; t(2) = 4.302653; half = 4.302653 / sqrt(3).
    interval = mean_interval([1.0, 2.0, 3.0])
    assert (interval.mean, interval.n) == (2.0, 3)
    assert interval.half == pytest.approx(2.484138, abs=1e-6)


def test_few_values():
    assert mean_interval([]) is None
    assert mean_interval([0.5]) == Interval(0.5, None, 1)
    assert mean_interval([0.5, 0.5]) == Interval(0.5, 0.0, 2)


def test_whether_an_interval_spans_zero():
    assert Interval(-0.1, 0.2, 3).spans_zero
    assert not Interval(-0.3, 0.2, 3).spans_zero
    assert not Interval(-0.3, None, 1).spans_zero
