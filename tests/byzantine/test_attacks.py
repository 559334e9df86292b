"""Attacks on rows and on data, compared with their definitions."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import Tensor

import fedsim
from fedsim.aggregation.numerics.columns import BLOCK
from fedsim.byzantine import attack, attack_strategy
from fedsim.byzantine.crafted import line_search, z_max
from fedsim.core.randomness import Draws
from fedsim.core.rows import new_rows
from fedsim.errors import ExperimentError, SettingWarning


@pytest.fixture
def honest():
    return torch.randn(7, 33, dtype=torch.double, generator=torch.Generator().manual_seed(0)) + 0.3


@pytest.fixture
def own_updates():
    return torch.randn(3, 33, dtype=torch.double, generator=torch.Generator().manual_seed(1))


def test_none_sends_the_trained_rows(honest, own_updates):
    assert torch.equal(attack(honest, "none", 3, own_updates=own_updates), own_updates)
    assert torch.equal(attack(honest[:3], "none", 5), honest[[0, 1, 2, 0, 1]])  # own_updates defaults to honest rows


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_sign_flipping_negates_own_rows_or_the_mean(scale, honest, own_updates):
    rows = attack(honest, "sign_flipping", 3, own_updates=own_updates, scale=scale)
    assert torch.equal(rows, -scale * own_updates)
    rows = attack(honest, "sign_flipping", 3, own_updates=own_updates, of="mean", scale=scale)
    assert torch.allclose(rows, (-scale * sum(honest) / 7).expand(3, -1), rtol=0, atol=1e-12)


def test_gaussian_draws_rows_with_the_given_standard_deviation(honest):
    rows = attack(honest, "gaussian", 3, std=2.5, seed=5)
    assert torch.equal(rows, 2.5 * Draws.of("attack", seed=5).normal(3, 33, dtype=torch.double))
    assert not attack(honest, "gaussian", 3, std=0.0).any()


def test_free_rider_sends_zero_or_the_last_update(honest, own_updates):
    zero = torch.zeros(3, 33, dtype=torch.double)
    last = honest[2] * 5
    assert torch.equal(attack(honest, "free_rider", 3, last=last), zero)
    assert torch.equal(attack(honest, "free_rider", 3, last=last, what="last"), last.expand(3, -1))
    assert torch.equal(attack(honest, "free_rider", 3, what="last"), zero)
    assert torch.equal(attack(honest, "free_rider", 3, own_updates=own_updates * torch.nan), zero)


def bound(name, **params):
    registration = attack_strategy.get(name)
    return attack_strategy.bind(registration, registration.check(params))


def rounds_of_rows(count, h=6, d=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([4.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.double)
    base_rows = torch.randn(h, d, dtype=torch.double, generator=generator) * spread
    return [base_rows + 0.1 * torch.randn(h, d, dtype=torch.double, generator=generator) for _ in range(count)]


def rows_in_turn(attack_of, rounds, workers=None):
    """Return the first attacker's row in each round, and the attack's final state."""
    state, sent = {}, []
    for round, honest in enumerate(rounds, 1):
        own_rows = honest.new_zeros(2, honest.shape[1])
        of_round = list(range(len(honest))) if workers is None else workers[round - 1]
        rows, state = attack_of(honest, own_rows, seed=3, moment=(round,), workers=of_round, state=state)
        assert torch.equal(rows[0], rows[1])
        sent.append(rows[0])
    return sent, state


def test_mimic_copies_one_honest_row(honest):
    assert torch.equal(attack(honest, "mimic", 3), honest[[0, 0, 0]])
    assert torch.equal(attack(honest, "mimic", 2, epsilon=6), honest[[6, 6]])
    with pytest.raises(ExperimentError, match="^epsilon = 7: must be less than 7, the number of honest workers"):
        attack(honest, "mimic", 3, epsilon=7)


def test_mimic_chooses_the_worker_by_its_definition():
    warmup, rounds = 3, rounds_of_rows(5)
    mean, sums = np.zeros(5), np.zeros(6)
    z = Draws.of("attack", 1, seed=3).normal(5, dtype=torch.double).numpy()
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
    absent = [numbers[0], [1, 2, 3, 4, 5, 99]]  # none of these workers has sent an earlier row
    assert torch.equal(rows_in_turn(bound("mimic", warmup=1), turned, absent)[0][1], turned[1][0])


def test_time_coupled_deviates_against_the_sum_of_all_means(honest):
    rounds = [honest, -0.4 * honest, -2 * honest]
    sent, state = rows_in_turn(bound("time_coupled", z=1.5), rounds)
    path = torch.zeros(33, dtype=torch.double)
    for row, rows in zip(sent, rounds, strict=True):
        path += rows.mean(0)
        assert torch.allclose(row, rows.mean(0) - 1.5 * path.sign() * rows.std(0), rtol=0, atol=1e-12)
    assert torch.allclose(state["path"], path, rtol=0, atol=1e-12)
    assert torch.equal(attack(honest, "time_coupled", 3), attack(honest, "time_coupled", 3, z=z_max(10, 3)))


DEVIATIONS = ["unit", "sign", "std"]
BOUNDED = ["min_max", "min_sum"]


def rows_of(*values):
    return torch.tensor(values, dtype=torch.double)


def column_moments(honest, ddof=1):
    """Return the mean and the standard deviation of each column, computed from exact sums."""
    columns = [[float(x) for x in column] for column in honest.T]
    means = [math.fsum(column) / len(column) for column in columns]
    stds = [
        math.sqrt(math.fsum((x - mean) ** 2 for x in column) / (len(column) - ddof))
        for column, mean in zip(columns, means, strict=True)
    ]
    return np.array(means), np.array(stds)


def bisected(name, honest, dev, bound="max"):
    """Return the row of min_max or min_sum with the largest admissible factor, found by bisection."""
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
    with pytest.raises(ExperimentError, match=rf"n = {n} workers and f = {f} .* s = {s} and n - f = {n - f}; set"):
        z_max(n, f)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("z", [None, 0.0, 1.5, -0.3])
def test_alie_is_z_standard_deviations_from_the_mean(honest, ddof, sign, z):
    mean, std = column_moments(honest, ddof)
    factor = z_max(10, 3) if z is None else z
    expected = torch.from_numpy(mean + sign * factor * std).expand(3, -1)
    assert torch.allclose(attack(honest, "alie", 3, z=z, sign=sign, ddof=ddof), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("n", "f"), [(10, 2), (8, 2), (5, 1)])
def test_alie_warns_if_z_is_0(n, f):
    honest = torch.randn(n - f, 4, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    line = f"^alie: z = 0 for n = {n}, f = {f}: this attack does nothing; set attack.z=1.5$"
    with pytest.warns(SettingWarning, match=line):
        rows = attack(honest, "alie", f)
    assert torch.allclose(rows, honest.mean(0).expand(f, -1))
    attack(honest, "alie", f, z=1.5)  # raises no warning (a warning is an error in these tests)


def test_one_honest_row_has_no_standard_deviation(honest):
    with pytest.raises(ExperimentError, match="^ddof = 1: .* needs at least 2 honest workers, not 1"):
        attack(honest[:1], "alie", 1, z=1.0)
    assert torch.allclose(attack(honest[:1], "alie", 1, z=1.0, ddof=0), honest[:1])


@pytest.mark.parametrize("eps", [1.0, 1.5])
def test_dissensus_cancels_the_step_of_the_receiver_or_reverses_it(eps, honest):
    """A receiver moves by the weighted sum of all rows, which is zero for eps = 1."""
    honest[2] = 0  # the receiver itself
    weights, byzantine = np.array([0.1, 0.2, 0.05, 0.15, 0.05, 0.1, 0.1]), np.array([0.05, 0.15, 0.05])
    rows = attack(honest, "dissensus", 3, weights=weights, byzantine_weights=byzantine, eps=eps).numpy()
    of_honest = sum(w * x for w, x in zip(weights, honest.numpy(), strict=True))
    assert np.allclose(of_honest + sum(w * x for w, x in zip(byzantine, rows, strict=True)), (1 - eps) * of_honest)
    assert (rows == rows[0]).all()
    with pytest.raises(ExperimentError, match=r"byzantine_weights = \[0.05, 0.15, 0.05\]: must be 2 numbers > 0"):
        attack(honest, "dissensus", 2, byzantine_weights=byzantine)


def test_ipm_is_the_mean_times_minus_eps(honest):
    mean, _ = column_moments(honest)
    for eps in (0.0, 0.5, 10):
        expected = torch.from_numpy(-eps * mean).expand(2, -1)
        assert torch.allclose(attack(honest, "ipm", 2, eps=eps), expected, rtol=0, atol=1e-11)
    assert torch.equal(attack(honest, "ipm", 2), attack(honest, "ipm", 2, eps=0.1))


@pytest.mark.parametrize("bound", ["max", "min"])
@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("dev", DEVIATIONS)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))])
@pytest.mark.parametrize(("h", "d"), [(2, 3), (3, 1), (6, 40), (25, 7)])
def test_min_max_and_min_sum_find_the_largest_factor(name, dev, bound, seed, h, d):
    generator = torch.Generator().manual_seed(seed)
    honest = torch.randn(h, d, dtype=torch.double, generator=generator) + torch.randn(d, generator=generator)
    honest[0] *= 1 + seed  # rows at different distances from their mean
    for rows in (honest, honest / 1024 + 1000):  # a large common offset costs no digits
        row = attack(rows, name, 1, dev=dev, bound=bound)[0]
        assert torch.allclose(row, bisected(name, rows, dev, bound), rtol=0, atol=1e-9)


@pytest.mark.parametrize("dev", DEVIATIONS)
def test_min_max_sends_the_mean_if_that_is_farther_than_the_least_bound(dev):
    honest = rows_of([0.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [-1.0, 1.0])
    assert torch.equal(attack(honest, "min_max", 1, dev=dev, bound="min"), honest.mean(0, keepdim=True))


@pytest.mark.parametrize(
    ("name", "params"),
    [("alie", {"z": 1.5}), ("ipm", {})] + [(name, {"dev": dev}) for name in BOUNDED for dev in DEVIATIONS],
)
def test_float32_rows_give_the_rounded_float64_result(name, params):
    honest = torch.randn(4, 2 * BLOCK + 5, generator=torch.Generator().manual_seed(0)) + 1
    rounded = attack(honest.double(), name, 1, **params).float()
    assert torch.equal(attack(honest, name, 1, **params), rounded)
    if name in BOUNDED:
        assert torch.allclose(rounded[0], bisected(name, honest, params["dev"]).float(), rtol=0, atol=1e-6)
    else:
        columns = honest[:, -7:]  # columns from two blocks
        assert torch.allclose(rounded[:, -7:], attack(columns, name, 1, **params), rtol=0, atol=1e-6)


OPTIMAL = ["opt_alie", "opt_ipm"]


def trimmed(matrix):
    """Return the mean of each column without its three largest and three smallest values."""
    return matrix.sort(dim=0).values[3:-3].mean(0)


def nearest_to_all(matrix):
    """Return the row with the smallest sum of squared distances to all rows (a discontinuous rule)."""
    return matrix[torch.cdist(matrix, matrix).square().sum(1).argmin()]


def filtered(matrix):
    """Return the mean of the rows whose norm is at most 1.1 times the median norm."""
    norms = matrix.norm(dim=1)
    return matrix[norms <= 1.1 * norms.median()].mean(0)


def damage(honest, rows, aggregate):
    return (aggregate(torch.cat([honest, rows])) - honest.mean(0)).norm().item()


def row_at(name, x, honest, sign=-1):
    """Return the attack's row for the factor `x`."""
    if name == "opt_ipm":
        return -x * honest.mean(0)
    return honest.mean(0) + sign * x * honest.std(0)


