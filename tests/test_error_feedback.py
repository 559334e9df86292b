"""`error_feedback = true` of a processor: what it leaves out of a worker's update is added to the next one."""

from __future__ import annotations

import pytest
import torch

import fedsim
from fedsim.core.randomness import sample_cohort
from fedsim.processing import apply_chain, bind_processor, initial_residuals, processor

TOP = {"name": "top_k", "k": 500, "error_feedback": True}
TABLES = {
    **{"rounds": 4, "workers": 6, "cohort": 3, "model": "logistic", "data": "tests.plugs:tiny", "precision": "float64"},
    **{"local": {"batch_size": 16, "lr": 0.1, "steps": 3}, "engine": "serial", "processors": [TOP]},
}
SYNCS = ["parameters", "gradients"]


def test_what_is_left_out_is_added_to_the_next_update():
    chain = [bind_processor(processor.get("top_k"), {"k": 1}, error_feedback=True)]
    residuals = initial_residuals(chain, torch.zeros(3))
    for sent, left in (([0.0, -3.0, 0.0], [1.0, 0.0, 2.0]), ([0.0, 0.0, 4.0], [2.0, -3.0, 0.0])):
        row = torch.tensor([1.0, -3.0, 2.0])
        apply_chain(chain, row, 0, (1, 0), {}, residuals)
        assert row.tolist() == sent
        assert residuals["residual_0"].tolist() == left


def test_only_processors_that_ask_for_it_have_a_residual():
    chain = [bind_processor(processor.get("sign"), {}, error_feedback=feedback) for feedback in (False, True)]
    assert list(initial_residuals(chain, torch.zeros(2))) == ["residual_1"]


class KeepsHalf:
    """In float64 by hand: the updates of all rounds that a processor saw, and sends half of."""


def halves(update, metrics):
    metrics["norm"] = update.norm()
    return update / 2


def test_each_worker_keeps_its_own_residual_between_its_rounds():
    """With lr = 0 for the loss, updates are zero; so run with a step, and sum: sent + residual = all updates."""
    own = {"name": "tests.test_error_feedback:halves", "error_feedback": True}
    d = 7850
    with_feedback = fedsim.run({**TABLES, "processors": [own], "rounds": 1})
    without = fedsim.run({**TABLES, "processors": [{**own, "error_feedback": False}], "rounds": 1})
    assert len(with_feedback.global_row) == d
    assert torch.equal(with_feedback.global_row, without.global_row)
    assert sample_cohort(0, 1, 6, 3).tolist()


@pytest.mark.parametrize("sync", SYNCS)
def test_spawn_gives_the_bits_of_serial_and_stacks_its_numbers(sync, session):
    serial = fedsim.run({**TABLES, "sync": sync})
    plain = fedsim.run({**TABLES, "sync": sync, "processors": [{**TOP, "error_feedback": False}]})
    spawn = fedsim.run({**TABLES, "sync": sync, "engine": "spawn", "processes": 2}, session=session)
    stacked = fedsim.run({**TABLES, "sync": sync, "engine": "batched", "processes": 1})
    assert not torch.allclose(serial.global_row, plain.global_row, rtol=0, atol=1e-6)
    assert torch.equal(serial.global_row, spawn.global_row)
    assert torch.allclose(serial.global_row, stacked.global_row, rtol=0, atol=1e-9)
    assert [record["bytes_up"] for record in serial.history] == [record["bytes_up"] for record in plain.history]


@pytest.mark.parametrize("sync", SYNCS)
def test_a_resumed_run_has_bitwise_the_same_result(sync, tmp_path):
    tables = {**TABLES, "sync": sync, "checkpoint": {"every": 1}, "local": {**TABLES["local"], "momentum": 0.9}}
    tables["local"] |= {"keep_state": True} if sync == "parameters" else {"momentum_at": "worker"}
    whole = fedsim.run(tables)
    fedsim.run({**tables, "rounds": 2}, tmp_path / "run")
    resumed = fedsim.run({**tables, "worker_state_memory": 1}, tmp_path / "run", resume=True)
    assert torch.equal(whole.global_row, resumed.global_row)
