"""Which workers are Byzantine, and in which rounds they attack."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from fedsim.core.randomness import numpy_generator


@dataclass(frozen=True)
class Attackers:
    """The Byzantine workers of each round. Its truth value is false if no round has any.

    Attributes:
        fixed: those that are Byzantine in every round.
        drawn: or, instead, (seed, number of workers, number of Byzantine workers): each round has its own.
        start_round: the first round in which they attack. Before it they follow the protocol.
    """

    fixed: frozenset[int] = frozenset()
    drawn: tuple[int, int, int] | None = None
    start_round: int = 1

    def __bool__(self) -> bool:
        return bool(self.fixed or self.drawn)

    def in_round(self, round: int) -> Collection[int]:
        """The numbers of the workers that attack in a round, counted from 1."""
        if round < self.start_round:
            return ()
        return self.fixed if self.drawn is None else _drawn(*self.drawn, round)


def draw_attackers(seed: int, workers: int, count: int, *round: int) -> list[int]:
    """The numbers of `count` Byzantine workers among all, for a run or for one of its rounds; ascending."""
    return sorted(numpy_generator(seed, "attackers", *round).permutation(workers)[:count].tolist())


@lru_cache(maxsize=8)  # each round asks again for every worker that it trains
def _drawn(seed: int, workers: int, count: int, round: int) -> frozenset[int]:
    return frozenset(draw_attackers(seed, workers, count, round))
