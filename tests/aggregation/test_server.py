from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fedsim.aggregation import ServerOptimizer, ServerStep, server_optimizer
from fedsim.aggregation.fedopt import ServerAdam
from fedsim.aggregation.server import ServerBMUF, ServerMomentum, ServerSGD
from fedsim.errors import ExperimentError
from fedsim.experiment import Experiment

ALL = list(server_optimizer)
VARIANTS = [(plug.name, {}) for plug in ALL] + [
    ("momentum", {"nesterov": True}),
    ("bmuf", {"nesterov": True, "zeta": 0.7}),
    ("slowmo", {"alpha": 0.9, "lr": 0.05}),
    ("adam", {"bias_correction": True}),
    ("adam", {"v0": "tau^2"}),
    ("yogi", {"bias_correction": True}),
    ("adagrad", {"bias_correction": True, "v0": 0.5}),
]
EXACT = {"rtol": 0, "atol": 1e-12}

every = pytest.mark.parametrize("plug", ALL, ids=lambda plug: plug.name)
every_variant = pytest.mark.parametrize(("name", "params"), VARIANTS, ids=lambda value: str(value))


@dataclass(frozen=True)
class Halfway(ServerStep):
    """A user's own optimizer: no state, its own parameter."""

    share: float = 0.5

    def step(self, rows, update, state):
        rows.add_(update, alpha=self.share)


@dataclass(frozen=True)
class Stray:
    """Not a server optimizer, though it looks like one."""

    def start(self, rows):
        return {}

    def step(self, rows, update, state):
        rows.add_(update)


def steps(optimizer, row, updates):
    row = row.clone()
    state = optimizer.start(row)
    for update in updates:
        optimizer.step(row, update.clone(), state)
    return row


def path(name, row, updates, **params):
    """The global row after each update, [steps, d]."""
    server, rows = ServerOptimizer(name, **params), []
    for update in updates:
        row = server.step(row, update)
        rows.append(row)
    return torch.stack(rows)


def numbers(*values):
    return torch.tensor(values, dtype=torch.double)


@pytest.fixture
def case():
    """A row [7] and six updates [6, 7] of sizes from 0.001 to 1000, a zero and a repeated one among them."""
    rng = np.random.default_rng(0)
    updates = rng.standard_normal((6, 7)) * 10.0 ** np.arange(-3, 4)
    updates[2, 3] = 0
    updates[4] = updates[3]
    return torch.from_numpy(rng.standard_normal(7)), torch.from_numpy(updates)


# The definitions, a number at a time.


def plain_sgd(w, updates, *, lr):
    for d in updates:
        w = w + lr * d
        yield w


def plain_momentum(w, updates, *, lr, beta, nesterov=False):
    v = 0.0
    for d in updates:
        v = beta * v + d
        w = w + lr * (d + beta * v if nesterov else v)
        yield w


def plain_slowmo(w, updates, *, alpha, beta, lr):
    u = 0.0
    for d in updates:
        average = w + d
        u = beta * u + (w - average) / lr
        w = w - alpha * lr * u
        yield w


def plain_bmuf(w, updates, *, bm, zeta):
    delta = 0.0
    for d in updates:
        delta = bm * delta + zeta * d
        w = w + delta
        yield w


def plain_fedopt(w, updates, *, grow, lr, beta1, tau, v0=0.0, beta2=None, bias_correction=False):
    m, v = 0.0, v0
    for t, d in enumerate(updates, 1):
        m = beta1 * m + (1 - beta1) * d
        v = grow(v, d, beta2)
        m_hat = m / (1 - beta1**t) if bias_correction else m
        v_hat = v / (1 - beta2**t) if bias_correction and beta2 is not None else v
        w = w + lr * m_hat / (v_hat**0.5 + tau)
        yield w


def adam_grows(v, d, beta2):
    return beta2 * v + (1 - beta2) * d**2


def yogi_grows(v, d, beta2):
    return v - (1 - beta2) * d**2 * np.sign(v - d**2)


def adagrad_grows(v, d, beta2):
    return v + d**2


PLAIN = {
    "sgd": plain_sgd,
    "momentum": plain_momentum,
    "diloco": lambda w, updates, **params: plain_momentum(w, updates, nesterov=True, **params),
    "slowmo": plain_slowmo,
    "bmuf": plain_bmuf,
    "adam": lambda w, updates, **params: plain_fedopt(w, updates, grow=adam_grows, **params),
    "yogi": lambda w, updates, **params: plain_fedopt(w, updates, grow=yogi_grows, **params),
    "adagrad": lambda w, updates, **params: plain_fedopt(w, updates, grow=adagrad_grows, **params),
}
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
    parameter = torch.nn.Parameter(row.clone())
    theirs = torch.optim.SGD([parameter], lr=0.5, momentum=0.9, nesterov=nesterov)
    for update in updates:
        parameter.grad = -update
        theirs.step()
    assert torch.allclose(path(name, row, updates, **params)[-1], parameter.detach(), rtol=1e-13, atol=1e-12)