def most_damage_on_a_grid(name, honest, aggregate, limit):
    """Return the largest damage of all factors on a grid from 0 to `limit`."""
    factors = torch.linspace(0, limit, 2001).tolist()
    return max(damage(honest, row_at(name, x, honest).expand(3, -1), aggregate) for x in factors)


@pytest.mark.parametrize("name", OPTIMAL)
@pytest.mark.parametrize("aggregate", [trimmed, nearest_to_all, filtered])
def test_no_factor_on_a_grid_does_more_damage(name, aggregate, honest):
    rows = attack(honest, name, 3, aggregate=aggregate, evaluations=40)
    assert damage(honest, rows, aggregate) >= 0.95 * most_damage_on_a_grid(name, honest, aggregate, 8.0)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("ddof", [0, 1])
def test_opt_alie_lies_on_the_line_of_alie(sign, ddof, honest):
    rows = attack(honest, "opt_alie", 3, aggregate=trimmed, sign=sign, ddof=ddof)
    steps = (rows[0] - honest.mean(0)) / (sign * honest.std(0, correction=ddof))
    assert steps[0] > 0
    assert torch.allclose(steps, steps[0].expand(33), rtol=1e-9)
    assert torch.allclose(rows, attack(honest, "alie", 3, z=steps[0].item(), sign=sign, ddof=ddof), atol=1e-9)


