"""ServerOptimizer, which needs no experiment."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch

from fedsim.config.experiment import Experiment
from fedsim.errors import ExperimentError
from fedsim.server import ServerOptimizer, ServerStep, server_optimizer
from tests.server.optimizers import every_variant, numbers, path


@dataclass(frozen=True)
class Halfway(ServerStep):
    """A user's own optimizer: no state, its own parameter."""

    share: float = 0.5

    def step(self, rows, update, state):
        rows.add_(update, alpha=self.share)


@dataclass(frozen=True)
class Stray:
    """The methods of a server optimizer without its base class."""

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
    plug = server_optimizer.get(name)
    assert torch.equal(first[-1], steps(plug.bind(plug.check(params)), row, updates))


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
    with pytest.raises(ExperimentError, match="must be a dataclass that derives from fedsim.server.ServerStep"):
        ServerOptimizer(name)
    with pytest.raises(ExperimentError, match="must be a dataclass that derives from fedsim.server.ServerStep"):
        Experiment(server=name)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("adm", {}, 'optimizer = "adm": no such server optimizer; did you mean "adam"?'),
        ("adam", {"v0": "tau"}, 'v0 = "tau": must be a valid number or "tau^2"'),
        (
            "adagrad",
            {"beta2": 0.9},
            "beta2 = 0.9: unknown key (the server optimizer is adagrad); beta2 goes with adam, ",
        ),
        ("yogi", {"bias_correction": True, "v0": 1.0}, "server.bias_correction = true: "),
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
    assert server.state == {}  # the step did not take place


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
