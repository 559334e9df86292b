"""Baselines and goals of the GPU check: every baseline does fedsim's work, and other work is an error."""

from __future__ import annotations

import functools

import pytest
import torch

import fedsim
from benchmarks.gpu import measure
from benchmarks.gpu.baselines import PROGRAMS, run_baseline
from benchmarks.gpu.goals import BASELINES, GOALS, Goal, verdicts
from tests.device.pretend import pretend_gpu

CPU = torch.device("cpu")
MODELS = {
    "net": {"model": {"name": "net", "dropout": 0.0}, "local": {"momentum": 0.5}},
    "cnn": {"model": {"name": "cnn", "widths": [4, 8], "hidden": 16}},
    "2nn": {"model": "2nn"},
}


def experiment(model, **changes):
    """Return an experiment in which 3 of 4 workers train on 2 whole batches and a short one."""
    local = {"epochs": 1, "batch_size": 4, "lr": 0.1, **MODELS[model].get("local", {})}
    tables = {"workers": 4, "cohort": 3, "rounds": 2, "partition": "iid", "engine": "serial", "device": "cpu"}
    data = {"name": "benchmarks.gpu.data:synthetic", "train": 4 * 10, "test": 20}
    return fedsim.load_experiment({**tables, "data": data, **MODELS[model], "local": local, **changes})


def assert_same_models(state, expected, tolerance):
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, atol=tolerance, rtol=0)


@functools.cache
def run_and_first_state(model):
    """Return the result of fedsim, and the state of the model after its first round."""
    result = fedsim.run(experiment(model, precision="float64"))
    return result, fedsim.run(result.experiment, rounds=1).model.state_dict()


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("model", MODELS)
def test_a_baseline_does_the_work_of_fedsim(model, program):
    if program == "jax":
        pytest.importorskip("jax")
    run = run_baseline(program, experiment(model, precision="float64"), CPU)
    result, first_state = run_and_first_state(model)
    assert_same_models(run.first, first_state, 1e-12)
    assert run.accuracies == pytest.approx([record.test_accuracy for record in result.history])
    assert run.samples == sum(sum(record.samples) for record in result.history) == 10 * 3 * 2


@pytest.mark.parametrize("program", ["captured loop", "captured vmap"])
def test_captured_baselines_replay_graphs_on_a_gpu(program):
    expected = run_baseline(program, experiment("net", rounds=1), CPU)
    with pretend_gpu() as gpu, gpu.counting() as counts:
        run = run_baseline(program, experiment("net", rounds=1), torch.device("cuda"))
    assert_same_models(run.first, expected.first, 1e-6)
    assert run.accuracies == expected.accuracies
    assert counts.graph_launches


def test_an_experiment_that_baselines_cannot_run_is_an_error():
    with pytest.raises(ValueError, match="baselines need one epoch of SGD"):
        run_baseline("vmap", experiment("2nn", local={"epochs": 2, "batch_size": 4, "lr": 0.1}), CPU)


@pytest.fixture
def workload(monkeypatch):
    """Make w3 a small workload whose runs are not kept for other tests."""
    monkeypatch.setitem(measure.WORKLOADS, "w3", (*measure.WORKLOADS["w3"], "workers=20", "cohort=3"))
    for cached in (measure.run_of, measure.state_after_few_samples):
        cached.cache_clear()
    yield "w3"
    for cached in (measure.run_of, measure.state_after_few_samples):
        cached.cache_clear()


def test_a_baseline_that_does_other_work_is_an_error(workload):
    figures = measure.baseline_rounds(workload, "vmap")
    assert "error" not in figures
    assert figures["round_ms"] > 0
    run = run_baseline("vmap", measure.experiment_of(workload), measure.DEVICE)
    assert measure.different_work(workload, run) == {}
    other = run._replace(samples=22 * 9)
    assert "the baseline on 198" in measure.different_work(workload, other)["error"]
    other = run._replace(accuracies=[accuracy - 0.5 for accuracy in run.accuracies])
    assert "test accuracies differ" in measure.different_work(workload, other)["error"]


def test_fedsim_and_baselines_have_the_same_model_after_a_round_in_float64(workload):
    assert 0 < measure.same_work(workload, "captured loop")["difference"] < 1e-9


@pytest.mark.parametrize("name", ["w3, bare loop", "w3, captured vmap", "w3, bare loop, same work"])
def test_baselines_are_measured_on_a_gpu(name, workload, monkeypatch):
    monkeypatch.setattr(measure, "DEVICE", torch.device("cuda"))
    with pretend_gpu() as gpu:
        assert "error" not in measure.MEASUREMENTS[name]()
    assert gpu.launches


def test_every_goal_has_a_measurement():
    measured = {goal.measurement for goal in GOALS if not goal.measurement.startswith("rules")}
    assert measured <= measure.MEASUREMENTS.keys()
    assert set(BASELINES) == {"bare loop", *PROGRAMS}
    assert {name.partition(", ")[2] for name in measure.MEASUREMENTS} >= set(BASELINES)


def test_a_verdict_names_the_best_baseline_that_did_the_same_work():
    figures = {
        "w1, batched": {"round_ms": 61.0},
        "w1, jax": {"round_ms": 165.0},
        "w1, vmap": {"round_ms": 1.0, "error": "round 1: test accuracies differ"},
        "w2, batched": {"round_ms": 50.0},
    }
    lines = {verdict.goal: " ".join(str(verdict).split()) for verdict in verdicts(figures)}
    assert lines[GOALS[0]] == "missed w1, batched round_ms 61 (at most 60), best baseline: jax 165"
    assert lines[GOALS[1]] == "met w2, batched round_ms 50 (at most 50)"
    assert lines[Goal("w3, processes", "start_seconds", 4)] == (
        "not measured w3, processes start_seconds - (at most 4)"
    )
    assert len(lines) == len(GOALS)