@pytest.mark.parametrize("name", OPTIMAL)
@pytest.mark.parametrize("evaluations", [2, 3, 16])
def test_the_rule_is_called_evaluations_times(name, evaluations, honest):
    asked = []

    def counting(matrix):
        asked.append(matrix.clone())
        return matrix.median(0).values

    rows = attack(honest, name, 3, aggregate=counting, evaluations=evaluations)
    assert len(asked) == evaluations
    assert all(torch.equal(matrix[:7], honest) and matrix.shape == (10, 33) for matrix in asked)
    assert any(torch.equal(matrix[7:], rows) for matrix in asked)
    assert asked[0].dtype == honest.dtype


@pytest.mark.parametrize("name", OPTIMAL)
def test_the_largest_factor_is_used_against_the_mean(name, honest):
    rows = attack(honest, name, 3, aggregate=fedsim.aggregate, evaluations=11)
    assert torch.allclose(rows[0], row_at(name, 2.0**9, honest), rtol=1e-9)


@pytest.mark.parametrize("name", OPTIMAL)
def test_half_precision_never_ends_in_infinity(name, honest):
    rows = attack(honest.half(), name, 3, aggregate=partial(fedsim.aggregate, nonfinite="keep"), evaluations=30)
    assert rows.dtype == torch.half
    assert rows.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "aggregate: is required, because the attack opt_ipm"),
        ({"aggregate": trimmed, "evaluations": 1}, "evaluations = 1: must be greater than or equal to 2"),
        ({"aggregate": lambda matrix: matrix}, r"aggregate: must return a tensor of shape \(33,\), not \(10, 33\)"),
    ],
)
def test_a_rule_and_two_evaluations_are_required(arguments, message, honest):
    with pytest.raises(ExperimentError, match=message):
        attack(honest, "opt_ipm", 3, **arguments)


