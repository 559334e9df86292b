from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fedsim
from fedsim.engines import distributed, named
from fedsim.training.probe import StackingProbe
from fedsim.training.stacked import NARROWEST_ON_CPU, STACK_BYTES_ON_CPU, WIDEST_ON_CPU, stack_width
from tests.engines.test_contract import ROUNDING, assert_close

STACKED = {"engine": "batched", "processes": 1}
TWO_SAMPLES = {  # the last batch of worker 0 has two samples
    "model": "tests.models:MoreThanTwo",
    "partition": {"name": "tests.components:same_last", "first": 66},
}


@pytest.mark.parametrize("width", [1, 2, 1000])
def test_the_width_of_stacks_does_not_show(width, tiny_experiment):
    tables = {**tiny_experiment, "workers": 5, "partition": "tests.components:uneven", "precision": "float64"}
    settings = []
    serial = fedsim.run(tables)
    stacked = fedsim.run({**tables, **STACKED, "batched": {"stack_size": width}}, on_start=settings.append)
    assert_close(serial, stacked, ROUNDING)
    assert settings[0].how == {"engine": "batched", "threads": 1, "processes": 1, "width": width}


@pytest.mark.parametrize("sync", ["parameters", "gradients"])
def test_an_error_in_a_stack_says_in_which_round(sync, tiny_experiment):
    """The model fails on batches of two samples. The engine `serial` names the worker."""
    tables = {**tiny_experiment, **TWO_SAMPLES, "sync": sync}
    error = "in round 1 failed: ValueError: Expected more than 2"
    with pytest.raises(fedsim.WorkerError, match=f"^a stack of workers {error}"):
        fedsim.run({**tables, **STACKED})
    with pytest.raises(fedsim.WorkerError, match=f"^worker 0 {error}"):
        fedsim.run(tables)


@pytest.fixture
def width_by_hand(prepared, monkeypatch):
    """Return a function that returns the stack width for rows of 100 float32 values; a batch of 5 keeps 500 bytes."""

    def width(total, momentum, threads=1, rows=20, d=100, device="cpu", sharing=1, **changes):
        monkeypatch.setattr("fedsim.training.stacked.total_memory_of", lambda device: total)
        local = {"batch_size": 5, "momentum": momentum}
        changes = {"precision": "float32", **changes}
        task, shared = prepared(workers=20, partition="iid", local=local, **changes)
        task = replace(task, device=torch.device(device))
        cohort = replace(shared.cohort, size=rows, rows=torch.empty(rows, d, device="meta"))
        shared = replace(shared, cohort=cohort, server=replace(shared.server, row=torch.zeros(d)))
        probe = StackingProbe((), coupled=False, merged=False, sample_bytes=100)
        return stack_width(task, shared, probe, threads, sharing)

    return width


@pytest.mark.parametrize(
    ("rows", "width"),
    [(1, 1), (4, 4), (7, 7), (8, 4), (15, 8), (16, 4), (20, 5), (31, 8), (32, 4), (100, 13), (256, 32), (1000, 32)],
)
def test_a_cohort_is_divided_into_two_four_or_eight_stacks_of_at_least_four_workers(rows, width, width_by_hand):
    """On a CPU, the memory of the machine does not matter."""
    assert [width_by_hand(total, 0.0, rows=rows) for total in (1, 1e9)] == [width, width]


@pytest.mark.parametrize(("rows", "width"), [(4, 4), (5, 3), (10, 3), (12, 3), (16, 4), (36, 4)])
def test_the_number_of_stacks_is_even_so_that_two_processes_can_share_them(rows, width, width_by_hand):
    """Rows of 1,663,370 numbers are stacked by at most four."""
    assert width_by_hand(1e12, 0.0, rows=rows, d=1_663_370) == width


