"""Every server optimizer compared with its definition, with numbers by hand, and with torch.optim."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim.server import ServerOptimizer
from tests.server.optimizers import ALL, EXACT, PLAIN, every, numbers, path

ADAM = {"lr": 0.03, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}  # the defaults
ADAGRAD = {"lr": 0.1, "beta1": 0.9, "tau": 1e-3}


@pytest.mark.parametrize(
    ("name", "params", "meaning"),
    [
        ("sgd", {"lr": 0.3}, {"lr": 0.3}),
        ("momentum", {"lr": 0.3, "beta": 0.5}, {"lr": 0.3, "beta": 0.5}),
        ("momentum", {"lr": 0.5, "nesterov": True}, {"lr": 0.5, "beta": 0.9, "nesterov": True}),
        ("diloco", {"lr": 0.4, "beta": 0.8}, {"lr": 0.4, "beta": 0.8}),
        ("slowmo", {"alpha": 0.8, "beta": 0.7, "lr": 1e-4}, {"alpha": 0.8, "beta": 0.7, "lr": 1e-4}),
        ("bmuf", {"bm": 0.75, "zeta": 0.9}, {"bm": 0.75, "zeta": 0.9}),
        ("adam", {"lr": 1, "beta1": 0.5, "beta2": 0.6, "tau": 0.1}, {"lr": 1, "beta1": 0.5, "beta2": 0.6, "tau": 0.1}),
        ("adam", {"v0": 2.0}, {**ADAM, "v0": 2.0}),
        ("adam", {"bias_correction": True}, {**ADAM, "bias_correction": True}),
        ("yogi", {"lr": 1, "beta1": 0.5, "beta2": 0.6, "tau": 0.1}, {"lr": 1, "beta1": 0.5, "beta2": 0.6, "tau": 0.1}),
        ("yogi", {"v0": "tau^2", "tau": 0.1}, {**ADAM, "tau": 0.1, "v0": 0.01}),
        ("adagrad", {"lr": 0.02, "beta1": 0.0, "tau": 0.5}, {"lr": 0.02, "beta1": 0.0, "tau": 0.5}),
        ("adagrad", {"v0": "tau^2", "tau": 0.1}, {**ADAGRAD, "tau": 0.1, "v0": 0.01}),
        ("adagrad", {"bias_correction": True, "v0": 0.5}, {**ADAGRAD, "bias_correction": True, "v0": 0.5}),
    ],
)
def test_every_optimizer_is_its_definition(name, params, meaning, case):
    row, updates = case
    columns = [list(PLAIN[name](w, d, **meaning)) for w, d in zip(row.numpy(), updates.numpy().T, strict=True)]
    expected = torch.from_numpy(np.stack(columns, axis=1))
    assert torch.allclose(path(name, row, updates, **params), expected, rtol=1e-13, atol=1e-12)


def by_torch(optimizer, row, updates, **params):
    """The row after steps of an optimizer of PyTorch on the negated updates as gradients."""
    parameter = torch.nn.Parameter(row.clone())
    theirs = optimizer([parameter], **params)
    for update in updates:
        parameter.grad = -update
        theirs.step()
    return parameter.detach()


@pytest.mark.parametrize("bias_correction", [False, True])
def test_only_adam_with_bias_correction_is_torch_optim_adam(bias_correction, case):
    row, updates = case
    theirs = by_torch(torch.optim.Adam, row, updates, lr=0.1, betas=(0.9, 0.99), eps=1e-3)
    ours = path("adam", row, updates, lr=0.1, bias_correction=bias_correction)[-1]
    assert torch.allclose(ours, theirs, **EXACT) is bias_correction


def test_bmuf_with_nesterov_broadcasts_a_row_ahead():
    server = ServerOptimizer("bmuf", bm=0.5, nesterov=True)
    start = numbers(0, 10)
    assert torch.equal(server.broadcast(start), start)  # there is no momentum yet
    first = server.step(start, numbers(2, 4))
    assert first.tolist() == [2, 14]
    assert server.broadcast(first).tolist() == [3, 16]
    second = server.step(first, numbers(-1, 2))
    assert second.tolist() == [2, 18]  # delta = 0, 4
    assert server.broadcast(second).tolist() == [2, 20]
    assert torch.equal(server.broadcast(second), server.broadcast(second))
    assert ServerOptimizer("bmuf", bm=0.5).broadcast(second) is not second


@every
def test_optimizers_broadcast_the_row_itself_by_default(plug, case):
    row, updates = case
    optimizer = plug.bind(plug.check({}))
    state = optimizer.start(row)
    optimizer.step(row, updates[0], state)
    assert optimizer.broadcast(row, state) is row


def test_there_is_a_definition_for_every_optimizer():
    assert {plug.name for plug in ALL} == set(PLAIN)
