"""Deliberate faults: lost and stopped processes, a failing capture, a failing kernel, Ctrl-C."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fedsim
from benchmarks.gpu.cases import Case, Context, Facts, check, need_gpu
from benchmarks.gpu.comparing import EXACT, STACKED, TINY, difference, reference, run
from benchmarks.gpu.section import ROOT

PLAIN = {**TINY, "workers": 4, "rounds": 3}
SPAWN = {"engine": "spawn", "processes": 2}
PROGRAM = """
import sys, fedsim
tables = {0!r}
if __name__ == "__main__":
    fedsim.run(tables, on_round=lambda record: print("round", record["round"], flush=True))
"""


def cases(context: Context) -> list[Case]:
    return [
        Case("a process is killed", partial(lost, context, signal.SIGKILL), 60, PLAIN),
        Case("a process is stopped", partial(lost, context, signal.SIGSTOP), 60, PLAIN),
        Case("resume", partial(resumed, context), 60, PLAIN),
        Case("a step that cannot be captured", partial(not_captured, context)),
        Case("Ctrl-C", partial(interrupted, context), 60),
        Case("a model that fails on the device", partial(failing_kernel, context), 60, PLAIN),
    ]


def right(context: Context, **facts: Any) -> Facts:
    """Whether an ordinary run on the device still gives the result of the CPU."""
    off = difference(run(context, {**PLAIN, **STACKED}), reference(context, PLAIN))
    return check(off <= EXACT, f"a run afterwards differs by {off:.1e}", off=off, **facts)


def lost(context: Context, kind: signal.Signals) -> Facts:
    """A process of a run is killed, or stopped, before the second round, which is done again."""
    begun: list[float] = []

    def on_round(record: dict[str, Any]) -> None:
        if record["round"] == 1 and not begun:
            begun.append(time.monotonic())
            os.kill(multiprocessing.active_children()[-1].pid, kind)

    result = run(context, {**PLAIN, **SPAWN, "rounds": 3, "timeout": 8}, on_round=on_round)
    off = difference(result, reference(context, PLAIN))
    seconds = round(time.monotonic() - begun[0], 1)
    return check(off <= EXACT, f"differs by {off:.1e}", off=off, seconds_after_the_loss=seconds)


def resumed(context: Context) -> Facts:
    with tempfile.TemporaryDirectory() as parent:
        tables = {**PLAIN, **STACKED, "checkpoint": {"every": 1}}
        run(context, {**tables, "rounds": 2}, out=f"{parent}/run")
        result = run(context, tables, out=f"{parent}/run", resume=True)
    off = difference(result, reference(context, PLAIN))
    return check(off <= EXACT, f"differs by {off:.1e}", off=off)


def not_captured(context: Context) -> Facts:
    """The run goes on without a graph, and dropout draws afterwards what it draws without."""
    need_gpu(context)
    local = {"batch_size": 16, "lr": 0.05}
    looking = {**PLAIN, **STACKED, "local": {**local, "solver": "benchmarks.gpu.plugs:Looking"}}
    off = difference(run(context, looking), reference(context, {**PLAIN, "local": local}))
    dropping = {**TINY, "model": "net"}
    after = difference(run(context, {**dropping, **STACKED}), reference(context, dropping))
    torch.nn.functional.dropout(torch.ones(100, device=context.device))
    return check(max(off, after) <= EXACT, f"differs by {max(off, after):.1e}", off=off, dropout_afterwards=after)


def interrupted(context: Context) -> Facts:
    """SIGINT in a later round: the program and its processes end, and no shared memory stays."""
    before = shared_memory()
    tables = {**PLAIN, **SPAWN, "rounds": 100_000, "device": context.device}
    with tempfile.TemporaryDirectory() as parent:
        program = Path(parent) / "program.py"
        program.write_text(PROGRAM.format(tables), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        process = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        try:
            while not (line := process.stdout.readline()).startswith("round 2"):
                if not line:
                    return check(False, "it ended before its second round")
            children = descendants(process.pid)
            started = time.monotonic()
            process.send_signal(signal.SIGINT)
            status = process.wait(20)
        finally:
            process.kill()
            process.stdout.close()
    seconds = round(time.monotonic() - started, 1)
    while (alive := [pid for pid in children if running(pid)]) and time.monotonic() < started + 20:
        time.sleep(0.1)
    facts = {"seconds": seconds, "status": status, "processes": len(children), "alive": alive}
    left = sorted(shared_memory() - before)
    return check(not alive and not left and status != 0, "something stays behind", **facts, left=left)


def running(pid: int) -> bool:
    """Whether a process exists that is not a zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def descendants(pid: int) -> list[int]:
    children = []
    with contextlib.suppress(OSError):
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [each for child in children for each in (child, *descendants(child))]


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def failing_kernel(context: Context) -> Facts:
    """A token number beyond the embedding fails within a kernel: the run ends with one error that names it."""
    tables = {**TINY, **SPAWN, "model": "tests.models:Embedded", "data": "benchmarks.gpu.plugs:tokens_beyond"}
    try:
        run(context, {**tables, "worker_retries": 0})
    except fedsim.FedsimError as error:
        return right(context, error=str(error).splitlines()[0][:300])
    return check(False, "no error was raised")
