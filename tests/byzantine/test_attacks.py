"""Attacks on rows are their definitions."""

from __future__ import annotations

import math
from functools import partial
from statistics import NormalDist

import numpy as np
import pytest
import torch

import fedsim
from fedsim.aggregation.numerics.columns import BLOCK
from fedsim.byzantine import attack, attack_strategy
from fedsim.byzantine.crafted import z_max
from fedsim.byzantine.optimal import line_search
from fedsim.core.randomness import Draws
from fedsim.errors import ExperimentError, SettingWarning


def test_none_sends_the_trained_rows(honest, own_updates):
    assert torch.equal(attack(honest, 3, "none", own_updates=own_updates), own_updates)
    assert torch.equal(attack(honest[:3], 5, "none"), honest[[0, 1, 2, 0, 1]])  # own_updates default to honest rows


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_sign_flipping_negates_own_rows_or_the_mean(scale, honest, own_updates):
    rows = attack(honest, 3, "sign_flipping", own_updates=own_updates, scale=scale)
    assert torch.equal(rows, -scale * own_updates)
    rows = attack(honest, 3, "sign_flipping", own_updates=own_updates, of="mean", scale=scale)
    assert torch.allclose(rows, (-scale * sum(honest) / 7).expand(3, -1), rtol=0, atol=1e-12)


def test_gaussian_has_standard_deviation_s(honest):
    wide = torch.zeros(1, 100_000, dtype=torch.double)
    rows = attack(wide, 2, "gaussian", s=3.0)
    assert rows.mean(1).abs().max() < 0.05
    assert (rows.std(1) - 3).abs().max() < 0.05
    assert (rows.abs() < 3).double().mean().item() == pytest.approx(0.6827, abs=0.005)
    assert abs(np.corrcoef(rows.numpy())[0, 1]) < 0.02
    assert torch.equal(attack(honest, 3, "gaussian", s=0.0), torch.zeros(3, 33, dtype=torch.double))


def test_gaussian_depends_only_on_the_seed(honest):
    rows = attack(honest, 3, "gaussian", seed=5)
    assert torch.equal(rows, attack(honest, 3, "gaussian", seed=5))
    assert not torch.equal(rows, attack(honest, 3, "gaussian", seed=6))
    assert torch.equal(rows[:2], attack(honest, 2, "gaussian", seed=5))
    assert torch.allclose(rows.float(), attack(honest.float(), 3, "gaussian", seed=5), rtol=0, atol=1e-4)
    assert torch.equal(rows, Draws.of(5, "attack").normal(3, 33, dtype=torch.double))


def test_free_rider_sends_zero_or_the_last_update(honest, own_updates):
    zero = torch.zeros(3, 33, dtype=torch.double)
    last = honest[2] * 5
    assert torch.equal(attack(honest, 3, "free_rider", last=last), zero)
    assert torch.equal(attack(honest, 3, "free_rider", last=last, what="last"), last.expand(3, -1))
    assert torch.equal(attack(honest, 3, "free_rider", what="last"), zero)
    assert torch.equal(attack(honest, 3, "free_rider", own_updates=own_updates * torch.nan), zero)


def bound(name, **params):
    plug = attack_strategy.get(name)
    return attack_strategy.bind(plug, plug.check(params))


