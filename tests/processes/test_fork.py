"""Forked processes compute as spawned ones do, whatever the program has done before."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

import fedsim
from fedsim.processes.child_process import forks
from fedsim.runs.setup import engine_of
from tests.commands import ended, start
from tests.forking import CONTEXT

# A program without a main guard, with a model from `__main__`, after computations with OpenMP threads. Processes must
# keep neither its SIGTERM handler nor its folder lock. A second run uses the first run's processes, without the lock.
# The program keeps its number of threads.
PROGRAM = """
import os, signal, sys, tempfile
import torch
from torch import nn
torch.set_num_threads(2)
layer = nn.Conv2d(1, 8, 5)
layer(torch.randn(64, 1, 28, 28)).exp().sum().backward()
torch.randn(600, 600) @ torch.randn(600, 600)
import fedsim

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 5), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
        self.layers(torch.zeros(1, 1, 28, 28))
    def forward(self, inputs):
        return self.layers(inputs)

signal.signal(signal.SIGTERM, lambda *_: None)
tables = dict(model=Mine, data="tests.components:tiny", workers=4, rounds=2, local={"steps": 2, "batch_size": 8})
serial = fedsim.run(tables, engine="serial").global_row
for start_method in sys.argv[1:]:
    folder = tempfile.mkdtemp() + "/run"
    with fedsim.Session() as session:
        some = dict(engine="processes", processes=2, start_method=start_method, session=session)
        fedsim.run(tables, folder, **some)
        longer = fedsim.run({**tables, "rounds": 3}, folder, resume=True, **some)
        print(torch.equal(serial, fedsim.run(tables, **some).global_row), len(longer.history), torch.get_num_threads())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked only on Linux")
def test_forked_processes_give_the_same_bits_after_the_program_has_computed(tmp_path):
    codes, outs, errors = ended([start("-c", PROGRAM, "fork", cwd=tmp_path)])
    assert (codes, outs) == ([0], ["True 3 2\n"]), errors


def test_a_program_with_other_threads_does_not_fork():
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        assert not forks("auto", 1)
        with pytest.raises(
            fedsim.ExperimentError, match="because this program has other threads; use start_method=auto$"
        ):
            forks("fork", 1)
    finally:
        ended.set()
        thread.join()


def test_the_engine_spawn_spawns_its_processes_also_in_races(tiny_experiment):
    ways, tables = [], {**tiny_experiment, "model": "logistic", "rounds": 1, "engine": "spawn", "processes": 1}
    spawned = fedsim.run(tables, on_start=lambda metadata: ways.append(metadata.how))
    assert torch.equal(spawned.global_row, fedsim.run({**tables, "engine": "serial"}).global_row)
    assert (ways[0]["engine"], ways[0]["start_method"]) == ("spawn", "spawn")
    assert engine_of(fedsim.Experiment(mode="race", policy="hogwild", engine="spawn")) == "spawn"
    message = '^start_method = "fork": the engine "spawn" spawns its processes; use engine=processes$'
    with pytest.raises(fedsim.ExperimentError, match=message):
        fedsim.Experiment(engine="spawn", start_method="fork")


def test_a_daemonic_process_may_run_an_experiment(tmp_path):
    """A daemonic process cannot have children, so it draws the picture itself."""
    process = CONTEXT.Process(target=_run_in, args=(tmp_path / "run",), daemon=True)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert (tmp_path / "run" / "curve.png").exists()


def _run_in(folder):
    fedsim.run(rounds=1, model="logistic", workers=2, engine="serial", data="mnist5k", out=folder)
