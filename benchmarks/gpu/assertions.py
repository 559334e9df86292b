"""Assertions about streams, graphs and memory that only a real GPU can confirm. Each is a pytest case.

`python -m benchmarks.gpu` runs them without other tests beside them. On the CPU, those that need a GPU are skipped. The
tests in tests/benchmarks/test_gpu_assertions.py run what the simulated GPU knows. Names are in benchmarks/gpu/goals.py.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import fedsim
from benchmarks.gpu.goals import ASSERTIONS
from benchmarks.gpu.measure import FEWEST_ROUNDS, ON_GPU, ROOT, STACKED, Figures, experiment_of
from benchmarks.gpu.profiling import profiled
from fedsim.errors import FedsimWarning
from fedsim.models.classic import cnn
from fedsim.rounds.cohorts import Cohorts
from fedsim.system.devices import release_memory
from fedsim.training.capture import GraphPool
from fedsim.training.cuda_graphs import MOST_NODES

MODULE = "benchmarks.gpu.assertions"  # pytest gives this module another name
GPU = torch.device("cuda", 0)
STEPS = 20  # local steps of `char_lstm`
RUNS = 20  # runs in one session
MOST_GROWTH = 64e6  # bytes by which memory may differ between the third and the last run
SLEEP_CYCLES = 2_000_000_000  # about one second of the GPU
ROUNDING = 1e-9  # largest difference of parameters in float64
SMALL_GPU = 8e9  # bytes


def needs_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")


def reserved_bytes() -> int:
    """Return the bytes that PyTorch keeps in this process after it has released what nothing uses."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def used_bytes() -> int:
    """Return the bytes of the GPU that all processes use, or the peak of this process if there is no GPU."""
    if not torch.cuda.is_available():
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    free, total = torch.cuda.mem_get_info()
    return total - free


def failed_capture() -> Figures:
    """After a capture that fails, the current stream and the reserved memory are those of before."""
    needs_gpu()
    numbers = torch.zeros(2**20, device=GPU)
    stream, reserved = torch.cuda.current_stream(), reserved_bytes()
    pool = GraphPool(GPU)
    with pytest.raises(Exception) as failure:  # noqa: PT011  # CUDA's errors are of several types
        pool.record(lambda: (numbers + 1).sum().item())
    assert torch.cuda.current_stream() == stream, "the process stays on the stream of the capture"
    replay = pool.record(lambda: numbers.add_(1))  # first called once to warm up
    before = numbers[0].item()
    replay()
    assert numbers[0].item() == before + 1, "a later capture does not do its work"
    message, replay, pool = str(failure.value), None, None
    del failure  # its traceback refers to the pool
    kept = reserved_bytes() - reserved
    assert kept <= 0, f"{kept} bytes of the failed capture stay reserved"
    return {"error_of_the_capture": message[:200]}


def graphs_of_char_lstm(workers: int) -> Figures:
    """Steps of `char_lstm` are captured in graphs of several steps that have about as many kernels as estimated.

    The figures are the time and the memory of the captures, and the kernels of a graph.
    """
    needs_gpu()
    captures: list[tuple[float, int]] = []
    record, settings = GraphPool.record, []

    def timed(*arguments: Any, **named: Any) -> Any:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # as `record` does before it captures
        started, before = time.perf_counter(), torch.cuda.memory_reserved()
        replay = record(*arguments, **named)
        torch.cuda.synchronize()
        captures.append((time.perf_counter() - started, torch.cuda.memory_reserved() - before))
        return replay

    with patch.object(GraphPool, "record", timed), profiled() as (start, stop, profile):

        def on_round(record: dict[str, Any]) -> None:
            {2: start, 3: stop}.get(record["round"], int)()

        experiment = experiment_of("char_lstm", *STACKED, f"workers={workers}", f"local.steps={STEPS}", rounds=3)
        result = fedsim.run(experiment, on_start=settings.append, on_round=on_round)
    captured = settings[0].how["cuda_graphs"]
    assert captured is True, f"no CUDA graphs: {captured}"
    graphs = profile["graphs"]  # replayed in a round
    nodes = round((profile["kernels"] - profile["launches"] + graphs) / max(1, graphs))
    figures = {
        **{"capture_seconds": round(sum(seconds for seconds, _ in captures), 2), "captures": len(captures)},
        "capture_mib": round(sum(reserved for _, reserved in captures) / 2**20),
        "first_round_ms": round(1e3 * sum(result.history[0]["seconds"].values()), 1),
        **{"graphs": graphs, "nodes_per_graph": nodes},
    }
    assert graphs, "no graph is replayed"
    assert graphs >= STEPS or nodes <= 2 * MOST_NODES, f"graphs are too large: {figures}"
    return figures


def memory_of_runs(*words: str, runs: int = RUNS, processes: int = 4) -> list[int]:
    """Return the used memory after each of several runs with processes in one session."""
    used = []
    words = words or ("workers=64", "cohort=16")
    experiment = experiment_of("w3", "engine=processes", f"processes={processes}", *words, few=True)
    with fedsim.Session() as session:
        for seed in range(runs):
            fedsim.run(experiment, seed=seed, session=session)
            gc.collect()
            used.append(used_bytes())
    return used


