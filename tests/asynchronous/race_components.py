"""Policies, models and data sets that the race tests name by import path."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.asynchronous.policies import Policy
from fedsim.asynchronous.policies.decentralized import Gossip
from fedsim.asynchronous.policies.gradient_updates import Hogwild, Locked
from fedsim.asynchronous.race.state import WRITES_ENDED
from fedsim.data import TensorData

TOKENS, TEXTS, CLASSES = 30, 60, 3


@dataclass(frozen=True)
class NeverStarting(Policy):
    def may_start(self, server, slot):
        return False

    def take(self, server, arrival):
        raise AssertionError("nothing can have come in")


def fail(how):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(frozen=True)
class FailingLocked(Locked):
    """A locked policy in which worker 1 is killed or stopped in the middle of its third update."""

    how: str = "kill"

    def take(self, server, arrival):
        if (arrival.worker, arrival.unit) == (1, 2):
            server.global_row[: len(server.global_row) // 2] = 0
            fail(self.how)
        super().take(server, arrival)


@dataclass(frozen=True)
class FailingHogwild(Hogwild):
    """`FailingLocked` without the lock."""

    def take(self, server, arrival):
        if (arrival.worker, arrival.unit) == (1, 2):
            server.global_row[: len(server.global_row) // 2] = 0
            fail("kill")
        super().take(server, arrival)


class Bag(nn.Module):
    """An embedding model whose embedding rows are the class scores of the tokens."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, CLASSES, sparse=sparse)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens).mean(1)


def disjoint_texts(root):
    """Return texts in three disjoint vocabularies, one for each worker of the partition `in_thirds`."""
    generator = torch.Generator().manual_seed(3)
    third = torch.arange(TEXTS) // (TEXTS // 3)
    tokens = torch.randint(0, TOKENS // 3, (TEXTS, 5), generator=generator) + third.view(-1, 1) * (TOKENS // 3)
    data = TensorData(tokens, tokens.sum(1) % CLASSES, dtype=torch.long)
    return data, data


def in_thirds(labels, n_workers, rng):
    return np.array_split(np.arange(len(labels)), 3)


class Script:
    """Order in which the workers of a race may pass named points. The size of a file is the number of passed points."""

    def __init__(self, folder: str) -> None:
        self._points, self._passed = (Path(folder) / name for name in ("points", "passed"))

    @classmethod
    def write(cls, folder, points):
        (folder / "points").write_text(" ".join(points))
        (folder / "passed").touch()
        return {"folder": str(folder)}

    def pass_points(self, worker: int, *names: str) -> None:
        """Wait at each of these points until it is the turn of this worker."""
        points = self._points.read_text().split()
        for name in names:
            while (passed := self._passed.stat().st_size) == len(points) or points[passed] != f"{name}{worker}":
                time.sleep(0.0002)
            with self._passed.open("ab") as file:
                file.write(b".")


class Scripted(nn.Module):
    """A linear model that passes the points `in` and `out` of its `Script` in the backward pass of each step."""

    def __init__(self, *, folder: str) -> None:
        super().__init__()
        self.linear, self.script = nn.Linear(1, 2), Script(folder)

    def forward(self, worker_ids: Tensor) -> Tensor:
        outputs, worker = self.linear(worker_ids), int(worker_ids[0, 0])
        if outputs.requires_grad and parent_process() is not None:
            outputs.register_hook(lambda gradient: self.script.pass_points(worker, "in", "out"))
        return outputs


@dataclass(frozen=True)
class ScriptedHogwild(Hogwild):
    """Hogwild that passes the points `write` and `written` of its `Script` at the beginning and end of each update."""

    folder: str = ""

    def take(self, server, arrival):
        Script(self.folder).pass_points(arrival.worker, "write")
        super().take(server, arrival)
        Script(self.folder).pass_points(arrival.worker, "written")


@dataclass(frozen=True)
class ScriptedGossip(Gossip):
    """Gossip that passes the points `write` and `written` of its `Script` at the beginning and end of each update."""

    folder: str = ""

    def take(self, server, arrival):
        Script(self.folder).pass_points(arrival.worker, "write")
        super().take(server, arrival)
        Script(self.folder).pass_points(arrival.worker, "written")


def contend(process, race_state):
    """Let process 1 ask for a lock while process 0 holds it. Process 0 releases it when process 1 begins to wait."""
    locks, lockf = race_state.locks, fcntl.lockf

    def announced(descriptor, operation, *span):
        if operation == fcntl.LOCK_EX:  # without LOCK_NB
            process.barrier.wait()
        return lockf(descriptor, operation, *span)

    if process.index == 0:
        locks.acquire([0, 1])
        process.barrier.wait()
        process.barrier.wait()
    else:
        process.barrier.wait()
        fcntl.lockf = announced
        locks.acquire([0])
        fcntl.lockf = lockf
    locks.release([0, 1])
    return locks.taken, locks.waited, locks.seconds


def worker_ids(root):
    """Return samples that consist of the worker to which the partition `in_halves` gives them."""
    ids = torch.arange(2).repeat_interleave(4)
    data = TensorData(ids.float().view(-1, 1), ids)
    return data, data


def in_halves(labels, n_workers, rng):
    return np.array_split(np.arange(len(labels)), 2)


def count_updates(process, race_state, times, locked):
    """Update a loss counter `times` times in the way that a race does."""
    ended = race_state.column(WRITES_ENDED)
    process.barrier.wait()
    for _ in range(times):
        if locked:
            race_state.locks.acquire([0])
        race_state.add(process.index)
        ended[process.index] += 1
        if locked:
            race_state.locks.release([0])
    return race_state.locks.taken, race_state.locks.waited
