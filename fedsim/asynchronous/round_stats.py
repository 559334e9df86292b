"""Statistics of a round of asynchronous training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields

from fedsim.records.round_stats import MetricLog
from fedsim.training.batches import WorkItem

Train = Callable[[Sequence[WorkItem]], object]


@dataclass
class RoundStats:
    """Statistics of one round of asynchronous training.

    Attributes:
        samples: maps each worker's ID to the number of training samples in its results that arrived.
        results: maps (worker ID, staleness) to the number of this worker's results with this staleness.
        loss_sum: sum of the training losses of all samples.
        loss_samples: number of samples in `loss_sum`.
        up, down: number of models or gradients that workers sent (up) and received (down).
        cancelled: maps each worker's ID to the number of its results that were cancelled.
        excluded: for each result that was excluded because of NaN or infinity, the ID of its worker.
        rejected: maps each worker's ID to the number of its results that the aggregation rule has rejected.
        combinations, unknown: number of times that the aggregation rule was used, and of these, the number of times in
            which the coefficients of the vectors in the result are unknown.
        coefficients: maps each worker's ID to the sum of the coefficients of its vectors.
        metrics: numbers that the rule recorded.
    """

    samples: Counter[int] = field(default_factory=Counter)
    results: Counter[tuple[int, int]] = field(default_factory=Counter)
    loss_sum: float = 0.0
    loss_samples: int = 0
    up: int = 0
    down: int = 0
    cancelled: Counter[int] = field(default_factory=Counter)
    excluded: list[int] = field(default_factory=list)
    rejected: Counter[int] = field(default_factory=Counter)
    combinations: int = 0
    unknown: int = 0
    coefficients: dict[int, float] = field(default_factory=dict)
    metrics: MetricLog = field(default_factory=MetricLog)

    @property
    def train_loss(self) -> float:
        """Mean training loss per sample, or NaN if all results were excluded."""
        return self.loss_sum / self.loss_samples if self.loss_samples else math.nan

    @property
    def staleness(self) -> Counter[int]:
        """Number of results for each staleness."""
        counts: Counter[int] = Counter()
        for (_, staleness), count in self.results.items():
            counts[staleness] += count
        return counts

    @property
    def dropped(self) -> Counter[int]:
        """Number of results of each worker that were not used."""
        return self.cancelled + Counter(self.excluded) + self.rejected

    def weights(self, workers: Sequence[int]) -> list[float] | None:
        """Return the mean coefficient of each of `workers` over all uses of the aggregation rule, or None if unknown.

        In an aggregation without a worker, the worker's coefficient counts as 0.
        """
        if self.unknown or not self.combinations:
            return None
        return [self.coefficients.get(worker, 0.0) / self.combinations for worker in workers]

    def add_coefficients(self, coefficients: Iterable[tuple[int, float]]) -> None:
        """Add pairs of a worker ID and the coefficient of this worker's vector to `coefficients`."""
        for worker, coefficient in coefficients:
            self.coefficients[worker] = self.coefficients.get(worker, 0.0) + coefficient

    def add(self, stats: RoundStats) -> None:
        """Add the statistics of another process to this object."""
        self.add_coefficients(stats.coefficients.items())
        self.metrics.extend(stats.metrics)
        for count in fields(self):
            if count.name not in ("coefficients", "metrics"):
                setattr(self, count.name, getattr(self, count.name) + getattr(stats, count.name))
