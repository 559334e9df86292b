"""Time and memory of a command and all its processes, observed from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

PAUSE = 0.02  # minimum seconds between two samples of the memory


class Watched(NamedTuple):
    seconds: float  # from start to end
    peak_bytes: int  # highest sum of the processes' proportional set sizes (PSS)


def watch(command: Sequence[str], share: float = 0.5, **options: Any) -> Watched:
    """Run a command to its end. Raises CalledProcessError if it fails, after killing the processes that it left.

    Args:
        share: maximum share of one core's time that samples of the memory take; without samples if it is 0.
        options: arguments of `subprocess.Popen`.
    """
    started = time.perf_counter()
    process = subprocess.Popen(command, start_new_session=True, **options)
    peak, pause = 0, PAUSE if share else None
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(pause)
                break
            sampled = time.perf_counter()
            peak = max(peak, tree_pss(process.pid))
            pause = max(PAUSE, (time.perf_counter() - sampled) / share)
        seconds = time.perf_counter() - started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Watched(seconds, peak)


def tree_pss(pid: int) -> int:
    """Return the PSS of a process and all its descendants, in bytes. A page that k processes share counts once."""
    return sum(map(_pss, _tree(pid)))


def _tree(pid: int) -> list[int]:
    children = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += task.read_text().split()
    return [pid, *(each for child in children for each in _tree(int(child)))]


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
