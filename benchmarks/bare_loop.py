"""An experiment as a bare loop in plain PyTorch (peers/bare.py) on any device, the baseline of several benchmarks.

Initial model, cohorts and batches equal those of fedsim, but PyTorch draws the dropout. After a round without dropout
both have the same global row up to rounding. Long training amplifies the rounding differences in float32, while they
stay small in float64.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from common import CPU
from torch import nn

from benchmarks.peers.bare import train
from benchmarks.peers.export import work_of
from benchmarks.peers.work import Result
from fedsim import Experiment, load_experiment
from fedsim.system.precision import PRECISIONS


def bare_loop(
    experiment: Experiment,
    device: torch.device = CPU,
    make_model: Callable[[], nn.Module] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Result:
    """Run the rounds of an experiment that consists of plain SGD, averaging and tests.

    Args:
        make_model: creates the model, which must have the parameters of the experiment's model (the default).
        clock: clock that measures the rounds.
    """
    torch.set_num_threads(1)
    with PRECISIONS[experiment.precision].training(device):
        return train(work_of(experiment, device, make_model), clock)


def without_dropout(experiment: Experiment) -> Experiment:
    """Return the experiment without dropout, so that the loop and fedsim draw the same numbers."""
    if "dropout" not in experiment.model.params:
        return experiment
    return load_experiment(experiment, ["model.dropout=0.0"])
