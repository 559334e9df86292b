from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsim.byzantine import attack, attack_strategy
from fedsim.core.rows import new_rows
from fedsim.errors import ExperimentError

EVERY = pytest.mark.parametrize("name", attack_strategy.names())


def median(matrix):
    return matrix.median(0).values


def backwards(honest: Tensor, own_updates: Tensor, *, scale: float = 1.0) -> Tensor:
    """A user's own attack on rows."""
    return own_updates.flip(1) * scale


def misshapen(honest: Tensor) -> Tensor:
    return honest


@dataclass(frozen=True)
class Blank:
    """A user's own attack on data, without a goal."""

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
    rows = attack(honest, 3, name, own_updates=own_updates, last=last, aggregate=median)
    assert rows.dtype == dtype
    assert rows.shape == (3, 33)
    rows.zero_()
    assert all(torch.equal(a, b) for a, b in zip(before, (honest, own_updates, last), strict=True))
    assert rows.is_contiguous()


@EVERY
def test_every_attack_is_a_pure_function(name, honest):
    global_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    one, again = (attack(honest, 4, name, aggregate=median, seed=3) for _ in range(2))
    assert torch.equal(one.nan_to_num(1.5), again.nan_to_num(1.5))
    assert torch.equal(torch.get_rng_state(), global_state[0])
    assert np.array_equal(np.random.get_state()[1], global_state[1])


@EVERY
def test_every_attack_accepts_any_number_of_columns(name, honest):
    assert attack(honest[:, :1], 2, name, aggregate=median).shape == (2, 1)
    assert attack(honest[:, :0], 2, name, aggregate=median).shape == (2, 0)
    strided = new_rows(7, 33, torch.double).copy_(honest)
    assert not strided.is_contiguous()
    plain, from_strided = (attack(h, 2, name, aggregate=median).nan_to_num(1.5) for h in (honest, strided))
    assert torch.allclose(plain, from_strided, rtol=0, atol=1e-12)


@EVERY
def test_without_attackers_or_honest_rows(name, honest, own_updates):
    assert attack(honest[:1], 0, name).shape == (0, 33)
    plug = attack_strategy.get(name)
    bound = attack_strategy.bind(plug, plug.check({}))
    given = {"aggregate": lambda rows: rows[0]}
    if "honest" in bound.accepts and name != "sign_flipping":
        with pytest.raises(ExperimentError, match=r"at least 1 honest row, there are 0|number of honest rows, 0"):
            bound(own_updates[:0], own_updates, **given)
    else:
        assert bound(own_updates[:0], own_updates, **given)[0].shape == (3, 33)


def test_an_attack_can_be_an_import_path(honest, own_updates):
    rows = attack(honest, 3, "tests.byzantine.test_functional:backwards", own_updates=own_updates, scale=2.0)
    assert torch.equal(rows, own_updates.flip(1) * 2)
    with pytest.raises(ExperimentError, match=r"must give rows of shape \(3, 33\) or \(33,\), not \(7, 33\)"):
        attack(honest, 3, "tests.byzantine.test_functional:misshapen")


def test_a_dataclass_with_poison_is_an_attack_on_data(honest, own_updates):
    plug = attack_strategy.get("tests.byzantine.test_functional:Blank")
    bound = attack_strategy.bind(plug, plug.check({"times": 3.0}))
    assert torch.equal(bound(honest, own_updates)[0], own_updates * 3)
    assert bound.poison(torch.ones(2), torch.arange(2), 2, None)[0].tolist() == [0, 0]
    assert bound.goal is None


HONEST = torch.zeros(7, 33)


@pytest.mark.parametrize(
    ("honest", "n_byzantine", "given", "message"),
    [
        *((bad, 2, {}, r"honest: must be a floating tensor \[n, d\] with n >= 1, not a list") for bad in ([[1.0]], [])),
        (torch.zeros(3), 2, {}, r"honest: .*, not torch.float32 \(3,\)"),
        *((HONEST, bad, {}, "n_byzantine = .*: must be a whole number >= 0") for bad in (-1, 1.0, True, "2")),
        (HONEST, 3, {"own_updates": torch.zeros(2, 33)}, r"own_updates: must be torch.float32 \(3, 33\) .*\(2, 33\)"),
        (HONEST, 3, {"last": torch.zeros(1, 33)}, r"last: must be torch.float32 \(33,\) .*\(1, 33\)"),
        (HONEST, 3, {"aggregate": 3}, "aggregate = 3: must be a callable of the matrix of all rows"),
        (HONEST, 3, {"name": "aile"}, 'attack.name = "aile": no such attack; did you mean "alie"'),
        (HONEST, 3, {"zz": 1.0}, r"attack.zz = 1.0: unknown key \(the attack is alie\); did you mean \"z\""),
    ],
)
def test_a_wrong_argument_is_an_error(honest, n_byzantine, given, message):
    with pytest.raises(ExperimentError, match=f"^{message}") as caught:
        attack(honest, n_byzantine, **given)
    assert len(caught.value.lines) == 1
