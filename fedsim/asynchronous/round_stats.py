"""Statistics of a round of asynchronous training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

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
        combined: for each use of the aggregation rule, the IDs of k workers, the coefficients of their vectors in the
            result (None if unknown), and the numbers that the rule recorded.
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
    combined: list[tuple[list[int], list[float] | None, dict[str, Any]]] = field(default_factory=list)

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
        totals = dict.fromkeys(workers, 0.0)
        for combined, coefficients, _ in self.combined:
            if coefficients is None:
                return None
            for worker, coefficient in zip(combined, coefficients, strict=True):
                totals[worker] = totals.get(worker, 0.0) + coefficient
        return [totals[worker] / len(self.combined) for worker in workers] if self.combined else None

    def rule_metrics(self) -> dict[str, float]:
        """Return the mean of each number that the aggregation rule recorded, by name."""
        log = MetricLog()
        for *_, metrics in self.combined:
            log.record(metrics)
        return log.means()

    def add(self, stats: RoundStats) -> None:
        """Add the statistics of another process to this object."""
        for count in fields(self):
            setattr(self, count.name, getattr(self, count.name) + getattr(stats, count.name))
