"""What every server optimizer does: by its definition, by hand, and as torch.optim does it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim.aggregation import ServerOptimizer
from tests.aggregation.server_optimizers import ALL, EXACT, PLAIN, every, numbers, path

ADAM = {"lr": 0.03, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}  # the defaults
ADAGRAD = {"lr": 0.1, "beta1": 0.9, "tau": 1e-3}


@pytest.mark.parametrize(
    ("name", "params", "meaning"),
    [
        ("sgd", {}, {"lr": 1.0}),
        ("sgd", {"lr": 0.3}, {"lr": 0.3}),
        ("momentum", {}, {"lr": 1.0, "beta": 0.9}),
        ("momentum", {"lr": 0.3, "beta": 0.5}, {"lr": 0.3, "beta": 0.5}),
        ("momentum", {"nesterov": True}, {"lr": 1.0, "beta": 0.9, "nesterov": True}),
        ("diloco", {}, {"lr": 0.7, "beta": 0.9}),
        ("diloco", {"lr": 0.4, "beta": 0.8}, {"lr": 0.4, "beta": 0.8}),
        ("slowmo", {}, {"alpha": 1.0, "beta": 0.5, "lr": 1.0}),
        ("slowmo", {"alpha": 0.8, "beta": 0.7, "lr": 0.05}, {"alpha": 0.8, "beta": 0.7, "lr": 0.05}),
        ("bmuf", {}, {"bm": 0.9, "zeta": 1.0}),
        ("bmuf", {"bm": 0.75, "zeta": 0.9}, {"bm": 0.75, "zeta": 0.9}),
        ("adam", {}, ADAM),
        ("adam", {"lr": 1, "beta1": 0.5, "beta2": 0.6, "tau": 0.1}, {"lr": 1, "beta1": 0.5, "beta2": 0.6, "tau": 0.1}),
        ("adam", {"v0": "tau^2"}, {**ADAM, "v0": 1e-6}),
        ("adam", {"v0": 2.0}, {**ADAM, "v0": 2.0}),
        ("adam", {"bias_correction": True}, {**ADAM, "bias_correction": True}),
        ("adam", {"bias_correction": True, "beta1": 0.0}, {**ADAM, "bias_correction": True, "beta1": 0.0}),
        ("yogi", {}, ADAM),
        ("yogi", {"lr": 1, "beta1": 0.5, "beta2": 0.6, "tau": 0.1}, {"lr": 1, "beta1": 0.5, "beta2": 0.6, "tau": 0.1}),
        ("yogi", {"v0": "tau^2", "tau": 0.1}, {**ADAM, "tau": 0.1, "v0": 0.01}),
        ("yogi", {"bias_correction": True}, {**ADAM, "bias_correction": True}),
        ("adagrad", {}, ADAGRAD),
        ("adagrad", {"lr": 0.02, "beta1": 0.0, "tau": 0.5}, {"lr": 0.02, "beta1": 0.0, "tau": 0.5}),
        ("adagrad", {"v0": "tau^2", "tau": 0.1}, {**ADAGRAD, "tau": 0.1, "v0": 0.01}),
        ("adagrad", {"bias_correction": True, "v0": 0.5}, {**ADAGRAD, "bias_correction": True, "v0": 0.5}),
    ],
)
def test_every_optimizer_is_its_definition_number_by_number(name, params, meaning, case):
    row, updates = case
    columns = [list(PLAIN[name](w, d, **meaning)) for w, d in zip(row.numpy(), updates.numpy().T, strict=True)]
    expected = torch.from_numpy(np.stack(columns, axis=1))
    assert torch.allclose(path(name, row, updates, **params), expected, rtol=1e-13, atol=1e-12)


def test_there_is_a_definition_for_every_optimizer():
    assert {plug.name for plug in ALL} == set(PLAIN)


@pytest.mark.parametrize(
    ("name", "params", "first", "second"),
    [  # from w = 0 by D = 2, then by D = -1
        ("sgd", {}, 2.0, 1.0),
        ("momentum", {"beta": 0.5}, 2.0, 2.0),  # v = 2, 0
        ("momentum", {"beta": 0.5, "nesterov": True}, 3.0, 2.0),  # D + v/2 = 3, -1
        ("diloco", {"lr": 1.0, "beta": 0.5}, 3.0, 2.0),
        ("slowmo", {"lr": 0.25}, 2.0, 2.0),  # u = -8, 0
        ("bmuf", {"bm": 0.5, "zeta": 2.0}, 4.0, 4.0),  # delta = 4, 0
        ("adam", {"lr": 1.0, "beta1": 0.5, "beta2": 0.75, "tau": 1.0}, 0.5, 0.5),  # m = 1, 0; v = 1, 1
        ("yogi", {"lr": 1.0, "beta1": 0.5, "beta2": 0.75, "tau": 1.0, "v0": 9.0}, 1 / (8**0.5 + 1), 1 / (8**0.5 + 1)),
        ("adagrad", {"lr": 3.0, "beta1": 0.5, "tau": 1.0}, 1.0, 1.0),  # m = 1, 0; v = 4, 5
        ("adagrad", {"lr": 3.0, "beta1": 0.0, "tau": 1.0, "v0": "tau^2"}, 6 / (5**0.5 + 1), None),
        ("adam", {"lr": 1.0, "tau": 1e-3, "bias_correction": True}, 2 / 2.001, None),  # the first step is a sign
        ("yogi", {"lr": 1.0, "tau": 1e-3, "bias_correction": True}, 2 / 2.001, None),
        ("adagrad", {"lr": 1.0, "tau": 1e-3, "bias_correction": True}, 2 / 2.001, None),
        ("adam", {"lr": 1.0, "tau": 1e-3}, 0.2 / 0.201, None),
    ],
)
def test_first_steps_by_hand(name, params, first, second):
    rows = path(name, numbers(0), numbers([2], [-1]), **params)[:, 0].tolist()
    assert rows[0] == pytest.approx(first, abs=1e-12)
    if second is not None:
        assert rows[1] == pytest.approx(second, abs=1e-12)


def test_yogi_holds_v_where_it_equals_the_square_and_lowers_it_where_it_is_more():
    server = ServerOptimizer("yogi", beta2=0.5, v0=4.0)
    server.step(numbers(0, 0, 0), numbers(2, 1, 3))
    assert server.state["v"].tolist() == [4.0, 3.5, 8.5]


def by_torch(optimizer, row, updates, **params):
    """Where an optimizer of PyTorch takes the row, given the negated updates as gradients."""
    parameter = torch.nn.Parameter(row.clone())
    theirs = optimizer([parameter], **params)
    for update in updates:
        parameter.grad = -update
        theirs.step()
    return parameter.detach()


@pytest.mark.parametrize(
    ("name", "params", "nesterov"),
    [
        ("momentum", {"lr": 0.5}, False),
        ("momentum", {"lr": 0.5, "nesterov": True}, True),
        ("diloco", {"lr": 0.5}, True),
    ],
)
def test_momentum_is_torch_optim_sgd_on_the_negated_update(name, params, nesterov, case):
    row, updates = case
    theirs = by_torch(torch.optim.SGD, row, updates, lr=0.5, momentum=0.9, nesterov=nesterov)
    assert torch.allclose(path(name, row, updates, **params)[-1], theirs, rtol=1e-13, atol=1e-12)


def test_diloco_is_torch_optim_sgd_with_the_papers_settings(case):
    row, updates = case
    theirs = by_torch(torch.optim.SGD, row, updates, lr=0.7, momentum=0.9, nesterov=True)
    assert torch.allclose(path("diloco", row, updates)[-1], theirs, rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize("bias_correction", [False, True])
def test_adam_with_bias_correction_is_torch_optim_adam_and_without_it_is_not(bias_correction, case):
    row, updates = case
    theirs = by_torch(torch.optim.Adam, row, updates, lr=0.1, betas=(0.9, 0.99), eps=1e-3)
    ours = path("adam", row, updates, lr=0.1, bias_correction=bias_correction)[-1]
    assert torch.allclose(ours, theirs, **EXACT) is bias_correction


@pytest.mark.parametrize("lr", [1e-4, 0.05, 3.0])
def test_slowmo_is_momentum_whatever_the_workers_constant_rate(lr, case):
    row, updates = case
    ours = path("slowmo", row, updates, alpha=0.8, beta=0.7, lr=lr)
    assert torch.allclose(ours, path("momentum", row, updates, lr=0.8, beta=0.7), rtol=1e-12, atol=1e-12)


def test_bmuf_with_zeta_1_is_momentum_with_lr_1(case):
    row, updates = case
    assert torch.equal(path("bmuf", row, updates, bm=0.6), path("momentum", row, updates, beta=0.6))


@pytest.mark.parametrize("name", ["momentum", "slowmo", "bmuf"])
def test_without_momentum_they_are_sgd(name, case):
    row, updates = case
    still = {"bmuf": {"bm": 0.0}}.get(name, {"beta": 0.0})
    assert torch.equal(path(name, row, updates, **still), path("sgd", row, updates))


def test_bmuf_with_nesterov_sends_the_row_ahead_and_keeps_the_row():
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


def test_bmuf_with_nesterov_where_updates_are_measured_from_what_was_sent():
    """The paper's loop on a model that moves a tenth of the way to 1, in plain numbers."""
    w, delta, expected = 0.0, 0.0, []
    for _ in range(8):
        sent = w + 0.8 * delta
        average = sent + 0.1 * (1 - sent)
        delta = 0.8 * delta + 0.9 * (average - sent)
        w = w + delta
        expected.append((sent, w))
    server, row, ours = ServerOptimizer("bmuf", bm=0.8, zeta=0.9, nesterov=True), numbers(0), []
    for _ in range(8):
        sent = server.broadcast(row)
        row = server.step(row, 0.1 * (1 - sent))
        ours.append((sent.item(), row.item()))
    assert np.allclose(ours, expected, **EXACT)


@every
def test_all_but_bmuf_with_nesterov_send_the_row_itself(plug, case):
    row, updates = case
    optimizer = plug.bind(plug.check({}))
    state = optimizer.start(row)
    optimizer.step(row, updates[0], state)
    assert optimizer.broadcast(row, state) is row
