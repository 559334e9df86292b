"""The ways to run a small experiment, each as a user's programs in a separate folder."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsim.processes.process_pool import START_TIMEOUT
from tests.commands import ROOT, processes_of_group, start, start_python, start_ranks, stat_of
from tests.runs.test_resuming import assert_the_same

EXPERIMENT = """
name = "tiny"
rounds = 12
workers = 4
model = "logistic"
local.batch_size = 16
checkpoint.every = 2
records.curve = false
"""
IN_POOLS = ("process_timeout=5", "max_restarts=100")
DATA = "data=tests.components:tiny"
RESUME = ("--resume", "run", "tiny.toml", DATA)
RUN = ("-m", "fedsim", "run", *RESUME)
COMPARE = ("-m", "fedsim", "compare", "--out", "run", "tiny.toml", DATA, "aggregate.rule=mean,median", "seed=0,1")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
DISTRIBUTED = ("engine=distributed", "distributed.timeout=5")
WAYS: dict[str, tuple[Any, ...]] = {
    "serial": (*RUN, "engine=serial", "records.updates=[2]", "data.local_test_fraction=0.3"),
    "processes": (*RUN, "engine=processes", "processes=2", *IN_POOLS),
    "batched": (*RUN, "engine=batched", "processes=2", *IN_POOLS),
    "race": (*RUN, "engine=processes", "processes=2", "mode=race", "policy=hogwild", *IN_POOLS),
    "clock": (*RUN, "engine=serial", "mode=clock", "policy=fedbuff", "clock.slowdown=lognormal"),
    "compare": (*COMPARE, *IN_POOLS, "--jobs", "2"),  # jobs of one process each
    "ranks": (*RUN, *DISTRIBUTED),
    "torchrun": (*TORCHRUN, ROOT / "run_experiment.py", *RESUME, *DISTRIBUTED),
    "restarts": (*TORCHRUN, "--max-restarts", "3", ROOT / "run_experiment.py", *RESUME, *DISTRIBUTED),
}
LAUNCHED = ("torchrun", "restarts")
RANKS, POOLS = ("ranks", *LAUNCHED), ("processes", "batched", "race", "compare")
LONGEST = START_TIMEOUT + 60.0  # seconds until programs end (a process may be stopped while it starts)
LONGEST_OF_RANKS = 45.0  # seconds until ranks without a launcher end; their time-out is 5 seconds
LONGEST_STAY = 40.0  # seconds until the processes of a killed launcher are gone
MARK = "FEDSIM_FAULT"
SIGTERM_BIT = 1 << (signal.SIGTERM - 1)


class FaultError(Exception):
    """A violated promise of fedsim."""


@dataclass
class Trial:
    """The programs of one way of running: a single program, or one per rank."""

    way: str
    folder: Path
    programs: list[Any] = field(default_factory=list)

    def start(self, *more: str) -> None:
        """Start the programs, with further command-line words."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "tiny.toml").write_text(EXPERIMENT)
        words, environment = (*WAYS[self.way], *more), {MARK: str(self.folder), "OMP_NUM_THREADS": "1"}
        if self.way == "ranks":
            self.programs = start_ranks(2, *words, cwd=self.folder)
        elif self.way in LAUNCHED:
            self.programs = [start_python(*words, cwd=self.folder, **environment)]
        else:
            self.programs = [start(*words, cwd=self.folder, **environment)]

    def await_handlers(self) -> None:
        """Wait until the programs catch signals. Earlier signals are handled by Python or the launcher."""
        deadline = time.monotonic() + LONGEST
        while not all(map(_catches_signals, self.mains)) and self.lives and time.monotonic() < deadline:
            time.sleep(0.005)

    @property
    def lives(self) -> bool:
        return any(program.poll() is None for program in self.programs)

    @property
    def mains(self) -> list[int]:
        return [program.pid for program in self.programs]

    def pids(self) -> set[int]:
        """Return the IDs of all living processes."""
        return {pid for main in self.mains for pid in processes_of_group(main)} | _marked(self.folder)

    def children(self) -> list[int]:
        """Return the IDs of the processes that may be killed; for forked ranks, the ranks themselves."""
        return sorted(self.pids() - set(self.mains if self.way != "ranks" else ()))

    def send(self, number: int, pids: Any) -> None:
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def end(self, stopped: int | None = None) -> tuple[list[int], str]:
        """Wait for the programs to end and return their exit codes and stderr. The `stopped` process is killed last."""
        longest, errors, codes = LONGEST_OF_RANKS if self.way == "ranks" else LONGEST, "", []
        deadline = time.monotonic() + longest
        if self.way in LAUNCHED and stopped:  # torchrun waits forever for a rank that is stopped after its last round
            killer = threading.Timer(LONGEST_STAY, self.send, [signal.SIGKILL, [stopped]])
            killer.daemon = True
            killer.start()
        waiting = sorted(self.programs, key=lambda program: program.pid == stopped)
        for program in waiting:
            if program.pid == stopped:
                self.send(signal.SIGKILL, [stopped])
            try:
                _, text = program.communicate(timeout=max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise FaultError(f"did not end within {longest:g} s") from None
            errors, codes = errors + text, [*codes, program.returncode]
        deadline = time.monotonic() + (LONGEST_STAY if self.way in LAUNCHED else 5.0)
        while (left := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.02)
        if left:
            raise FaultError(f"{len(left)} processes are left: {' '.join(map(_command, left))}")
        if f'File "{ROOT / "fedsim"}' in errors or "terminate called" in errors or "SIGABRT" in errors:
            raise FaultError(f"a traceback, or an aborted process: {errors[-3000:]}")
        return codes, errors

    def destroy(self) -> None:
        self.send(signal.SIGKILL, self.pids())

    def restart(self) -> None:
        """Continue the run to its end."""
        self.start()
        codes, errors = self.end()
        if any(codes):
            raise FaultError(f"the resumed run ended with {codes}: {errors[-3000:]}")

    def compare_with(self, whole: Path) -> None:
        """Check that the run folders are bit-identical where fedsim promises it."""
        for path in [whole / "run", *sorted((whole / "run" / "runs").glob("*"))]:
            counterpart = self.folder / path.relative_to(whole)
            if not (path / "model.safetensors").exists():
                continue
            if not (counterpart / "model.safetensors").exists():
                raise FaultError(f"{counterpart.name} holds no model")
            try:
                if self.way != "race":
                    assert_the_same(counterpart, path)
            except AssertionError as error:
                raise FaultError(f"{counterpart.name} differs from a run without faults: {str(error)[:300]}") from None


class Wholes:
    """Runs without faults, one per way of running, made on first use."""

    def __init__(self, root: Path) -> None:
        self._root, self.seconds = root, dict[str, float]()

    def folder(self, way: str) -> Path:
        if way not in self.seconds:
            trial = Trial(way, self._root / f"whole-{way}")
            shutil.rmtree(trial.folder, ignore_errors=True)
            trial.start()
            trial.await_handlers()
            begun = time.monotonic()
            codes, errors = trial.end()
            if any(codes):
                raise SystemExit(f"without faults, {way} ends with {codes}: {errors}")
            self.seconds[way] = time.monotonic() - begun
        return self._root / f"whole-{way}"

    def start(self, trial: Trial, rng: random.Random) -> None:
        """Start the programs and wait until a random moment of the run."""
        self.folder(trial.way)
        trial.start()
        trial.await_handlers()
        time.sleep(rng.random() * self.seconds[trial.way])


def _catches_signals(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) & SIGTERM_BIT)


def _marked(folder: Path) -> set[int]:
    """Return the living processes that a launcher has started in their own sessions."""
    mark, pids = f"{MARK}={folder}".encode(), set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (path / "environ").read_bytes().split(b"\0"):
                pids |= {int(path.name)} if stat_of(path.name) else set()
        except OSError:  # the process has ended or belongs to another user
            continue
    return pids


def _command(pid: int) -> str:
    try:
        return f"{pid} ({Path(f'/proc/{pid}/cmdline').read_text()[-80:]})"
    except OSError:
        return str(pid)
