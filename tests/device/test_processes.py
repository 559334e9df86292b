"""Tests that the pretend GPU cannot run: processes, races, signals and failing kernels.

Without a GPU they run on the CPU, but not in the default suite, because the engine tests cover the same there.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

import fedsim
from fedsim.asynchronous.policies import policy
from fedsim.core import philox
from tests.commands import assert_none_left, processes_of_group, read_until, start_python
from tests.device.agreement import (
    CLOSE,
    ENGINES,
    FULL,
    PLACE,
    REAL,
    ROUNDING,
    TINY,
    assert_same_model,
    assert_same_results,
    run_on_cpu,
    settings_of,
)
from tests.engines.test_contract import ALL_CASES, syncs_of

pytestmark = [pytest.mark.gpu, *([] if REAL else [pytest.mark.slow])]
needs_gpu = pytest.mark.skipif(not REAL, reason="needs a real GPU")

SPAWN = {"engine": "processes", "processes": 2}
PLAIN = {**TINY, "workers": 4, "rounds": 3}
CASES = [f"{case}, {sync}" for case in ALL_CASES for sync in syncs_of((case,))][::2]
SLACK = 2**20  # bytes that a library may keep
PROGRAM = """
import fedsim
if __name__ == "__main__":
    fedsim.run({0!r}, on_round=lambda record: print("round", record["round"], flush=True))
"""


def run(tables, **options):
    return fedsim.run({**tables, "device": PLACE}, **options)


@pytest.mark.parametrize("case", CASES)
def test_processes_agree_with_the_cpu(case, session):
    name, _, sync = case.rpartition(", ")
    tables = {**FULL, "sync": sync, **ALL_CASES[name], "precision": "float64"}
    assert_same_results(run_on_cpu(tables), run({**tables, **SPAWN}, session=session))


@pytest.mark.parametrize("sync", ["parameters", "gradients"])
def test_processes_that_stack_rows_agree_with_the_cpu(sync, session):
    tables = {**PLAIN, "sync": sync, "model": "tests.models:Normalised"}
    assert_same_results(run_on_cpu(tables), run({**tables, "engine": "batched", "processes": 2}, session=session))


@pytest.mark.parametrize(
    "registration",
    [registration for registration in policy if registration.name != "sync"],
    ids=lambda registration: registration.name,
)
def test_races_learn(registration, session):
    """The results depend on timing."""
    tables = {**FULL, "precision": "float32", "rounds": 3, "local": {"batch_size": 16, "lr": 0.05}}
    if registration.name == "eamsgd":
        tables["local"]["momentum"] = 0.5
    race = {"mode": "race", "policy": settings_of(registration), "race": {"runs": 1}}
    assert run({**tables, **race, **SPAWN}, session=session).test_accuracy > 0.15


@pytest.mark.filterwarnings("ignore::fedsim.errors.FedsimWarning")  # the warning that the round is repeated
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_round_that_lost_a_process_is_repeated(number):
    def on_round(record):
        if record["round"] == 1 and not lost:
            lost.append(multiprocessing.active_children()[-1].pid)
            os.kill(lost[0], number)

    lost = []
    result = run({**PLAIN, **SPAWN, "process_timeout": 8}, on_round=on_round)
    assert lost
    assert_same_model(run_on_cpu(PLAIN), result, ROUNDING)


def test_an_interrupt_ends_all_processes_and_leaves_no_shared_memory(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format({**PLAIN, **SPAWN, "rounds": 3000, "device": PLACE}))
    process = start_python(str(program), cwd=tmp_path)
    read_until(process, "round 2")
    members = {f"torch_{pid}_" for pid in processes_of_group(process.pid)}
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert_none_left(process.pid)
    assert not [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(tuple(members))]


def test_a_kernel_that_fails_ends_one_run_with_an_error_and_no_later_one():
    """A token number beyond the embedding makes a kernel fail."""
    tables = {**TINY, **SPAWN, "model": "tests.models:Embedded", "data": f"{__name__}:tokens_beyond"}
    with pytest.raises(fedsim.FedsimError, match="index"):
        run({**tables, "max_restarts": 0})
    assert_same_model(run_on_cpu(PLAIN), run({**PLAIN, **ENGINES["batched"]}), ROUNDING)


def tokens_beyond(root):
    """Token sequences of which some, but not the first, contain a token that the embedding does not have."""
    samples = [(torch.arange(k, k + 7) % 50, k % 3) for k in range(60)]
    return [(tokens + 50 * (k > 20), label) for k, (tokens, label) in enumerate(samples)], samples


@needs_gpu
@pytest.mark.parametrize("engine", ["serial", "batched", "auto", "processes"])
def test_memory_does_not_grow_from_run_to_run(engine):
    """Python's cycle collector is off, so memory that is held by a reference cycle is detected too."""
    way = {**ENGINES, "auto": {"engine": "auto", "processes": 1}, "processes": SPAWN}[engine]
    tables = {**TINY, "model": "cnn", "workers": 8, "rounds": 1, "precision": "float32", **way}
    used = []
    gc.collect()
    gc.disable()
    try:
        for seed in range(3):
            run({**tables, "seed": seed})
            used.append(torch.cuda.memory_allocated())
    finally:
        gc.enable()
    assert used[-1] <= used[0] + SLACK


@needs_gpu
@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_tf32_and_float32_differ_as_much_as_they_should(engine, monkeypatch):
    # PyTorch's default, which must have no effect in float32
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    tables = {**TINY, "model": {"name": "net", "dropout": 0.0}, **ENGINES[engine]}
    exact, *rows = (run({**tables, "precision": name}).global_row.double() for name in CLOSE)
    float32, tf32, bf16 = (float((row - exact).norm() / exact.norm()) for row in rows)
    assert float32 < 1e-4
    assert float32 < tf32 < 1e-2
    assert bf16 < 5e-2
    assert torch.backends.cudnn.allow_tf32


@needs_gpu
def test_a_replay_draws_by_the_key_and_the_step_that_lie_in_memory_then():
    keys, step = torch.tensor((1, 2**62 + 12345, 7)), torch.zeros((), dtype=torch.int64, device=PLACE)
    stream = philox.Stream(keys.to(PLACE), step)
    philox.words(stream, 10_001)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = philox.words(stream, 10_001)
    step.fill_(5)
    graph.replay()
    assert torch.equal(replayed.cpu(), philox.words(philox.Stream(keys, 5), 10_001))
