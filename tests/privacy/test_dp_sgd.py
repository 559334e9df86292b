"""DP-SGD: clipped gradients of samples with noise, against a plain loop, in all engines."""

from __future__ import annotations

import collections
import math

import pytest
import torch

import fedsim
from fedsim.cli.privacy_plan import privacy_plan
from fedsim.core.randomness import Draws
from fedsim.training import sample_gradients
from tests import components
from tests.textbook import Federation, small_two_nn

pytestmark = pytest.mark.usefixtures("coarse")  # for plans
LOCAL = {"algorithm": "dp_sgd", "lr": 0.1, "clip": 0.05, "noise": 0.4, "batch_size": 16}


def tables_of(tiny_experiment, **local):
    return {
        **tiny_experiment,
        "processes": 1,
        "precision": "float64",
        "rounds": 2,
        "local": {**LOCAL, **local},
        "aggregate": "mean",
    }


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_a_run_equals_a_plain_loop_over_samples(engine, tiny_experiment):
    tables = {**tables_of(tiny_experiment), "engine": engine, "partition": "tests.components:uneven"}
    ours = fedsim.run(tables).global_row
    plain = Federation(small_two_nn, components.tiny, 3, 16, "tests.components:uneven")
    for round in (1, 2):
        rows = []
        for worker in range(3):
            row = plain.row.clone()
            for step, (inputs, targets) in enumerate(plain.epoch(round, worker)):
                total = torch.zeros_like(row)
                for place in range(len(inputs)):
                    gradient = plain.gradient(row, (inputs[place : place + 1], targets[place : place + 1]))
                    total += gradient * min(1.0, 0.05 * (1 - 1e-5) / float(gradient.norm()))
                noise = Draws.of("sample_privacy", round, worker, step, seed=0).normal(len(row), dtype=row.dtype)
                row -= 0.1 * (total + 0.4 * 0.05 * noise) / len(inputs)
            rows.append(row)
        plain.row = torch.stack(rows).mean(0)
    assert torch.allclose(ours, plain.row, rtol=0, atol=1e-9)


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_a_batch_that_needs_much_memory_is_computed_in_parts(engine, tiny_experiment, monkeypatch):
    tables = {**tables_of(tiny_experiment), "rounds": 1, "engine": engine, "processes": 1}
    whole = fedsim.run(tables)
    monkeypatch.setattr(sample_gradients, "MOST_BYTES", 7 * 8 * len(whole.global_row))  # 7 gradients of float64
    in_parts = fedsim.run(tables)
    assert torch.allclose(in_parts.global_row, whole.global_row, rtol=0, atol=1e-9)
    assert in_parts.history[0].train_loss == pytest.approx(whole.history[0].train_loss, rel=1e-9)


def test_dropout_keep_state_and_momentum_agree_in_stacks(tiny_experiment):
    tables = {**tables_of(tiny_experiment, momentum=0.5, keep_optimizer_state=True), "model": "net"}
    serial, stacked = (fedsim.run({**tables, "engine": engine}) for engine in ("serial", "batched"))
    assert torch.allclose(serial.global_row, stacked.global_row, rtol=0, atol=1e-9)
    assert serial.history[0].train_loss == pytest.approx(stacked.history[0].train_loss, abs=1e-9)


def test_epsilon_counts_each_epoch_of_each_round(tiny_experiment):
    releases = fedsim.privacy.Releases(noise=0.4, workers=3, cohort=3)
    history = fedsim.run(tables_of(tiny_experiment, epochs=2)).history
    assert [record.metrics["epsilon"] for record in history] == [releases.epsilon(n, 1e-5) for n in (2, 4)]
    history = fedsim.run(tables_of(tiny_experiment, steps=3)).history
    assert [record.metrics["epsilon"] for record in history] == [releases.epsilon(n, 1e-5) for n in (3, 6)]


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_models_without_gradients_of_samples_are_named(engine, tiny_experiment):
    tables = {**tables_of(tiny_experiment), "engine": engine, "model": "tests.models:Normalised"}
    with pytest.raises(fedsim.ExperimentError, match=r"tests.models:Normalised.*BatchNorm") as caught:
        fedsim.run(tables)
    assert len(caught.value.lines) == 1


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of PyTorch's attention under vmap
def test_recurrent_layers_are_refused_and_attention_is_not():
    text = {"data": "shakespeare", "task": "next_token", "rounds": 1, "workers": 2, "partition": "iid"}
    text["local"] = {**LOCAL, "batch_size": 2, "steps": 1}
    small_gpt = {"name": "gpt", "layers": 1, "width": 8, "heads": 1}
    assert math.isfinite(fedsim.run({**text, "model": small_gpt}).history[0].train_loss)
    with pytest.raises(fedsim.ExperimentError, match=r'^model.name = "char_lstm": has no gradient for each sample'):
        fedsim.run({**text, "model": {"name": "char_lstm", "layers": 1, "hidden": 4}})