@pytest.mark.parametrize("top", [0.01, 0.3, 0.999, 1.0, 1.5, 2.0, 7.3, 100.0])
def test_line_search_finds_the_top_of_a_hill_and_the_edge_of_a_cliff(top):
    assert line_search(lambda x: -abs(x - top), 60) == pytest.approx(top, rel=1e-6)
    assert line_search(lambda x: x if x <= top else -1.0, 60) == pytest.approx(top, rel=1e-6)


def test_line_search_tries_the_points_of_golden_section_search():
    tried = []
    line_search(lambda x: tried.append(x) or -abs(x - 2.9), 16)
    low, high, expected = 2.0, 4.0, [0.0, 1.0, 2.0, 4.0]
    part = (5**0.5 - 1) / 2
    points = [high - part * (high - low), low + part * (high - low)]
    expected += points
    while len(expected) < 16:
        if abs(points[0] - 2.9) < abs(points[1] - 2.9):
            high = points[1]
            points = [high - part * (high - low), points[0]]
            expected.append(points[0])
        else:
            low = points[0]
            points = [points[1], low + part * (high - low)]
            expected.append(points[1])
    assert tried == pytest.approx(expected)


CORNERS = {
    "top_left": (slice(0, 2), slice(0, 2)),
    "top_right": (slice(0, 2), slice(5, 7)),
    "bottom_left": (slice(7, 9), slice(0, 2)),
    "bottom_right": (slice(7, 9), slice(5, 7)),
}


