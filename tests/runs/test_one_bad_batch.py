"""With aggregate.nonfinite = "exclude", a worker with one bad batch is excluded only in the rounds of that batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import fedsim
from fedsim.core.randomness import batch_order
from tests import components
from tests.runs.test_nonfinite import ENGINES

ROUNDS, BATCH = 8, 16


def with_one_bad_sample(root):
    """A data set of float images, the last of which contains NaN."""
    train, test = components.tiny(root)
    inputs = train.inputs.float()
    inputs[-1] = torch.nan
    return replace(train, inputs=inputs), replace(test, inputs=test.inputs.float())


def only_biases(update):
    """A processor that drops the weights of `logistic`, and with them all NaN."""
    sent = torch.zeros_like(update)
    sent[-10:] = update[-10:].nan_to_num()
    return sent


FEEDBACK = {"processors": [{"name": "tests.runs.test_one_bad_batch:only_biases", "error_feedback": True}]}
CASES = {
    "momentum": {"sync": "gradients", "local": {"momentum": 0.9, "momentum_at": "worker"}},
    "kept momentum": {"local": {"momentum": 0.9, "keep_optimizer_state": True}},
    "control variates": {"local": {"algorithm": "scaffold"}},
    "personal models": {"local": {"algorithm": "ditto", "lam": 0.1}},
    "error feedback": FEEDBACK,
    "error feedback of gradients": {**FEEDBACK, "sync": "gradients"},
}


def run(tables, case, engine, session, **local):
    changes = {"data": "tests.runs.test_one_bad_batch:with_one_bad_sample", "partition": "tests.components:in_blocks"}
    changes |= {"model": "logistic", "rounds": ROUNDS, "aggregate": {"nonfinite": "exclude"}, **case, **ENGINES[engine]}
    changes["local"] = {"batch_size": BATCH, "lr": 0.05, "steps": 1, **case.get("local", {}), **local}
    return fedsim.run({**tables, **changes}, session=session)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
def test_what_an_excluded_worker_keeps_does_not_spoil_its_later_rounds(case, engine, tiny_experiment, session):
    size = len(components.in_blocks(np.zeros(len(components.tiny(None)[0])), 3)[2])
    first = [batch_order(0, round, 2, 0, size).tolist()[:BATCH] for round in range(1, ROUNDS + 1)]
    bad = [[2] if size - 1 in samples else [] for samples in first]
    assert [] in bad[bad.index([2]) :]
    result = run(tiny_experiment, CASES[case], engine, session)
    assert [record.excluded for record in result.history] == bad
    assert result.global_row.isfinite().all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("local", [{"algorithm": "scaffold", "option": 1}, {"algorithm": "mimelite"}])
def test_a_full_gradient_with_nan_does_not_reach_the_server(local, engine, tiny_experiment, session):
    """Every full gradient uses the bad sample, even if the row is finite."""
    result = run(tiny_experiment, {}, engine, session, **local)
    assert [record.excluded for record in result.history] == [[2]] * ROUNDS
    assert result.global_row.isfinite().all()
