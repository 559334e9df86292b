"""Memory, file descriptors and processes do not grow in a long run."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
from pathlib import Path

import pytest

import fedsim
from tests.leftovers import segments

ROUNDS = 1_000
# Rounds. Of each range, the minimum of the memory is compared, because it fluctuates, and the maximum of the counts,
# because the process that draws the curve opens its fonts with the first picture.
EARLY, LATE = range(100, 201, 10), range(900, 1_001, 10)
ENGINES = {"serial": {}, "processes": {"processes": 2}, "batched": {"processes": 1}}
MODES = {"rounds": {}, "clock": {"mode": "clock", "policy": "fedbuff", "clock": {"slowdown": "lognormal"}}}


def resident(pid):
    """Return how many bytes of memory a process does not share with others."""
    _, everything, shared, *_ = (int(number) for number in Path(f"/proc/{pid}/statm").read_text().split())
    return (everything - shared) * os.sysconf("SC_PAGESIZE")


def resources():
    """Return the run's memory in bytes and its numbers of file descriptors, shared-memory segments and processes.

    Freed memory that the allocator of this process keeps, which grows with fragmentation, does not count.
    """
    ctypes.CDLL(None).malloc_trim(0)
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    handles = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
    return sum(map(resident, pids)), handles, len(segments()), len(pids)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_thousand_rounds_of_256_workers_leak_nothing(engine, mode, tmp_path, capsys):
    samples = {EARLY: [], LATE: []}

    def look(record):
        for rounds, measured in samples.items():
            if record["round"] in rounds:
                measured.append(resources())

    tables = {
        **{"name": "soak", "rounds": ROUNDS, "workers": 256, "model": "logistic", "engine": engine, **ENGINES[engine]},
        **{"local": {"steps": 1, "batch_size": 16, "lr": 0.05}, "checkpoint": {"every": 10}, **MODES[mode]},
    }
    result = fedsim.run(tables, tmp_path / "run", on_round=look)
    (early, *before), (late, *after) = (
        (min(memory), *map(max, counts)) for memory, *counts in (zip(*taken, strict=True) for taken in samples.values())
    )
    of_history = _bytes_of(result.history[EARLY[0] : LATE[0]])
    with capsys.disabled():
        print(f"\n{engine}, {mode}: {early / 2**20:.1f} MiB at first, {late / 2**20:.1f} at last, of")
        print(f"which {of_history / 2**20:.1f} are the history; descriptors, segments, processes {before}, {after}")
    assert after == before
    assert late - early - of_history < 0.04 * early  # leaking one row per round would give 0.08


def _bytes_of(thing):
    """Return the bytes of nested lists and dicts in units of 16, without small integers, which Python shares."""
    inner = 0
    if isinstance(thing, dict):
        inner = sum(map(_bytes_of, thing.values()))
    elif isinstance(thing, (list, tuple)):
        inner = sum(map(_bytes_of, thing))
    elif isinstance(thing, int) and -5 <= thing <= 256:
        return 0
    return -(-sys.getsizeof(thing) // 16) * 16 + inner
