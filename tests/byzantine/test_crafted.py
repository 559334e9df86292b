from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch

from fedsim.aggregation.numerics.columns import BLOCK
from fedsim.byzantine import attack
from fedsim.byzantine.crafted import z_max
from fedsim.errors import ExperimentError, SettingWarning

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
