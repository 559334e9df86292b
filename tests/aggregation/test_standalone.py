"""A server optimizer by itself, without an experiment."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch

from fedsim.aggregation import ServerOptimizer, ServerStep, server_optimizer
from fedsim.errors import ExperimentError
from fedsim.experiment import Experiment
from tests.aggregation.server_optimizers import every, every_variant, numbers, path


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
            "beta2 = 0.9: unknown key (the server optimizer is adagrad); beta2 goes with adam, yogi",
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