@pytest.fixture
def batch():
    inputs = torch.randn(40, 3, 9, 7, generator=torch.Generator().manual_seed(0))
    return inputs, torch.arange(40) % 10


@pytest.fixture
def draws():
    return Draws.of("poison", seed=0)


def poisoned_samples(before, after):
    return [k for k, (a, b) in enumerate(zip(before, after, strict=True)) if not torch.equal(a, b)]


def test_label_flipping_flips_labels(batch):
    inputs, targets = bound("label_flipping").poison(*batch, 10)
    assert torch.equal(inputs, batch[0])
    assert targets.tolist() == [9 - k % 10 for k in range(40)]
    assert targets.dtype == torch.long


@pytest.mark.parametrize("corner", CORNERS)
def test_a_backdoor_poisons_a_share_of_the_batch(corner, batch, draws):
    backdoor = bound("backdoor", corner=corner, size=2, value=2.5, target=4, poisoned=0.25)
    inputs, targets = backdoor.poison(*batch, 10, draws)
    changed = poisoned_samples(batch[0], inputs)
    assert len(changed) == 10
    for k in range(40):
        expected, label = batch[0][k].clone(), k % 10
        if k in changed:
            expected[:, CORNERS[corner][0], CORNERS[corner][1]] = 2.5
            label = 4
        assert torch.equal(inputs[k], expected)
        assert targets[k] == label
    assert targets.dtype == torch.long


def test_the_goal_of_a_backdoor(batch):
    inputs, wanted = bound("backdoor", size=2, value=2.5, target=4).goal(*batch, 10)
    expected = batch[0][batch[1] != 4].clone()
    expected[:, :, 7:, 5:] = 2.5
    assert torch.equal(inputs, expected)
    assert wanted.tolist() == [4] * 36


def test_the_share_of_poisoned_samples_is_right_on_average(batch, draws):
    backdoor = bound("backdoor", value=9.0, poisoned=0.35)
    inputs, targets = batch[0][:5], batch[1][:5]
    counts = [len(poisoned_samples(inputs, backdoor.poison(inputs, targets, 10, draws)[0])) for _ in range(400)]
    assert set(counts) == {1, 2}
    assert np.mean(counts) == pytest.approx(1.75, abs=0.1)
    for size in (1, 7, 40):
        all_of_them = bound("backdoor", poisoned=1.0, target=3).poison(batch[0][:size], batch[1][:size], 10, draws)
        assert all_of_them[1].tolist() == [3] * size


