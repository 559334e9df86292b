from __future__ import annotations

import os

import pytest
import torch

import fedsim
from fedsim.errors import ExperimentError
from fedsim.system import devices


@pytest.fixture
def one_core():
    """Restrict this process, and the processes that it starts, to one core."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system does not report the cores that a process may use")
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


def test_one_core_is_one_process_unless_more_are_asked_for(one_core, tiny_experiment):
    assert devices.usable_cores() == 1
    assert devices.default_processes(torch.device("cpu"), 100, 1) == 1
    tables = {**tiny_experiment, "model": "logistic", "rounds": 1, "workers": 4}
    alone = fedsim.run(tables).global_row
    processes = []
    fedsim.run({**tables, "engine": "auto"}, on_start=lambda metadata: processes.append(metadata.how["processes"]))
    assert processes == [1]
    several = fedsim.run({**tables, "engine": "processes", "processes": 2})
    assert torch.equal(several.global_row, alone)


@pytest.mark.slow
def test_on_one_core_four_processes_race_to_the_end(one_core, tiny_experiment):
    race = {"engine": "processes", "processes": 4, "mode": "race", "policy": "hogwild", "workers": 4}
    assert len(fedsim.run({**tiny_experiment, **race, "local": {"batch_size": 16}}).history) == 2


def test_a_missing_gpu_is_one_line_and_auto_uses_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.resolve_device("auto") == torch.device("cpu")
    for version, why in (
        (None, r" \(PyTorch .* is built without CUDA; install .*\)"),
        ("12.8", r" \(run nvidia-smi .*\)"),
    ):
        monkeypatch.setattr(torch.version, "cuda", version)
        message = rf'^device = "cuda:1": PyTorch does not find this device{why}; available here: auto, cpu$'
        with pytest.raises(ExperimentError, match=message):
            devices.resolve_device("cuda:1")
