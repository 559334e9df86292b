"""DP-SGD: clipped gradients of samples with noise, against a plain loop, in all engines."""

from __future__ import annotations

import pytest
import torch

import fedsim
from fedsim.core.randomness import Draws
from tests import components
from tests.textbook import Federation, small_two_nn

LOCAL = {"algorithm": "dp_sgd", "lr": 0.1, "clip": 0.05, "noise": 0.4, "batch_size": 16}


def tables_of(tiny_experiment, **local):
    return {**tiny_experiment, "precision": "float64", "rounds": 2, "local": {**LOCAL, **local}, "aggregate": "mean"}


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
                noise = Draws.of(0, "sample_privacy", round, worker, step).normal(len(row), dtype=row.dtype)
                row -= 0.1 * (total + 0.4 * 0.05 * noise) / len(inputs)
            rows.append(row)
        plain.row = torch.stack(rows).mean(0)
    assert torch.allclose(ours, plain.row, rtol=0, atol=1e-9)


def test_noise_has_its_standard_deviation(tiny_experiment):
    tables = {**tables_of(tiny_experiment, steps=1, epochs=None), "rounds": 1, "workers": 1}
    with_noise, without = (fedsim.run({**tables, "local": {**tables["local"], "noise": z}}) for z in (0.4, 0.0))
    difference = (with_noise.global_row - without.global_row) / 0.1
    assert difference.std() == pytest.approx(0.4 * 0.05 / 16, rel=0.03)


def test_dropout_keep_state_and_momentum_agree_in_stacks(tiny_experiment):
    tables = {**tables_of(tiny_experiment, momentum=0.5, keep_state=True), "model": "net"}
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


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"sync": "gradients"}, "local.algorithm"),
        ({"sampling": {"name": "power_of_choice", "candidates": 5}, "workers": 9, "cohort": 2}, "sampling.name"),
        ({"aggregate": "qfedavg"}, "aggregate.rule"),
        ({"mode": "clock", "policy": "fedbuff"}, "local.algorithm"),
        ({"local": {**LOCAL, "accumulate": 2}}, "local.accumulate"),
        ({"privacy": {"mechanism": "central", "clip": 1.0, "noise": 1.0}}, "privacy.mechanism"),
    ],
)
def test_what_cannot_be_combined_is_refused(tables, key):
    with pytest.raises(fedsim.ExperimentError) as caught:
        fedsim.Experiment(**{"local": LOCAL, **tables})
    assert caught.value.key == key
    assert len(caught.value.lines) == 1