def test_diloco_is_torch_optim_sgd_with_the_papers_settings(case):
    row, updates = case
    parameter = torch.nn.Parameter(row.clone())
    theirs = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for update in updates:
        parameter.grad = -update
        theirs.step()
    assert torch.allclose(path("diloco", row, updates)[-1], parameter.detach(), rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize("bias_correction", [False, True])
def test_adam_with_bias_correction_is_torch_optim_adam_and_without_it_is_not(bias_correction, case):
    row, updates = case
    parameter = torch.nn.Parameter(row.clone())
    theirs = torch.optim.Adam([parameter], lr=0.1, betas=(0.9, 0.99), eps=1e-3)
    for update in updates:
        parameter.grad = -update
        theirs.step()
    ours = path("adam", row, updates, lr=0.1, bias_correction=bias_correction)[-1]
    assert torch.allclose(ours, parameter.detach(), **EXACT) is bias_correction


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


# What the engines rely on.


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slices_of_columns_are_stepped_as_the_whole_is(name, params, dtype):
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
def test_state_has_the_rows_shape_and_dtype_and_the_update_is_left_alone(name, params, dtype, case):
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


@every_variant
def test_a_zero_update_leaves_a_row_that_was_never_moved_where_it_is(name, params, case):
    row, _ = case
    assert torch.equal(path(name, row, torch.zeros(3, 7, dtype=torch.double), **params)[-1], row)


@every_variant
def test_with_lr_0_the_row_stays(name, params, case):
    row, updates = case
    scale = {"bmuf": "zeta", "slowmo": "alpha"}.get(name, "lr")
    assert torch.equal(path(name, row, updates, **{**params, scale: 0})[-1], row)


@every
def test_every_optimizer_is_frozen_and_pickles_with_its_parameters(plug):
    optimizer = plug.bind(plug.check({}))
    assert pickle.loads(pickle.dumps(optimizer)) == optimizer
    with pytest.raises(AttributeError):
        optimizer.lr = 2.0


def test_extra_state_is_kept_only_where_it_is_asked_for():
    row = numbers(1, 2)
    assert ServerSGD().start(row) == {}
    assert list(ServerMomentum().start(row)) == ["v"]
    assert list(ServerBMUF(nesterov=True).start(row)) == ["delta"]
    assert list(ServerAdam().start(row)) == ["m", "v"]
    assert list(ServerAdam(bias_correction=True).start(row)) == ["m", "v", "m_weight", "v_weight"]


def test_bias_correction_is_accurate_in_float32():
    row, updates = torch.zeros(3), torch.ones(200, 3)
    ours = path("adam", row, updates, lr=1.0, beta2=0.9999, tau=1e-6, bias_correction=True)
    assert torch.allclose(ours, torch.arange(1, 201)[:, None].expand(200, 3).float(), rtol=2e-6)


def test_an_experiment_takes_every_optimizer_with_its_parameters():
    for name, params in VARIANTS:
        experiment = Experiment(server={"optimizer": name, **params})
        assert Experiment(**experiment.resolved()) == experiment


# By itself, without an experiment.


@every_variant
def test_a_step_changes_neither_of_its_inputs_and_repeats_in_a_new_object(name, params, case):
    row, updates = case
    before, updates_before = row.clone(), updates.clone()
    first = path(name, row, updates, **params)
    assert torch.equal(row, before)
    assert torch.equal(updates, updates_before)
    assert torch.equal(path(name, row, updates, **params), first)
    plug = server_optimizer.get(name)
    assert torch.equal(first[-1], steps(plug.bind(plug.check(params)), row, updates))


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0,), (1,), (5,), (2, 3), ()])
def test_shape_and_dtype_are_kept(plug, dtype, shape):
    server = ServerOptimizer(plug.name)
    row = server.step(torch.ones(shape, dtype=dtype), torch.ones(shape, dtype=dtype))
    for tensor in (row, server.broadcast(row), *server.state.values()):
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        assert tensor.isfinite().all()


def test_rows_may_be_views_expanded_or_parameters(case):
    row, updates = case
    expected = path("momentum", row, updates)
    strided = torch.stack([row, row], dim=1)[:, 0]
    assert torch.equal(path("momentum", strided, updates), expected)
    parameter = torch.nn.Parameter(row)
    moved = path("momentum", parameter, updates)
    assert torch.equal(moved, expected)
    assert not moved.requires_grad
    ones = torch.ones(1).expand(7)
    assert torch.equal(path("adam", ones, torch.ones(1, 1).expand(3, 7)), path("adam", ones.clone(), torch.ones(3, 7)))


