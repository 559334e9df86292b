"""`error_feedback = true` of a processor: what it leaves out of a worker's update is added to the next one."""

from __future__ import annotations

import torch

import fedsim
from fedsim.core.randomness import sample_cohort
from fedsim.models import logistic
from fedsim.processing import apply_chain, initial_residuals, processor
from tests import plugs
from tests.textbook import Federation

TOP = {"name": "top_k", "k": 500, "error_feedback": True}
HALF = {"name": "tests.processing.test_error_feedback:half", "error_feedback": True}
TABLES = {
    **{"rounds": 4, "workers": 6, "cohort": 3, "model": "logistic", "data": "tests.plugs:tiny", "precision": "float64"},
    **{"local": {"batch_size": 16, "lr": 0.1, "steps": 3}, "engine": "serial", "processors": [TOP]},
}


def test_what_is_left_out_is_added_to_the_next_update():
    chain = [processor.bind(processor.get("top_k"), {"k": 1}, error_feedback=True)]
    residuals = initial_residuals(chain, torch.zeros(3))
    for sent, left in (([0.0, -3.0, 0.0], [1.0, 0.0, 2.0]), ([0.0, 0.0, 4.0], [2.0, -3.0, 0.0])):
        row = torch.tensor([1.0, -3.0, 2.0])
        apply_chain(chain, row, 0, (1, 0), {}, residuals)
        assert row.tolist() == sent
        assert residuals["residual_0"].tolist() == left


def test_only_processors_that_ask_for_it_have_a_residual():
    chain = [processor.bind(processor.get("sign"), {}, error_feedback=feedback) for feedback in (False, True)]
    assert list(initial_residuals(chain, torch.zeros(2))) == ["residual_1"]


def half(update):
    """A processor that depends on its input continuously, so that rounding stays small."""
    return update / 2


def test_each_worker_keeps_its_own_residual_between_its_rounds():
    """A loop in plain PyTorch, with a dictionary of what each worker has left out."""
    tables = {**TABLES, "sync": "gradients", "local": {"batch_size": 16, "lr": 0.1, "steps": 1}, "rounds": 5}
    tables |= {"aggregate": "mean"}
    result = fedsim.run({**tables, "processors": [HALF]})
    federation, left = Federation(logistic, plugs.tiny, 6, 16), {}
    for round in range(1, 6):
        sent = []
        for worker in sample_cohort(0, round, 6, 3).tolist():
            gradient = federation.gradient(federation.row, federation.epoch(round, worker)[0])
            total = gradient + left.get(worker, 0.0)
            sent.append(total / 2)
            left[worker] = total - sent[-1]
        federation.row = federation.row - 0.1 * torch.stack(sent).mean(0)
    assert torch.allclose(result.global_row, federation.row, rtol=0, atol=1e-12)
