"""Every server optimizer is its definition, steps columns as whole rows, and those of torch.optim."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim.server import ServerOptimizer, server_optimizer
from tests.server.optimizers import ALL, EXACT, PLAIN, every, every_variant, numbers, path

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


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slices_of_columns_step_like_the_whole_row(name, params, dtype):
    generator = torch.Generator().manual_seed(0)
    row, updates = (torch.randn(n, 1003, generator=generator, dtype=dtype) for n in (1, 5))
    plug = server_optimizer.get(name)
    optimizer = plug.bind(plug.check(params))
    parts = [slice(0, 1), slice(1, 500), slice(500, 500), slice(500, 1003)]
    whole, cut = row[0].clone(), row[0].clone()
    state, cut_state = optimizer.start(whole), optimizer.start(cut)
    for update in updates:
        sent = torch.cat(
            [optimizer.broadcast(cut[part], {k: tensor[part] for k, tensor in cut_state.items()}) for part in parts]
        )
        torch.testing.assert_close(sent, optimizer.broadcast(whole, state))
        optimizer.step(whole, update, state)
        for part in parts:
            optimizer.step(cut[part], update[part], {k: tensor[part] for k, tensor in cut_state.items()})
    torch.testing.assert_close(cut, whole)  # not the bits: ends of slices may take other instructions
    torch.testing.assert_close(cut_state, state)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_state_has_the_shape_and_dtype_of_the_row(name, params, dtype, case):
    row, update = case[0].to(dtype), case[1][0].to(dtype)
    plug = server_optimizer.get(name)
    optimizer = plug.bind(plug.check(params))
    state, before = optimizer.start(row), update.clone()
    moved = row.clone()
    optimizer.step(moved, update, state)
    assert torch.equal(update, before)
    assert moved.dtype == dtype
    assert not torch.equal(moved, row)
    assert {(tensor.shape, tensor.dtype) for tensor in state.values()} <= {(row.shape, dtype)}
    assert not {tensor.data_ptr() for tensor in state.values()} & {moved.data_ptr(), update.data_ptr()}


def test_bias_correction_is_accurate_in_float32():
    row, updates = torch.zeros(3), torch.ones(200, 3)
    ours = path("adam", row, updates, lr=1.0, beta2=0.9999, tau=1e-6, bias_correction=True)
    assert torch.allclose(ours, torch.arange(1, 201)[:, None].expand(200, 3).float(), rtol=2e-6)