def runs_in_a_session(program: str = f"from {MODULE} import memory_of_runs; print(memory_of_runs())") -> Figures:
    """Memory does not grow with the runs of a session with 4 processes, and nothing is written to stderr.

    `program`: Python code that prints the used bytes after each run.
    """
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path},
        **{"cwd": ROOT, "capture_output": True, "text": True, "check": False},
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stderr == "", f"stderr: {done.stderr[-500:]}"
    used = json.loads(done.stdout.splitlines()[-1])
    figures = {"used_mb": [round(each / 1e6) for each in used]}
    assert used[-1] - used[2] <= MOST_GROWTH, f"memory grows: {figures}"
    return figures


@contextlib.contextmanager
def busy_gpu() -> Iterator[Callable[[], bool]]:
    """Give the GPU work for a second, and yield a function that returns whether the host has waited for it."""
    torch.cuda._sleep(SLEEP_CYCLES)
    done = torch.cuda.Event()
    done.record()
    yield done.query


def drawing_ahead(*words: str, few: bool = False) -> Figures:
    """Drawing the next round of w3 while the GPU computes never waits for the GPU, and gives the same model.

    `few`: as in `experiment_of`.
    """
    needs_gpu()
    prepare, waits, drawn = Cohorts.prepare_next, list[bool](), list[bool]()

    def watched(cohorts: Cohorts, round: int) -> None:
        with busy_gpu() as has_waited:
            prepare(cohorts, round)
            waits.append(has_waited())
        drawn.append(cohorts._prepared is not None and cohorts._prepared[0] == round + 1)

    results, experiment = [], experiment_of("w3", *STACKED, "precision=float64", *words, rounds=3, few=few)
    for function in (watched, lambda cohorts, round: None):
        with patch.object(Cohorts, "prepare_next", function):
            results.append(fedsim.run(experiment))
    difference = (results[0].global_row - results[1].global_row).abs().max().item()
    assert drawn == [True, True, False], "the second and third round are not drawn ahead"
    assert not any(waits), f"drawing ahead waits for the GPU: {waits}"
    assert difference <= ROUNDING, f"models differ by {difference}"
    return {"difference": difference}


def limit_memory() -> contextlib.ExitStack:
    """Let this process see and use the memory of a small GPU only, until the returned stack is closed."""
    mem_get_info, (_, total) = torch.cuda.mem_get_info, torch.cuda.mem_get_info()
    hidden = max(0, int(total - SMALL_GPU))

    def of_small_gpu(device: Any = None) -> tuple[int, int]:
        free, total = mem_get_info(device)
        return free - hidden, total - hidden

    stack = contextlib.ExitStack()
    stack.enter_context(patch.object(torch.cuda, "mem_get_info", of_small_gpu))
    torch.cuda.set_per_process_memory_fraction(min(1.0, SMALL_GPU / total))
    stack.callback(torch.cuda.set_per_process_memory_fraction, 1.0)
    return stack


limit_memory_once = functools.cache(limit_memory)


def cnn_on_a_small_gpu() -> nn.Module:
    """Return a `cnn`. In a child process, also limit the memory of this process until its end."""
    if multiprocessing.parent_process() is not None:
        limit_memory_once()
    return cnn()


def small_gpu(processes: int, *words: str, rounds: int = FEWEST_ROUNDS) -> Figures:
    """On a GPU with 8 GB, 100 workers of `cnn` fit into the memory that all processes use together."""
    needs_gpu()
    settings, used = [], []
    how = ("engine=batched", f"processes={processes}", f"model={MODULE}:cnn_on_a_small_gpu")
    experiment = experiment_of("w2", *how, "workers=100", "cohort=100", *words, rounds=rounds, few=True)
    with limit_memory(), warnings.catch_warnings():
        warnings.simplefilter("error", FedsimWarning)  # steps run without CUDA graphs if memory runs out
        fedsim.run(experiment, on_start=settings.append, on_round=lambda _: used.append(used_bytes()))
    figures = {"used_gb": round(max(used) / 1e9, 2), "width": settings[0].how["width"]}
    assert max(used) <= SMALL_GPU, f"all processes use too much memory: {figures}"
    return figures


FUNCTIONS: dict[str, Callable[[], Figures]] = {
    "failed capture": failed_capture,
    "drawing ahead": functools.partial(drawing_ahead, "cohort=1000"),
    "runs in a session": runs_in_a_session,
    **{f"8 GB, {k} process{'es' * (k > 1)}": functools.partial(small_gpu, k) for k in (1, 2)},
    **{f"graphs of char_lstm, {k} workers": functools.partial(graphs_of_char_lstm, k) for k in (10, 100)},
}


@pytest.mark.parametrize("name", ASSERTIONS)
def test_assertion(name: str, record_property: Callable[[str, object], None]) -> None:
    if ON_GPU:
        release_memory(GPU)  # of the test before
    record_property("figures", FUNCTIONS[name]())