def test_the_state_begins_with_the_first_step_and_what_is_shown_is_a_copy():
    server = ServerOptimizer("momentum", beta=0.5)
    row = numbers(0)
    server.broadcast(row)
    assert server.state == {}
    row = server.step(row, numbers(1))
    shown = server.state
    assert shown["v"].item() == 1
    shown["v"].zero_()
    assert server.step(row, numbers(0)).item() == 1.5
    assert shown["v"].item() == 0
    server.broadcast(row).zero_()
    assert row.item() == 1


def test_a_copy_goes_on_by_itself():
    server = ServerOptimizer("adam")
    row = server.step(numbers(0), numbers(1))
    for twin in (copy.deepcopy(server), pickle.loads(pickle.dumps(server))):
        assert torch.equal(twin.step(row, numbers(2)), copy.deepcopy(server).step(row, numbers(2)))


def test_a_users_own_optimizer_goes_by_its_import_path():
    server = ServerOptimizer(f"{__name__}:Halfway", share=0.25)
    assert server.step(numbers(1), numbers(4)).item() == 2
    assert server.broadcast(numbers(1)).item() == 1


@pytest.mark.parametrize("name", [f"{__name__}:Stray", f"{__name__}:steps"])
def test_what_is_no_server_optimizer_is_refused(name):
    with pytest.raises(ExperimentError, match="must be a dataclass that derives from fedsim.aggregation.ServerStep"):
        ServerOptimizer(name)
    with pytest.raises(ExperimentError, match="must be a dataclass that derives from fedsim.aggregation.ServerStep"):
        Experiment(server=name)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("adm", {}, 'optimizer = "adm": no such server optimizer; did you mean "adam"?'),
        ("momentum", {"momentum": 0.9}, "momentum = 0.9: unknown key (the server optimizer is momentum); "),
        ("momentum", {"beta": 1}, "beta = 1: must be less than 1"),
        ("sgd", {"lr": -1}, "lr = -1: must be greater than or equal to 0"),
        ("sgd", {"lr": float("nan")}, "lr = nan: must be "),
        ("slowmo", {"lr": 0}, "lr = 0: must be greater than 0"),
        ("bmuf", {"bm": 1.0}, "bm = 1.0: must be less than 1"),
        ("adam", {"tau": 0}, "tau = 0: must be greater than 0"),
        ("adam", {"v0": -1}, 'v0 = -1: must be greater than or equal to 0 or "tau^2"'),
        ("adam", {"v0": "tau"}, 'v0 = "tau": must be a valid number or "tau^2"'),
        (
            "adagrad",
            {"beta2": 0.9},
            "beta2 = 0.9: unknown key (the server optimizer is adagrad; beta2 goes with adam, yogi); did you mean",
        ),
        (
            "yogi",
            {"bias_correction": True, "v0": "tau^2"},
            "server.bias_correction = true: makes up for a v that starts at 0, but server.v0 = tau^2",
        ),
    ],
)
def test_a_wrong_name_or_parameter_is_one_clear_line(name, params, message):
    with pytest.raises(ExperimentError) as caught:
        ServerOptimizer(name, **params)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "update", "message"),
    [
        (
            torch.zeros(3),
            torch.zeros(4),
            "update: must be torch.float32 [3] on cpu like global_row, not torch.float32 [4]",
        ),
        (
            torch.zeros(3),
            torch.zeros(3).double(),
            "update: must be torch.float32 [3] on cpu like global_row, not torch.fl",
        ),
        (
            torch.zeros(3),
            torch.zeros(3, device="meta"),
            "update: must be torch.float32 [3] on cpu like global_row, not t",
        ),
        (torch.zeros(3), [0.0, 0.0, 0.0], "update: must be torch.float32 [3] on cpu like global_row, not a list"),
        (
            torch.zeros(3).int(),
            torch.zeros(3).int(),
            "global_row: must be a floating tensor, not torch.int32 [3] on cpu",
        ),
        (None, torch.zeros(3), "global_row: must be a floating tensor, not a NoneType"),
    ],
)
def test_row_and_update_must_go_together(row, update, message):
    server = ServerOptimizer("momentum")
    with pytest.raises(ExperimentError) as caught:
        server.step(row, update)
    assert str(caught.value).startswith(message)
    assert server.state == {}  # a refused step is no first step


@pytest.mark.parametrize("row", [torch.zeros(4), torch.zeros(1, 3), torch.zeros(3).double()], ids=str)
def test_later_rows_must_be_like_the_first(row):
    server = ServerOptimizer("momentum")
    server.step(torch.zeros(3), torch.ones(3))
    for attempt in (lambda: server.step(row, row), lambda: server.broadcast(row)):
        with pytest.raises(
            ExperimentError, match=r"^global_row: must be torch.float32 \[3\] on cpu as at the first step, "
        ):
            attempt()
    assert server.state["v"].tolist() == [1, 1, 1]
