"""What engines and experiments rely on, whichever the local solver."""

from __future__ import annotations

import pickle

import pytest
import torch

from fedsim.errors import ExperimentError
from fedsim.local import SGD, Product, solver, step_along
from tests.local.variants import VARIANTS, every_variant, made


def test_every_solver_has_a_variant():
    assert {name for name, _ in VARIANTS.values()} == set(solver.names())


@every_variant
def test_solvers_are_elementwise_so_stacks_and_slices_take_the_same_steps(variant):
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
def test_a_step_along_a_product_is_the_step_along_the_gradients_that_it_stands_for(variant):
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(3, 4, 5, generator=generator, dtype=torch.double)
    moved, expected, method = weights.clone(), weights.clone(), made(variant)
    states = method.start(moved), method.start(expected)
    for _ in range(3):
        left, right = (torch.randn(3, 2, n, generator=generator, dtype=torch.double) for n in (4, 5))
        step_along(method, moved, Product(left, right), states[0])
        step_along(method, expected, torch.einsum("kmo,kmi->koi", left, right), states[1])
    torch.testing.assert_close(moved, expected)
    torch.testing.assert_close(states[0], states[1])


def test_a_solver_that_knows_of_no_products_is_given_the_gradients():
    class Plain:
        def step(self, rows, gradients, state):
            rows -= gradients

    left, right, weights = torch.ones(1, 2, 1), torch.ones(1, 2, 3), torch.zeros(1, 1, 3)
    step_along(Plain(), weights, Product(left, right), {})
    assert torch.equal(weights, torch.full((1, 1, 3), -2.0))


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_state_has_the_rows_shape_and_type_and_memory_of_its_own_where_it_stays(variant, dtype):
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
def test_at_a_learning_rate_of_zero_nothing_moves(variant):
    method, rows = made(variant, lr=0.0), torch.randn(7, generator=torch.Generator().manual_seed(0))
    moved, state = rows.clone(), method.start(rows)
    for _ in range(2):
        method.step(moved, torch.ones_like(rows), state)
    assert torch.equal(moved, rows)


@pytest.mark.parametrize("variant", ["sgd", "fedprox", "adam", "adagrad"])
def test_a_parameter_that_no_step_uses_stays_where_it_is(variant):
    method, row = made(variant), torch.randn(7, generator=torch.Generator().manual_seed(0))
    moved, state = row.clone(), method.start(row)
    for _ in range(3):
        method.step(moved, torch.zeros_like(row), state)
    assert torch.equal(moved, row)


@every_variant
def test_a_solver_travels_to_other_processes(variant):
    assert pickle.loads(pickle.dumps(made(variant))) == made(variant)


def test_nesterov_without_momentum_is_refused():
    with pytest.raises(ExperimentError, match=r"local.nesterov = true: needs local.momentum > 0"):
        SGD(nesterov=True)


@pytest.mark.parametrize(
    ("name", "params", "line"),
    [
        ("sgd", {"lr": -0.1}, "local.lr = -0.1: must be greater than or equal to 0"),
        ("sgd", {"momentum": 1.0}, "local.momentum = 1.0: must be less than 1"),
        ("sgd", {"weight_decay": -1.0}, "local.weight_decay = -1.0: must be greater than or equal to 0"),
        ("sgd", {"mu": 0.1}, "local.mu = 0.1: unknown key (the local solver is sgd); mu goes with fedprox"),
        ("fedprox", {"mu": -0.1}, "local.mu = -0.1: must be greater than or equal to 0"),
        ("adam", {"beta1": 1.0}, "local.beta1 = 1.0: must be less than 1"),
        ("adamw", {"beta2": -0.1}, "local.beta2 = -0.1: must be greater than or equal to 0"),
        ("adam", {"eps": 0.0}, "local.eps = 0.0: must be greater than 0"),
        ("adam", {"momentum": 0.9}, "local.momentum = 0.9: unknown key (the local solver is adam); momentum goes with"),
        ("adagrad", {"lr_decay": -1.0}, "local.lr_decay = -1.0: must be greater than or equal to 0"),
        ("adagrad", {"eps": 0.0}, "local.eps = 0.0: must be greater than 0"),
    ],
)
def test_impossible_parameters_are_refused_in_one_line(name, params, line):
    with pytest.raises(ExperimentError) as caught:
        solver.get(name).check(params, "local")
    (found,) = caught.value.lines
    assert found.startswith(line)
