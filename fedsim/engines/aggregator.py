"""The interface of an aggregation, whose methods a round calls in order, and what its implementations share.

`RowAggregator` aggregates rows in the memory of this process, `RankAggregator` rows of several ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fedsim.aggregation.rules.averages import mean
from fedsim.engines.deferred_check import DeferredCheck
from fedsim.engines.round_stats import AggregationContext, AggregationStats
from fedsim.engines.task import SharedState, TaskSpec


class Aggregator(Protocol):
    """From the workers' rows to the next global row, in the order in which a round calls the methods.

    Attributes:
        has_last: whether there is a last aggregated update, for rules and attacks that take it.
        deferred_check: checks the rows of a round together, where that is possible.
    """

    has_last: bool
    deferred_check: DeferredCheck | None

    def sent_row(self, round: int) -> Tensor:
        """The row [d] that the workers get in a round in which parameters are aggregated; read only."""

    def begin(self, round: int, slots: Sequence[int]) -> None:
        """Begin an aggregation with the rows that this process has trained: parameters become updates, in place."""

    def rows_processed(self, slots: Sequence[int]) -> None:
        """Note that processors have changed the rows at these slots, which this process has trained."""

    def attack(self, context: AggregationContext) -> None:
        """Replace the rows of the Byzantine workers, after the rows of all processes are ready."""

    def aggregate(self, context: AggregationContext) -> AggregationStats:
        """Apply the rule to the rows. Keeps the result for `server_step`."""

    def server_step(self) -> None:
        """Move the global row along the aggregated update."""

    def combine_buffers(self, context: AggregationContext, excluded: Collection[int]) -> None:
        """Update the global buffers from those of the cohort, without the excluded workers."""

    def begin_with_parameters(self) -> None:
        """Reset the states of rule and server after the last round in which gradients are aggregated."""

    def rule_state(self) -> dict[str, Tensor]:
        """A copy of the state of the rule, and of that of the attack under names that begin with "attack."."""

    def restore_rule(self, state: dict[str, Tensor]) -> None:
        """Continue with the states of the rule and of the attack."""

    def states_by_columns(self) -> dict[str, Tensor]:
        """Copies [d] of the optimizer states that ranks divide by columns; empty where memory is shared."""

    def load_columns(self, tensors: dict[str, Tensor]) -> None:
        """Set them from such tensors."""

    def train_losses(self) -> Tensor:
        """Mean training losses of the last round [cohort], float64, by slot."""

    def round_rows(self, context: AggregationContext) -> tuple[Tensor, Tensor] | None:
        """The rows after the last aggregation and the losses before training, by slot; None in ranks but the first."""


def set_cohort_weights(shared: SharedState, weights: Mapping[int, float]) -> None:
    """Set the weights by inverse probability of the workers of a cohort."""
    workers, n = sorted(weights), len(weights)
    shared.cohort_workers.fill_(torch.iinfo(torch.int64).max)
    shared.cohort_workers[:n] = torch.tensor(workers)
    shared.cohort_weights[:n] = torch.tensor([weights[worker] for worker in workers], dtype=torch.double)


def weights_by_probability(shared: SharedState, workers: Sequence[int]) -> Tensor:
    """The weights [n] by inverse probability of some workers; 1 for workers that are not in the cohort."""
    wanted = torch.tensor(workers)
    places = torch.searchsorted(shared.cohort_workers, wanted).clamp_(max=len(shared.cohort_workers) - 1)
    return torch.where(shared.cohort_workers[places] == wanted, shared.cohort_weights[places], 1.0)


def weights_of(task: TaskSpec, shared: SharedState, workers: Sequence[int], samples: Sequence[int]) -> Tensor | None:
    """The weights [n] of these workers for the rule, on the CPU, or None for equal ones.

    Args:
        samples: the number of samples of each, for weights by samples.
    """
    if not task.rule.accepts_weights or (task.weights == "uniform" and not task.rule.needs_weights):
        return None
    if task.weights == "inverse_probability":
        return weights_by_probability(shared, workers)
    if task.weights == "samples":
        values: Sequence[float] = samples
    else:
        values = [1.0 if task.weights == "uniform" else task.weights[worker] for worker in workers]
    return torch.tensor(values, dtype=torch.double)


def spoil(task: TaskSpec, rows: Tensor, of_workers: Tensor) -> None:
    """Set the rows [..., d] of workers that send or keep NaN or infinity [..., w] to NaN, which excludes these workers.

    Does nothing if the task keeps such numbers.
    """
    if task.nonfinite != "keep":
        rows += (of_workers * 0).sum(-1, keepdim=True).to(rows.dtype)


def write_attacked(task: TaskSpec, shared: SharedState, index: Tensor | list[int], rows: Tensor) -> None:
    """Write the rows of Byzantine workers; NaN if their messages, which an attack does not replace, are not finite."""
    rows = rows.clone()
    for message in shared.messages.values():
        spoil(task, rows, message[index])
    shared.rows[index] = rows


def combines_buffers(task: TaskSpec, shared: SharedState) -> bool:
    """Whether the buffers of workers are used after a round."""
    return shared.global_buffers.numel() > 0 and task.buffers != "server"


def combine_buffers(
    task: TaskSpec, shared: SharedState, context: AggregationContext, excluded: Collection[int], buffers: Tensor
) -> None:
    """Set the global buffers to the mean of `buffers` [n, b], weighted as rows are.

    The buffers of excluded workers do not count, and with `nonfinite = "exclude"` neither do buffers with NaN or
    infinity, which a Byzantine worker may send with a finite row. Without a worker that counts, the global buffers stay
    as they are.
    """
    workers, weights = context.workers, context.weights
    if task.nonfinite == "exclude":
        unfit = {worker for worker, fit in zip(workers, buffers.isfinite().all(1).tolist(), strict=True) if not fit}
        excluded = unfit.union(excluded)
    if excluded:
        kept = [place for place, worker in enumerate(workers) if worker not in excluded]
        workers, buffers = [workers[place] for place in kept], buffers[kept]
        weights = None if weights is None else weights[kept]
    if workers and (weights is None or weights.any()):
        shared.global_buffers.copy_(mean(buffers, weights))
