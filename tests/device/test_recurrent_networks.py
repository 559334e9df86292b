"""Recurrent networks on a GPU: stacked as on a CPU, without PyTorch's warning about their weights."""

from __future__ import annotations

import pytest

import fedsim
from fedsim.engines import base
from fedsim.runs.setup import check_run
from tests.device.agreement import assert_agrees_with_the_cpu
from tests.device.pretend import pretend_gpu
from tests.engines.in_process import InProcessPool
from tests.engines.zoo import experiment

SLOW = "LSTM with a projection", "RNN of ReLU"  # they have the operations of the other kinds
KINDS = [
    *[("LSTM", engine) for engine in ("serial", "batched")],
    *[(kind, "batched, no graphs") for kind in ("LSTM without biases, both ways", "GRU", "RNN")],
    *[pytest.param(kind, "batched", marks=pytest.mark.slow) for kind in SLOW],
]


def test_processes_pass_on_no_warning_about_weights(monkeypatch, recwarn):
    """Neither in training nor in tests."""
    monkeypatch.setattr(base, "ProcessPool", InProcessPool)
    with pretend_gpu():
        fedsim.run({**experiment("LSTM"), "rounds": 1, "engine": "processes", "processes": 2, "device": "cuda"})
    assert not [warning for warning in recwarn if "RNN" in str(warning.message)]


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "engine"), KINDS)
def test_a_recurrent_network_agrees_with_the_cpu(kind, engine):
    """A warning of PyTorch is an error here."""
    assert_agrees_with_the_cpu({**experiment(kind), "rounds": 1}, engine)


def test_the_check_of_a_comparison_gives_no_warning_about_weights(gpu, recwarn):
    with fedsim.Session() as session:
        check_run(fedsim.Experiment(**{**experiment("LSTM"), "device": "cuda"}), session, to_run=True)
    assert not [warning for warning in recwarn if "RNN" in str(warning.message)]
