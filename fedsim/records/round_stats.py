"""Statistics of the aggregations of a round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor


class MetricLog(dict[str, list[float | Tensor]]):
    """Numbers that components, such as aggregation rules, recorded in a round: a list for each metric name."""

    def record(self, values: Mapping[str, float | Tensor]) -> None:
        """Record one number for each metric name in `values`."""
        for name, value in values.items():
            self.setdefault(name, []).append(value)

    def extend(self, log: Mapping[str, Sequence[float | Tensor]]) -> None:
        """Append all numbers of another log to this log."""
        for name, values in log.items():
            self.setdefault(name, []).extend(values)

    def on_host(self) -> MetricLog:
        """Return a copy of this log with floats instead of tensors."""
        return MetricLog({name: _floats(values) for name, values in self.items()})

    def means(self) -> dict[str, float]:
        """Return the mean of the recorded numbers for each metric name."""
        return {name: math.fsum(values) / len(values) for name, values in self.on_host().items()}


def _floats(values: list[float | Tensor]) -> list[float | Tensor]:
    tensors = [value.detach().double().reshape(()) for value in values if isinstance(value, Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(read) if isinstance(value, Tensor) else float(value) for value in values]


@dataclass
class SentUpdates:
    """Updates (or gradients) that workers sent in a round.

    Attributes:
        messages: pairs (worker IDs, bytes that a network would carry for one update of each of these workers), in the
            order in which the updates were sent.
        metrics: numbers that compressors and other update processors recorded.
    """

    messages: list[tuple[Sequence[int], int]] = field(default_factory=list)
    metrics: MetricLog = field(default_factory=MetricLog)

    @property
    def count(self) -> int:
        """Number of updates."""
        return sum(len(workers) for workers, _ in self.messages)

    @property
    def nbytes(self) -> int:
        """Bytes of all updates together."""
        return sum(len(workers) * nbytes for workers, nbytes in self.messages)

    def add(self, workers: Sequence[int], nbytes: int, metrics: Mapping[str, float | Tensor] | None = None) -> None:
        """Add one update of `nbytes` bytes from each of the `workers`. `metrics` are numbers to record."""
        self.messages.append((workers, nbytes))
        self.metrics.record(metrics or {})

    def sizes(self) -> dict[int, list[int]]:
        """Return the bytes of each worker's updates by worker ID, in the order in which they were sent."""
        sizes: dict[int, list[int]] = {}
        for workers, nbytes in self.messages:
            for worker in workers:
                sizes.setdefault(worker, []).append(nbytes)
        return sizes

    def on_host(self) -> SentUpdates:
        """Return a copy with floats instead of tensors, which can be sent to another process."""
        return SentUpdates(self.messages, self.metrics.on_host())

    @classmethod
    def total(cls, parts: Iterable[SentUpdates]) -> SentUpdates:
        """Combine the updates and metrics of several steps, or of several processes, which train different workers."""
        total = cls()
        for part in parts:
            total.messages += part.messages
            total.metrics.extend(part.metrics)
        return total


@dataclass
class AggregationStats:
    """Statistics of one aggregation, or of all aggregations of a round.

    Attributes:
        shares: coefficient of each worker's update in the result, in the order of the cohort; None if the rule is not
            linear.
        excluded: IDs of the workers whose updates were excluded because of NaN or infinity.
        metrics: numbers that the rule recorded.
        sent: sizes of the aggregated updates or gradients.
        clusters: index of the global model that each worker has trained, in the order of the cohort; empty if there is
            only one.
    """

    shares: list[float] | None = None
    excluded: list[int] = field(default_factory=list)
    metrics: MetricLog = field(default_factory=MetricLog)
    sent: SentUpdates = field(default_factory=SentUpdates)
    clusters: list[int] = field(default_factory=list)

    def on_host(self) -> AggregationStats:
        """Return a copy with floats instead of tensors, which can be sent to another process."""
        return replace(self, metrics=self.metrics.on_host(), sent=self.sent.on_host())


class RoundTotals:
    """Collects the statistics of a round with several aggregations: one per step (of gradients) or one per cluster.

    `workers` is the number of workers. Their coefficients are averaged over the steps, and a worker counts as excluded
    if any step excluded it. `clusters` contains the index of each worker's global model. It is empty without clusters.
    With clusters, each worker takes part in exactly one aggregation.
    """

    def __init__(self, workers: int, clusters: Sequence[int] = ()) -> None:
        self._shares, self._clusters = np.zeros(workers), list(clusters)
        self._excluded: set[int] = set()
        self._steps = self._with_shares = 0
        self._metrics = MetricLog()
        self._sent: list[SentUpdates] = []

    def add(self, slots: Sequence[int], stats: AggregationStats) -> None:
        """Add the statistics of one step's aggregation.

        Args:
            slots: positions in the cohort of the workers whose gradients the step aggregated.
            stats: statistics of the aggregation.
        """
        self._steps += 1
        self._excluded.update(stats.excluded)
        self._metrics.extend(stats.metrics)
        self._sent.append(stats.sent)
        if stats.shares is not None:
            self._with_shares += 1
            self._shares[slots] += stats.shares

    def total(self) -> AggregationStats:
        """Return the statistics of all steps of the round."""
        linear = self._with_shares == self._steps > 0
        shares = (self._shares / (1 if self._clusters else self._steps)).tolist() if linear else None
        sent = SentUpdates.total(self._sent)
        return AggregationStats(shares, sorted(self._excluded), self._metrics, sent, self._clusters).on_host()
