"""Run drawn experiments, in this process or in long-lived processes with another order of hashes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fedsim
from fedsim.errors import DataError, ExperimentError, MissingPackageError
from tests.commands import ROOT, free_port
from tests.fuzz.draw import Settings
from tests.waves import in_waves

REFUSALS = (ExperimentError, DataError, MissingPackageError)
HASH_SEEDS = ("1", "2")
QUIET = {"records.curve": False, "records.figures": []}
COMPLETED: list[Settings] = []  # experiments that were run to their end since the list was cleared


@dataclass
class Outcome:
    """What a run computed: the global row, the buffers of the model, and the numbers of each round."""

    row: Tensor
    state: dict[str, Tensor]
    rounds: list[dict[str, Any]]

    @classmethod
    def of(cls, result: fedsim.Result) -> Outcome:
        state = {name: value.clone() for name, value in result.model.state_dict().items()}
        return cls(result.global_row.clone(), state, [untimed(record) for record in result.history])


def untimed(record: Any) -> dict[str, Any]:
    """Return a record as plain values of JSON, without times."""
    return json.loads(json.dumps({key: value for key, value in record.items() if key != "seconds"}))


def run(settings: Settings, out: Path | None = None, **options: Any) -> Outcome:
    return Outcome.of(result_of(settings, out, **options))


def result_of(settings: Settings, out: Path | None = None, **options: Any) -> fedsim.Result:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = fedsim.run({**QUIET, **settings}, out, **options)
    COMPLETED.append({**QUIET, **settings})
    return result


class Lab:
    """Runs experiments. Repeated runs of one draw are computed once."""

    def __init__(self) -> None:
        self._known: dict[str, Outcome] = {}
        self._children: list[Child] = []
        self._folder = tempfile.TemporaryDirectory(prefix="fedsim-fuzz-")

    def run(self, settings: Settings, **changes: Any) -> Outcome:
        settings = {"engine": "serial", **settings, **changes}
        key = json.dumps(settings, sort_keys=True)
        if key not in self._known:
            self._known[key] = run(settings)
        return self._known[key]

    def forget(self) -> None:
        """Forget the results, before another draw."""
        self._known.clear()
        COMPLETED.clear()

    def in_children(self, settings: Settings) -> list[Outcome]:
        """Run an experiment in processes with different hash seeds."""
        return self._ask([{} for _ in HASH_SEEDS], settings)

    def on_ranks(self, settings: Settings, *, in_waves: bool = False) -> list[Outcome]:
        """Run an experiment on two ranks, and return the outcome of each. See `tests.waves` for `in_waves`."""
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        shared |= {"IN_WAVES": "1"} if in_waves else {}
        return self._ask([{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)], settings)

    def _ask(self, environments: list[dict[str, str]], settings: Settings) -> list[Outcome]:
        self._children = self._children or [Child(seed, Path(self._folder.name)) for seed in HASH_SEEDS]
        for child, environment in zip(self._children, environments, strict=True):
            child.send({"engine": "serial", **settings}, environment)
        answers = [child.receive() for child in self._children]
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        if errors:  # a refusal by one rank is a WorkerError in the others
            raise next((error for error in errors if isinstance(error, ExperimentError)), errors[0])
        COMPLETED.append({"engine": "serial", **QUIET, **settings})
        return answers

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self._folder.name) as path:
            yield Path(path)

    def end_children(self) -> None:
        """End the processes, which may be at work, before new ones start for the next experiment."""
        for child in self._children:
            child.kill()
        self._children = []

    def close(self) -> None:
        for child in self._children:
            child.close()
        self._folder.cleanup()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Child:
    """A process with its own hash seed, which runs experiments that it receives as lines of JSON."""

    def __init__(self, hash_seed: str, folder: Path) -> None:
        self._answer = folder / f"answer-{hash_seed}"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.fuzz.runs", str(self._answer)]
        self._process = subprocess.Popen(
            command,
            **{"cwd": ROOT, "env": environment, "text": True},
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL},
            start_new_session=True,
        )

    def send(self, settings: Settings, environment: dict[str, str]) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps([settings, environment]) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        assert self._process.stdout
        if not self._process.stdout.readline():
            raise RuntimeError(f"the process of the fuzzer ended with exit code {self._process.wait()}")
        return torch.load(self._answer, weights_only=False)

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def _serve(answer: str) -> None:
    """Run each experiment of stdin in a fork, because a rank's group outlives its run, and report its end on stdout."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        Path(answer).unlink(missing_ok=True)
        if not (pid := os.fork()):
            _answer(*json.loads(line), answer)
        os.waitpid(pid, 0)
        print("done", flush=True)


def _answer(settings: Settings, environment: dict[str, str], answer: str) -> None:
    """Store the outcome of an experiment or its error, and end the process."""
    os.environ.update(environment)
    try:
        with in_waves() if "IN_WAVES" in environment else contextlib.nullcontext():
            outcome: Any = run(settings)
    except BaseException as error:
        outcome = ExperimentError(str(error)) if isinstance(error, REFUSALS) else RuntimeError(repr(error))
    torch.save(outcome, answer)
    os._exit(0)


if __name__ == "__main__":
    from tests.fuzz import runs  # the outcomes are of this module's class, not of __main__'s

    runs._serve(sys.argv[1])
