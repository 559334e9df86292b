"""Learning rate, batch size, momentum and clipping of each worker, against plain loops in float64."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional as F

import fedsim
from fedsim.clients.schedule import Schedule, Varying
from fedsim.core.randomness import draw_key
from fedsim.errors import ExperimentError
from tests.asynchronous.test_clock_runs import points
from tests.clients.test_local_work import EXPERIMENT, ROUNDS, STACKED, WORKERS, zero
from tests.textbook import Federation

ENGINES = {"serial": {}, "processes": {"engine": "processes", "processes": 2}, "stacks": STACKED}


@pytest.fixture(scope="module")
def session():
    with fedsim.Session() as session:
        yield session


def falling(worker, round):
    return 0.1 * (1 + worker) / round


def sizes(worker, round):
    return [3, 4, 5, 15][(worker + round) % 4]


def between(low, high, key):
    """Return the definition of {uniform = [low, high]} with real numbers."""
    return lambda worker, round: low + (high - low) * draw_key(0, f"local_{key}", round, worker) / 2**63


def one_of(values, key):
    return lambda worker, round: values[draw_key(0, f"local_{key}", round, worker) % len(values)]


# Each way of giving numbers: the settings, and the definition of each number.
WAYS = {
    "lists": (
        {"lr": [0.1, 0.0, 0.3, 0.7], "momentum": [0.0, 0.9, 0.5, 0.0], "clip_norm": [0.1, 1, 0.3, 5]},
        {key: lambda worker, round, key=key: WAYS["lists"][0][key][worker] for key in ("lr", "momentum", "clip_norm")},
    ),
    "draws": (
        {
            **{"lr": {"uniform": [0, 1]}, "momentum": {"choice": [0, 0.5, 0.9]}, "clip_norm": {"uniform": [0.1, 0.5]}},
            "batch_size": {"uniform": [3, 9]},
        },
        {
            **{"lr": between(0, 1, "lr"), "momentum": one_of([0, 0.5, 0.9], "momentum")},
            **{"clip_norm": between(0.1, 0.5, "clip_norm"), "batch_size": one_of(range(3, 10), "batch_size")},
        },
    ),
    "functions": ({"lr": falling, "batch_size": sizes}, {"lr": falling, "batch_size": sizes}),
}


def sgd_step(row, start, gradient, state, lr, momentum):
    state["v"] = momentum * state.get("v", 0) + gradient + 0.1 * row
    return row - lr * state["v"]


def fedprox_step(row, start, gradient, state, lr, momentum):
    state["v"] = momentum * state.get("v", 0) + gradient + 0.5 * (row - start)
    return row - lr * state["v"]


def adam_step(row, start, gradient, state, lr, momentum):
    t = state["t"] = state.get("t", 0) + 1
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * gradient
    state["v"] = 0.999 * state.get("v", 0) + 0.001 * gradient**2
    return row - lr * (state["m"] / (1 - 0.9**t)) / ((state["v"] / (1 - 0.999**t)).sqrt() + 1e-8)


ALGORITHMS = {"sgd": (sgd_step, {"weight_decay": 0.1}), "fedprox": (fedprox_step, {"mu": 0.5}), "adam": (adam_step, {})}


def trained(step, numbers):
    """Return the global row after federated averaging, where worker k has `numbers[key](k, round)` in a round."""
    federation = Federation(zero, points, WORKERS, 4)
    for round in range(1, ROUNDS + 1):
        rows = []
        for worker in range(WORKERS):
            own = {"lr": 0.1, "momentum": 0.0, "clip_norm": 1e9, "batch_size": 4}
            own |= {key: number(worker, round) for key, number in numbers.items()}
            federation.batch_size, row, state = own["batch_size"], federation.row.clone(), {}
            for batch in (batch for epoch in range(2) for batch in federation.epoch(round, worker, epoch)):
                gradient = federation.gradient(row, batch)
                gradient = gradient * min(1, own["clip_norm"] / (float(gradient.norm()) + 1e-6))
                row = step(row, federation.row, gradient, state, own["lr"], own["momentum"])
            rows.append(row)
        federation.row = torch.stack(rows).mean(0)
    return federation.row


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_worker_trains_with_its_own_numbers_in_every_engine(algorithm, way, session):
    settings, numbers = WAYS[way]
    step, parameters = ALGORITHMS[algorithm]
    if algorithm == "adam":
        settings = {key: value for key, value in settings.items() if key != "momentum"}
    local = {"algorithm": algorithm, "batch_size": 4, "epochs": 2, "lr": 0.1, **parameters, **settings}
    expected, results = trained(step, numbers), {}
    for engine, tables in ENGINES.items() if algorithm == "sgd" else {"serial": {}, "stacks": STACKED}.items():
        shared = session if engine == "processes" else None
        results[engine] = fedsim.run({**EXPERIMENT, "local": local, **tables}, session=shared)
        assert torch.allclose(results[engine].global_row, expected, rtol=0, atol=1e-12), engine
        assert all(record["samples"] == [30] * WORKERS for record in results[engine].history)
    if algorithm == "sgd":
        assert torch.equal(results["serial"].global_row, results["processes"].global_row)


def test_equal_numbers_of_all_workers_give_the_results_of_one_number():
    one = {"batch_size": 4, "lr": 0.1, "momentum": 0.5, "clip_norm": 0.3, "epochs": 2}
    for engine in ({}, STACKED):
        rows = [
            fedsim.run({**EXPERIMENT, **engine, "local": local}).global_row
            for local in (one, {key: [value] * WORKERS for key, value in one.items()})
        ]
        assert torch.allclose(*rows, rtol=0, atol=1e-15)


def test_a_schedule_multiplies_the_learning_rate_of_each_worker():
    rates = [0.1, 0.2, 0.3, 0.4]
    for per, factor in (("round", lambda round, step: 0.5 ** (round - 1)), ("step", lambda round, step: 0.5**step)):
        federation = Federation(zero, points, WORKERS, 4)
        for round in (1, 2):
            rows = []
            for worker, lr in enumerate(rates):
                row, batches = federation.row, federation.batches(round, worker)
                for step in range(2):
                    row = row - lr * factor(round, step) * federation.gradient(row, next(batches))
                rows.append(row)
            federation.row = torch.stack(rows).mean(0)
        schedule = {"name": "exponential", "gamma": 0.5, "per": per}
        local = {"batch_size": 4, "lr": rates, "steps": 2, "schedule": schedule}
        for engine in ({}, STACKED):
            result = fedsim.run({**EXPERIMENT, **engine, "local": local, "rounds": 2})
            assert torch.allclose(result.global_row, federation.row, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", [{}, STACKED])
def test_scaffold_divides_by_the_rate_of_each_worker(engine):
    """Karimireddy et al. 2020, option 2: c_k becomes c_k - c + (x - y_k) / (K lr_k)."""
    rates, federation = [0.1, 0.2, 0.3, 0.4], Federation(zero, points, WORKERS, 4)
    x, c, own = federation.row, torch.zeros_like(federation.row), [torch.zeros_like(federation.row)] * WORKERS
    for round in range(1, 4):
        ends, changes = [], []
        for worker, lr in enumerate(rates):
            y, batches = x, federation.epoch(round, worker)
            for batch in batches:
                y = y - lr * (federation.gradient(y, batch) - own[worker] + c)
            changes.append((x - y) / (len(batches) * lr) - c)
            ends.append(y)
        own = [before + change for before, change in zip(own, changes, strict=True)]
        x, c = torch.stack(ends).mean(0), c + sum(changes) / WORKERS
    local = {"algorithm": "scaffold", "batch_size": 4, "lr": rates}
    result = fedsim.run({**EXPERIMENT, **engine, "local": local, "rounds": 3})
    assert torch.allclose(result.global_row, x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", [{}, STACKED])
def test_fednova_normalises_by_the_momentum_of_each_worker(engine):
    """Wang et al. 2020: |a_k| is the sum of the gradients' factors in the update, which are powers of momentum."""
    moments, sizes_of, x = [0.0, 0.3, 0.6, 0.9], [3, 4, 5, 15], Federation(zero, points, WORKERS, 4).row
    updates, norms = [], []
    for worker, (momentum, batch_size) in enumerate(zip(moments, sizes_of, strict=True)):
        federation, y, v = Federation(zero, points, WORKERS, batch_size), x, torch.zeros_like(x)
        batches = federation.epoch(1, worker)
        for batch in batches:
            v = momentum * v + federation.gradient(y, batch)
            y = y - 0.1 * v
        updates.append(y - x)
        norms.append(sum(momentum**power for step in range(len(batches)) for power in range(step + 1)))
    expected = x + sum(norms) / WORKERS * sum(u / a for u, a in zip(updates, norms, strict=True)) / WORKERS
    local = {"algorithm": "fednova", "batch_size": sizes_of, "lr": 0.1, "momentum": moments}
    result = fedsim.run({**EXPERIMENT, **engine, "local": local, "rounds": 1})
    assert torch.allclose(result.global_row, expected, rtol=0, atol=1e-12)


