"""What each solver computes, against PyTorch's optimizers and by hand."""

from __future__ import annotations

import pytest
import torch

from fedsim.clients import SGD, Adagrad, Adam, AdamW, FedProx, RowOptimizer

D, STEPS = 1000, 20
NUMBERS = [torch.float32, torch.float64]
SGDS = [
    {},
    {"momentum": 0.9},
    {"weight_decay": 0.1},
    {"momentum": 0.5, "weight_decay": 0.01},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
]


def paths(method, theirs, dtype):
    """For each step the row of a solver, and of a PyTorch optimizer that is given the same gradients."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(D, generator=generator, dtype=dtype)
    parameter, gradient = torch.nn.Parameter(row.clone()), torch.zeros_like(row)
    ours, theirs = RowOptimizer(method, row, gradient), theirs([parameter])
    for _ in range(STEPS):
        scale = torch.randn(D, generator=generator, dtype=dtype).exp()  # so that no two parameters are alike
        drawn = scale * torch.randn(D, generator=generator, dtype=dtype)
        ours.zero_grad()
        gradient.add_(drawn)
        ours.step()
        parameter.grad = drawn
        theirs.step()
        yield row, parameter.detach()


@pytest.mark.parametrize("params", SGDS)
@pytest.mark.parametrize("dtype", NUMBERS)
def test_sgd_is_torch_optim_sgd_bit_by_bit(params, dtype):
    for ours, theirs in paths(SGD(lr=0.1, **params), lambda p: torch.optim.SGD(p, lr=0.1, **params), dtype):
        assert torch.equal(ours, theirs)


ADAMS = [
    {},
    {"lr": 0.1, "weight_decay": 0.2},
    {"lr": 0.1, "weight_decay": 0.2, "amsgrad": True},
    {"lr": 0.1, "beta1": 0.5, "beta2": 0.7, "eps": 0.1},
    {"lr": 0.1, "beta1": 0.0, "beta2": 0.9999},
]
ADAGRADS = [
    {},
    {"lr": 0.1, "lr_decay": 0.3},
    {"lr": 0.1, "weight_decay": 0.2, "initial_accumulator_value": 0.5, "eps": 0.1, "lr_decay": 0.01},
]
ADAPTIVE = [
    *((Adam, torch.optim.Adam, params) for params in ADAMS),
    *((AdamW, torch.optim.AdamW, params) for params in ADAMS),
    *((Adagrad, torch.optim.Adagrad, params) for params in ADAGRADS),
]


def in_pytorch(optimizer, params):
    """A function of parameters that makes PyTorch's optimizer with our parameters."""
    same = {name: value for name, value in params.items() if name not in ("beta1", "beta2")}
    if optimizer is not torch.optim.Adagrad:
        same["betas"] = params.get("beta1", 0.9), params.get("beta2", 0.999)
    return lambda parameters: optimizer(parameters, **same)


@pytest.mark.parametrize(("solver", "theirs", "params"), ADAPTIVE)
@pytest.mark.parametrize("dtype", NUMBERS)
def test_adaptive_solvers_are_those_of_pytorch(solver, theirs, params, dtype):
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for ours, expected in paths(solver(**params), in_pytorch(theirs, params), dtype):
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


def test_the_first_steps_of_adam_are_accurate_in_float32():
    """1 - 0.999^t cancels in float32: to five digits at t = 1, which a step of lr would show."""
    params = {"lr": 1.0, "eps": 1e-30}
    for ours, theirs in paths(Adam(**params), in_pytorch(torch.optim.Adam, params), torch.float32):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=3e-6)


def test_the_late_steps_of_adam_are_accurate_in_float32():
    """After 3,000 steps it is about as far from PyTorch's in float64 as PyTorch's in float32 is."""
    generator, row = torch.Generator().manual_seed(0), torch.zeros(100)
    exact, rounded = (torch.nn.Parameter(torch.zeros(100, dtype=dtype)) for dtype in (torch.float64, torch.float32))
    method, optimizers = Adam(lr=1e-3), [torch.optim.Adam([parameter], lr=1e-3) for parameter in (exact, rounded)]
    state = method.start(row)
    for _ in range(3000):
        drawn = torch.randn(100, generator=generator)
        exact.grad, rounded.grad = drawn.double(), drawn.clone()
        for optimizer in optimizers:
            optimizer.step()
        method.step(row, drawn, state)
    ours, theirs = ((values.detach().double() - exact.detach()).abs().max() for values in (row, rounded))
    assert ours < 2 * theirs < 1e-5


@pytest.mark.parametrize("params", SGDS)
@pytest.mark.parametrize("dtype", NUMBERS)
def test_fedprox_is_sgd_on_the_loss_with_the_proximal_term(params, dtype):
    """mu / 2 |w - w_start|^2, differentiated by PyTorch."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(D, generator=generator, dtype=dtype)
    start, parameter = row.clone(), torch.nn.Parameter(row.clone())
    theirs, method = torch.optim.SGD([parameter], lr=0.1, **params), FedProx(lr=0.1, mu=0.7, **params)
    state = method.start(row)
    for _ in range(STEPS):
        drawn = torch.randn(D, generator=generator, dtype=dtype)
        theirs.zero_grad()
        (drawn @ parameter + 0.7 / 2 * (parameter - start).square().sum()).backward()
        theirs.step()
        method.step(row, drawn, state)
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(row, parameter.detach(), rtol=tolerance, atol=tolerance)
    assert torch.equal(state["constant"], start * -0.7)


@pytest.mark.parametrize("params", SGDS)
@pytest.mark.parametrize("dtype", NUMBERS)
def test_fedprox_with_mu_zero_is_sgd(params, dtype):
    for ours, theirs in paths(FedProx(lr=0.1, mu=0.0, **params), lambda p: torch.optim.SGD(p, lr=0.1, **params), dtype):
        assert torch.equal(ours, theirs)
    row = torch.zeros(3)
    assert set(FedProx(mu=0.0, **params).start(row)) == set(SGD(**params).start(row))
