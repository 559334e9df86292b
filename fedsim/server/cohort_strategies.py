"""The cohort strategies uniform, by_size, round_robin, fixed and power_of_choice; see `fedsim.server.cohort`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from fedsim.core.randomness import sample_workers
from fedsim.errors import ExperimentError, show
from fedsim.server.cohort import cohort_strategy

Chosen = tuple[np.ndarray, np.ndarray]  # workers, and the probability of each


@cohort_strategy("uniform")
def uniform(n_workers: int, size: int, rng: np.random.Generator) -> Chosen:
    """Workers are drawn uniformly without replacement, as in FedAvg (McMahan et al. 2017).

    Each worker has the probability size / n_workers. Cost: O(size log size), whatever the number of workers.

    >>> uniform(4, 2, np.random.default_rng(0))
    (array([2, 3]), array([0.5, 0.5]))
    """
    return sample_workers(rng, n_workers, size), np.full(size, size / n_workers)


@cohort_strategy("by_size")
def by_size(n_workers: int, size: int, rng: np.random.Generator, samples: np.ndarray | None) -> Chosen:
    """Workers are drawn with probability proportional to their number of samples, without replacement.

    The probability of worker k is exactly size n_k / n, at most 1; what a worker has above 1 goes to the others. It is
    systematic sampling in random order (Madow 1949): in a random order of the workers, the intervals of lengths
    probability_k are laid end to end, and the workers are chosen in whose intervals u, u + 1, ..., u + size - 1 lie.

    Scheme I of Li et al. 2020 ("On the convergence of FedAvg on non-IID data") draws with these probabilities with
    replacement; a round has one row for each worker, so here a worker is chosen at most once. As there, the plain mean
    of the updates, `aggregate.weights = "uniform"`, is an unbiased estimate of the mean by samples over all workers, if
    no probability is limited to 1. `aggregate.weights = "inverse_probability"` is unbiased in every case.

    Draws: one `rng.permutation` and one `rng.random`; as `uniform` if all workers have as many samples. Cost:
    O(n_workers), or O(size log size) if all workers have as many samples, as with partition = "virtual".

    >>> by_size(3, 2, np.random.default_rng(0), np.array([60, 20, 20]))
    (array([0, 1]), array([1. , 0.5]))
    """
    if samples is None:
        return uniform(n_workers, size, rng)
    probabilities = inclusion_probabilities(samples, size)
    certain = probabilities > 1 - 1e-9
    order = rng.permutation(np.flatnonzero(~certain))
    ends, count = np.cumsum(probabilities[order]), size - int(certain.sum())
    drawn = np.searchsorted(ends[:-1], rng.random() + np.arange(count), side="right")
    chosen = np.concatenate([np.flatnonzero(certain), order[drawn]])
    return chosen, probabilities[chosen]


def inclusion_probabilities(samples: np.ndarray, size: int) -> np.ndarray:
    """The probabilities [n] of `by_size`: proportional to `samples`, at most 1, with the sum `size`.

    >>> inclusion_probabilities(np.array([60, 20, 20]), 2)
    array([1. , 0.5, 0.5])
    """
    certain = np.zeros(len(samples), dtype=bool)
    while True:
        left = np.where(certain, 0, samples)
        probabilities = np.where(certain, 1.0, (size - certain.sum()) * left / max(left.sum(), 1))
        if not (probabilities > 1).any():
            return probabilities
        certain |= probabilities >= 1


@cohort_strategy("round_robin")
def round_robin(n_workers: int, size: int, round: int) -> Chosen:
    """Workers take turns: round 1 has workers 0 to size - 1, round 2 the next `size`, and so on in a circle.

    Nothing is drawn. As the probability of a worker counts the share of rounds in which it takes part,
    size / n_workers. Cost: O(size).

    >>> [round_robin(5, 2, round)[0].tolist() for round in (1, 2, 3)]
    [[0, 1], [2, 3], [4, 0]]
    """
    return ((round - 1) * size + np.arange(size)) % n_workers, np.full(size, size / n_workers)


@cohort_strategy("fixed")
@dataclass(frozen=True)
class Fixed:
    """The same workers take part in every round, each with probability 1.

    Args:
        workers: different workers, as many as the key `cohort`.

    >>> Fixed([3, 1])()
    (array([3, 1]), array([1., 1.]))
    """

    workers: Annotated[list[NonNegativeInt], Field(examples=[[0, 1]])]

    def __call__(self) -> Chosen:
        return np.array(self.workers), np.ones(len(self.workers))

    def check(self, n_workers: int, size: int) -> None:
        """Raise ExperimentError unless they are `size` different workers."""
        where = f"sampling.workers = {show(self.workers)}"
        if len(set(self.workers)) < len(self.workers) or any(worker >= n_workers for worker in self.workers):
            raise ExperimentError(f"{where}: must be different workers, from 0 to {n_workers - 1}")
        if len(self.workers) != size:
            raise ExperimentError(f"{where}: must be as many as the cohort, {size}; set cohort={len(self.workers)}")


@cohort_strategy("power_of_choice")
@dataclass(frozen=True)
class PowerOfChoice:
    """Of some candidates, the workers with the highest loss at the global model (Cho et al. 2020, pow-d).

    The candidates are drawn as in `by_size`. Each computes the mean loss on its own samples before the round; of equal
    losses the lower number of the worker is chosen. The choice favours some workers, so their probabilities are not
    known. Cost: one pass over the samples of the candidates, which also receive the global model, and `by_size`.

    Args:
        candidates: from the key `cohort`, where the losses do not matter, to the number of workers; d in the paper.

    >>> losses = lambda workers: np.array([0.1, 0.5, 0.3, 0.2])[workers]
    >>> PowerOfChoice(candidates=4)(4, 2, np.random.default_rng(0), None, losses)
    array([1, 2])
    """

    candidates: Annotated[PositiveInt, Field(examples=[30])]

    def __call__(
        self,
        n_workers: int,
        size: int,
        rng: np.random.Generator,
        samples: np.ndarray | None,
        losses: Callable[[Sequence[int]], np.ndarray],
    ) -> np.ndarray:
        drawn = np.sort(by_size(n_workers, self.candidates, rng, samples)[0])
        found = losses(drawn.tolist())
        return drawn[np.argsort(-np.where(np.isnan(found), np.inf, found), kind="stable")[:size]]

    def check(self, n_workers: int, size: int) -> None:
        """Raise ExperimentError unless there are at least `size` candidates, and as many workers."""
        if not size <= self.candidates <= n_workers:
            raise ExperimentError(
                f"sampling.candidates = {self.candidates}: must be from {size}, the cohort, to {n_workers}, the workers"
            )
