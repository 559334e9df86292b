"""The assertions of the GPU check on the simulated GPU and on the CPU, as far as these know streams and memory."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import assertions
from benchmarks.gpu.goals import ASSERTIONS
from fedsim.rounds.cohorts import Cohorts
from fedsim.training.capture import GraphPool
from tests.device.pretend import pretend_gpu

FEW = "workers=8", "cohort=4", "model=logistic"


@pytest.fixture
def gpu(monkeypatch):
    """Yield the simulated GPU, on which a benchmark computes."""
    monkeypatch.setattr("benchmarks.gpu.measure.DEVICE", torch.device("cuda"))
    with pretend_gpu() as gpu:
        yield gpu


def test_all_assertions_have_functions():
    assert assertions.FUNCTIONS.keys() == set(ASSERTIONS)


def test_a_failed_capture_leaves_stream_and_memory(gpu):
    assert "capturing" in assertions.FUNCTIONS["failed capture"]()["error_of_the_capture"]
    assert len(gpu.graphs) == 1


def test_a_failed_capture_that_changes_the_stream_is_noticed(gpu, monkeypatch):
    record, other = GraphPool.record, torch.cuda.Stream()

    def forgetting(pool, run):
        try:
            return record(pool, run)
        except Exception:
            torch.cuda.set_stream(other)
            raise

    monkeypatch.setattr(GraphPool, "record", forgetting)
    with pytest.raises(AssertionError, match="stays on the stream of the capture"):
        assertions.failed_capture()


def test_a_failed_capture_that_keeps_memory_is_noticed(gpu, monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: None)
    with pytest.raises(AssertionError, match="bytes of the failed capture stay reserved"):
        assertions.failed_capture()


@pytest.fixture
def counted(gpu, monkeypatch):
    """Count waits in place of a second of work, which the simulated GPU does at once."""

    @contextlib.contextmanager
    def busy_gpu():
        with gpu.counting() as counts:
            yield lambda: counts.waits > 0

    monkeypatch.setattr(assertions, "busy_gpu", busy_gpu)


def test_drawing_ahead_waits_for_nothing(counted):
    assert assertions.drawing_ahead(*FEW, few=True)["difference"] == 0


def test_a_wait_while_drawing_ahead_is_noticed(counted, monkeypatch):
    drawn = Cohorts._drawn

    def waiting(cohorts, round):
        torch.cuda.synchronize()
        return drawn(cohorts, round)

    monkeypatch.setattr(Cohorts, "_drawn", waiting)
    with pytest.raises(AssertionError, match="drawing ahead waits"):
        assertions.drawing_ahead(*FEW, few=True)


def test_rounds_that_are_not_drawn_ahead_are_noticed(counted, monkeypatch):
    monkeypatch.setattr(Cohorts, "prepare_next", lambda cohorts, round: None)
    with pytest.raises(AssertionError, match="not drawn ahead"):
        assertions.drawing_ahead(*FEW, few=True)


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("print([5, 7, 9, 9])", None),
        ("print([10**7] * 3 + [10**8])", "memory grows"),
        ("import sys; print([1] * 20); print('a tensor was shared', file=sys.stderr)", "stderr: a tensor was shared"),
        ("raise SystemExit('no memory')", "no memory"),
    ],
)
def test_memory_that_grows_and_lines_on_stderr_are_noticed(program, error):
    with contextlib.nullcontext() if error is None else pytest.raises(AssertionError, match=error):
        assertions.runs_in_a_session(program)


def test_memory_is_noted_after_each_run_of_a_session():
    used = assertions.memory_of_runs(*FEW, runs=3, processes=2)
    assert used == sorted(used)  # the peaks of this process
    assert len(used) == 3


@pytest.mark.slow
def test_workers_of_a_small_gpu_are_trained_in_narrower_stacks(gpu, monkeypatch):
    monkeypatch.setattr(assertions, "used_bytes", lambda: 7e9)
    assert 20 < assertions.small_gpu(1, "local.steps=1", rounds=1)["width"] < 100
    assert torch.cuda.mem_get_info()[1] > 9e9, "the limit ends"


GRAPHS = {  # (kernels, launches, replayed graphs), whether steps are captured, and the error
    "graphs of ten steps": ((8_004, 6, 2), True, None),
    "large graphs": ((20_004, 6, 2), True, "graphs are too large"),
    "graphs of one large step": ((400_000, 30, 20), True, None),
    "no graphs": ((400, 400, 0), "the model draws random numbers", "no CUDA graphs: the model draws"),
    "graphs that are not replayed": ((400, 400, 0), True, "no graph is replayed"),
}


@pytest.mark.parametrize("case", GRAPHS)
def test_graphs_of_more_kernels_than_estimated_are_noticed(case, gpu, monkeypatch):
    counts, captured, error = GRAPHS[case]

    def run(experiment, on_start, on_round):
        on_start(SimpleNamespace(how={"cuda_graphs": captured}))
        return SimpleNamespace(history=[{"seconds": {"train": 2.0}}])

    profile = contextlib.nullcontext((None, None, dict(zip(("kernels", "launches", "graphs"), counts, strict=True))))
    monkeypatch.setattr(assertions, "profiled", lambda: profile)
    monkeypatch.setattr(assertions.fedsim, "run", run)
    with contextlib.nullcontext() if error is None else pytest.raises(AssertionError, match=error):
        figures = assertions.graphs_of_char_lstm(10)
        assert figures["nodes_per_graph"] == round((counts[0] - counts[1] + counts[2]) / counts[2])


@pytest.mark.parametrize("used", [7e9, 9e9])
def test_more_memory_than_that_of_the_small_gpu_is_noticed(used, gpu, monkeypatch):
    def run(experiment, on_start, on_round):
        on_start(SimpleNamespace(how={"width": 50}))
        on_round({})

    monkeypatch.setattr(assertions.fedsim, "run", run)
    monkeypatch.setattr(assertions, "used_bytes", lambda: used)
    with contextlib.nullcontext() if used < 8e9 else pytest.raises(AssertionError, match="use too much memory"):
        assert assertions.small_gpu(2) == {"used_gb": 7.0, "width": 50}


def test_the_memory_of_a_small_gpu_is_that_of_all_processes(gpu):
    free, total = torch.cuda.mem_get_info()
    with assertions.limit_memory():
        assert torch.cuda.mem_get_info() == (8e9 - (total - free), 8e9)
        assert assertions.used_bytes() == total - free
