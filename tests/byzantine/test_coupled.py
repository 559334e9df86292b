from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim.byzantine import attack, attack_strategy, bind_attack
from fedsim.byzantine.crafted import z_max
from fedsim.core.randomness import Draws
from fedsim.errors import ExperimentError


def bound(name, **params):
    plug = attack_strategy.get(name)
    return bind_attack(plug, plug.check(params))


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
