from __future__ import annotations

from functools import partial

import pytest
import torch

import fedsim
from fedsim.byzantine import attack
from fedsim.byzantine.optimal import line_search
from fedsim.errors import ExperimentError

OPTIMAL = ["opt_alie", "opt_ipm"]


def trimmed(matrix):
    """The mean without the three largest and the three smallest of each column."""
    return matrix.sort(dim=0).values[3:-3].mean(0)


def nearest_to_all(matrix):
    """The row with the least sum of squared distances: a discontinuous rule."""
    return matrix[torch.cdist(matrix, matrix).square().sum(1).argmin()]


def filtered(matrix):
    """The mean of the rows whose norm is at most 1.1 times the median norm."""
    norms = matrix.norm(dim=1)
    return matrix[norms <= 1.1 * norms.median()].mean(0)


def damage(honest, rows, aggregate):
    return (aggregate(torch.cat([honest, rows])) - honest.mean(0)).norm().item()


def row_at(name, x, honest, sign=-1):
    """The attack's row for one factor."""
    if name == "opt_ipm":
        return -x * honest.mean(0)
    return honest.mean(0) + sign * x * honest.std(0)


def grid(name, honest, aggregate, limit):
    """The most damage that factors from 0 to `limit` do."""
    factors = torch.linspace(0, limit, 2001).tolist()
    return max(damage(honest, row_at(name, x, honest).expand(3, -1), aggregate) for x in factors)


@pytest.mark.parametrize("name", OPTIMAL)
@pytest.mark.parametrize("aggregate", [trimmed, nearest_to_all, filtered])
def test_no_factor_on_a_grid_does_more_damage(name, aggregate, honest):
    rows = attack(honest, 3, name, aggregate=aggregate, evaluations=40)
    assert damage(honest, rows, aggregate) >= 0.95 * grid(name, honest, aggregate, 8.0)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("ddof", [0, 1])
def test_opt_alie_lies_on_the_line_of_alie(sign, ddof, honest):
    rows = attack(honest, 3, "opt_alie", aggregate=trimmed, sign=sign, ddof=ddof)
    steps = (rows[0] - honest.mean(0)) / (sign * honest.std(0, correction=ddof))
    assert steps[0] > 0
    assert torch.allclose(steps, steps[0].expand(33), rtol=1e-9)
    assert torch.allclose(rows, attack(honest, 3, "alie", z=steps[0].item(), sign=sign, ddof=ddof), atol=1e-9)


@pytest.mark.parametrize("name", OPTIMAL)
@pytest.mark.parametrize("evaluations", [2, 3, 16])
def test_the_rule_is_called_evaluations_times(name, evaluations, honest):
    asked = []

    def counting(matrix):
        asked.append(matrix.clone())
        return matrix.median(0).values

    rows = attack(honest, 3, name, aggregate=counting, evaluations=evaluations)
    assert len(asked) == evaluations
    assert all(torch.equal(matrix[:7], honest) and matrix.shape == (10, 33) for matrix in asked)
    assert any(torch.equal(matrix[7:], rows) for matrix in asked)
    assert asked[0].dtype == honest.dtype


@pytest.mark.parametrize("name", OPTIMAL)
def test_the_largest_factor_is_used_against_the_mean(name, honest):
    rows = attack(honest, 3, name, aggregate=fedsim.aggregate, evaluations=11)
    assert torch.allclose(rows[0], row_at(name, 2.0**9, honest), rtol=1e-9)


@pytest.mark.parametrize("name", OPTIMAL)
def test_half_precision_never_ends_in_infinity(name, honest):
    rows = attack(honest.half(), 3, name, aggregate=partial(fedsim.aggregate, nonfinite="keep"), evaluations=30)
    assert rows.dtype == torch.half
    assert rows.isfinite().all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "aggregate: the attack opt_ipm needs the rule"),
        ({"aggregate": trimmed, "evaluations": 1}, "evaluations = 1: must be greater than or equal to 2"),
        ({"aggregate": lambda matrix: matrix}, r"aggregate: must return shape \(33,\), not \(10, 33\)"),
    ],
)
def test_a_rule_and_two_evaluations_are_required(given, message, honest):
    with pytest.raises(ExperimentError, match=message):
        attack(honest, 3, "opt_ipm", **given)


@pytest.mark.parametrize("top", [0.01, 0.3, 0.999, 1.0, 1.5, 2.0, 7.3, 100.0])
def test_line_search_finds_the_top_of_a_hill_and_the_edge_of_a_cliff(top):
    assert line_search(lambda x: -abs(x - top), 60) == pytest.approx(top, rel=1e-6)
    assert line_search(lambda x: x if x <= top else -1.0, 60) == pytest.approx(top, rel=1e-6)
