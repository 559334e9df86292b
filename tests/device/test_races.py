"""Races on a GPU: shared state is on the GPU and is written before other processes read it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedsim
from fedsim.asynchronous.race.state import RaceState
from fedsim.engines import base
from fedsim.runs.loops.race_loop import RaceLoop
from tests.device.pretend import GPU
from tests.engines.in_process import InProcessPool


@pytest.fixture
def tables(tiny_experiment, monkeypatch):
    monkeypatch.setattr(base, "ProcessPool", InProcessPool)
    return {**tiny_experiment, "device": "cuda", "engine": "processes", "processes": 2, "model": "logistic"}


@pytest.mark.parametrize("policy", ["hogwild", "fedbuff"])
def test_lost_updates_are_counted_where_the_model_lies(policy, gpu, tables, monkeypatch):
    made, begin = [], RaceLoop.__init__
    monkeypatch.setattr(RaceLoop, "__init__", lambda self, *arguments: begin(self, *arguments) or made.append(self))
    lost, count = [], RaceState.lost

    def overwritten(race_state):
        race_state.loss_counters[0] -= 2.0  # as if two additions had been overwritten
        lost.append(count(race_state))
        return lost[-1]

    monkeypatch.setattr(RaceState, "lost", overwritten)
    result = fedsim.run({**tables, "mode": "race", "policy": policy, "race": {"runs": 1}, "rounds": 1})
    assert made[0]._race_state.loss_counters.device == GPU
    assert result.history[0]["race"]["updates_lost"] == lost[0] == 2.0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mode": "clock", "policy": "fedbuff", "clock": {"slowdown": "lognormal"}},
        {"mode": "race", "policy": "fedbuff", "race": {"runs": 2}},
    ],
    ids=lambda changes: changes.get("mode", "rounds"),
)
def test_operations_of_this_process_are_synchronised_before_calls_of_others(changes, gpu, tables, monkeypatch):
    """The parent synchronises after its GPU operations and before it calls another process."""
    events, call = [], InProcessPool.call

    def called(crew, function, *arguments):
        events.append("call")
        return call(crew, function, *arguments)

    def synchronized(device):
        assert torch.device(device) == GPU
        events.append("synchronize")

    monkeypatch.setattr(InProcessPool, "call", called)
    monkeypatch.setattr(base, "synchronize", synchronized, raising=False)
    fedsim.run({**tables, **changes, "rounds": 1})
    calls = [place for place, event in enumerate(events) if event == "call"]
    assert len(calls) > 3
    assert events[calls.pop() - 1] == "call", "at the end processes release the task, on any device"
    assert {events[place - 1] for place in calls} == {"synchronize"}


@pytest.mark.parametrize("nonfinite", ["keep", "error"])
def test_hogwild_counts_gradients_and_updates_when_the_gpu_has_computed_them(nonfinite, gpu, tables, monkeypatch):
    """Otherwise staleness and overlaps would be those of kernel launches."""

    class Watched(np.ndarray):
        """A column of counters that notes at each use whether the host has waited for all work of the GPU."""

        def tolist(self):
            reads.append(is_idle())
            return super().tolist()

        def __setitem__(self, *args):
            writes.append(is_idle())
            super().__setitem__(*args)

    def is_idle():
        return all(gpu.host[stream] >= tick for stream, tick in gpu.everything.clock.items())

    reads, writes, column = [], [], RaceState.column
    monkeypatch.setattr(RaceState, "column", lambda *args: column(*args).view(Watched))
    race = {"mode": "race", "policy": "hogwild", "aggregate": {"nonfinite": nonfinite}, "race": {"runs": 1}}
    fedsim.run({**tables, **race, "rounds": 1})
    assert len(writes) > 8
    assert all(writes)
    assert all(reads[1::3])  # the first of three reads of a step is before the gradient
    assert all(reads[2::3])
