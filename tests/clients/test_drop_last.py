"""`local.drop_last`: epochs of whole batches only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedsim
from fedsim.engines.task import Schedule
from fedsim.errors import ExperimentError
from tests.asynchronous.test_clock_runs import points
from tests.textbook import Federation

BATCH, LR, ROUNDS = 4, 0.1, 2

EXPERIMENT = {
    "rounds": ROUNDS,
    "workers": 4,  # of 15 samples each, so 3 whole batches
    "engine": "serial",
    "precision": "float64",
    "model": {"name": f"{__name__}:zero"},
    "data": "tests.asynchronous.test_clock_runs:points",
    "aggregate": "mean",
    "local": {"batch_size": BATCH, "epochs": 2, "lr": LR, "drop_last": True},
}
STACKED = {"engine": "batched", "processes": 1}
MODES = {
    "parameters": {},
    "gradients": {"sync": "gradients"},
    "parameters in stacks": STACKED,
    "gradients in stacks": {"sync": "gradients", **STACKED},
    "one worker on the clock": {"workers": 1, "mode": "clock", "policy": "asgd"},
}


def zero() -> nn.Module:
    module = nn.Linear(6, 3)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    return module


def expected_row(workers, *, each_step):
    """The global row of federated averaging, or of synchronous SGD, on the full batches of two epochs."""
    federation = Federation(zero, points, workers, BATCH)
    for round in range(1, ROUNDS + 1):
        epochs = [[*federation.epoch(round, k), *federation.epoch(round, k, 1)] for k in range(workers)]
        full = [[batch for batch in batches if len(batch[1]) == BATCH] for batches in epochs]
        rows = [federation.row] * workers
        for of_step in zip(*full, strict=True):
            gradients = [federation.gradient(row, batch) for row, batch in zip(rows, of_step, strict=True)]
            if each_step:
                gradients = [sum(gradients) / workers] * workers
            rows = [row - LR * gradient for row, gradient in zip(rows, gradients, strict=True)]
        federation.row = sum(rows) / workers
    return federation.row


@pytest.mark.parametrize("mode", MODES)
def test_epochs_have_whole_batches_only(mode):
    tables = {**EXPERIMENT, **MODES[mode]}
    if mode.endswith("clock"):
        del tables["aggregate"]
    result = fedsim.run(tables)
    workers = tables["workers"]
    expected = expected_row(workers, each_step=not mode.startswith("parameters"))
    assert torch.allclose(result.global_row, expected, rtol=0, atol=1e-12)
    per_epoch = {4: 12, 1: 60}[workers]
    assert [record["samples"] for record in result.history] == [[2 * per_epoch] * workers] * ROUNDS


def test_a_shard_smaller_than_a_batch_is_one_batch():
    schedule = Schedule(BATCH, epochs=3, drop_last=True)
    for size, steps, samples in ((1, 3, 3), (3, 3, 9), (4, 3, 12), (5, 3, 12), (7, 3, 12), (8, 6, 24)):
        assert (schedule.steps_for(size), schedule.samples_for(size)) == (steps, samples), size
        sizes = [schedule.batch_size_at(step, size) for step in range(steps + 1)]
        assert (sum(sizes), sizes[-1]) == (samples, 0)
    record = fedsim.run({**EXPERIMENT, "local": {"batch_size": 100, "drop_last": True}}).history[0]
    assert record["samples"] == [15] * 4
    assert record["train_loss"] > 0


@pytest.fixture
def normalised(tiny_experiment):
    """Worker 0 has 65 samples, so one more than four batches of 16."""
    partition = {"strategy": "tests.plugs:same_last", "first": 65}
    return {**tiny_experiment, "model": "tests.models:Normalised", "partition": partition, "rounds": 1}


LAST_BATCH = (
    r"^local.batch_size = 16: the last batch of worker 0 \(65 samples\) has one sample, on which the model cannot be "
    r"trained \(ValueError: Expected more than 1 value per channel.*\); set local.drop_last = true$"
)


@pytest.mark.parametrize(("engine", "sync"), [({}, "parameters"), (STACKED, "gradients")], ids=["serial", "batched"])
def test_a_last_batch_of_one_sample_with_batchnorm_is_an_error_before_the_run(normalised, engine, sync):
    tables = {**normalised, **engine, "sync": sync}
    with pytest.raises(ExperimentError, match=LAST_BATCH):
        fedsim.run(tables)
    result = fedsim.run({**tables, "local": {**tables["local"], "drop_last": True}})
    assert result.history[0]["samples"] == [64, 80, 48]


def test_a_shard_of_one_sample_with_batchnorm_is_an_error_that_names_the_worker(normalised):
    tables = {**normalised, "partition": "tests.plugs:ending_in_one", "local": {"batch_size": 16, "drop_last": True}}
    with pytest.raises(
        ExperimentError, match=r"^partition.strategy = .*: worker 2 has one sample, on which the model "
    ):
        fedsim.run(tables)
