"""Components that kill or stop their process when a test orders it."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path

from torch import Tensor, nn

from fedsim.asynchronous.policies.gradient_updates import Locked
from fedsim.server.optimizer import ServerAdam
from tests.components import tiny


def order(folder, *orders):
    """Order one process to die in each phase (`train`, `test`, `aggregate` or `take`), or to stop (`train-stop`)."""
    for number, phase in enumerate(orders):
        (Path(folder) / f"{phase}-{number}").touch()


def obey(folder, phase):
    """Carry out an order for this phase, in a child process but not in the test's own process."""
    if parent_process() is None:
        return
    for path in sorted(Path(folder).glob(f"{phase}-*")):
        try:
            path.unlink()
        except FileNotFoundError:  # another process was faster
            continue
        os.kill(os.getpid(), signal.SIGSTOP if "stop" in path.name else signal.SIGKILL)


class Mortal(nn.Module):
    """A model that carries out orders in training and in the test."""

    def __init__(self, *, folder: str) -> None:
        super().__init__()
        self.linear, self.folder = nn.Linear(784, 10), folder

    def forward(self, images: Tensor) -> Tensor:
        obey(self.folder, "train" if self.training else "test")
        return self.linear(images.flatten(1))


class MortalNormalised(Mortal):
    """`Mortal` with BatchNorm."""

    def __init__(self, *, folder: str) -> None:
        super().__init__(folder=folder)
        self.norm = nn.BatchNorm1d(10)

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(super().forward(images))


@dataclass(frozen=True)
class MortalAdam(ServerAdam):
    """A server optimizer that carries out orders after its step."""

    folder: str = ""

    def step(self, rows, update, state):
        super().step(rows, update, state)
        obey(self.folder, "aggregate")


@dataclass(frozen=True)
class MortalLocked(Locked):
    """A policy that carries out orders in the middle of an update, while it holds the lock."""

    folder: str = ""

    def take(self, server, arrival):
        server.global_row[: len(server.global_row) // 2] += 1.0
        obey(self.folder, "take")
        server.global_row[: len(server.global_row) // 2] -= 1.0
        super().take(server, arrival)


def tiny_after_orders(root, *, folder: str):
    """Carry out orders for the phase `load`, then load the data set `tiny`."""
    obey(folder, "load")
    return tiny(root)


def die_second(process):
    """Kill the second process of a pool."""
    if process.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
