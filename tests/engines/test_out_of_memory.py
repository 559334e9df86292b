"""Messages for a device without free memory (the device and its error are simulated)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedsim
from fedsim.training.memory import explain_oom, what_would_fit
from fedsim.training.shared_state import SharedState

SAID = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB. See documentation."


class TooLarge(nn.Module):
    """A model that raises the error of a full GPU in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(784, 10)

    def forward(self, images):
        if self.training and len(images) > 1:
            raise torch.OutOfMemoryError(SAID)
        return self.linear(images.flatten(1))


def test_all_that_can_be_less_is_named_with_its_number(prepared):
    task, _ = prepared(local={"batch_size": 64})
    named = "processes (now 4), batched.stack_size (now 16), local.batch_size (now 64)"
    assert what_would_fit(task, 4, 16) == f"cpu is out of memory; reduce one of: {named}"
    assert what_would_fit(task, 1).endswith("reduce one of: local.batch_size (now 64)")
    task, _ = prepared(local={"batch_size": 1})
    assert what_would_fit(task, 1) == "cpu is out of memory; use a smaller model"


def test_it_is_reported_once_and_other_errors_pass(prepared):
    task, _ = prepared(local={"batch_size": 64})
    with pytest.raises(torch.OutOfMemoryError) as caught, explain_oom(task, 4), explain_oom(task, 2, 8):
        raise torch.OutOfMemoryError(SAID)
    assert str(caught.value) == (
        "cpu is out of memory; reduce one of: processes (now 2), batched.stack_size (now 8), "
        "local.batch_size (now 64) (CUDA out of memory. Tried to allocate 2.00 GiB)"
    )
    with pytest.raises(ZeroDivisionError), explain_oom(task, 1):
        raise ZeroDivisionError


def test_where_training_needs_too_much_the_run_ends_with_that_line(tiny_experiment):
    with pytest.raises(fedsim.WorkerError) as caught:
        fedsim.run({**tiny_experiment, "model": "tests.engines.test_out_of_memory:TooLarge"})
    assert str(caught.value).splitlines()[0] == (
        "worker 0 in round 1 failed: OutOfMemoryError: cpu is out of memory; reduce one of: "
        "local.batch_size (now 16) (CUDA out of memory. Tried to allocate 2.00 GiB)"
    )


def test_where_the_rows_alone_need_too_much_the_experiment_is_refused(tiny_experiment, monkeypatch):
    def full(*arguments):
        raise torch.OutOfMemoryError(SAID)

    monkeypatch.setattr(SharedState, "allocate", full)
    with pytest.raises(fedsim.ExperimentError, match='^device = "cpu": cpu is out of memory; reduce one of: '):
        fedsim.run(tiny_experiment)
