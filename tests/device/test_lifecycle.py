"""Runs on a GPU from start to end, and what happens when something fails."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import fedsim
from fedsim.asynchronous.server_state import ServerState
from fedsim.core.snapshot import Snapshot
from fedsim.engines import base
from fedsim.errors import FedsimWarning, ProcessLostError
from fedsim.rounds.executor import Executor
from fedsim.rounds.synchronous_rounds import SynchronousRounds
from fedsim.training.shared_state import SharedState
from tests.device.pretend import GPU, upload
from tests.engines.in_process import InProcessPool

FULL = partial(torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 15 GiB.")
ASSERT = partial(RuntimeError, "CUDA error: device-side assert triggered\nCUDA kernel errors might be reported late")
CLOCK = {"mode": "clock", "policy": {"name": "k_sync", "k": 2}, "clock": {"slowdown": "lognormal"}}


class Failing(nn.Module):
    """A model that raises an error in training, in the test, or in every call."""

    error: Callable[[], BaseException] | None = None
    phase = ""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(784, 10)

    def forward(self, images):
        if Failing.error is not None and Failing.phase in ("always", "train" if self.training else "test"):
            raise Failing.error()
        return self.linear(images.flatten(1))


@pytest.fixture
def tables(tiny_experiment):
    return {**tiny_experiment, "rounds": 1, "workers": 4, "device": "cuda", "model": "logistic"}


@pytest.fixture
def failing(tables, monkeypatch):
    """Return an experiment whose model fails, and a function that sets how it fails after the run has started."""
    monkeypatch.setattr(Failing, "error", None)

    def fail(error, phase):
        monkeypatch.setattr(Failing, "error", error)
        monkeypatch.setattr(Failing, "phase", phase)

    return {**tables, "model": Failing}, fail


def test_auto_stacks_all_rows_in_one_process_and_replays_their_steps(gpu, tables):
    settings = []
    fedsim.run({**tables, "engine": "auto", "processes": 4}, on_start=settings.append)
    how = settings[0].how
    assert (how["engine"], how["processes"], how["width"], how["cuda_graphs"]) == ("batched", 1, 4, True)


@pytest.mark.parametrize("phase", ["train", "test"])
@pytest.mark.parametrize("engine", ["serial", "batched", "processes"])
def test_a_full_gpu_ends_one_run_with_a_line_and_no_later_one(engine, phase, gpu, failing, monkeypatch):
    monkeypatch.setattr(base, "ProcessPool", InProcessPool)
    matrices, allocate = [], SharedState.allocate.__func__

    def noted(cls, *arguments, **options):
        shared = allocate(cls, *arguments, **options)
        matrices.append(StorageWeakRef(shared.cohort.rows.untyped_storage()))
        return shared

    monkeypatch.setattr(SharedState, "allocate", classmethod(noted))
    tables, fail = failing
    tables = {**tables, "engine": engine}
    if engine == "batched":
        tables["cuda_graphs"] = False  # a graph replay runs no Python code that could raise
    expected = fedsim.run(tables)
    with fedsim.Session() as session:
        with pytest.raises(fedsim.WorkerError, match=r"cuda:0 is out of memory; reduce one of: "):
            fedsim.run(tables, session=session, on_start=lambda metadata: fail(FULL, phase))
        fail(None, "")
        gc.collect()
        assert all(each.expired() for each in matrices)
        assert torch.equal(fedsim.run(tables, session=session).global_row, expected.global_row)


@pytest.mark.parametrize("where", ["the policy", "the model's first samples"])
def test_a_gpu_that_is_full_outside_of_training_is_one_line_too(where, gpu, failing, monkeypatch):
    tables, fail = failing

    def full(*_):
        raise FULL()

    if where == "the policy":
        monkeypatch.setattr(ServerState, "combine_gradients", full)
        tables |= CLOCK
    else:
        fail(FULL, "always")
    with pytest.raises(fedsim.ExperimentError, match='^device = "cuda:0": cuda:0 is out of memory; reduce one of: '):
        fedsim.run(tables)


def test_the_error_of_a_device_side_assert_names_the_usual_cause(gpu, failing):
    tables, fail = failing
    with pytest.raises(fedsim.WorkerError) as caught:
        fedsim.run(tables, on_start=lambda metadata: fail(ASSERT, "train"))
    line = str(caught.value).splitlines()[0]
    assert line.startswith(
        "worker 0 in round 1 failed: RuntimeError: CUDA error: device-side assert triggered; often an "
    )
    assert "index is out of range" in line
    assert "kernel errors" not in line


def test_an_interrupt_ends_the_engine_and_releases_the_rows(gpu, failing):
    tables, fail = failing
    with fedsim.Session() as session:
        with pytest.raises(KeyboardInterrupt):
            fedsim.run(tables, session=session, on_start=lambda metadata: fail(KeyboardInterrupt, "train"))
        fail(None, "")
        assert session._engine is None
        fedsim.run(tables, session=session)


def test_a_snapshot_stays_on_the_gpu_if_that_has_room_and_is_the_same_on_the_host(gpu, monkeypatch, tmp_path):
    original = upload(torch.rand(3, 5)).T
    roomy, full = Snapshot(), Snapshot()
    roomy.keep({"row": original})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (100, 10**9))
    full.keep({"row": original})
    places = [each.tensors["row"].device for each in (roomy, full)]
    assert places == [GPU, torch.device("cpu")]
    for snapshot in (roomy, full):
        assert snapshot.tensors["row"].is_contiguous()
        original.zero_()
        snapshot.put_back({"row": original})
        assert torch.equal(original.cpu(), full.tensors["row"])


@pytest.mark.parametrize("changes", [{}, CLOCK], ids=["rounds", "clock"])
def test_a_round_that_lost_a_process_is_repeated_from_a_copy_on_the_gpu(changes, gpu, tables, monkeypatch, tmp_path):
    monkeypatch.setattr(base, "ProcessPool", InProcessPool)
    tables = {**tables, **changes, "engine": "processes", "processes": 2, "rounds": 3, "checkpoint": {"every": 2}}
    tables["records"] = {"curve": False}
    whole = fedsim.run(tables, tmp_path / "whole")
    call, calls = InProcessPool.call, []

    def lose_one(crew, function, *arguments):
        calls.append(arguments[1] if len(arguments) > 1 else None)
        result = call(crew, function, *arguments)
        if calls[-1] in (SynchronousRounds.run_round, Executor.train_apart) and calls.count(calls[-1]) == 2:
            crew.close()  # as a pool of processes does before it raises an error
            raise ProcessLostError("process 1 is gone", "is gone", 1, None)
        return result

    monkeypatch.setattr(InProcessPool, "call", lose_one)
    with pytest.warns(FedsimWarning, match="process 1 is gone"):
        again = fedsim.run(tables, tmp_path / "again")
    assert torch.equal(again.global_row, whole.global_row)
    name = "checkpoints/round-00002.safetensors"
    checkpoint, expected = load_file(tmp_path / "again" / name), load_file(tmp_path / "whole" / name)
    assert all(torch.equal(checkpoint[key], expected[key]) for key in checkpoint.keys() | expected.keys())
