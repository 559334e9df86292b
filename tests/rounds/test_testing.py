"""The test of the global model: equal in every engine and mode, and without effect on the model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fedsim
from fedsim.core.randomness import seed_everything
from tests import components, models

TEST_BATCH = 250  # test batch size on a CPU
TIMED = {"mode": "clock", "clock": {"slowdown": {"name": "list", "values": [1.0, 1.5, 2.2]}}}
ENGINES = {
    "serial": {"engine": "serial"},
    "processes": {"engine": "processes", "processes": 2},
    "batched": {"engine": "batched", "processes": 1},
    "clock": {"engine": "serial", "policy": "asgd", **TIMED},
    "race": {"engine": "processes", "processes": 2, "mode": "race", "policy": "asgd", "race": {"runs": 1}},
}


@pytest.fixture
def tables(tiny_experiment):
    return {**tiny_experiment, "data": "tests.components:tested_on_many", "precision": "float64", "device": "cpu"}


def loss_of(model, seed=None, round=None):
    """Return the mean loss on the test images. With `seed`, the generators are seeded before each batch."""
    test = components.tested_on_many(None)[1].to(torch.device("cpu"), torch.float64)
    losses = []
    with torch.random.fork_rng(), torch.no_grad():
        for batch, positions in enumerate(torch.arange(len(test)).split(TEST_BATCH)):
            if seed is not None:
                seed_everything(torch.device("cpu"), seed, "test", round, batch)
            inputs, targets = test.gather(positions)
            losses.append(F.cross_entropy(model(inputs), targets, reduction="sum"))
    assert len(losses) == 4
    return float(sum(losses)) / len(test)


@pytest.mark.parametrize("engine", ENGINES)
def test_draws_at_test_time_are_seeded_by_round_and_batch(engine, tables, session):
    result = fedsim.run({**tables, "model": "tests.models:AlwaysDropping", **ENGINES[engine]}, session=session)
    assert result.history[-1]["test_loss"] == pytest.approx(loss_of(result.model, 0, 2), rel=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_that_writes_to_its_parameters_is_tested_on_a_copy(engine, tables, session):
    model = {"name": "tests.models:Halving"}
    result = fedsim.run({**tables, "model": model, **ENGINES[engine]}, session=session)
    plain = models.Halving(halves=False).double()
    plain.load_state_dict(result.model.state_dict())
    with torch.no_grad():
        plain.linear.weight *= 0.5
    assert result.history[-1]["test_loss"] == pytest.approx(loss_of(plain), rel=1e-12)
    if engine != "race":
        untouched = fedsim.run({**tables, "model": {**model, "halves": False}, **ENGINES[engine]}, session=session)
        assert torch.equal(result.global_row, untouched.global_row)


def test_the_losses_that_a_rule_asks_for_are_of_a_copy_of_the_row(tables):
    """Rows still start from the global row, so they do not move with learning rate 0."""
    change = {"model": "tests.models:Halving", "aggregate": "tests.components:lossy_mean", "local": {"lr": 0.0}}
    after_one_round, after_two_rounds = (
        fedsim.run({**tables, **change, "rounds": rounds}).global_row for rounds in (1, 2)
    )
    assert torch.equal(after_one_round, after_two_rounds)