@pytest.mark.parametrize("name", ["label_flipping", "backdoor"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_poisoning_keeps_the_batch_and_its_memory_format(name, memory_format, batch):
    inputs, targets = batch[0].contiguous(memory_format=memory_format), batch[1]
    before = inputs.clone(), targets.clone()
    arguments = {"draws": Draws.of("poison", seed=0)} if name == "backdoor" else {}
    poisoned, _ = bound(name).poison(inputs, targets, 10, **arguments)
    shown, _ = bound(name).goal(inputs, targets, 10)
    assert poisoned.is_contiguous(memory_format=memory_format)
    assert poisoned.dtype == shown.dtype == inputs.dtype
    assert torch.equal(inputs, before[0])
    assert torch.equal(targets, before[1])


@pytest.mark.parametrize(
    ("name", "params", "scale"), [("label_flipping", {}, 1), ("backdoor", {}, 1), ("backdoor", {"gamma": 2.5}, 2.5)]
)
def test_a_backdoor_scales_its_rows_and_label_flipping_does_not(name, params, scale, honest, own_updates):
    assert torch.equal(attack(honest, name, 3, own_updates=own_updates, **params), scale * own_updates)
    assert bound(name, **params).alters_rows == (scale != 1)


@pytest.mark.parametrize(
    ("params", "shape", "message"),
    [
        ({"size": 8}, (4, 1, 9, 7), r"attack.size = 8: the patch must fit into images of 9x7"),
        ({}, (4, 10), r"the patch of a backdoor needs images .* not samples of shape \(10,\)"),
        ({"target": 10}, (4, 1, 9, 7), "attack.target = 10: must be a class from 0 to 9"),
    ],
)
def test_an_impossible_backdoor_is_refused(params, shape, message, draws):
    backdoor = bound("backdoor", **params)
    inputs, targets = torch.zeros(shape), torch.arange(4)
    with pytest.raises(ExperimentError, match=message):
        backdoor.poison(inputs, targets, 10, draws)
    with pytest.raises(ExperimentError, match=message):
        backdoor.goal(inputs, targets, 10)


@pytest.mark.parametrize("registration", list(attack_strategy), ids=lambda registration: registration.name)
def test_bound_attacks_can_be_pickled(registration):
    there = pickle.loads(pickle.dumps(bound(registration.name)))
    assert there.name == registration.name
    assert (there.poison is None) == (bound(registration.name).poison is None)


EVERY = pytest.mark.parametrize("name", attack_strategy.names())


def median(matrix):
    return matrix.median(0).values


def backwards(honest: Tensor, own_updates: Tensor, *, scale: float = 1.0) -> Tensor:
    """A user-defined attack on rows."""
    return own_updates.flip(1) * scale


def misshapen(honest: Tensor) -> Tensor:
    return honest


@dataclass(frozen=True)
class Blank:
    """A user-defined attack on data that has no goal."""

    times: float = 2.0

    def __call__(self, own_updates: Tensor, honest: Tensor) -> Tensor:
        return own_updates * self.times

    def poison(self, inputs, targets, classes, rng):
        return torch.zeros_like(inputs), targets


@EVERY
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_attack_returns_a_new_tensor(name, dtype, honest, own_updates):
    honest, own_updates, last = honest.to(dtype), own_updates.to(dtype), honest[1].to(dtype)
    before = honest.clone(), own_updates.clone(), last.clone()
    rows = attack(honest, name, 3, own_updates=own_updates, last=last, aggregate=median)
    assert rows.dtype == dtype
    assert rows.shape == (3, 33)
    rows.zero_()
    assert all(torch.equal(a, b) for a, b in zip(before, (honest, own_updates, last), strict=True))
    assert rows.is_contiguous()


@pytest.mark.filterwarnings("ignore:.*poisons data")
@EVERY
def test_every_attack_is_a_pure_function(name, honest):
    global_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    first, again = (attack(honest, name, 4, aggregate=median, seed=3) for _ in range(2))
    assert torch.equal(first.nan_to_num(1.5), again.nan_to_num(1.5))
    assert torch.equal(torch.get_rng_state(), global_state[0])
    assert np.array_equal(np.random.get_state()[1], global_state[1])


@pytest.mark.filterwarnings("ignore:.*poisons data")
@EVERY
def test_every_attack_accepts_any_number_of_columns(name, honest):
    assert attack(honest[:, :1], name, 2, aggregate=median).shape == (2, 1)
    assert attack(honest[:, :0], name, 2, aggregate=median).shape == (2, 0)
    strided = new_rows(7, 33, torch.double).copy_(honest)
    assert not strided.is_contiguous()
    plain, from_strided = (attack(h, name, 2, aggregate=median).nan_to_num(1.5) for h in (honest, strided))
    assert torch.allclose(plain, from_strided, rtol=0, atol=1e-12)


@EVERY
def test_without_attackers_or_honest_rows(name, honest, own_updates):
    assert attack(honest[:1], name, 0).shape == (0, 33)
    registration = attack_strategy.get(name)
    bound = attack_strategy.bind(registration, registration.check({}))
    weights = {"weights": torch.ones(0), "byzantine_weights": torch.ones(3)}
    arguments = {"aggregate": lambda rows: rows[0], **weights}
    if "honest" in bound.accepts and name not in ("sign_flipping", "dissensus"):
        with pytest.raises(ExperimentError, match="at least 1 honest worker, but|less than 0, the number of honest"):
            bound(own_updates[:0], own_updates, **arguments)
    else:
        assert bound(own_updates[:0], own_updates, **arguments)[0].shape == (3, 33)


def test_an_attack_can_be_an_import_path(honest, own_updates):
    rows = attack(honest, "tests.byzantine.test_attacks:backwards", 3, own_updates=own_updates, scale=2.0)
    assert torch.equal(rows, own_updates.flip(1) * 2)
    with pytest.raises(ExperimentError, match=r"must return a tensor of shape \(3, 33\) or \(33,\), not \(7, 33\)"):
        attack(honest, "tests.byzantine.test_attacks:misshapen", 3)


def test_a_dataclass_with_poison_is_an_attack_on_data(honest, own_updates):
    registration = attack_strategy.get("tests.byzantine.test_attacks:Blank")
    bound = attack_strategy.bind(registration, registration.check({"times": 3.0}))
    assert torch.equal(bound(honest, own_updates)[0], own_updates * 3)
    assert bound.poison(torch.ones(2), torch.arange(2), 2, None)[0].tolist() == [0, 0]
    assert bound.goal is None


HONEST = torch.zeros(7, 33)


@pytest.mark.parametrize(
    ("honest", "n_byzantine", "arguments", "message"),
    [
        ([], 2, {}, r"honest: must be a floating-point tensor .*n >= 1\), not an empty list"),
        (torch.zeros(3), 2, {}, r"honest: .*, not torch.float32 \(3,\)"),
        *((HONEST, bad, {}, "n_byzantine = .*: must be a whole number >= 0") for bad in (-1, 1.0, True, "2")),
        (HONEST, 3, {"own_updates": torch.zeros(2, 33)}, r"own_updates: must be torch.float32 \(3, 33\) .*\(2, 33\)"),
        (HONEST, 3, {"last": torch.zeros(1, 33)}, r"last: must be torch.float32 \(33,\) .*\(1, 33\)"),
        (HONEST, 3, {"aggregate": "krum"}, r'aggregate = "krum": must be a .*partial\(.* name="krum", ...\)'),
        (HONEST, 3, {"name": "aile"}, 'name = "aile": no such attack; did you mean "alie"'),
        (HONEST, 3, {"zz": 1.0}, r"zz = 1.0: unknown key \(the attack is alie\); allowed: name, ddof"),
    ],
)
def test_a_wrong_argument_is_an_error(honest, n_byzantine, arguments, message):
    with pytest.raises(ExperimentError, match=f"^{message}") as caught:
        attack(honest, **{"name": "alie", "n_byzantine": n_byzantine, **arguments})
    assert len(caught.value.lines) == 1
