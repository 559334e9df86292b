"""Cohort strategies, which choose the workers of a synchronous round, and the cohorts of a run.

A strategy is a function or a frozen dataclass. Its positional parameters receive these inputs by name; its keyword-only
parameters, or its fields, are its configuration:

    n_workers  number of workers
    size       size of the cohort, the key `cohort`
    round      from 1
    now        virtual seconds at the start of the round with mode = "clock"; otherwise the number of the round
    seed       of the experiment
    rng        NumPy generator, a function of (seed, round)
    samples    number of samples of each worker, int64 [n_workers]; None if all workers have as many
    losses     a function from workers [k] to the mean loss of each on its own samples at the global model, float64 [k]
    metrics    a dict, to which the strategy may add numbers: they are recorded for the round under their names

It returns the numbers of at most `size` different workers, in any order, or (workers, probabilities) with the
probability that each of them is chosen, for `aggregate.weights = "inverse_probability"`. A dataclass may have a method
`check(n_workers, size)`, which raises ExperimentError before the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fedsim.core.randomness import numpy_generator
from fedsim.core.registry import Plug, Registry
from fedsim.data import Shards
from fedsim.errors import ExperimentError, show

INPUTS = ("n_workers", "size", "round", "now", "seed", "rng", "samples", "losses", "metrics")

cohort_strategy = Registry("cohort strategy", given=INPUTS)

Losses = Callable[[Sequence[int]], np.ndarray]


@dataclass(frozen=True)
class BoundCohortStrategy:
    """A cohort strategy with its parameters.

    Attributes:
        accepts: the names of its inputs.
    """

    function: Callable[..., Any]
    name: str
    accepts: tuple[str, ...]

    @property
    def place(self) -> str:
        """`sampling.strategy = "by_size"`, for errors."""
        return f"sampling.strategy = {show(self.name)}"

    def known_ahead(self, *, timed: bool) -> bool:
        """Whether a cohort does not depend on earlier rounds; `timed` if `now` are virtual seconds."""
        return "losses" not in self.accepts and not (timed and "now" in self.accepts)

    def check(self, n_workers: int, size: int) -> None:
        """Raise ExperimentError if the strategy cannot choose `size` of `n_workers` workers."""
        if check := getattr(self.function, "check", None):
            check(n_workers, size)

    def __call__(self, **inputs: Any) -> tuple[list[int], list[float] | None]:
        """The chosen workers, ascending, and the probability of each; None if the strategy does not know it.

        Raises ExperimentError unless they are at most `size` different workers, with probabilities in (0, 1].
        """
        result = self.function(**{name: inputs[name] for name in self.accepts})
        workers, probabilities = result if isinstance(result, tuple) else (result, None)
        chosen = np.asarray(workers)
        n_workers, size = inputs["n_workers"], inputs["size"]
        valid = chosen.ndim == 1 and (chosen.dtype.kind in "iu" or not len(chosen))
        if not valid or len(set(chosen.tolist())) < len(chosen) or len(chosen) > size:
            raise ExperimentError(f"{self.place}: must return at most {size} different workers, not {show(workers)}")
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < n_workers:
            raise ExperimentError(f"{self.place}: must return workers from 0 to {n_workers - 1}, not {show(workers)}")
        order = np.argsort(chosen)
        if probabilities is None:
            return chosen[order].tolist(), None
        known = np.asarray(probabilities, dtype=np.float64)
        if known.shape != chosen.shape or not ((known > 0) & (known <= 1 + 1e-12)).all():
            raise ExperimentError(f"{self.place}: must return a probability above 0, at most 1, for each worker")
        return chosen[order].tolist(), known[order].tolist()


def bind_cohort_strategy(plug: Plug, params: dict[str, Any]) -> BoundCohortStrategy:
    """The strategy `plug` with checked parameters."""
    return BoundCohortStrategy(plug.bind(params), plug.name, tuple(plug.takes))


@dataclass(frozen=True)
class Cohort:
    """The workers of one round.

    Attributes:
        workers: those that report, ascending.
        dropped: those that were chosen and do not report, ascending.
        weights: of `workers`, for weights by inverse probability; None for other weights.
        candidates: workers that computed the loss of the global model.
        metrics: numbers that the strategy recorded.
    """

    workers: list[int]
    dropped: list[int] = field(default_factory=list)
    weights: dict[int, float] | None = None
    candidates: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CohortSampler:
    """The cohorts of a run, each a pure function of the seed, the round, and what the strategy takes.

    Args:
        size: of a cohort.
        shards: of all workers.
        dropout: the probability that a chosen worker does not report.
        weighted: whether cohorts have weights by inverse probability.

    Raises ExperimentError if the strategy or the weights need sizes of shards that are not known.
    """

    strategy: BoundCohortStrategy
    seed: int
    size: int
    shards: Shards
    dropout: float = 0.0
    weighted: bool = False

    def __post_init__(self) -> None:
        needing = [self.strategy.place] if "samples" in self.strategy.accepts else []
        needing += ['aggregate.weights = "inverse_probability"'] if self.weighted else []
        if needing and not (self.shards.listed or self.shards.equal_sizes):
            raise ExperimentError(
                f"{needing[0]}: needs the number of samples of every worker, and this virtual partition does not say "
                "that all are equal; use another partition or sampling.strategy=uniform"
            )

    @cached_property
    def samples(self) -> np.ndarray | None:
        """The number of samples of each worker, int64 [n_workers]; None if all workers have as many."""
        n = len(self.shards)
        return None if self.shards.equal_sizes else np.array([self.shards.size(worker) for worker in range(n)])

    def __call__(self, round: int, now: float | None = None, losses: Losses | None = None) -> Cohort:
        """The cohort of a round; `now` are virtual seconds, None without a clock."""
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
        workers = [worker for worker in chosen if not self._drops_out(round, worker)]
        dropped = sorted(set(chosen) - set(workers))
        return Cohort(workers, dropped, weights, candidates, metrics)

    def _drops_out(self, round: int, worker: int) -> bool:
        return self.dropout > 0 and numpy_generator(self.seed, "worker_dropout", round, worker).random() < self.dropout

    def _weights(self, workers: Sequence[int], probabilities: Sequence[float] | None) -> dict[int, float]:
        """The weight of each worker: its share of all samples over the probability that it reports."""
        if probabilities is None:
            raise ExperimentError(
                'aggregate.weights = "inverse_probability": needs the probability that a worker is chosen, which '
                f"{self.strategy.place} does not give; use other weights, or sampling.strategy=by_size"
            )
        shares = [1 / len(self.shards)] * len(workers)
        if self.samples is not None:
            shares = (self.samples[list(workers)] / self.samples.sum()).tolist()
        reports = [probability * (1 - self.dropout) for probability in probabilities]
        return {worker: share / p for worker, share, p in zip(workers, shares, reports, strict=True)}
