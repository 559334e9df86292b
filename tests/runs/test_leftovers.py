"""A run leaves nothing in the process: no tensors, no files, no threads, and no changed settings of the libraries."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import warnings

import numpy as np
import pytest
import torch

import fedsim
from fedsim.asynchronous.policy import policy

CLOCK = {"mode": "clock", "clock": {"slowdown": "lognormal"}}
SCHEDULES = {
    "local.schedule": {"name": "step", "step_size": 1},
    "server.schedule": {"name": "cosine", "warmup": 1},
}


def tensors():
    """Return the number of living tensors and of their bytes."""
    gc.collect()
    living = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return len(living), sum(tensor.untyped_storage().nbytes() for tensor in living if tensor.layout is torch.strided)


def settings():
    """Return everything global that a run might change."""
    numpy_state = np.random.get_state(legacy=False)
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return {
        "random": (random.getstate(), str(numpy_state["state"]), torch.get_rng_state().tolist()),
        "threads of PyTorch": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "types": (torch.get_default_dtype(), torch.get_default_device(), torch.get_float32_matmul_precision()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "determinism": (torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark),
        "tf32": (cuda.allow_tf32, cudnn.allow_tf32),
        "errors of NumPy": np.geterr(),
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
    for seed in (1, 2):
        work(seed)
        assert tensors() == living
    after = settings()
    assert {name for name in before if before[name] != after[name]} == set()


@pytest.fixture
def run(tiny_experiment):
    def run(seed, **changes):
        return fedsim.run({**tiny_experiment, "seed": seed}, **changes)

    return run


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": "serial"},
        {"engine": "batched"},
        {"engine": "batched", "model": "cnn", "rounds": 1},
        {"engine": "auto", "model": "net", "rounds": 1, "processes": 1},
        {"engine": "spawn", "processes": 2},
        {"engine": "batched", "sync": "gradients"},
        {"engine": "batched", "model": "tests.models:Normalised"},
        {"engine": "batched", "precision": "bf16"},
        {"engine": "batched", "local.algorithm": "scaffold", "cohort": 2},
        {"engine": "serial", "local.algorithm": "ditto"},
        {"engine": "serial", "model": "tests.models:Noisy", "local.clip_norm": 1.0},
        {"engine": "batched", "processors": [{"name": "top_k", "ratio": 0.1}, "qsgd"], "broadcast": ["cast"]},
        {"engine": "batched", "privacy": {"mechanism": "central", "noise": 1.0, "clip": 1.0}},
        {"engine": "batched", "local.algorithm": "dp_sgd", "local.noise": 1.0, "local.clip": 1.0, "local.momentum": 0},
        {"engine": "batched", "attack": {"name": "alie", "fraction": 0.3}, "aggregate.rule": "median"},
        {"engine": "serial", "data.augment": ["flip", "torchvision:RandomAffine"]},
        {"engine": "serial", "worker_evaluation.every": 1},
        {"engine": "serial", **SCHEDULES},
        {"task": "regression", "data": "tests.other_tasks:planes", "model": "tests.other_tasks:plane"},
        {**CLOCK, "engine": "batched"},
        {**CLOCK, "engine": "spawn", "processes": 2},
        {"mode": "race", "engine": "spawn", "processes": 2},
    ],
    ids=str,
)
def test_a_run_leaves_no_tensors_and_changes_no_settings(changes, run):
    assert_leaves_nothing(lambda seed: run(seed, **changes))


@pytest.mark.parametrize("name", [registration.name for registration in policy])
def test_an_asynchronous_policy_leaves_no_tensors_and_changes_no_settings(name, run):
    assert_leaves_nothing(lambda seed: run(seed, **CLOCK, policy=name))
