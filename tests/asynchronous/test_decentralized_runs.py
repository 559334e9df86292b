"""Whole runs on topologies, compared with loops from the papers' definitions in float64."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from typer.testing import CliRunner

import fedsim
from fedsim.cli.main import app
from fedsim.config.files import tomllib
from fedsim.core.randomness import numpy_generator
from tests.asynchronous.policies.test_topologies import matching
from tests.asynchronous.test_clock_runs import linear, points
from tests.textbook import Federation

HERE = "tests.asynchronous.test_clock_runs"
N, LR = 6, 0.1
SPEEDS = [1.0, 1.1, 1.3, 1.7, 2.1, 2.9]  # seconds per step
SMALL = {
    "mode": "clock",
    "workers": N,
    "rounds": 3,
    "engine": "serial",
    "precision": "float64",
    "model": f"{HERE}:linear",
    "data": f"{HERE}:points",
    "partition": "contiguous",
    "local": {"batch_size": 4, "lr": LR},
    "clock.slowdown": SPEEDS,
    "records": {"curve": False, "model": False},
}
GIVEN = [  # a path with loops
    [0.7, 0.3, 0, 0, 0, 0],
    [0.3, 0.2, 0.5, 0, 0, 0],
    [0, 0.5, 0.1, 0.4, 0, 0],
    [0, 0, 0.4, 0.5, 0.1, 0],
    [0, 0, 0, 0.1, 0, 0.9],
    [0, 0, 0, 0, 0.9, 0.1],
]
EDGES = {  # by hand
    "ring": {(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (0, 5)},
    "torus": {(0, 1), (1, 2), (0, 2), (3, 4), (4, 5), (3, 5), (0, 3), (1, 4), (2, 5)},
    "star": {(0, 1), (0, 2), (0, 3), (0, 4), (0, 5)},
    "complete": set(itertools.combinations(range(N), 2)),
    "exponential": {(i, j) for i, j in itertools.combinations(range(N), 2) if j - i != 3},
    "matching": None,  # changes
    "given": None,
}


def weights_of(name, round):
    """Return the mixing matrix: Metropolis-Hastings weights of the edges, or the given matrix."""
    if name == "given":
        return GIVEN
    edges = EDGES[name]
    if name == "matching":
        edges = {(0, 1), (2, 3), (4, 5)} if round % 2 else {(1, 2), (3, 4), (0, 5)}
    degree = [sum(worker in edge for edge in edges) for worker in range(N)]
    weights = [[0.0] * N for _ in range(N)]
    for i, j in edges:
        weights[i][j] = weights[j][i] = 1 / (1 + max(degree[i], degree[j]))
    for i in range(N):
        weights[i][i] = 1 - sum(weights[i])
    return weights


def tables(policy, name, **changes):
    topology = {"matching": matching, "given": GIVEN}.get(name, name)
    return {**SMALL, "policy": {"name": policy, "topology": topology}, **changes}


def federation():
    return Federation(linear, points, N, 4, "contiguous")


def batches_of(workers):
    """Return a list of all batches of a few rounds, for each worker."""
    return [[batch for round in range(1, 12) for batch in workers.epoch(round, worker)] for worker in range(N)]


def consensus_distance(models):
    mean = sum(models) / len(models)
    return (sum(float(((model - mean) ** 2).sum()) for model in models) / len(models)) ** 0.5


@pytest.mark.parametrize("name", EDGES)
def test_d_psgd_matches_algorithm_1(name):
    """Lian et al. 2017: x_i becomes the sum of W_ij x_j, minus the step along the gradient at the old x_i."""
    result = fedsim.run(tables("d_psgd", name))
    workers = federation()
    batches, models, steps = batches_of(workers), [workers.row] * N, len(workers.epoch(1, 0))
    assert {len(workers.epoch(1, worker)) for worker in range(N)} == {steps}
    for round, record in enumerate(result.history, 1):
        weights = weights_of(name, round)
        for step in range((round - 1) * steps, round * steps):
            gradients = [workers.gradient(models[i], batches[i][step]) for i in range(N)]
            models = [sum(weights[i][j] * models[j] for j in range(N)) - LR * gradients[i] for i in range(N)]
        assert record.metrics["consensus_distance"] == pytest.approx(consensus_distance(models), rel=1e-11)
        edges = sum(weights[i][j] > 0 for i in range(N) for j in range(N) if i != j)
        assert record.bytes_up == record.bytes_down == steps * edges * 21 * 8
        assert record.asynchronous.updates == round * steps
        assert record.virtual_seconds == pytest.approx(round * steps * max(SPEEDS))
    assert torch.allclose(result.global_row, sum(models) / N, rtol=0, atol=1e-12)


def test_d_psgd_decays_the_weights_of_the_old_model():
    """The gradient at the old x_i includes that of the penalty weight_decay / 2 |x_i|^2."""
    result = fedsim.run(tables("d_psgd", "torus", local={"batch_size": 4, "lr": LR, "steps": 2, "weight_decay": 0.3}))
    workers, weights = federation(), weights_of("torus", 1)
    models = [workers.row] * N
    for round, step in itertools.product((1, 2, 3), (0, 1)):
        old = models
        gradients = [workers.gradient(old[i], workers.epoch(round, i)[step]) + 0.3 * old[i] for i in range(N)]
        models = [sum(weights[i][j] * old[j] for j in range(N)) - LR * gradients[i] for i in range(N)]
    assert torch.allclose(result.global_row, sum(models) / N, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", EDGES)
def test_gossip_matches_pairs_drawn_by_the_weights(name):
    """Boyd et al. 2006: worker i contacts its neighbour j with probability P_ij, and both take their average."""
    result = fedsim.run(tables("gossip", name))
    workers, done, at = federation(), [0] * N, list(SPEEDS)
    batches, models, began = batches_of(workers), [workers.row] * N, [workers.row] * N
    steps = len(workers.epoch(1, 0)) * N
    for round, record in enumerate(result.history, 1):
        weights = weights_of(name, round)
        for _ in range(steps):
            i = at.index(min(at))
            gradient = workers.gradient(began[i], batches[i][done[i]])
            neighbours = [j for j in range(N) if j != i and weights[i][j]]
            shares = [weights[i][j] / (1 - weights[i][i]) for j in neighbours]
            rng = numpy_generator(0, "neighbour", i, done[i])
            equal = max(shares) - min(shares) < 1e-9
            j = neighbours[int(rng.integers(len(neighbours)))] if equal else rng.choice(neighbours, p=shares)
            models[i] = models[j] = (models[i] - LR * gradient + models[j]) / 2
            done[i] += 1
            at[i] += SPEEDS[i]
            began[i] = models[i]
        assert record.metrics["consensus_distance"] == pytest.approx(consensus_distance(models), rel=1e-11)
    assert torch.allclose(result.global_row, sum(models) / N, rtol=0, atol=1e-12)


def test_d_psgd_on_a_complete_graph_is_gradient_averaging():
    """With W_ij = 1 / n, the mean of all models takes steps along mean gradients, and so does synchronous SGD."""
    changes = {"rounds": 1, "local": {"steps": 1, "batch_size": 4, "lr": LR}}
    together = fedsim.run({**SMALL, **changes, "sync": "gradients", "aggregate": "mean"})
    apart = fedsim.run(tables("d_psgd", "complete", **changes))
    assert torch.allclose(together.global_row, apart.global_row, rtol=0, atol=1e-14)
    assert together.history[0].virtual_seconds == apart.history[0].virtual_seconds


@pytest.mark.parametrize("policy", ["d_psgd", "gossip", "ad_psgd"])
def test_a_resumed_run_has_the_same_result(policy, tmp_path):
    """Worker 4 leaves in the middle, the graph changes, shards have different sizes, and buffers are averaged."""
    changes = {
        "model": f"{HERE}:normalised",
        "partition": {"name": "dirichlet", "alpha": 0.8},
        "clock.departures": {"4": 9.0},
        "checkpoint.every": 1,
        "local": {"batch_size": 4, "lr": LR, "momentum": 0.5},
    }
    whole = fedsim.run(tables(policy, "matching", **changes, rounds=4))
    fedsim.run(tables(policy, "matching", **changes, rounds=2), tmp_path / "run")
    resumed = fedsim.run(tables(policy, "matching", **changes, rounds=4), tmp_path / "run", resume=True)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    for expected, record in zip(whole.history, resumed.history, strict=True):
        assert record.metrics == expected.metrics
        assert record.bytes_up == expected.bytes_up


def test_the_metadata_is_recorded(tmp_path):
    fedsim.run(tables("gossip", "star", rounds=1), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["topology"] == {
        "name": "star",
        "degrees": [1, 5],
        "weights": "Metropolis-Hastings",
        "spectral_gap": pytest.approx(1 / 6),
    }


def test_a_race_records_the_consensus_distance(session):
    for name in ("gossip", "d_psgd"):
        settings = tables(name, "ring", mode="race", rounds=1, engine="processes", processes=2)
        del settings["clock.slowdown"]
        result = fedsim.run({**settings, "race.runs": 2}, session=session)
        assert result.history[0].metrics["consensus_distance"] > 0


def test_the_spectral_gap_is_printed(tmp_path):
    words = ["mode=clock", "policy=d_psgd", "policy.topology=torus", "workers=4", "rounds=1", "local.steps=1"]
    line = "topology: torus, degree 2, Metropolis-Hastings weights, spectral gap 0.6667"
    checked = CliRunner().invoke(app, ["run", *words, "--dry-run"])
    assert checked.stdout.startswith(f"# {line}\n")
    assert fedsim.load_experiment(tomllib.loads(checked.stdout)).policy.topology.name == "torus"
    assert line in CliRunner().invoke(app, ["run", *words, "--out", str(tmp_path / "run")]).stdout.splitlines()


def broken(root):
    """Return the points, with NaN in all inputs of worker 1."""
    train, test = points(root)
    train.inputs[10:20] = float("nan")
    return train, test


def test_a_worker_whose_results_are_excluded_only_averages():
    """It takes no step at all, not even one of weight decay."""
    local = {"batch_size": 4, "lr": LR, "weight_decay": 0.3}
    changes = {"aggregate.nonfinite": "exclude", "data": f"{__name__}:broken", "rounds": 1, "local": local}
    result = fedsim.run(tables("d_psgd", "ring", **changes))
    workers = federation()
    batches, models, weights = batches_of(workers), [workers.row] * N, weights_of("ring", 1)
    for step in range(result.history[0].asynchronous.updates):
        old = models
        gradients = [(workers.gradient(old[i], batches[i][step]) + 0.3 * old[i]) * (i != 1) for i in range(N)]
        models = [sum(weights[i][j] * old[j] for j in range(N)) - LR * gradients[i] for i in range(N)]
    assert result.history[0].excluded == [1] * (step + 1)
    assert torch.allclose(result.global_row, sum(models) / N, rtol=0, atol=1e-12)


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_buffers_of_excluded_results_are_not_averaged(buffers):
    changes = {"aggregate.nonfinite": "exclude", "data": f"{__name__}:broken", "buffers": buffers}
    local = {"batch_size": 4, "lr": LR, "drop_last": True}
    result = fedsim.run(tables("d_psgd", "ring", model=f"{HERE}:normalised", local=local, **changes))
    assert 1 in result.history[0].excluded
    assert all(values.isfinite().all() for values in result.model.state_dict().values())


def test_f_follows_a_graph_that_changes():
    """Worker 3 attacks worker 2 in odd rounds, and worker 4 in even ones. Each ignores its only neighbour then."""
    attack = {"name": "gaussian", "std": 1e6, "workers": [3]}
    result = fedsim.run(**tables("d_psgd", "matching", aggregate="ios", attack=attack))
    assert max(record.test_loss for record in result.history) < 2
