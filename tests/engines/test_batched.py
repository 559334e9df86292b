from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fedsim
from fedsim.engines.stacking.probe import StackingProbe
from fedsim.engines.trainers.stacked import NARROWEST_ON_CPU, STACK_BYTES_ON_CPU, WIDEST_ON_CPU, stack_width
from fedsim.runs.setup import prepare
from tests.engines.test_contract import ROUNDING, assert_close

STACKED = {"engine": "batched", "processes": 1}
TWO_SAMPLES = {  # in the last batch of worker 0
    "model": "tests.models:MoreThanTwo",
    "partition": {"strategy": "tests.plugs:same_last", "first": 66},
}


@pytest.mark.parametrize("width", [1, 2, 1000])
def test_the_width_of_stacks_does_not_show(width, tiny_experiment):
    tables = {**tiny_experiment, "workers": 5, "partition": "tests.plugs:uneven", "precision": "float64"}
    settings = []
    serial = fedsim.run(tables)
    stacked = fedsim.run({**tables, **STACKED, "batched": {"width": width}}, on_start=settings.append)
    assert_close(serial, stacked, ROUNDING)
    assert settings[0].how == {"processes": 1, "width": width}


@pytest.fixture
def width_for(monkeypatch):
    """Return the stack width for an experiment, given the processes and the bytes of memory."""

    def width(processes, total, threads=1, **tables):
        monkeypatch.setattr("fedsim.engines.trainers.stacked.total_memory_of", lambda device: total)
        wanted = fedsim.Experiment(**{"model": "2nn", "engine": "serial", "data": "tests.plugs:tiny", **tables})
        with fedsim.Session() as session, prepare(wanted, session) as (task, engine):
            shared = engine.shared
            return stack_width(task, shared, StackingProbe.of(task, shared), processes, threads)

    return width


def test_stacks_are_as_wide_as_a_share_of_the_cohort_the_caches_and_memory_allow(width_for):
    plenty, row = 1e12, 4 * 199_210
    assert width_for(1, plenty, workers=9, cohort=7) == 7
    assert width_for(2, plenty, workers=9, cohort=7) == 4
    in_caches = STACK_BYTES_ON_CPU // row
    assert width_for(1, plenty, workers=100) == in_caches
    assert width_for(1, plenty, threads=2, workers=100) == 2 * in_caches
    assert width_for(1, plenty, workers=100, model="cnn") == NARROWEST_ON_CPU  # although these leave the caches
    assert width_for(1, plenty, workers=100, model="logistic") == WIDEST_ON_CPU


@pytest.mark.parametrize("sync", ["parameters", "gradients"])
def test_an_error_in_a_stack_says_in_which_round(sync, tiny_experiment):
    """The model takes no batch of two samples; the engine serial names the worker."""
    tables = {**tiny_experiment, **TWO_SAMPLES, "sync": sync}
    error = "in round 1 failed: ValueError: Expected more than 2"
    with pytest.raises(fedsim.WorkerError, match=f"^a stack of workers {error}"):
        fedsim.run({**tables, **STACKED})
    with pytest.raises(fedsim.WorkerError, match=f"^worker 0 {error}"):
        fedsim.run(tables)


def test_an_error_in_a_stack_of_another_process_says_in_which_round_and_process(tiny_experiment):
    tables = {**tiny_experiment, **TWO_SAMPLES}
    with pytest.raises(fedsim.WorkerError, match=r"a stack of workers in round 1 failed \(process \d\): ValueError"):
        fedsim.run({**tables, "engine": "batched", "processes": 2})


@pytest.fixture
def width_by_hand(prepared, monkeypatch):
    """Return the width for twenty rows of 100 numbers, of 4 bytes; a batch of 5 samples keeps 500 bytes."""

    def width(total, processes, momentum, device="cpu", **changes):
        monkeypatch.setattr("fedsim.engines.trainers.stacked.total_memory_of", lambda device: total)
        local = {"batch_size": 5, "momentum": momentum}
        task, shared = prepared(workers=20, partition="iid", precision="float32", local=local, **changes)
        task = replace(task, device=torch.device(device))
        cohort = replace(shared.cohort, rows=torch.zeros(20, 100))
        shared = replace(shared, cohort=cohort, server=replace(shared.server, row=torch.zeros(100)))
        probe = StackingProbe((), coupled=False, merged=False, sample_bytes=100)
        return stack_width(task, shared, probe, processes, 1)

    return width


@pytest.mark.parametrize(
    ("total", "processes", "momentum", "width"),
    [
        (2 * 10 * 3 * 400 + 2 * 10 * 1000, 1, 0.0, 10),  # three copies of a row, and twice the batch's activations
        (2 * 10 * 3 * 400 + 2 * 10 * 1000 - 1, 1, 0.0, 9),
        (2 * 10 * 5 * 400 + 2 * 10 * 1000, 1, 0.5, 10),  # with momentum two more
        (2 * 10 * 3 * 400 + 2 * 10 * 1000, 2, 0.0, 5),
        (1, 1, 0.0, 1),
        (1e9, 1, 0.0, 20),
        (1e9, 3, 0.0, 7),
    ],
)
def test_the_width_by_hand(total, processes, momentum, width, width_by_hand):
    assert width_by_hand(total, processes, momentum) == width


def test_memory_is_let_go_of_with_the_task(tiny_experiment):
    with fedsim.Session() as session:
        wanted = fedsim.Experiment(**{**tiny_experiment, **STACKED})
        with prepare(wanted, session) as (_, engine):
            assert len(engine.shared.cohort.rows) == 3
        with pytest.raises(AttributeError):
            engine.shared  # noqa: B018


@pytest.mark.parametrize(
    ("cuda_graphs", "momentum", "row_bytes"),
    [  # of a row, 400 bytes, and of the activations of a batch, 1000 bytes, as many as the docstring says
        (False, 0.0, 2 * 400 + (3 * 400 + 1000)),
        (None, 0.0, 2 * 400 + 2 * (3 * 400 + 1000)),
        (False, 0.5, 4 * 400 + (4 * 400 + 1000)),
        (True, 0.5, 4 * 400 + 2 * (4 * 400 + 1000)),
    ],
)
def test_the_width_on_a_gpu_counts_masks_and_graphs(cuda_graphs, momentum, row_bytes, width_by_hand):
    changes = {"device": "cuda", "cuda_graphs": cuda_graphs}
    totals = 2 * 7 * row_bytes, 2 * 7 * row_bytes - 1
    assert [width_by_hand(total, 1, momentum, **changes) for total in totals] == [7, 6]
