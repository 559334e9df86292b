"""Races on a GPU: what processes share lies there, and is written before they look at it."""

from __future__ import annotations

import pytest
import torch

import fedsim
from fedsim.asynchronous.racing import Course
from fedsim.asynchronous.track import Track
from fedsim.engines import spawn
from tests.device.pretend import GPU
from tests.engines.in_process import InProcessCrew


@pytest.fixture
def tables(tiny_experiment, monkeypatch):
    monkeypatch.setattr(spawn, "Crew", InProcessCrew)
    return {**tiny_experiment, "device": "cuda", "engine": "spawn", "processes": 2, "model": "logistic"}


@pytest.mark.parametrize("policy", ["hogwild", "fedbuff"])
def test_lost_updates_are_counted_where_the_model_lies(policy, gpu, tables, monkeypatch):
    courses, begin = [], Course.__init__
    monkeypatch.setattr(Course, "__init__", lambda self, *given: begin(self, *given) or courses.append(self))
    lost, count = [], Track.lost

    def overwritten(track):
        track.canaries[0] -= 2.0  # as if two additions had been overwritten
        lost.append(count(track))
        return lost[-1]

    monkeypatch.setattr(Track, "lost", overwritten)
    result = fedsim.run({**tables, "mode": "race", "policy": policy, "race": {"runs": 1}, "rounds": 1})
    assert courses[0]._track.canaries.device == GPU
    assert result.history[0]["race"]["updates_lost"] == lost[0] == 2.0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mode": "clock", "policy": "fedbuff", "clock": {"speed": "lognormal"}},
        {"mode": "race", "policy": "fedbuff", "race": {"runs": 2}},
    ],
    ids=lambda changes: changes.get("mode", "rounds"),
)
def test_whatever_this_process_writes_is_there_before_others_are_called(changes, gpu, tables, monkeypatch):
    """Every operation of the parent on the GPU comes before a synchronisation, which comes before a call."""
    events, call = [], InProcessCrew.call

    def called(crew, function, *arguments):
        events.append("call")
        return call(crew, function, *arguments)

    def synchronized(device):
        assert torch.device(device) == GPU
        events.append("synchronize")

    monkeypatch.setattr(InProcessCrew, "call", called)
    monkeypatch.setattr(spawn, "synchronize", synchronized, raising=False)
    fedsim.run({**tables, **changes, "rounds": 1})
    calls = [place for place, event in enumerate(events) if event == "call"]
    assert len(calls) > 3
    assert events[calls.pop() - 1] == "call", "at the end processes let go of the task, whatever the device does"
    assert {events[place - 1] for place in calls} == {"synchronize"}
