from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim.byzantine import attack
from fedsim.core.randomness import Draws


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
