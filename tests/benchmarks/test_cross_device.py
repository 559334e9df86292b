"""benchmarks/cross_device.py with few workers and images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedsim

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def cross_device(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return __import__("cross_device")


@pytest.fixture
def bare_loop(cross_device):
    return __import__("bare_loop").bare_loop


def test_w4_is_the_network_and_the_work_of_the_benchmark_of_pfl(cross_device):
    words = cross_device.WORKLOADS["w4"]
    experiment = fedsim.load_experiment(words[0], words[1:])
    local = experiment.local
    assert (experiment.workers, experiment.cohort_size) == (1000, 50)
    assert (local.epochs, local.batch_size, local.params["lr"]) == (1, 10, 0.1)
    network = experiment.model.component()
    assert sum(parameter.numel() for parameter in network.parameters()) == 1_626_442
    assert [module.p for module in network.modules() if isinstance(module, torch.nn.Dropout)] == [0.25, 0.5]


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_w4_and_the_bare_loop_do_the_same_work(engine, cross_device, bare_loop, tmp_path):
    words = cross_device.WORKLOADS["w4"]
    changes = ("rounds=1", "workers=8", "cohort=4", "data.train=48", "data.test=10", f"data.root={tmp_path}")
    exact = ("precision=float64", "model.dropout=0.0", f"engine={engine}", "processes=1")
    experiment = fedsim.load_experiment(words[0], [*words[1:], *changes, *exact])
    threads = torch.get_num_threads()
    try:
        bare = bare_loop(experiment)
    finally:
        torch.set_num_threads(threads)
    state = fedsim.run(experiment).model.state_dict()
    move = cross_device.norm_of_difference(bare.start, bare.first)
    assert cross_device.norm_of_difference(state, bare.first) < 1e-9 * move