def test_a_schedule_that_does_not_multiply_needs_one_learning_rate():
    local = {"lr": [0.1] * 4, "schedule": {"name": "cosine", "eta_min": 0.01}}
    with pytest.raises(
        ExperimentError, match="cannot scale the workers' different values .*; use one local.lr, or omit eta_"
    ):
        fedsim.run({**EXPERIMENT, "local": local})


def test_the_time_of_a_worker_follows_its_number_of_batches():
    tables = {**EXPERIMENT, "mode": "clock", "rounds": 2}
    slowest = fedsim.run({**tables, "local": {"batch_size": 3}}).history[-1]["virtual_seconds"]
    result = fedsim.run({**tables, "local": {"batch_size": [15, 15, 3, 5]}})
    assert result.history[-1]["virtual_seconds"] == slowest
    del tables["aggregate"]
    tables |= {"policy": "fedasync", "local": {"batch_size": [15, 5, 3, 5], "lr": falling}, "rounds": 3}
    samples = Counter()
    for record in fedsim.run(tables).history:
        samples.update(dict(zip(record["cohort"], record["samples"], strict=True)))
    assert samples[0] > samples[1] >= samples[2] > 0  # 1, 3, 5 and 3 batches


@pytest.mark.parametrize("policy", ["asgd", "fedasync"])
@pytest.mark.parametrize("engine", ["serial", "stacks"])
def test_the_results_of_one_asynchronous_worker_are_those_of_rounds(policy, engine):
    """With one worker, a step along its clipped gradient is a local step."""
    local = {"batch_size": [7], "clip_norm": [0.05], "lr": [0.3] if policy == "fedasync" else 0.3}
    tables = {**EXPERIMENT, **ENGINES[engine], "workers": 1, "local": local}
    rows = [fedsim.run(tables).global_row]
    del tables["aggregate"]
    settings = {"name": policy, "alpha": 1.0} if policy == "fedasync" else policy
    rows.append(fedsim.run({**tables, "mode": "clock", "policy": settings}).global_row)
    assert torch.allclose(*rows, rtol=0, atol=1e-12)