@pytest.mark.parametrize(
    ("parameters", "threads", "width"),
    [
        (7_850, 1, WIDEST_ON_CPU),
        (199_210, 1, STACK_BYTES_ON_CPU // (4 * 199_210)),
        (199_210, 2, 2 * (STACK_BYTES_ON_CPU // (4 * 199_210))),
        (1_663_370, 1, NARROWEST_ON_CPU),  # although such rows exceed the caches
    ],
)
def test_stacks_of_a_large_cohort_stay_in_the_caches_of_a_cpu(parameters, threads, width, width_by_hand):
    rows = 50 * width
    assert width_by_hand(1e12, 0.0, threads, rows=rows, d=parameters) == width


def test_half_as_many_rows_fit_into_the_caches_in_float64(width_by_hand):
    widths = [width_by_hand(1e12, 0.0, rows=1000, d=100_000, precision=f"float{bits}") for bits in (32, 64)]
    assert widths == [STACK_BYTES_ON_CPU // 400_000, STACK_BYTES_ON_CPU // 800_000]


@pytest.mark.parametrize(
    ("cuda_graphs", "momentum", "row_bytes"),
    [  # multiples of a row (400 bytes) and of a batch's activations (1000 bytes), as in the docstring
        (False, 0.0, 2 * 400 + (3 * 400 + 1000)),
        (None, 0.0, 2 * 400 + 2 * (3 * 400 + 1000)),
        (False, 0.5, 4 * 400 + (4 * 400 + 1000)),
        (True, 0.5, 4 * 400 + 2 * (4 * 400 + 1000)),
    ],
)
def test_the_width_on_a_gpu_counts_masks_and_graphs(cuda_graphs, momentum, row_bytes, width_by_hand):
    changes = {"device": "cuda", "cuda_graphs": cuda_graphs}
    totals = 2 * 7 * row_bytes, 2 * 7 * row_bytes - 1
    assert [width_by_hand(total, momentum, **changes) for total in totals] == [7, 6]
    assert [width_by_hand(total, momentum, **changes) for total in (1, 1e9)] == [1, 20]


@pytest.mark.parametrize(("d", "total"), [(100, 2 * 20 * 3_000), (1_663_370, 8e9)])
def test_processes_on_one_gpu_divide_its_memory(d, total, width_by_hand):
    """The stacks of all processes together take no more than those of one process. CPUs do not depend on processes."""
    alone = width_by_hand(total, 0.0, rows=100, d=d, device="cuda")
    assert [width_by_hand(total, 0.0, rows=100, d=d, device="cuda", sharing=n) for n in (2, 4)] == [
        pytest.approx(alone / n, abs=1) for n in (2, 4)
    ]
    assert width_by_hand(1e9, 0.0, rows=100, d=d, device="cuda", sharing=10**9) == 1
    assert width_by_hand(1e9, 0.0, rows=100, sharing=4) == width_by_hand(1e9, 0.0, rows=100)


def test_the_engine_says_how_many_processes_share_the_gpu(prepared, monkeypatch):
    seen = []
    monkeypatch.setattr(named, "stack_width", lambda *arguments: seen.append(arguments) or 1)
    task, shared = prepared(workers=4)
    named.stacked(task, shared, 2, 1)
    assert seen[0][3:] == (1, 2)


@pytest.mark.parametrize("others", [5, 9])
def test_ranks_agree_on_the_narrowest_stack(others, prepared, monkeypatch):
    """Ranks may have different GPUs, shared by different numbers of ranks, but they divide a wave in the same way."""
    seen = []
    monkeypatch.setattr(distributed, "stack_width", lambda *arguments: seen.append(arguments) or 7)
    task, shared = prepared(workers=4)
    trainer = task.experiment.distributed.model_copy(update={"trainer": "batched"})
    experiment = task.experiment.model_copy(update={"distributed": trainer})
    engine = object.__new__(distributed.DistributedEngine)
    engine._group, engine._threads = SimpleNamespace(sharing=2, gather_objects=lambda width: [width, others]), 1
    monkeypatch.setattr(distributed.StackingProbe, "of", lambda *arguments: None)
    _, metadata = engine.trainers(replace(task, experiment=experiment, device=torch.device("cuda")), shared)
    assert seen[0][3:] == (1, 2)
    assert metadata == {"width": min(7, others)}
