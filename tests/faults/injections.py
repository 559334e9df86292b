"""The kinds of fault injections: what each does to a run, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import fedsim
from fedsim.cli.main import app
from fedsim.comparison import load_comparison
from fedsim.errors import FedsimError, FedsimWarning, show_warnings_as_lines
from tests.commands import free_port, start
from tests.faults.ways import LAUNCHED, POOLS, RANKS, WAYS, FaultError, Trial, Wholes
from tests.hostile.mutations import EXTREMES, OPERATIONS, mutated
from tests.processes.test_rendezvous import GREETINGS, impostor
from tests.runs.test_resuming import broken_off
from tests.time_limit import time_limit

READ_SECONDS = 30  # time limit for reading foreign files
LAST_WORDS = ("error: ", "interrupted", "terminated")  # beginnings of the last line of a failing program


def finish(trial: Trial, wholes: Wholes, allowed: set[int], stopped: int | None = None) -> None:
    """Check how the programs end, resume an unfinished run, and compare the result with a run without faults."""
    codes, errors = trial.end(stopped)
    lines, ended = sum(line.startswith(LAST_WORDS) for line in errors.splitlines()), len(codes) - codes.count(0)
    said = (
        trial.way in LAUNCHED or sum(code > 0 for code in codes) <= lines <= ended
    )  # a second signal ends a program at once
    if not set(codes) <= allowed | {0} or not said:
        raise FaultError(f"exit codes {codes}: {errors[-3000:]}")
    if any(codes):
        trial.restart()
    trial.compare_with(wholes.folder(trial.way))


def child_is_lost(trial: Trial, wholes: Wholes, rng: random.Random, number: int) -> None:
    """Kill or stop a random child process of the run, or one rank."""
    wholes.start(trial, rng)
    while not (children := trial.children()) and trial.lives:
        time.sleep(0.005)
    victim = rng.choice(children) if children else None
    trial.send(number, [victim] if victim else [])
    finish(trial, wholes, {1, -signal.SIGKILL} if trial.way in ("ranks", "torchrun") else set(), victim)


def killed_child(trial: Trial, wholes: Wholes, rng: random.Random) -> None:
    child_is_lost(trial, wholes, rng, signal.SIGKILL)


def stopped_child(trial: Trial, wholes: Wholes, rng: random.Random) -> None:
    child_is_lost(trial, wholes, rng, signal.SIGSTOP)


def killed_run(trial: Trial, wholes: Wholes, rng: random.Random) -> None:
    """Kill all processes or only the main program, up to three times, then resume."""
    for _ in range(rng.randint(1, 3)):
        wholes.start(trial, rng)
        trial.send(signal.SIGKILL, trial.pids() if rng.random() < 0.7 else trial.mains)
        trial.end()
    trial.restart()
    trial.compare_with(wholes.folder(trial.way))


def exception_in_rank(trial: Trial, wholes: Wholes, rng: random.Random) -> None:
    """Let the model of one rank raise an exception after a random number of steps. A run has about 96 steps."""
    once = trial.way == "restarts"
    model = "tests.models:FailsInRankOnce" if once else "tests.models:FailsInRank"
    trial.start(f"model={model}", f"model.rank={rng.randrange(2)}", f"model.after={rng.randrange(90)}")
    codes, errors = trial.end()
    if any(codes) == once or "(rank " not in errors or "ZeroDivisionError: this model" not in errors:
        raise FaultError(f"exit codes {codes}: {errors[-3000:]}")


def suspended(trial: Trial, wholes: Wholes, rng: random.Random) -> None:
    """Suspend all processes, and resume them before or after the time-outs, which end a run on ranks."""
    wholes.start(trial, rng)
    pids = trial.pids()
    trial.send(signal.SIGSTOP, pids)
    time.sleep(rng.choice([0.1, 7.0]))
    trial.send(signal.SIGCONT, pids)
    finish(trial, wholes, {1} if trial.way in RANKS else set())


def signalled(trial: Trial, wholes: Wholes, rng: random.Random) -> None:
    """Send SIGINT or SIGTERM to a main program or to all processes, once or twice."""
    number = rng.choice([signal.SIGINT, signal.SIGTERM])
    wholes.start(trial, rng)
    targets = trial.pids() if rng.random() < 0.5 else {rng.choice(trial.mains)}
    for _ in range(rng.randint(1, 2)):
        trial.send(number, targets)
        time.sleep(rng.random() * 0.1)
    finish(trial, wholes, {128 + number, -number, *({1} if trial.way in RANKS else {})})


def lonely_rank(trial: Trial, wholes: Wholes, rng: random.Random) -> None:
    """Start one of two ranks, perhaps with an impostor in place of the other, and perhaps interrupt it."""
    rank, number = rng.choice(["0", "1", "1"]), rng.choice([None, signal.SIGINT, signal.SIGTERM])
    port = free_port() if rank == "0" else impostor(rng.choice(GREETINGS), queue.SimpleQueue())
    trial.folder.mkdir(parents=True)
    words = ("-m", "fedsim", "run", "data=tests.components:tiny", "engine=distributed", "distributed.timeout=2")
    trial.programs = [start(*words, cwd=trial.folder, RANK=rank, WORLD_SIZE="2", MASTER_PORT=port)]
    if number:
        trial.await_handlers()
        time.sleep(rng.random())
        trial.send(number, trial.mains)
    codes, errors = trial.end()
    allowed = {1, 128 + number} if number else {1}  # the timeout may come before the signal
    if len(codes) != 1 or not allowed.issuperset(codes) or not errors.startswith(LAST_WORDS) or errors.count("\n") != 1:
        raise FaultError(f"rank {rank} of 2, alone: exit code {codes}: {errors}")


def bounded(action: str) -> AbstractContextManager[None]:
    return time_limit(READ_SECONDS, FaultError(f"{action}: more than {READ_SECONDS} s"))


def foreign_files(trial: Trial, wholes: Wholes, rng: random.Random) -> None:
    """Damage files of a run or comparison, then read the folder with all commands and functions."""
    whole, folder = wholes.folder(trial.way) / "run", trial.folder / "run"
    trial.folder.mkdir(parents=True)
    if trial.way != "compare" and rng.random() < 0.5:
        broken_off(whole, folder, rng.choice([4, 6, 8, 10]))
    else:
        shutil.copytree(whole, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    changed = rng.sample(files, rng.randint(1, 2))
    for path in changed:
        change(path, files, rng)
    words = [("report", folder), ("plot", folder, "--out", trial.folder / "plot.svg"), ("replay", folder)]
    words += [("compare", folder)] if trial.way == "compare" else [("run", "--resume", folder, "--allow-imports")]
    names = ", ".join(str(path.relative_to(folder)) for path in changed)
    for command in words:
        with bounded(f"{command[0]} with changed {names}"), warnings.catch_warnings():
            warnings.simplefilter("default", FedsimWarning)  # as outside of pytest
            result = CliRunner().invoke(app, [str(word) for word in command])
        said = f"{command[0]} with changed {names}: exit code {result.exit_code}: {result.output[-500:]!r}"
        if result.exit_code not in (0, 1, 2) or not isinstance(result.exception, (SystemExit, type(None))):
            raise FaultError(f"{said} {result.exception!r}")
        if not result.output.replace("\n", "").isprintable():
            raise FaultError(said)
    of_checkpoints = all(path.parent.name == "checkpoints" for path in changed)
    if of_checkpoints and not result.exit_code and trial.way not in RANKS:
        trial.compare_with(whole.parent)
    for read in (fedsim.load_run, load_comparison):
        with (
            bounded(f"{read.__name__} with changed {names}"),
            warnings.catch_warnings(),
            contextlib.suppress(FedsimError),
        ):
            show_warnings_as_lines()
            repr(getattr(read(folder), "model", None))


def change(path: Path, files: list[Path], rng: random.Random) -> None:
    """Damage a file, or replace it in the way another program could."""
    content = path.read_bytes()
    at = rng.randrange(len(content) + 1)
    kind = rng.choice(["cut", "bits", "insert", "tree", "tree", "swap", "link", "folder", "pipe"])
    if kind == "cut":
        path.write_bytes(content[:at])
    elif kind == "bits" and content:
        flipped = bytearray(content)
        for _ in range(rng.choice([1, 1, 20])):
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
    elif kind == "tree" and path.suffix in (".json", ".jsonl"):
        lines = content.splitlines() if path.suffix == ".jsonl" else [content]
        trees = [tree for line in lines for tree in parsed(line)]
        changes = [(rng.randrange(10**9), rng.choice(OPERATIONS), rng.choice(EXTREMES), "round") for _ in range(2)]
        texts = [json.dumps(tree, ensure_ascii=False) for tree in mutated(trees, changes)]
        path.write_bytes("\n".join(texts).encode("utf-8", errors="surrogatepass"))
    elif kind in ("insert", "tree"):
        odd = rng.choice([b"\r", b"\x1b]0;x\x07", "\u202e".encode(), b'"' * 3, b"9" * 200_000, b"[" * 3_000, b"\xff\0"])
        path.write_bytes(content[:at] + odd + content[at:])
    else:
        path.unlink()
    if kind == "swap":
        others = [other for other in files if other.is_file() and other != path]
        shutil.copyfile(rng.choice(others), path)
    elif kind == "link":
        path.symlink_to(rng.choice([path, path.parent / "nothing", path.parent]))
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)


def parsed(line: bytes) -> list[Any]:
    """Return the JSON value of a line in a list, or [] for an incomplete line."""
    try:
        return [json.loads(line)]
    except ValueError:
        return []


Injection = Callable[[Trial, Wholes, random.Random], None]
# weight, and the ways of running to which the injection applies
KINDS: dict[Injection, tuple[float, tuple[str, ...]]] = {
    killed_child: (3.0, (*POOLS, *RANKS)),
    stopped_child: (1.0, (*POOLS, *RANKS)),
    killed_run: (3.0, tuple(WAYS)),
    exception_in_rank: (2.0, RANKS),
    suspended: (1.0, tuple(WAYS)),
    signalled: (4.0, tuple(WAYS)),
    lonely_rank: (1.0, ("ranks",)),
    foreign_files: (13.0, tuple(way for way in WAYS if way not in LAUNCHED)),
}