def test_averaged_gradients_are_those_of_each_workers_batches_and_norms():
    norms, batch_sizes = [0.01, 0.1, 1.0, 10.0], [3, 5, 5, 15]
    local = {"batch_size": batch_sizes, "clip_norm": norms, "lr": 0.1, "steps": 2}
    federation = Federation(zero, points, WORKERS, 4)
    epochs = []
    for worker, federation.batch_size in enumerate(batch_sizes):
        epochs.append([batch for epoch in range(2) for batch in federation.epoch(1, worker, epoch)])
    for step in range(2):
        gradients = [federation.gradient(federation.row, batches[step]) for batches in epochs]
        clipped = [g * min(1, c / (float(g.norm()) + 1e-6)) for g, c in zip(gradients, norms, strict=True)]
        federation.row = federation.row - 0.1 * sum(clipped) / WORKERS
    for engine in ({}, STACKED):
        result = fedsim.run({**EXPERIMENT, **engine, "sync": "gradients", "rounds": 1, "local": local})
        assert torch.allclose(result.global_row, federation.row, rtol=0, atol=1e-12)
        assert result.history[0]["samples"] == [6, 10, 10, 30]


def trains(model, batches, lr=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def test_a_training_function_gets_the_rate_of_its_worker():
    rows = [
        fedsim.run({**EXPERIMENT, "local": {**algorithm, "lr": falling, "batch_size": 4}}).global_row
        for algorithm in ({}, {"algorithm": trains})
    ]
    assert torch.allclose(*rows, rtol=0, atol=1e-12)


@dataclass(frozen=True)
class Scalar(fedsim.clients.ClientAlgorithm):
    """SGD that accepts only one learning rate."""

    lr: float = 0.1

    def step(self, rows, gradients, state):
        rows.add_(gradients, alpha=-self.lr)


@dataclass(frozen=True)
class Columns(Scalar):
    """SGD that accepts one learning rate per row."""

    def step(self, rows, gradients, state):
        rows.sub_(self.lr * gradients)


@dataclass(frozen=True)
class Fixed(Scalar):
    """SGD that takes the learning rate from elsewhere if workers are trained together."""

    def step(self, rows, gradients, state):
        rows.sub_((self.lr if isinstance(self.lr, float) else 0.1) * gradients)


def test_an_algorithm_of_ones_own_is_stacked_only_if_its_steps_use_a_rate_per_worker():
    def row_of(algorithm, **tables):
        local = {"algorithm": algorithm, "lr": falling, "batch_size": 4}
        return fedsim.run({**EXPERIMENT, "local": local, **tables}).global_row

    expected = row_of("sgd")
    assert torch.allclose(row_of(Columns, **STACKED), expected, rtol=0, atol=1e-12)
    assert torch.allclose(row_of(Scalar), expected, rtol=0, atol=1e-12)
    for algorithm, reason in ((Scalar, "'alpha' must be Number, not Tensor"), (Fixed, "does not use each worker's lr")):
        with pytest.raises(ExperimentError, match=f"{reason}.*; use engine=processes"):
            row_of(algorithm, **STACKED)


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (lambda worker, round: -worker, "lr = -1: must be greater than or equal to 0"),
        (lambda worker, round: "high" if worker else 0.1, 'lr = "high": must be a valid number'),
        (lambda worker, round: {0: 0.1}[worker], "KeyError: 1"),
    ],
)
def test_what_a_function_returns_is_checked(function, line):
    with pytest.raises(ExperimentError, match=rf"local.lr = .*: worker 1 in round 1: {line}"):
        fedsim.run({**EXPERIMENT, "local": {"lr": function}})


