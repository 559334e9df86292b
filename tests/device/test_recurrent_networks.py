"""Recurrent networks on a GPU: stacked as on a CPU, without PyTorch's warning about their weights."""

from __future__ import annotations

import pytest

from tests.device.agreement import ENGINES, assert_agrees_with_the_cpu
from tests.engines.zoo import experiment

KINDS = "LSTM", "LSTM without biases, both ways", "LSTM with a projection", "GRU", "RNN", "RNN of ReLU"


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_recurrent_network_agrees_with_the_cpu(kind, engine):
    """A warning of PyTorch is an error here."""
    assert_agrees_with_the_cpu({**experiment(kind), "rounds": 1}, engine)