def rounds_of_rows(count, h=6, d=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([4.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.double)
    own = torch.randn(h, d, dtype=torch.double, generator=generator) * spread
    return [own + 0.1 * torch.randn(h, d, dtype=torch.double, generator=generator) for _ in range(count)]


def rows_in_turn(attack_of, rounds, workers=None):
    """The first attacker's row of each round, and the state at the end."""
    state, sent = {}, []
    for round, honest in enumerate(rounds, 1):
        own = honest.new_zeros(2, honest.shape[1])
        of_round = list(range(len(honest))) if workers is None else workers[round - 1]
        rows, state = attack_of(honest, own, seed=3, moment=(round,), workers=of_round, state=state)
        assert torch.equal(rows[0], rows[1])
        sent.append(rows[0])
    return sent, state


def test_mimic_copies_one_honest_row(honest):
    assert torch.equal(attack(honest, 3, "mimic"), honest[[0, 0, 0]])
    assert torch.equal(attack(honest, 2, "mimic", epsilon=6), honest[[6, 6]])
    with pytest.raises(ExperimentError, match="attack.epsilon = 7: must be below the number of honest rows, 7"):
        attack(honest, 3, "mimic", epsilon=7)


def test_mimic_chooses_the_worker_by_its_definition():
    warmup, rounds = 3, rounds_of_rows(5)
    mean, sums = np.zeros(5), np.zeros(6)
    z = Draws.of(3, "attack", 1).normal(5, dtype=torch.double).numpy()
    z = z / np.linalg.norm(z)
    for t, (honest, sent) in enumerate(
        zip(rounds, rows_in_turn(bound("mimic", warmup=warmup), rounds)[0], strict=True)
    ):
        x = honest.numpy()
        if t < warmup:
            mean = (t * mean + x.mean(0)) / (t + 1)
            z = t * z + sum((row - mean) * ((row - mean) @ z) for row in x)
            z = z / np.linalg.norm(z)
            sums += [row @ z for row in x]
        assert torch.equal(sent, honest[int(np.abs(sums).argmax())])


def test_mimic_remembers_workers_and_not_rows():
    rounds = rounds_of_rows(2)
    numbers = [[10, 20, 30, 40, 50, 60], [60, 50, 40, 30, 20, 10]]
    turned = [rounds[0], rounds[0].flip(0)]
    sent, state = rows_in_turn(bound("mimic", warmup=1), turned, numbers)
    assert torch.equal(sent[0], sent[1])
    assert state["t"] == 1
    absent = [numbers[0], [1, 2, 3, 4, 5, 99]]  # none of them is known
    assert torch.equal(rows_in_turn(bound("mimic", warmup=1), turned, absent)[0][1], turned[1][0])


def test_time_coupled_deviates_against_the_sum_of_all_means(honest):
    rounds = [honest, -0.4 * honest, -2 * honest]
    sent, state = rows_in_turn(bound("time_coupled", z=1.5), rounds)
    path = torch.zeros(33, dtype=torch.double)
    for row, rows in zip(sent, rounds, strict=True):
        path += rows.mean(0)
        assert torch.allclose(row, rows.mean(0) - 1.5 * path.sign() * rows.std(0), rtol=0, atol=1e-12)
    assert torch.allclose(state["path"], path, rtol=0, atol=1e-12)
    assert torch.equal(attack(honest, 3, "time_coupled"), attack(honest, 3, "time_coupled", z=z_max(10, 3)))


DEVIATIONS = ["unit", "sign", "std"]
BOUNDED = ["min_max", "min_sum"]


def rows_of(*values):
    return torch.tensor(values, dtype=torch.double)


def column_moments(honest, ddof=1):
    """Mean and standard deviation of each column, by exact sums."""
    columns = [[float(x) for x in column] for column in honest.T]
    means = [math.fsum(column) / len(column) for column in columns]
    stds = [
        math.sqrt(math.fsum((x - mean) ** 2 for x in column) / (len(column) - ddof))
        for column, mean in zip(columns, means, strict=True)
    ]
    return np.array(means), np.array(stds)


def bisected(name, honest, dev, bound="max"):
    """min_max or min_sum with the largest factor, found by bisection."""
    honest = honest.double().numpy()
    mean, worst = honest.mean(0), {"min_max": np.max, "min_sum": np.sum}[name]
    deviation = {
        "unit": lambda: mean / np.linalg.norm(mean),
        "sign": lambda: np.sign(mean),
        "std": lambda: honest.std(0, ddof=1),
    }[dev]()

    def value(row):
        return worst(((honest - row) ** 2).sum(1))

    bound = {"max": max, "min": min}[bound](value(row) for row in honest)
    if value(mean) > bound:
        return torch.from_numpy(mean)
    low, high = 0.0, 1.0
    while value(mean - high * deviation) <= bound:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if value(mean - middle * deviation) <= bound else (low, middle)
    return torch.from_numpy(mean - low * deviation)


@pytest.mark.parametrize(
    ("n", "f", "share"),
    [(50, 24, 24 / 26), (20, 4, 9 / 16), (10, 3, 4 / 7), (5, 1, 2 / 4), (4, 1, 1 / 3), (11, 5, 5 / 6), (3, 1, 1 / 2)],
)
def test_z_max_is_a_normal_quantile(n, f, share):
    assert z_max(n, f) == pytest.approx(NormalDist().inv_cdf(share), abs=1e-12)


@pytest.mark.parametrize(("n", "f", "s"), [(10, 6, 0), (2, 1, 1)])
def test_z_max_names_n_f_and_s_in_its_error(n, f, s):
    with pytest.raises(ExperimentError, match=rf"n = {n} and f = {f} make s = {s} and n - f = {n - f}; choose z"):
        z_max(n, f)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("z", [None, 0.0, 1.5, -0.3])
def test_alie_is_z_standard_deviations_from_the_mean(honest, ddof, sign, z):
    mean, std = column_moments(honest, ddof)
    factor = z_max(10, 3) if z is None else z
    expected = torch.from_numpy(mean + sign * factor * std).expand(3, -1)
    assert torch.allclose(attack(honest, 3, "alie", z=z, sign=sign, ddof=ddof), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("n", "f"), [(10, 2), (8, 2), (5, 1)])
def test_alie_warns_if_z_is_0(n, f):
    honest = torch.randn(n - f, 4, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    line = f"^alie: z = 0 for n = {n}, f = {f}: this attack does nothing; set attack.z, e.g. 1.5$"
    with pytest.warns(SettingWarning, match=line):
        rows = attack(honest, f, "alie")
    assert torch.allclose(rows, honest.mean(0).expand(f, -1))
    attack(honest, f, "alie", z=1.5)  # without a warning, which would be an error here


def test_one_honest_row_has_no_standard_deviation(honest):
    with pytest.raises(ExperimentError, match="attack.ddof = 1: .* needs more than 1 of them, not 1"):
        attack(honest[:1], 1, "alie", z=1.0)
    assert torch.allclose(attack(honest[:1], 1, "alie", z=1.0, ddof=0), honest[:1])


def test_ipm_is_the_mean_times_minus_eps(honest):
    mean, _ = column_moments(honest)
    for eps in (0.0, 0.5, 10):
        expected = torch.from_numpy(-eps * mean).expand(2, -1)
        assert torch.allclose(attack(honest, 2, "ipm", eps=eps), expected, rtol=0, atol=1e-11)
    assert torch.equal(attack(honest, 2, "ipm"), attack(honest, 2, "ipm", eps=0.1))


@pytest.mark.parametrize("bound", ["max", "min"])
@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("dev", DEVIATIONS)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))])
@pytest.mark.parametrize(("h", "d"), [(2, 3), (3, 1), (6, 40), (25, 7)])
def test_min_max_and_min_sum_find_the_largest_factor(name, dev, bound, seed, h, d):
    generator = torch.Generator().manual_seed(seed)
    honest = torch.randn(h, d, dtype=torch.double, generator=generator) + torch.randn(d, generator=generator)
    honest[0] *= 1 + seed  # rows at different distances from their mean
    for rows in (honest, honest / 1024 + 1000):  # a large common part costs no digits
        row = attack(rows, 1, name, dev=dev, bound=bound)[0]
        assert torch.allclose(row, bisected(name, rows, dev, bound), rtol=0, atol=1e-9)


