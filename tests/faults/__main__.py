"""Inject random faults into runs: kills, stops, signals, suspensions, foreign files.

    python -m tests.faults --minutes 60            # one line per injection, then a table
    python -m tests.faults --seed 3 --only 17      # repeat injection 17 of seed 3
    python -m tests.faults --ranks --injections 60 # only runs on ranks, by hand and with torchrun

Injection i depends only on (seed, i), but the moment at which it hits a run depends on the machine. The exit code is 1
if an injection fails. An injection fails if a run does not end in bounded time, prints a traceback, or leaves
processes, shared memory or temporary files behind, or if a resumed run is not bit-identical to one without faults.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from multiprocessing.util import Finalize
from pathlib import Path

import torch


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this time (default: 60)")
    parser.add_argument("--injections", type=int, default=10**9, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0, help="of all draws (default: 0)")
    parser.add_argument("--only", type=int, help="one injection, by its number")
    parser.add_argument("--ranks", action="store_true", help="only runs on ranks, without foreign files")
    options = parser.parse_args(words)
    root = Path(tempfile.mkdtemp(prefix="fedsim-faults-"))
    scratch = root / "temporary"
    scratch.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)  # used by the programs too
    numbers = [options.only] if options.only is not None else range(options.injections)
    counts, failures, deadline = Counter(), Counter(), time.monotonic() + 60 * options.minutes
    from tests.faults.injections import KINDS, foreign_files  # imported after the folder for temporary files is chosen
    from tests.faults.ways import RANKS, WAYS, Wholes
    from tests.forking import fork_workers

    fork_workers()
    torch.set_num_threads(1)
    wholes = Wholes(root)
    for number in numbers:
        if time.monotonic() > deadline:
            break
        rng, begun = random.Random(f"{options.seed} {number}"), time.monotonic()
        kinds = [kind for kind in KINDS if not (options.ranks and kind is foreign_files)]
        kind = rng.choices(kinds, [KINDS[kind][0] for kind in kinds])[0]
        way = rng.choice([way for way in KINDS[kind][1] if way in RANKS or not options.ranks])
        reason = failure_of(kind, way, wholes, rng, root / f"{number:05}", scratch)
        place = f"{number:5} {kind.__name__} x {way}"
        print(f"{place:36} {time.monotonic() - begun:5.1f} s  {'FAILED: ' + reason if reason else 'ok'}", flush=True)
        counts[kind, way] += 1
        failures[kind, way] += bool(reason)
    print(f"\n{'injections (failed)':20}" + "".join(f"{way:>10}" for way in WAYS))
    for kind in KINDS:
        cells = [f"{counts[kind, way]} ({failures[kind, way]})" if counts[kind, way] else "" for way in WAYS]
        print(f"{kind.__name__:20}" + "".join(f"{cell:>10}" for cell in cells))
    print(f"{counts.total()} injections, {failures.total()} failed" + f"; see {root}" * bool(failures.total()))
    if not failures.total():
        Finalize(
            None, shutil.rmtree, [root], exitpriority=-200
        )  # runs after the clean-up of multiprocessing, which has files there
    return int(failures.total() > 0)


def failure_of(kind, way, wholes, rng, folder, scratch) -> str | None:
    """Return why an injection failed, keeping its folder, or None."""
    from tests.faults.ways import FaultError, Trial
    from tests.leftovers import left_behind, segments

    wholes.folder(way)
    memory, files, trial = segments(), set(os.listdir(scratch)), Trial(way, folder)
    try:
        kind(trial, wholes, rng)
        if left := left_behind(memory):
            raise FaultError(f"shared memory is left: {left}")
        # files of torchrun
        left = {name for name in set(os.listdir(scratch)) - files if not name.startswith("torchelastic_")}
        if left:
            raise FaultError(f"temporary files are left: {left}")
    except FaultError as fault:
        return str(fault)
    except Exception:
        return f"the injection itself, or fedsim in this process: {traceback.format_exc()}"
    finally:
        trial.destroy()
    shutil.rmtree(folder, ignore_errors=True)
    return None


if __name__ == "__main__":
    sys.exit(main())
