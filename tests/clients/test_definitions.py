"""What each client algorithm computes, compared with PyTorch's optimizers and with values computed by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedsim.clients import SGD, Adagrad, Adam, AdamW, FedNova, FedProx, RoundNumbers, Scaffold, WorkerRound

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
    """Yield the row of a client algorithm and that of a PyTorch optimizer after each step with the same gradients."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(D, generator=generator, dtype=dtype)
    parameter, state = torch.nn.Parameter(row.clone()), method.start(row)
    theirs = theirs([parameter])
    for _ in range(STEPS):
        scale = torch.randn(D, generator=generator, dtype=dtype).exp()  # gives each parameter its own scale
        drawn = scale * torch.randn(D, generator=generator, dtype=dtype)
        method.step(row, drawn.clone(), state)
        parameter.grad = drawn
        theirs.step()
        yield row, parameter.detach()


@pytest.mark.parametrize("algorithm", [SGD(lr=0.1), FedProx(lr=0.1, mu=0.0)], ids=["sgd", "fedprox with mu = 0"])
@pytest.mark.parametrize("params", SGDS)
@pytest.mark.parametrize("dtype", NUMBERS)
def test_sgd_is_torch_optim_sgd_bit_by_bit(algorithm, params, dtype):
    for ours, theirs in paths(replace(algorithm, **params), lambda p: torch.optim.SGD(p, lr=0.1, **params), dtype):
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
    """Return a function that creates PyTorch's optimizer with fedsim's parameters."""
    same = {name: value for name, value in params.items() if name not in ("beta1", "beta2")}
    if optimizer is not torch.optim.Adagrad:
        same["betas"] = params.get("beta1", 0.9), params.get("beta2", 0.999)
    return lambda parameters: optimizer(parameters, **same)


@pytest.mark.parametrize(("algorithm", "theirs", "params"), ADAPTIVE)
@pytest.mark.parametrize("dtype", NUMBERS)
def test_adaptive_algorithms_equal_those_of_pytorch(algorithm, theirs, params, dtype):
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for ours, expected in paths(algorithm(**params), in_pytorch(theirs, params), dtype):
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


def test_the_first_steps_of_adam_are_accurate_in_float32():
    """In float32, 1 - 0.999^t loses digits to cancellation at t = 1, which would show in the first step."""
    params = {"lr": 1.0, "eps": 1e-30}
    for ours, theirs in paths(Adam(**params), in_pytorch(torch.optim.Adam, params), torch.float32):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=3e-6)


def test_the_late_steps_of_adam_are_accurate_in_float32():
    """After 3,000 steps, fedsim in float32 is about as far from PyTorch in float64 as PyTorch in float32 is."""
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
    """PyTorch differentiates the proximal term mu / 2 |w - w_start|^2."""
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


def test_a_worker_that_takes_no_step_keeps_its_control_variate():
    """With option 2, (x - y) / (K lr) would be 0 / 0 for this worker, as it is for a learning rate of 0."""
    worker_states, control = {"c_k": torch.full((2, 3), 5.0)}, torch.ones(3)
    algorithm, rows = Scaffold(lr=0.5), torch.zeros(2, 3)
    worker = WorkerRound({"c": control}, worker_states, lambda: RoundNumbers(*[np.array([0, 2])] * 6), rows)
    state = algorithm.start_round(rows, worker)
    rows[1] -= 4
    assert algorithm.finish(rows, state, worker)["change"].tolist() == [[0, 0, 0], [3, 3, 3]]
    assert worker_states["c_k"].tolist() == [[5, 5, 5], [8, 8, 8]]
    state = algorithm.start_round(torch.zeros(2, 3), worker)
    unmoved = replace(algorithm, lr=0.0).finish(torch.zeros(2, 3), state, worker)
    assert not unmoved["change"].any()


def test_the_update_of_a_worker_that_takes_no_step_is_zero_in_fednova():
    rows, numbers = torch.ones(1, 3), RoundNumbers(*np.zeros((5, 1), dtype=np.int64), np.array([2.0]))
    messages = FedNova().finish(rows, {"start": torch.ones(1, 3)}, WorkerRound({}, {}, lambda: numbers, rows))
    assert rows.tolist() == [[1, 1, 1]]
    assert [message.item() for message in messages.values()] == [2, 0]