@pytest.mark.parametrize("dev", DEVIATIONS)
def test_min_max_sends_the_mean_if_that_is_farther_than_the_least_bound(dev):
    honest = rows_of([0.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [-1.0, 1.0])
    assert torch.equal(attack(honest, 1, "min_max", dev=dev, bound="min"), honest.mean(0, keepdim=True))


@pytest.mark.parametrize(
    ("name", "params"),
    [("alie", {"z": 1.5}), ("ipm", {})] + [(name, {"dev": dev}) for name in BOUNDED for dev in DEVIATIONS],
)
def test_float32_rows_give_the_rounded_float64_result(name, params):
    honest = torch.randn(4, 2 * BLOCK + 5, generator=torch.Generator().manual_seed(0)) + 1
    rounded = attack(honest.double(), 1, name, **params).float()
    assert torch.equal(attack(honest, 1, name, **params), rounded)
    if name in BOUNDED:
        assert torch.allclose(rounded[0], bisected(name, honest, params["dev"]).float(), rtol=0, atol=1e-6)
    else:
        columns = honest[:, -7:]  # from two blocks
        assert torch.allclose(rounded[:, -7:], attack(columns, 1, name, **params), rtol=0, atol=1e-6)


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


def most_damage_on_a_grid(name, honest, aggregate, limit):
    """The most damage that factors from 0 to `limit` do."""
    factors = torch.linspace(0, limit, 2001).tolist()
    return max(damage(honest, row_at(name, x, honest).expand(3, -1), aggregate) for x in factors)


@pytest.mark.parametrize("name", OPTIMAL)
@pytest.mark.parametrize("aggregate", [trimmed, nearest_to_all, filtered])
def test_no_factor_on_a_grid_does_more_damage(name, aggregate, honest):
    rows = attack(honest, 3, name, aggregate=aggregate, evaluations=40)
    assert damage(honest, rows, aggregate) >= 0.95 * most_damage_on_a_grid(name, honest, aggregate, 8.0)


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
