"""A run leaves nothing in the process: no tensors, no files, no threads, and no changed settings of the libraries."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import traceback
import warnings

import numpy as np
import pytest
import torch

import fedsim
from fedsim.errors import DivergedError
from tests.foreign import WALKED

CLOCK = {"mode": "clock", "clock": {"slowdown": "lognormal"}}
SCHEDULES = {"local.schedule": {"name": "step", "step_size": 1}, "server.schedule": {"name": "cosine", "warmup": 1}}


def tensors():
    """Return the number of living tensors and of their bytes."""
    gc.collect()
    living = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return len(living), sum(tensor.untyped_storage().nbytes() for tensor in living if tensor.layout is torch.strided)


def settings():
    """Return everything global that a run might change."""
    numpy_state = np.random.get_state(legacy=False)
    return {
        "random": (random.getstate(), str(numpy_state["state"]), torch.get_rng_state().tolist()),
        "settings": [(setting.name, setting.read()) for setting in WALKED],
        "threads of PyTorch": torch.get_num_interop_threads(),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.gettrace()),
        "environment": dict(os.environ),
        "imports": list(sys.path),
        "folder": os.getcwd(),
        "threads": threading.active_count(),
        "files": sorted(os.readlink(f"/proc/self/fd/{number}") for number in open_files()),
    }


def open_files():
    return [number for number in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{number}")]


def assert_leaves_nothing(work):
    """Assert that repeating `work` leaves no tensors, and changes no settings. The first call fills caches."""
    work(0)
    before, living = settings(), tensors()
    work(1)
    assert tensors() == living
    after = settings()
    assert {name for name in before if before[name] != after[name]} == set()


@pytest.fixture
def run(tiny_experiment):
    def run(seed, **changes):
        unchanged = {key: value for key, value in tiny_experiment.items() if key not in changes}
        return fedsim.run({**unchanged, "seed": seed}, **changes)

    return run


CASES = [
    {"engine": "serial", **SCHEDULES},
    {"engine": "batched"},
    {"engine": "auto", "model": "net", "rounds": 1, "processes": 1},
    {"engine": "processes", "processes": 2},
    {"engine": "auto", "workers": 8, "processes": 1},  # trains them in stacks
    {**CLOCK, "engine": "batched", "policy": "fedbuff"},
    {"mode": "race", "policy": "hogwild", "engine": "processes", "processes": 2},
    {"engine": "batched", "processors": [{"name": "top_k", "ratio": 0.1}, "qsgd"], "downlink": ["cast"]},
]


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_a_run_leaves_no_tensors_and_changes_no_settings(changes, run):
    assert_leaves_nothing(lambda seed: run(seed, **changes))


@pytest.mark.parametrize("engine", ["serial", "batched", "processes"])
def test_a_failed_or_interrupted_run_leaves_no_tensors_as_long_as_its_error_exists(engine, run):
    """A notebook keeps the last error, and with it everything that the frames of its traceback refer to."""
    errors = []

    def interrupt(record):
        raise KeyboardInterrupt

    def work(seed):
        with pytest.raises(DivergedError) as diverged:
            run(seed, engine=engine, **{"local.lr": 1e30})
        with pytest.raises(KeyboardInterrupt) as interrupted:
            run(seed, engine=engine, on_round=interrupt)
        with pytest.raises(fedsim.ExperimentError) as refused:
            run(seed, engine=engine, model="tests.models:Lazy")
        errors.extend((diverged.value, interrupted.value, refused.value))

    assert_leaves_nothing(work)


def test_a_kept_error_of_the_users_model_has_the_frames_of_the_model(run):
    with pytest.raises(fedsim.WorkerError) as caught:
        run(0, model={"name": "tests.models:Fails", "how": "raise"})
    cause = caught.value.__cause__
    assert "forward" in [frame.name for frame in traceback.extract_tb(cause.__traceback__)]


def test_a_comparison_leaves_no_tensors_and_changes_no_settings(tiny_experiment):
    tables = {**tiny_experiment, "engine": "batched", "rounds": 1}
    assert_leaves_nothing(lambda seed: fedsim.compare(tables, {"local.lr": [0.1, 1e30]}, jobs=1))
