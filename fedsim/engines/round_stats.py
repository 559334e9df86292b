"""Inputs and statistics of the aggregations of a round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class AggregationContext:
    """Which rows one aggregation combines.

    Attributes:
        slots: slot numbers of the rows.
        workers: worker ID of each row.
        weights: [n], float64 on the CPU; None for equal weights.
        moment: (round,), or (round, step) if every step is a synchronisation: coordinates of random draws.
    """

    slots: Sequence[int]
    workers: list[int]
    weights: Tensor | None
    moment: tuple[int, ...]


class MetricLog(dict[str, list[float | Tensor]]):
    """The numbers that components recorded in a round, by name. Tensors stay on their device until `on_host`."""

    def record(self, values: Mapping[str, float | Tensor]) -> None:
        """Add one number to each of these names."""
        for name, value in values.items():
            self.setdefault(name, []).append(value)

    def extend(self, log: Mapping[str, Sequence[float | Tensor]]) -> None:
        """Add the numbers of another log."""
        for name, values in log.items():
            self.setdefault(name, []).extend(values)

    def on_host(self) -> MetricLog:
        """Return the log with numbers in place of tensors. Each name is read from the device at once."""
        return MetricLog({name: _floats(values) for name, values in self.items()})

    def means(self) -> dict[str, float]:
        """Return the mean for each name; bit-identical for any order of the numbers."""
        return {name: math.fsum(values) / len(values) for name, values in self.on_host().items()}


def _floats(values: list[float | Tensor]) -> list[float | Tensor]:
    tensors = [value.detach().double().reshape(()) for value in values if isinstance(value, Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(read) if isinstance(value, Tensor) else float(value) for value in values]


@dataclass
class SentUpdates:
    """The updates, or the gradients, that workers have sent in a round.

    Attributes:
        count: number of updates.
        nbytes: that a network would carry for them.
        metrics: numbers that processors recorded.
    """

    count: int = 0
    nbytes: int = 0
    metrics: MetricLog = field(default_factory=MetricLog)

    def add(self, count: int, nbytes: int, metrics: Mapping[str, float | Tensor] | None = None) -> None:
        """Add the metrics of more updates; `metrics` has one number for each name."""
        self.count += count
        self.nbytes += nbytes
        self.metrics.record(metrics or {})

    def on_host(self) -> SentUpdates:
        """Return the same with numbers in place of tensors, so that it can be sent to another process."""
        return SentUpdates(self.count, self.nbytes, self.metrics.on_host())

    @classmethod
    def total(cls, parts: Iterable[SentUpdates]) -> SentUpdates:
        """Return the sum over processes."""
        total = cls()
        for part in parts:
            total.add(part.count, part.nbytes)
            total.metrics.extend(part.metrics)
        return total


@dataclass
class AggregationStats:
    """Facts about an aggregation, or about all aggregations of a round.

    Attributes:
        shares: coefficient of each slot's row in the result, if the rule is a linear combination.
        excluded: workers whose rows were left out, because they were not finite.
        metrics: numbers that the rule recorded.
        sent: the gradients that were aggregated, if each step of a round is a synchronisation.
    """

    shares: list[float] | None = None
    excluded: list[int] = field(default_factory=list)
    metrics: MetricLog = field(default_factory=MetricLog)
    sent: SentUpdates = field(default_factory=SentUpdates)

    def on_host(self) -> AggregationStats:
        """Return the same with numbers in place of tensors, so that it can be sent to another process."""
        return replace(self, metrics=self.metrics.on_host(), sent=self.sent.on_host())


class GradientRoundStats:
    """Statistics of a round with one aggregation per step: mean shares, and workers excluded in any step."""

    def __init__(self, cohort: Sequence[int]) -> None:
        self._shares = [0.0] * len(cohort)
        self._excluded: set[int] = set()
        self._steps = self._with_shares = 0
        self._metrics = MetricLog()
        self.sent = SentUpdates()

    def add(self, context: AggregationContext, stats: AggregationStats) -> None:
        self._steps += 1
        self._excluded.update(stats.excluded)
        self._metrics.extend(stats.metrics)
        if stats.shares is not None:
            self._with_shares += 1
            for slot, share in zip(context.slots, stats.shares, strict=True):
                self._shares[slot] += share

    def total(self) -> AggregationStats:
        linear = self._with_shares == self._steps > 0
        shares = [share / self._steps for share in self._shares] if linear else None
        return AggregationStats(shares, sorted(self._excluded), self._metrics, self.sent).on_host()
