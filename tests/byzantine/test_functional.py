from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsim.byzantine import attack, attack_strategy, bind_attack
from fedsim.core.rows import new_rows
from fedsim.errors import ExperimentError

EVERY = pytest.mark.parametrize("name", attack_strategy.names())

OWN_ROWS = {"none", "sign_flipping", "gaussian", "label_flipping", "backdoor"}  # the others send one row many times


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
def test_attackers_send_the_same_row_or_their_own(name, honest):
    rows = attack(honest, 4, name, aggregate=median).nan_to_num(1.5)
    assert torch.equal(rows, rows[:1].expand(4, -1)) == (name not in OWN_ROWS)


@EVERY
def test_every_attack_accepts_any_number_of_columns(name, honest):
    assert attack(honest[:, :1], 2, name, aggregate=median).shape == (2, 1)
    assert attack(honest[:, :0], 2, name, aggregate=median).shape == (2, 0)
    strided = new_rows(7, 33, torch.double).copy_(honest)
    assert not strided.is_contiguous()
    plain, from_strided = (attack(h, 2, name, aggregate=median).nan_to_num(1.5) for h in (honest, strided))
    assert torch.allclose(plain, from_strided, rtol=0, atol=1e-12)


@EVERY
def test_no_attackers_send_no_rows(name, honest):
    assert attack(honest[:1], 0, name).shape == (0, 33)


@EVERY
def test_an_attack_needs_an_honest_row(name):
    with pytest.raises(ExperimentError, match=r"honest: needs at least 1 honest row, there are 0 \(shape \(0, 33\)\)"):
        attack(torch.zeros(0, 33), 2, name)


@EVERY
def test_bound_attacks_without_honest_rows(name, own_updates):
    plug = attack_strategy.get(name)
    bound = bind_attack(plug, plug.check({}))
    given = {"aggregate": lambda rows: rows[0]}
    if "honest" in bound.accepts and name != "sign_flipping":
        with pytest.raises(ExperimentError, match=r"at least 1 honest row, there are 0|number of honest rows, 0"):
            bound(own_updates[:0], own_updates, **given)
    else:
        assert bound(own_updates[:0], own_updates, **given).shape == (3, 33)


@pytest.mark.gpu
@EVERY
def test_every_attack_on_a_gpu_gives_the_result_of_the_cpu(name, honest, own_updates):
    rows = attack(honest.cuda(), 3, name, own_updates=own_updates.cuda(), last=honest[0].cuda(), aggregate=median)
    assert rows.is_cuda
    expected = attack(honest, 3, name, own_updates=own_updates, last=honest[0], aggregate=median)
    assert torch.allclose(rows.cpu(), expected, rtol=0, atol=1e-9, equal_nan=True)


def test_own_updates_default_to_honest_rows(honest):
    assert torch.equal(attack(honest[:3], 5, "none"), honest[[0, 1, 2, 0, 1]])


def test_an_attack_can_be_an_import_path(honest, own_updates):
    rows = attack(honest, 3, "tests.byzantine.test_functional:backwards", own_updates=own_updates, scale=2.0)
    assert torch.equal(rows, own_updates.flip(1) * 2)
    with pytest.raises(ExperimentError, match=r"must give rows of shape \(3, 33\) or \(33,\), not \(7, 33\)"):
        attack(honest, 3, "tests.byzantine.test_functional:misshapen")


def test_a_dataclass_with_poison_is_an_attack_on_data(honest, own_updates):
    plug = attack_strategy.get("tests.byzantine.test_functional:Blank")
    bound = bind_attack(plug, plug.check({"times": 3.0}))
    assert torch.equal(bound(honest, own_updates), own_updates * 3)
    assert bound.poison(torch.ones(2), torch.arange(2), 2, None)[0].tolist() == [0, 0]
    assert bound.goal is None


@pytest.mark.parametrize("bad", [torch.zeros(3), torch.zeros(2, 2, 2), torch.zeros(2, 3, dtype=torch.long), [[1.0]]])
def test_honest_rows_are_a_floating_matrix(bad):
    with pytest.raises(ExperimentError, match=r"honest: must be a floating tensor \[h, d\], not"):
        attack(bad, 2)


@pytest.mark.parametrize("n_byzantine", [-1, 1.0, True, "2"])
def test_the_number_of_attackers_is_a_whole_number(n_byzantine, honest):
    with pytest.raises(ExperimentError, match="n_byzantine = .*: must be a whole number >= 0"):
        attack(honest, n_byzantine)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"own_updates": torch.zeros(2, 33, dtype=torch.double)},
            r"own_updates: must be torch.float64 \(3, 33\) .*float64 \(2, 33\)",
        ),
        ({"own_updates": torch.zeros(3, 33)}, r"own_updates: must be torch.float64 .*, not torch.float32"),
        ({"last": torch.zeros(1, 33, dtype=torch.double)}, r"last: must be torch.float64 \(33,\) .*\(1, 33\)"),
    ],
)
def test_other_rows_must_match_the_honest_rows(given, message, honest):
    with pytest.raises(ExperimentError, match=message):
        attack(honest, 3, "none", **given)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("aile", {}, 'attack.name = "aile": no such attack; did you mean "alie"'),
        ("alie", {"zz": 1.0}, r"attack.zz = 1.0: unknown key \(the attack is alie\); did you mean \"z\""),
        ("alie", {"z": float("nan")}, "attack.z = nan: must be a finite number"),
        ("min_max", {"dev": "var"}, 'attack.dev = "var": must be "unit", "sign" or "std"'),
    ],
)
def test_a_wrong_name_or_parameter_is_an_error(name, params, message, honest):
    with pytest.raises(ExperimentError, match=message) as caught:
        attack(honest, 3, name, **params)
    assert len(caught.value.lines) == 1


@pytest.mark.parametrize(("name", "given"), [("sign_flipping", "own_updates"), ("free_rider", "last")])
def test_rows_must_be_tensors(name, given):
    with pytest.raises(ExperimentError, match=rf"^{given}: must be a tensor \(.*\), not a list$"):
        attack(torch.zeros(3, 2), 1, name, **{given: [0.0, 0.0]})


def test_aggregate_must_be_callable(honest):
    with pytest.raises(ExperimentError, match="^aggregate = 3: must be a callable of the matrix of all rows$"):
        attack(honest, 2, "opt_ipm", aggregate=3)