@pytest.mark.parametrize(("key", "first"), [("lr", 1), ("batch_size", 2), ("steps", 3)])
def test_a_function_whose_numbers_change_is_refused(key, first):
    """Each process calls the function again, so the results would depend on the engine."""
    numbers = itertools.count(first)
    with pytest.raises(
        ExperimentError,
        match=rf"local.{key} = .*: worker 0 in round 1: the function returned {first}, and {first + 1} in",
    ):
        fedsim.run({**EXPERIMENT, "local": {key: lambda worker, round: next(numbers)}})


def test_a_run_with_a_function_is_stored_and_resumed(tmp_path):
    local = {"lr": f"{__name__}:falling", "batch_size": 4}
    every = {"checkpoint": {"every": 1}, "rounds": 2, "records": {"curve": False}}
    whole = fedsim.run({**EXPERIMENT, "local": local, "rounds": 4})
    fedsim.run({**EXPERIMENT, "local": local, **every}, tmp_path / "path")
    assert f'lr = "{__name__}:falling"' in (tmp_path / "path" / "experiment.toml").read_text()
    resumed = fedsim.run(
        tmp_path / "path" / "experiment.toml", tmp_path / "path", rounds=4, resume=True, allow_imports=True
    )
    assert torch.equal(resumed.global_row, whole.global_row)
    tables = {**EXPERIMENT, **every, "local": {"lr": lambda worker, round: falling(worker, round), "batch_size": 4}}
    fedsim.run(tables, tmp_path / "object")
    resumed = fedsim.run(tables, tmp_path / "object", rounds=4, resume=True)
    assert torch.equal(resumed.global_row, whole.global_row)
    with pytest.raises(ExperimentError, match=r"local.lr = .*: stands for an object of a Python program"):
        fedsim.run(tmp_path / "object" / "experiment.toml", allow_imports=True)


def test_a_distribution_replaces_a_number_on_the_command_line():
    for word in ("local.lr={uniform=[0.1,0.5]}", "local.lr.uniform=[0.1,0.5]"):
        experiment = fedsim.load_experiment({"local": {"lr": 0.3}}, [word])
        assert experiment.local.params["lr"] == {"uniform": [0.1, 0.5]}


def test_a_parameter_whose_values_are_lists_keeps_its_meaning():
    def decayed(model, batches, *, lr: list[float]):
        assert lr == [0.1, 0.2]
        trains(model, batches, lr[0])

    fedsim.run({**EXPERIMENT, "local": {"algorithm": decayed, "lr": [0.1, 0.2]}})


def test_every_batch_size_that_may_leave_one_sample_is_refused_with_batchnorm():
    tables = {**EXPERIMENT, "model": "tests.clients.test_varying_settings:normalised"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch_size in ([5, 5, 5, 7], {"choice": [5, 7]}, {"uniform": [5, 9]}):
            with pytest.raises(ExperimentError, match=r"^local.batch_size = .*has one sample.*local.drop_last = true$"):
                fedsim.run({**tables, "local": {"batch_size": batch_size}})
    assert Schedule(Varying("uniform", [2, 10**9])).longest(0).batch_size == 2


def normalised():
    return torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(3))
