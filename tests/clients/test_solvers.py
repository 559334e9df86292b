"""What engines and experiments rely on, of every element-wise local solver."""

from __future__ import annotations

import pickle

import pytest
import torch

from fedsim.clients import OuterProductGrad, solver, step_along

VARIANTS = {
    "sgd": ("sgd", {}),
    "sgd with momentum": ("sgd", {"momentum": 0.9}),
    "sgd with weight decay": ("sgd", {"weight_decay": 0.1}),
    "sgd with momentum and weight decay": ("sgd", {"momentum": 0.5, "weight_decay": 0.01}),
    "sgd with all": ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "fedprox": ("fedprox", {"mu": 0.5}),
    "fedprox with all": ("fedprox", {"mu": 0.5, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "fedprox that pulls nowhere": ("fedprox", {"mu": 0.0, "momentum": 0.9, "weight_decay": 0.01}),
    "mimelite": ("mimelite", {"beta": 0.5}),
    "scaffold": ("scaffold", {}),
    "scaffold with weight decay": ("scaffold", {"weight_decay": 0.1, "option": 1}),
    "fednova": ("fednova", {}),
    "fednova with all": ("fednova", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "feddyn": ("feddyn", {"alpha": 0.5}),
    "feddyn with all": ("feddyn", {"alpha": 0.5, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": ("adam", {}),
    "adam with all": ("adam", {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1, "amsgrad": True}),
    "adam without memory": ("adam", {"beta1": 0.0, "beta2": 0.0}),
    "adamw": ("adamw", {"weight_decay": 0.1}),
    "adamw with all": ("adamw", {"beta1": 0.8, "beta2": 0.9, "weight_decay": 0.2, "amsgrad": True}),
    "adagrad": ("adagrad", {}),
    "adagrad with all": (
        "adagrad",
        {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.3, "eps": 1e-3},
    ),
    "fedper": ("fedper", {"personal": ["*"], "momentum": 0.5}),
    "lg_fedavg": ("lg_fedavg", {"personal": ["*"], "weight_decay": 0.1}),
    "fedbn": ("fedbn", {"momentum": 0.9, "nesterov": True}),
    "moon": ("moon", {"momentum": 0.5}),
    "local_only": ("local_only", {"momentum": 0.5}),
}

every_variant = pytest.mark.parametrize("variant", VARIANTS)


def made(variant, lr=0.1):
    """The solver of a variant."""
    name, params = VARIANTS[variant]
    plug = solver.get(name)
    return plug.bind(plug.check({"lr": lr, **params}))


def test_every_element_wise_solver_has_a_variant():
    assert {name for name, _ in VARIANTS.values()} == {plug.name for plug in solver if plug.target.element_wise}


@every_variant
def test_solvers_are_elementwise(variant):
    method, generator = made(variant), torch.Generator().manual_seed(0)
    rows, gradients = (torch.randn(*n, 3, 64, generator=generator, dtype=torch.double) for n in ((), (4,)))
    stacked, one_by_one = rows.clone(), rows.clone()
    state = method.start(stacked)
    for step in gradients:
        method.step(stacked, step.clone(), state)
    for row, steps in zip(one_by_one, gradients.unbind(1), strict=True):
        for part in (slice(0, 20), slice(20, 64)):
            state = method.start(row[part])
            for step in steps:
                method.step(row[part], step[part].clone(), state)
    assert torch.equal(stacked, one_by_one)


@every_variant
def test_a_fused_step_is_the_step_along_the_gradients(variant):
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(3, 4, 5, generator=generator, dtype=torch.double)
    moved, expected, method = weights.clone(), weights.clone(), made(variant)
    states = method.start(moved), method.start(expected)
    for _ in range(3):
        left, right = (torch.randn(3, 2, n, generator=generator, dtype=torch.double) for n in (4, 5))
        step_along(method, moved, OuterProductGrad(left, right), states[0])
        step_along(method, expected, torch.einsum("kmo,kmi->koi", left, right), states[1])
    torch.testing.assert_close(moved, expected)
    torch.testing.assert_close(states[0], states[1])


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_state_has_the_shape_and_dtype_of_the_rows(variant, dtype):
    method, rows = made(variant), torch.randn(2, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    state = method.start(rows)
    assert {(tensor.shape, tensor.dtype) for tensor in state.values()} <= {(rows.shape, dtype)}
    lying = {name: tensor.data_ptr() for name, tensor in state.items()}
    assert len({rows.data_ptr(), *lying.values()}) == 1 + len(state)
    moved = rows.clone()
    for _ in range(2):
        method.step(moved, torch.ones_like(rows), state)
    assert moved.dtype == dtype
    assert {name: tensor.data_ptr() for name, tensor in state.items()} == lying


@every_variant
def test_solvers_can_be_pickled(variant):
    assert pickle.loads(pickle.dumps(made(variant))) == made(variant)
