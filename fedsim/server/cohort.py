"""Cohort strategies, which choose the workers of a synchronous round.

A strategy is a function or a frozen dataclass. Its positional parameters receive these inputs by name. Its keyword-only
parameters, or its fields, are its configuration:

    n_workers  number of workers
    size       size of the cohort, the key `cohort`
    round      number of the round, from 1
    now        virtual seconds at the start of the round with mode = "clock", otherwise the number of the round
    seed       seed of the experiment
    rng        NumPy generator, seeded by (seed, round)
    samples    number of samples of each worker, int64 [n_workers], or None if all workers have equally many
    losses     function from worker IDs [k] to each worker's mean loss on its own samples at the global model, float64
               [k]
    metrics    dict to which the strategy may add numbers, which are recorded for the round under their keys

The attribute `amplifies` of a strategy says which random sampling privacy accounting may assume: "without_replacement"
or "poisson".

A strategy returns the IDs of at most `size` different workers, in any order, or (workers, probabilities). The
probability that each of these workers is chosen is needed for `aggregate.weights = "inverse_probability"`. A dataclass
may have a method `check(n_workers, size)`, which raises ExperimentError before the run, and a method
`largest(n_workers, size)`, which returns the maximum number of workers in a cohort if this can be more than `size`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import numpy as np

from fedsim.core.numbers import Example, NonNegativeInt, PositiveInt
from fedsim.core.randomness import numpy_generator, sample_workers
from fedsim.core.registry import Component, Registry
from fedsim.data import Shards
from fedsim.errors import ExperimentError, show

INPUTS = ("n_workers", "size", "round", "now", "seed", "rng", "samples", "losses", "metrics")

Losses = Callable[[Sequence[int]], np.ndarray]

LOG_RARE = 12 * math.log(10)  # -log of the probability 1e-12 of a Poisson cohort that is too large


@dataclass(frozen=True)
class CohortStrategy(Component):
    """Cohort strategy: a callable that chooses the workers that take part in a round (the cohort)."""

    @property
    def place(self) -> str:
        """The setting that chooses the strategy, such as `sampling.name = "by_size"`, for error messages."""
        return f"sampling.name = {show(self.name)}"

    def check(self, n_workers: int, size: int) -> None:
        """Raise ExperimentError if the strategy cannot choose `size` of `n_workers` workers."""
        if check := getattr(self.function, "check", None):
            check(n_workers, size)

    def largest(self, n_workers: int, size: int) -> int:
        """Return the maximum number of workers in a cohort for which `size` of `n_workers` workers are requested."""
        largest = getattr(self.function, "largest", None)
        return largest(n_workers, size) if largest else size

    def __call__(self, **inputs: Any) -> tuple[list[int], list[float] | None]:
        """Choose the workers of a round.

        Returns the worker IDs in ascending order, and the probability with which each was chosen, or None if unknown.

        Raises ExperimentError if the strategy returns too many workers, a worker twice, or an invalid probability.
        """
        result = self.on(inputs)
        workers, probabilities = result if isinstance(result, tuple) else (result, None)
        chosen = np.asarray(workers)
        n_workers, size = inputs["n_workers"], self.largest(inputs["n_workers"], inputs["size"])
        valid = chosen.ndim == 1 and (chosen.dtype.kind in "iu" or not len(chosen))
        if not valid or len(set(chosen.tolist())) < len(chosen) or len(chosen) > size:
            raise ExperimentError(
                f"{self.place}: must return at most {size} workers without duplicates, not {show(workers)}"
            )
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < n_workers:
            raise ExperimentError(f"{self.place}: must return workers from 0 to {n_workers - 1}, not {show(workers)}")
        order = np.argsort(chosen)
        if probabilities is None:
            return chosen[order].tolist(), None
        known = np.asarray(probabilities, dtype=np.float64)
        if known.shape != chosen.shape or not ((known > 0) & (known <= 1 + 1e-12)).all():
            raise ExperimentError(
                f"{self.place}: must return a probability > 0 and <= 1 for each worker, not {show(known.tolist())}"
            )
        return chosen[order].tolist(), known[order].tolist()


sampling_strategy = Registry("cohort strategy", inputs=INPUTS, traits=("amplifies",), component=CohortStrategy)


@dataclass(frozen=True)
class Cohort:
    """Workers that take part in one round.

    Attributes:
        workers: IDs of the workers that send an update, ascending.
        dropped: IDs of the workers that were chosen but drop out, ascending.
        weights: dict from worker ID to aggregation weight if weights are based on probabilities, otherwise None.
        candidates: IDs of the workers that computed their loss at the strategy's request.
        metrics: numbers that the strategy adds to the records, by key.
    """

    workers: list[int]
    dropped: list[int] = field(default_factory=list)
    weights: dict[int, float] | None = None
    candidates: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CohortSampler:
    """Chooses the workers that take part in each round (the cohort). The same seed gives the same choices.

    Args:
        strategy: cohort strategy.
        seed: seed of the experiment.
        size: number of workers in a cohort.
        shards: training samples of all workers.
        dropout: probability that a chosen worker drops out.
        weighted: whether aggregation weights are based on the probability of being chosen.

    Raises ExperimentError if the numbers of samples are needed but unknown.
    """

    strategy: CohortStrategy
    seed: int = field(kw_only=True)
    size: int
    shards: Shards
    dropout: float = 0.0
    weighted: bool = False

    def __post_init__(self) -> None:
        needing = [self.strategy.place] if "samples" in self.strategy.accepts else []
        needing += ['aggregate.weights = "inverse_probability"'] if self.weighted else []
        if needing and not (self.shards.listed or self.shards.equal_sizes):
            raise ExperimentError(
                f"{needing[0]}: needs the number of samples of every worker, which is unknown for this virtual "
                "partition; use another partition or sampling.name=uniform"
            )

    @cached_property
    def samples(self) -> np.ndarray | None:
        """Number of samples of each worker, int64 [n_workers], or None if all workers have equally many."""
        n = len(self.shards)
        return None if self.shards.equal_sizes else np.array([self.shards.size(worker) for worker in range(n)])

    def __call__(self, round: int, now: float | None = None, losses: Losses | None = None) -> Cohort:
        """Choose the workers of a round.

        Args:
            round: number of the round, from 1.
            now: virtual seconds at the start of the round. None without a virtual clock.
            losses: function from worker IDs to each worker's loss of the global model, for strategies that need losses.
        """
        n_workers, metrics, candidates = len(self.shards), dict[str, float](), list[int]()

        def losses_of(workers: Sequence[int]) -> np.ndarray:
            assert losses is not None
            candidates.extend(map(int, workers))
            return losses(candidates[-len(workers) :])

        chosen, probabilities = self.strategy(
            n_workers=n_workers,
            size=self.size,
            round=round,
            now=round if now is None else now,
            seed=self.seed,
            rng=numpy_generator(self.seed, "cohort", round),
            samples=self.samples if "samples" in self.strategy.accepts else None,
            losses=losses_of,
            metrics=metrics,
        )
        weights = self._weights(chosen, probabilities) if self.weighted else None
        dropped = [worker for worker in chosen if self._drops_out(round, worker)] if self.dropout else []
        workers = sorted(set(chosen) - set(dropped)) if dropped else chosen
        return Cohort(workers, dropped, weights, candidates, metrics)

    def _drops_out(self, round: int, worker: int) -> bool:
        return bool(numpy_generator(self.seed, "worker_dropout", round, worker).random() < self.dropout)

    def _weights(self, workers: Sequence[int], probabilities: Sequence[float] | None) -> dict[int, float]:
        """Return each worker's weight by ID: its fraction of all samples / the probability that it sends an update.

        Raises ExperimentError if `probabilities` is None.
        """
        if probabilities is None:
            raise ExperimentError(
                'aggregate.weights = "inverse_probability": needs the probability that a worker is chosen, which '
                f"{self.strategy.place} does not provide; use other weights, or sampling.name=by_size"
            )
        shares = [1 / len(self.shards)] * len(workers)
        if self.samples is not None:
            shares = (self.samples[list(workers)] / self.samples.sum()).tolist()
        reports = [probability * (1 - self.dropout) for probability in probabilities]
        return {worker: share / p for worker, share, p in zip(workers, shares, reports, strict=True)}


Chosen = tuple[np.ndarray, np.ndarray]  # worker IDs, and the probability that each worker is chosen


@sampling_strategy("uniform", amplifies="without_replacement")
def uniform(n_workers: int, size: int, rng: np.random.Generator) -> Chosen:
    """Draw workers uniformly without replacement, as in FedAvg (McMahan et al. 2017).

    Each worker is chosen with probability size / n_workers. Cost: O(size log size), independent of the number of
    workers.

    >>> uniform(4, 2, np.random.default_rng(0))
    (array([2, 3]), array([0.5, 0.5]))
    """
    return sample_workers(rng, n_workers, size), np.full(size, size / n_workers)


@sampling_strategy("poisson", amplifies="poisson")
@dataclass(frozen=True)
class Poisson:
    """Let each worker take part with probability q = size / n_workers, independently of all others.

    The number of workers in a round varies, and a round may have none. Poisson sampling has the tightest privacy
    accounting (Abadi et al. 2016). The number k of workers is binomial, and k workers are then drawn uniformly.

    Memory is reserved for a cohort so large that a larger one has a probability below 1e-12 per round (Bernstein's
    inequality). If a larger one is drawn, it is cut to this size.

    Draws: one `rng.binomial` and those of `uniform`. Cost: O(k log k), independent of the number of workers.

    >>> Poisson()(1000, 2, np.random.default_rng(0))
    (array([269, 510]), array([0.002, 0.002]))
    """

    def __call__(self, n_workers: int, size: int, rng: np.random.Generator) -> Chosen:
        q = size / n_workers
        count = min(int(rng.binomial(n_workers, q)), self.largest(n_workers, size))
        return sample_workers(rng, n_workers, count), np.full(count, q)

    def largest(self, n_workers: int, size: int) -> int:
        """Return the maximum number of workers in a cohort, if `size` of `n_workers` workers are chosen on average."""
        return min(n_workers, size + math.ceil(LOG_RARE / 3 + math.sqrt(LOG_RARE**2 / 9 + 2 * LOG_RARE * size)))


@sampling_strategy("by_size")
def by_size(n_workers: int, size: int, rng: np.random.Generator, samples: np.ndarray | None) -> Chosen:
    """Draw workers without replacement, with probabilities proportional to their numbers of samples.

    Worker k with n_k of all n samples is chosen with probability exactly size n_k / n. If this exceeds 1 for some
    workers, they are always chosen, and the other probabilities are increased so that their sum is `size`. The method
    is systematic sampling in random order (Madow 1949). Each worker has an interval whose length is its probability.
    The intervals are laid end to end in a random order of the workers. A worker is chosen if its interval contains one
    of the points u, u + 1, ..., u + size - 1, where u is uniform in [0, 1).

    Scheme I of Li et al. 2020 ("On the convergence of FedAvg on non-IID data") draws with replacement. Here a worker is
    chosen at most once, because a round has one update per worker. As in the paper, the unweighted mean of the updates
    (`aggregate.weights = "uniform"`) is an unbiased estimate of the sample-weighted mean over all workers, unless a
    probability is limited to 1. `aggregate.weights = "inverse_probability"` is unbiased in every case.

    Draws: one `rng.permutation` and one `rng.random`, or those of `uniform` if all workers have equally many samples.
    Cost: O(n_workers), or O(size log size) if all workers have equally many samples, as with partition = "virtual".

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
    """Return the probabilities [n] with which `by_size` chooses each worker.

    They are proportional to the sample counts `samples` [n] and limited to 1, and their sum is `size`.

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


@sampling_strategy("round_robin")
def round_robin(n_workers: int, size: int, round: int) -> Chosen:
    """Let workers take turns: workers 0 to size - 1 in round 1, the next `size` workers in round 2, and so on.

    After the last worker, the order starts again at worker 0. Nothing is drawn. The probability of each worker is
    defined as the fraction of rounds in which it takes part, size / n_workers. Cost: O(size).

    >>> [round_robin(5, 2, round)[0].tolist() for round in (1, 2, 3)]
    [[0, 1], [2, 3], [4, 0]]
    """
    return ((round - 1) * size + np.arange(size)) % n_workers, np.full(size, size / n_workers)


@sampling_strategy("fixed")
@dataclass(frozen=True)
class Fixed:
    """Fixed cohort: the same workers take part in every round, each with probability 1.

    Args:
        workers: IDs of the workers, all different. Their number must equal the setting `cohort`.

    >>> Fixed([3, 1])()
    (array([3, 1]), array([1., 1.]))
    """

    workers: Annotated[list[NonNegativeInt], Example([0, 1])]

    def __call__(self) -> Chosen:
        return np.array(self.workers), np.ones(len(self.workers))

    def check(self, n_workers: int, size: int) -> None:
        """Raise ExperimentError unless `workers` are `size` different worker IDs below `n_workers`."""
        where = f"sampling.workers = {show(self.workers)}"
        if len(set(self.workers)) < len(self.workers) or any(worker >= n_workers for worker in self.workers):
            raise ExperimentError(f"{where}: must be worker IDs from 0 to {n_workers - 1}, without duplicates")
        if len(self.workers) != size:
            raise ExperimentError(f"{where}: must list {size} workers, the cohort size; set cohort={len(self.workers)}")


@sampling_strategy("power_of_choice")
@dataclass(frozen=True)
class PowerOfChoice:
    """Power-of-choice sampling: the workers with the highest losses among random candidates (Cho et al. 2020, pow-d).

    The candidates are drawn by the strategy `by_size`. Before the round, each candidate receives the global model and
    computes its mean loss on its own samples. Of equal losses, the worker with the lower ID is chosen. The probability
    that a worker is chosen is unknown. Cost: that of `by_size`, and one pass over the samples of the candidates.

    Args:
        candidates: number of candidates, d in the paper, between the setting `cohort` (then the losses do not matter)
            and the number of workers.

    >>> losses = lambda workers: np.array([0.1, 0.5, 0.3, 0.2])[workers]
    >>> PowerOfChoice(candidates=4)(4, 2, np.random.default_rng(0), None, losses)
    array([1, 2])
    """

    candidates: Annotated[PositiveInt, Example(30)]

    def __call__(
        self,
        n_workers: int,
        size: int,
        rng: np.random.Generator,
        samples: np.ndarray | None,
        losses: Callable[[Sequence[int]], np.ndarray],
    ) -> np.ndarray:
        drawn = np.sort(by_size(n_workers, self.candidates, rng, samples)[0])
        drawn_losses = losses(drawn.tolist())
        return drawn[np.argsort(-np.where(np.isnan(drawn_losses), np.inf, drawn_losses), kind="stable")[:size]]

    def check(self, n_workers: int, size: int) -> None:
        """Raise ExperimentError unless the number of candidates is between `size` and `n_workers`."""
        if not size <= self.candidates <= n_workers:
            raise ExperimentError(
                f"sampling.candidates = {self.candidates}: must be between {size} (the cohort size) and {n_workers} "
                "(the number of workers)"
            )
