"""Python objects that may keep a state: runs with checkpoints say that a resumed run starts with a new copy."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch

import fedsim
from fedsim.core.objects import may_change
from fedsim.errors import SettingWarning

EXPERIMENT = {
    "model": "logistic",
    "data": "tests.components:tiny",
    "workers": 3,
    "rounds": 4,
    "engine": "serial",
    "local": {"batch_size": 16, "lr": 0.05},
}


class Momentum:
    """A rule that keeps its last result in an attribute."""

    def __init__(self, beta=0.9):
        self.beta, self.last = beta, None

    def __call__(self, updates):
        mean = updates.mean(0)
        self.last = mean if self.last is None else self.beta * self.last + mean
        return self.last


momentum = Momentum()


class Scaled:
    """A rule whose attributes never change."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, updates):
        return self.factor * updates.mean(0)


class Attack(Momentum):
    def __call__(self, honest):
        return -super().__call__(honest)


def with_momentum(updates, state):
    last = updates.mean(0) + 0.9 * state.get("last", torch.zeros_like(updates[0]))
    return last, {"last": last}


def counter():
    count = 0

    def rule(updates):
        nonlocal count
        count += 1
        return updates.mean(0) / count

    return rule


def collector():
    seen = []
    return lambda updates: seen.append(updates.mean(0)) or sum(seen)


def unfinished():
    """Return a function with an empty cell."""

    def rule(updates):
        return later(updates)

    if rule is None:
        later = rule
    return rule


def scaled(factor):
    return lambda updates: factor * updates.mean(0)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (Momentum(), True),
        (Momentum().__call__, True),
        (functools.partial(Momentum()), True),
        (counter(), True),
        (collector(), True),
        (Scaled(2.0), False),
        (Scaled(scaled(2.0)), False),
        (Scaled([2.0]), True),
        (Scaled(Momentum()), True),
        (scaled(2.0), False),
        (unfinished(), False),
        (functools.partial(scaled(2.0)), False),
        (with_momentum, False),
        (Momentum, False),  # each run makes a new object
        (torch.nn.CrossEntropyLoss(), False),
        (torch.optim.SGD, False),
    ],
)
def test_an_object_may_change_if_it_assigns_to_something_or_holds_something_mutable(target, expected):
    assert may_change(target) == expected


def lines_of(action):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in caught if warning.category is SettingWarning]


@pytest.mark.parametrize(
    ("table", "changes"),
    [
        ("aggregate", lambda: {"aggregate": Momentum()}),
        ("aggregate", lambda: {"aggregate": "tests.runs.test_objects_with_state:momentum"}),
        ("attack", lambda: {"attack": {"name": Attack(), "workers": [0]}}),
    ],
)
def test_a_run_with_checkpoints_and_its_resume_name_the_object(table, changes, tmp_path):
    def run(rounds, every=1, out=tmp_path / "run", **more):
        return fedsim.run(EXPERIMENT, out, rounds=rounds, checkpoint={"every": every}, **changes(), **more)

    (start,) = lines_of(lambda: run(2))
    assert start.startswith(f"{table}: ")
    assert " starts with a new copy when the run is resumed, because checkpoints do not contain " in start
    (resumed,) = lines_of(lambda: run(4, resume=True))
    assert " starts with a new copy here, because checkpoints do not contain " in resumed
    assert lines_of(lambda: run(2, every=0, out=tmp_path / "without")) == []
    assert lines_of(lambda: run(2, out=None)) == []


def test_the_input_state_is_resumed_without_a_warning(tmp_path):
    whole = fedsim.run(EXPERIMENT, aggregate=with_momentum)
    fedsim.run(EXPERIMENT, tmp_path, rounds=2, checkpoint={"every": 1}, aggregate=with_momentum)
    resumed = fedsim.run(EXPERIMENT, tmp_path, checkpoint={"every": 1}, aggregate=with_momentum, resume=True)
    assert [record.test_loss for record in resumed.history] == [record.test_loss for record in whole.history]


def test_each_run_copies_the_object_so_runs_do_not_share_a_state():
    shared = Momentum()
    losses = {fedsim.run(EXPERIMENT, aggregate=rule).history[-1].test_loss for rule in (shared, shared, Momentum())}
    assert len(losses) == 1
    assert shared.last is None


def test_a_comparison_names_an_object_once(tmp_path):
    def compare(out):
        axes = {"aggregate.rule": ["mean", Momentum(), Scaled(2.0)], "seed": [0, 1]}
        fedsim.compare({**EXPERIMENT, "rounds": 1}, axes, out, jobs=1)

    (only,) = lines_of(lambda: compare(tmp_path / "out"))
    assert 'aggregate: "<Momentum' in only
    assert lines_of(lambda: compare(None)) == []
