from __future__ import annotations

import pytest
import torch

from fedsim.errors import ExperimentError
from fedsim.local import SGD, Product, RowOptimizer, solver, step_along

CONFIGURATIONS = [
    {},
    {"momentum": 0.9},
    {"weight_decay": 0.1},
    {"momentum": 0.5, "weight_decay": 0.01},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
]


@pytest.mark.parametrize("params", CONFIGURATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sgd_is_torch_optim_sgd_bit_by_bit(params, dtype):
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(1000, generator=generator, dtype=dtype)
    parameter = torch.nn.Parameter(row.clone())
    gradient = torch.zeros_like(row)
    ours = RowOptimizer(SGD(lr=0.1, **params), row, gradient)
    theirs = torch.optim.SGD([parameter], lr=0.1, **params)
    for _ in range(5):
        drawn = torch.randn(1000, generator=generator, dtype=dtype)
        ours.zero_grad()
        gradient.add_(drawn)
        ours.step()
        parameter.grad = drawn
        theirs.step()
    assert torch.equal(row, parameter.detach())


@pytest.mark.parametrize("params", CONFIGURATIONS)
def test_sgd_is_elementwise_so_stacks_and_slices_take_the_same_steps(params):
    method = SGD(lr=0.1, **params)
    rows, gradients = torch.randn(3, 64, dtype=torch.double), torch.randn(4, 3, 64, dtype=torch.double)
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


@pytest.mark.parametrize("params", CONFIGURATIONS)
def test_a_step_along_a_product_is_the_step_along_the_gradients_that_it_stands_for(params):
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(3, 4, 5, generator=generator, dtype=torch.double)
    moved, expected, sgd = weights.clone(), weights.clone(), SGD(lr=0.1, **params)
    states = sgd.start(moved), sgd.start(expected)
    for _ in range(3):
        left, right = (torch.randn(3, 2, n, generator=generator, dtype=torch.double) for n in (4, 5))
        step_along(sgd, moved, Product(left, right), states[0])
        step_along(sgd, expected, torch.einsum("kmo,kmi->koi", left, right), states[1])
    torch.testing.assert_close(moved, expected)
    torch.testing.assert_close(states[0], states[1])


def test_a_solver_that_knows_of_no_products_is_given_the_gradients():
    class Plain:
        def step(self, rows, gradients, state):
            rows -= gradients

    left, right, weights = torch.ones(1, 2, 1), torch.ones(1, 2, 3), torch.zeros(1, 1, 3)
    step_along(Plain(), weights, Product(left, right), {})
    assert torch.equal(weights, torch.full((1, 1, 3), -2.0))


def test_nesterov_without_momentum_is_refused():
    with pytest.raises(ExperimentError, match=r"local.nesterov = true: needs local.momentum > 0"):
        SGD(nesterov=True)


@pytest.mark.parametrize("params", [{"lr": -0.1}, {"momentum": 1.0}, {"weight_decay": -1.0}])
def test_impossible_parameters_are_refused(params):
    with pytest.raises(ExperimentError):
        solver.get("sgd").check(params, "local")
