"""Memory, descriptors and processes do not grow in a long run."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

import pytest

import fedsim
from tests.leftovers import segments

EARLY, LATE = 100, 1_000
ENGINES = {"serial": {}, "spawn": {"processes": 2}, "batched": {"processes": 1}}
MODES = {"rounds": {}, "clock": {"mode": "clock", "policy": "fedbuff", "clock": {"speed": "lognormal"}}}


def resident(pid):
    """Bytes of memory that a process does not share with others."""
    _, everything, shared, *_ = (int(number) for number in Path(f"/proc/{pid}/statm").read_text().split())
    return (everything - shared) * os.sysconf("SC_PAGESIZE")


def resources():
    """Bytes of memory, file descriptors, segments of shared memory, and processes of the run."""
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    handles = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
    return sum(map(resident, pids)), handles, len(segments()), len(pids)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_thousand_rounds_of_256_workers_leak_nothing(engine, mode, tmp_path, capsys):
    found = {}

    def look(record):
        if record["round"] in (EARLY, LATE):
            found[record["round"]] = resources()

    tables = {
        **{"name": "soak", "rounds": LATE, "workers": 256, "model": "logistic", "engine": engine, **ENGINES[engine]},
        **{"local": {"steps": 1, "batch_size": 16, "lr": 0.05}, "checkpoint": {"every": 10}, **MODES[mode]},
    }
    result = fedsim.run(tables, tmp_path / "run", on_round=look)
    (early, *before), (late, *after) = found[EARLY], found[LATE]
    of_history = _bytes_of(result.history[EARLY:])
    with capsys.disabled():
        print(f"\n{engine}, {mode}: {early / 2**20:.1f} MiB after {EARLY} rounds, {late / 2**20:.1f} after {LATE}, of")
        print(f"which {of_history / 2**20:.1f} are the history; descriptors, segments, processes {before}, {after}")
    assert after == before
    assert late - early - of_history < 0.02 * early


def _bytes_of(thing):
    """Of nested lists and dicts, without small integers, which Python shares; it allocates multiples of 16 bytes."""
    inner = 0
    if isinstance(thing, dict):
        inner = sum(map(_bytes_of, thing.values()))
    elif isinstance(thing, (list, tuple)):
        inner = sum(map(_bytes_of, thing))
    elif isinstance(thing, int) and -5 <= thing <= 256:
        return 0
    return -(-sys.getsizeof(thing) // 16) * 16 + inner
