"""Server optimizers: each with its main parameters against its definition and torch.optim; and ServerOptimizer."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fedsim.config.experiment import Experiment
from fedsim.errors import ExperimentError
from fedsim.server import ServerOptimizer, ServerStep, server_optimizer


@pytest.fixture
def case():
    """Return a row [7] and updates [6, 7] with entries from 0.001 to 1000, a zero row and two equal rows."""
    rng = np.random.default_rng(0)
    updates = rng.standard_normal((6, 7)) * 10.0 ** np.arange(-3, 4)
    updates[2, 3] = 0
    updates[4] = updates[3]
    return torch.from_numpy(rng.standard_normal(7)), torch.from_numpy(updates)


ALL = list(server_optimizer)
VARIANTS = [(registration.name, {}) for registration in ALL] + [
    ("sgd", {"lr": 0.3}),
    ("momentum", {"lr": 0.5, "beta": 0.5, "nesterov": True}),
    ("diloco", {"lr": 0.4, "beta": 0.8}),
    ("bmuf", {"bm": 0.75, "nesterov": True, "zeta": 0.7}),
    ("slowmo", {"alpha": 0.8, "beta": 0.7, "lr": 1e-4}),
    ("adam", {"bias_correction": True}),
    ("adam", {"lr": 1.0, "beta1": 0.5, "beta2": 0.6, "tau": 0.1, "v0": 2.0}),
    ("yogi", {"lr": 1.0, "beta1": 0.5, "beta2": 0.6, "tau": 0.1, "v0": "tau^2"}),
    ("yogi", {"bias_correction": True}),
    ("adagrad", {"lr": 0.02, "beta1": 0.0, "tau": 0.5, "v0": "tau^2"}),
    ("adagrad", {"bias_correction": True, "v0": 0.5}),
]
EXACT = {"rtol": 0, "atol": 1e-12}

every = pytest.mark.parametrize("registration", ALL, ids=lambda registration: registration.name)
every_variant = pytest.mark.parametrize(("name", "params"), VARIANTS, ids=lambda value: str(value))


def path(name, row, updates, **params):
    """Return the global row after each update [steps, d]."""
    server, rows = ServerOptimizer(name, **params), []
    for update in updates:
        row = server.step(row, update)
        rows.append(row)
    return torch.stack(rows)


def numbers(*values):
    return torch.tensor(values, dtype=torch.double)


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


def plain_bmuf(w, updates, *, bm, zeta, nesterov):  # nesterov changes only what is sent
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


@every_variant
def test_every_optimizer_matches_its_definition(name, params, case):
    row, updates = case
    meaning = server_optimizer.get(name).check(params)
    if meaning.get("v0") == "tau^2":
        meaning["v0"] = meaning["tau"] ** 2
    columns = [list(PLAIN[name](w, d, **meaning)) for w, d in zip(row.numpy(), updates.numpy().T, strict=True)]
    expected = torch.from_numpy(np.stack(columns, axis=1))
    assert torch.allclose(path(name, row, updates, **params), expected, rtol=1e-13, atol=1e-12)


def test_bmuf_with_nesterov_broadcasts_a_row_ahead():
    server = ServerOptimizer("bmuf", bm=0.5, nesterov=True)
    start = numbers(0, 10)
    assert torch.equal(server.broadcast(start), start)  # no momentum yet
    first = server.step(start, numbers(2, 4))
    assert first.tolist() == [2, 14]
    assert server.broadcast(first).tolist() == [3, 16]
    second = server.step(first, numbers(-1, 2))
    assert second.tolist() == [2, 18]  # delta = 0, 4
    assert server.broadcast(second).tolist() == [2, 20]
    assert torch.equal(server.broadcast(second), server.broadcast(second))
    assert ServerOptimizer("bmuf", bm=0.5).broadcast(second) is not second


@every
def test_optimizers_broadcast_the_row_itself_by_default(registration, case):
    row, updates = case
    optimizer = registration.bind(registration.check({}))
    state = optimizer.start(row)
    optimizer.step(row, updates[0], state)
    assert optimizer.broadcast(row, state) is row


def test_there_is_a_definition_for_every_optimizer():
    assert {registration.name for registration in ALL} == set(PLAIN)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slices_of_columns_step_like_the_whole_row(name, params, dtype):
    generator = torch.Generator().manual_seed(0)
    row, updates = (torch.randn(n, 1003, generator=generator, dtype=dtype) for n in (1, 5))
    registration = server_optimizer.get(name)
    optimizer = registration.bind(registration.check(params))
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
    torch.testing.assert_close(cut, whole)  # not bit-identical: the ends of slices may use other instructions
    torch.testing.assert_close(cut_state, state)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_state_has_the_shape_and_dtype_of_the_row(name, params, dtype, case):
    row, update = case[0].to(dtype), case[1][0].to(dtype)
    registration = server_optimizer.get(name)
    optimizer = registration.bind(registration.check(params))
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


@dataclass(frozen=True)
class Halfway(ServerStep):
    """A user-defined server optimizer without state and with one parameter."""

    share: float = 0.5

    def step(self, rows, update, state):
        rows.add_(update, alpha=self.share)


@dataclass(frozen=True)
class Stray:
    """A class with the methods of a server optimizer but without its base class."""

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


@every_variant
def test_a_step_keeps_its_inputs(name, params, case):
    row, updates = case
    before, updates_before = row.clone(), updates.clone()
    first = path(name, row, updates, **params)
    assert torch.equal(row, before)
    assert torch.equal(updates, updates_before)
    assert torch.equal(path(name, row, updates, **params), first)
    registration = server_optimizer.get(name)
    assert torch.equal(first[-1], steps(registration.bind(registration.check(params)), row, updates))


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


def test_a_copied_optimizer_is_independent():
    server = ServerOptimizer("adam")
    row = server.step(numbers(0), numbers(1))
    for twin in (copy.deepcopy(server), pickle.loads(pickle.dumps(server))):
        assert torch.equal(twin.step(row, numbers(2)), copy.deepcopy(server).step(row, numbers(2)))


def test_an_optimizer_can_be_an_import_path():
    server = ServerOptimizer(f"{__name__}:Halfway", share=0.25)
    assert server.step(numbers(1), numbers(4)).item() == 2
    assert server.broadcast(numbers(1)).item() == 1


@pytest.mark.parametrize("name", [f"{__name__}:Stray", f"{__name__}:steps"])
def test_other_classes_are_an_error(name):
    with pytest.raises(ExperimentError, match="the .* must be a dataclass that derives from fedsim.server.ServerStep"):
        ServerOptimizer(name)
    with pytest.raises(ExperimentError, match="the .* must be a dataclass that derives from fedsim.server.ServerStep"):
        Experiment(server=name)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("adm", {}, 'name = "adm": no such server optimizer; did you mean "adam"?'),
        ("adam", {"v0": "tau"}, 'v0 = "tau": must be a valid number or "tau^2"'),
        (
            "adagrad",
            {"beta2": 0.9},
            "beta2 = 0.9: unknown key (the server optimizer is adagrad); beta2 is a parameter of adam, ",
        ),
        ("yogi", {"bias_correction": True, "v0": 1.0}, "bias_correction = true: "),
    ],
)
def test_a_wrong_name_or_parameter_is_an_error(name, params, message):
    with pytest.raises(ExperimentError) as caught:
        ServerOptimizer(name, **params)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("update", [torch.zeros(4), torch.zeros(3).double(), torch.zeros(3, device="meta"), [0.0] * 3])
def test_row_and_update_must_match(update):
    server = ServerOptimizer("momentum")
    with pytest.raises(ExperimentError, match=r"^update: must be torch.float32 \[3\] on cpu like global_row, not "):
        server.step(torch.zeros(3), update)
    assert server.state == {}  # the step has had no effect


@pytest.mark.parametrize("row", [torch.zeros(1, 3), torch.zeros(3).double()], ids=str)
def test_later_rows_must_be_like_the_first(row):
    server = ServerOptimizer("momentum")
    server.step(torch.zeros(3), torch.ones(3))
    for attempt in (lambda: server.step(row, row), lambda: server.broadcast(row)):
        with pytest.raises(
            ExperimentError, match=r"^global_row: must be torch.float32 \[3\] on cpu as at the first step, "
        ):
            attempt()
    assert server.state["v"].tolist() == [1, 1, 1]


def test_a_step_of_a_state_dict_is_that_of_its_row():
    by_row, by_dict = ServerOptimizer("momentum", beta=0.5), ServerOptimizer("momentum", beta=0.5)
    row = torch.arange(6.0)
    state = {"weight": row[:4].view(2, 2), "count": torch.tensor(3), "bias": row[4:]}
    for step in range(2):
        update = torch.arange(6.0) + step
        row = by_row.step(row, update)
        state = by_dict.step(state, {"bias": update[4:], "weight": update[:4].view(2, 2), "count": torch.tensor(9)})
        assert torch.equal(torch.cat([state["weight"].view(-1), state["bias"]]), row)
        assert (list(state), state["count"]) == (["weight", "count", "bias"], 3)
    assert torch.equal(by_dict.broadcast(state)["bias"], state["bias"])
    with pytest.raises(ExperimentError, match=r"^update: has no entry \['count'\], which global_row\[0\] has"):
        by_dict.step(state, {"weight": state["weight"], "bias": state["bias"]})