def epsilon_of_sums(count, noise, delta=1e-5):
    """Return the epsilon of `count` sums that include the same sample, computed by dp-accounting alone."""
    library, rdp = pytest.importorskip("dp_accounting"), pytest.importorskip("dp_accounting.rdp")
    accountant = rdp.RdpAccountant(neighboring_relation=library.NeighboringRelation.ADD_OR_REMOVE_ONE)
    return accountant.compose(library.GaussianDpEvent(noise), count).get_epsilon(delta)


def most_releases(shards, cohorts, epochs):
    """Return how many sums of a run include the same sample: one in each epoch of each worker that holds the sample."""
    releases = collections.Counter()
    for cohort in cohorts:
        for worker in cohort:
            releases.update(epochs * shards[worker].tolist())
    return max(releases.values())


@pytest.mark.parametrize(
    ("name", "params", "holders", "epochs"),
    [("virtual", {"samples": 190}, 4, 1), ("virtual", {"samples": 40}, 3, 2), ("iid", {}, 1, 2)],
)
def test_epsilon_counts_every_worker_that_holds_a_sample(name, params, holders, epochs, tiny_experiment):
    partition = {"name": name, **params}
    tables = {**tables_of(tiny_experiment, noise=2.0, epochs=epochs), "workers": 4, "partition": partition}
    result = fedsim.run(tables)
    shards = fedsim.partition(components.tiny(None)[0].targets, name, 4, **params)
    count = most_releases(shards, [record.cohort for record in result.history], epochs)
    assert count == 2 * epochs * holders
    assert result.history[-1].metrics["epsilon"] == pytest.approx(epsilon_of_sums(count, 2.0), rel=1e-9)
    plan = dict(privacy_plan(result.experiment))
    assert plan["epsilon (rdp)"] == f"{epsilon_of_sums(count, 2.0):.3g}"
    assert ("overlap" in plan) == (holders > 1)


@pytest.mark.parametrize("sampling", ["uniform", "poisson"])
def test_epsilon_counts_at_most_the_workers_of_a_cohort(sampling, tiny_experiment):
    tables = {**tables_of(tiny_experiment, noise=2.0), "workers": 30, "cohort": 2, "sampling": sampling, "rounds": 3}
    experiment = fedsim.Experiment(**tables, partition={"name": "virtual", "samples": 190})
    history = fedsim.run(experiment).history
    shards = fedsim.partition(components.tiny(None)[0].targets, "virtual", 30, samples=190)
    count = most_releases(shards, [record.cohort for record in history], 1)
    epsilon = history[-1].metrics["epsilon"]
    assert epsilon == pytest.approx(epsilon_of_sums(3 * experiment.largest_cohort, 2.0), rel=1e-9)
    assert epsilon >= epsilon_of_sums(count, 2.0)


def test_epsilon_counts_the_server_that_trains_on_samples_of_workers(tiny_experiment):
    rule = {"rule": "fltrust", "root_samples": 20}
    tables = {**tables_of(tiny_experiment, noise=2.0), "aggregate": rule}
    result = fedsim.run(tables)
    assert result.history[-1].metrics["epsilon"] == pytest.approx(epsilon_of_sums(2 * 2, 2.0), rel=1e-9)
    assert dict(privacy_plan(result.experiment))["epsilon (rdp)"] == f"{epsilon_of_sums(4, 2.0):.3g}"


def test_the_server_counts_in_addition_to_the_workers_of_a_cohort(tiny_experiment):
    rule = {"rule": "fltrust", "root_samples": 200}
    tables = {**tables_of(tiny_experiment, noise=2.0), "aggregate": rule, "workers": 6, "cohort": 2}
    experiment = fedsim.Experiment(**tables, partition={"name": "virtual", "samples": 200})
    assert dict(privacy_plan(experiment))["epsilon (rdp)"] == f"{epsilon_of_sums(2 * (2 + 1), 2.0):.3g}"


def twice(labels, worker):
    """A virtual partition in which each worker holds its samples twice."""
    return [worker, worker + 1] * 5


@pytest.mark.parametrize(
    ("workers", "partition", "reason"),
    [
        (1001, {"name": "virtual", "samples": 5}, "shards may overlap"),
        (3, "tests.privacy.test_dp_sgd:twice", "holds the same sample twice"),
    ],
)
def test_an_unknown_number_of_releases_is_refused(workers, partition, reason, tiny_experiment):
    tables = {**tables_of(tiny_experiment), "workers": workers, "cohort": 2, "partition": partition}
    for action in (fedsim.run, lambda tables: privacy_plan(fedsim.Experiment(**tables))):
        with pytest.raises(fedsim.ExperimentError, match=reason) as caught:
            action(tables)
        assert caught.value.key == "partition.name"
        assert len(caught.value.lines) == 1
