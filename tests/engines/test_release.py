"""Engines hold no memory of a run after its end, even without the cyclic garbage collector."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import fedsim
from fedsim.engines import base
from fedsim.system.devices import release_memory
from fedsim.training.shared_state import SharedState
from tests.engines.in_process import InProcessPool

CLOCK = {"mode": "clock", "policy": "fedbuff", "clock": {"slowdown": "lognormal"}}


@pytest.fixture
def matrices(monkeypatch):
    """Yield weak references to all allocated row matrices, with the garbage collector switched off.

    A matrix that is moved to shared memory counts as its new memory.
    """
    references, allocate, share = [], SharedState.allocate.__func__, SharedState.share

    def noted(cls, *arguments, **options):
        shared = allocate(cls, *arguments, **options)
        references.append(StorageWeakRef(shared.cohort.rows.untyped_storage()))
        return shared

    def moved(shared):
        share(shared)
        references[-1] = StorageWeakRef(shared.cohort.rows.untyped_storage())
        return shared

    monkeypatch.setattr(SharedState, "allocate", classmethod(noted))
    monkeypatch.setattr(SharedState, "share", moved)
    gc.collect()
    gc.disable()
    yield references
    gc.enable()


def alive(matrices):
    return [not each.expired() for each in matrices]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"engine": "auto", "workers": 4},
        {"engine": "batched", "model": "tests.models:Normalised"},
        {"engine": "batched", "sync": "gradients"},
        {"sync": "gradients", "model": "net"},
        {**CLOCK},
        {"engine": "batched", **CLOCK},
    ],
    ids=str,
)
def test_no_run_keeps_a_matrix_of_rows(changes, tiny_experiment, matrices):
    tables = {**tiny_experiment, "model": "logistic", "rounds": 1, "processes": 1, **changes}
    if tables["engine"] == "serial":
        del tables["processes"]
    for seed in range(2):
        fedsim.run({**tables, "seed": seed})
    with fedsim.Session() as session:
        for seed in range(3):
            fedsim.run({**tables, "seed": seed}, session=session)
        assert alive(matrices) == [False] * 5


@pytest.mark.parametrize("changes", [{}, CLOCK], ids=str)
def test_processes_release_device_memory_when_nothing_holds_the_rows(changes, tiny_experiment, matrices, monkeypatch):
    alive_at_release = []
    monkeypatch.setattr(base, "ProcessPool", InProcessPool)
    monkeypatch.setattr(base, "release_memory", lambda device: alive_at_release.append(alive(matrices)))
    fedsim.run({**tiny_experiment, "engine": "processes", "processes": 2, "rounds": 1, **changes})
    assert alive_at_release == [[True], [False]], "before the processes start, and after the run"


def test_releasing_memory_is_not_a_failure_on_a_failed_device_and_does_nothing_on_a_cpu(monkeypatch):
    asked = []

    def fail():
        asked.append("empty_cache")
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: asked.append("ipc_collect"))
    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    release_memory(torch.device("cpu"))
    assert asked == []
    release_memory(torch.device("cuda", 0))
    assert asked == ["ipc_collect", "empty_cache"]


def test_one_process_releases_device_memory_after_each_run(tiny_experiment, matrices, monkeypatch):
    alive_at_release = []
    monkeypatch.setattr(base, "release_memory", lambda device: alive_at_release.append(alive(matrices)))
    fedsim.run({**tiny_experiment, "rounds": 1})
    assert alive_at_release == [[False]]
