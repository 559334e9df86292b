"""What racing processes share beside the server: locks, what each of them is doing, and what is measured of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedsim.asynchronous.locks import Locks
from fedsim.engines.barrier import LINE
from fedsim.system.sharing import share

COORDINATES = 64  # of a canary

BEGUN, ENDED, ADDED, STATUS = range(4)  # places in a slot's line
IDLE, WORKING, FINISHED, HELD_BACK = range(4)  # what a slot is doing; the last two are ways to end a round


@dataclass
class Track:
    """The state of a race of so many slots, for one round at a time.

    Attributes:
        canaries: float64 [n, COORDINATES], on the device of the model; every update adds 1 to one of them, or to two,
            by an operation like that on the row.
        lines: int64 [n, LINE]: of each slot how many writes it has begun and ended, how often it has added to a canary,
            and what it is doing. A line is written by the process of its slot alone.
        events: int64 [1], how many pieces of work have begun or come in; written by whoever has the server's lock.
    """

    canaries: Tensor
    lines: Tensor
    events: Tensor
    locks: Locks = field(default_factory=Locks)

    @classmethod
    def of(cls, slots: int, device: torch.device) -> Track:
        """A track in shared memory, its canaries on the device of the model."""
        track = cls(
            canaries=torch.zeros(slots, COORDINATES, dtype=torch.double, device=device),
            lines=torch.zeros(slots, LINE, dtype=torch.int64),
            events=torch.zeros(1, dtype=torch.int64),
        )
        share([track.canaries, track.lines, track.events])
        return track

    def clear(self) -> None:
        """Get ready for a round; for the parent, while nobody races."""
        for tensor in (self.canaries, self.lines, self.events):
            tensor.zero_()

    def column(self, place: int) -> np.ndarray:
        """One of the places of all lines, [n], as it is at any time that one looks."""
        return self.lines.numpy()[:, place]

    def add(self, slot: int, canaries: Sequence[int] = (0,)) -> None:
        """A slot adds 1 to these canaries, under the locks, if there are any, that it has for its update."""
        for canary in canaries:
            self.canaries[canary].add_(1.0)
        self.lines.numpy()[slot, ADDED] += len(canaries)

    def lost(self) -> float:
        """How many additions have been overwritten, on average over a canary's coordinates."""
        return int(self.column(ADDED).sum()) - float(self.canaries.sum()) / COORDINATES


@dataclass
class Measures:
    """What a race has measured, of one process or, added up, of several.

    Attributes:
        updates: pieces of work applied.
        overlapped: how many of these were computed while somebody else wrote the row that was being read.
        locks_taken, locks_waited, lock_seconds: see `Locks`.
        held_back: workers that broke off their round, because nobody was left who could have let them go on.
        began, ended: when the first began and the last ended, in seconds of a clock that all processes see.
    """

    updates: int = 0
    overlapped: int = 0
    locks_taken: int = 0
    locks_waited: int = 0
    lock_seconds: float = 0.0
    held_back: int = 0
    began: float = float("inf")
    ended: float = 0.0

    def add(self, other: Measures) -> None:
        for name in ("updates", "overlapped", "locks_taken", "locks_waited", "lock_seconds", "held_back"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.began, self.ended = min(self.began, other.began), max(self.ended, other.ended)

    @property
    def seconds(self) -> float:
        return self.ended - self.began
