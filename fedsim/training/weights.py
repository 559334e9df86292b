"""Weights of the workers in an aggregation, and exclusion of workers whose rows contain NaN or infinity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedsim.aggregation import AggregationInputs, Pipeline, screened
from fedsim.aggregation.inputs import NOTHING_LEFT
from fedsim.errors import DivergedError
from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask

if TYPE_CHECKING:
    from fedsim.config.experiment import Experiment


@dataclass(frozen=True)
class AggregationContext:
    """Workers whose updates are aggregated together, and their weights.

    Attributes:
        slots: position of each worker in the cohort.
        workers: ID of each worker.
        samples: number of samples of each worker in this aggregation.
        weights: weight of each of the n workers, [n], float64 on the CPU; None for equal weights.
        moment: (round,), or (round, step) if every step aggregates gradients. Random numbers depend on `moment`.
        cluster: index of the global model that the updates change.
    """

    slots: Sequence[int]
    workers: list[int]
    samples: list[int]
    weights: Tensor | None
    moment: tuple[int, ...]
    cluster: int = 0

    def by_cluster(self, clusters: Sequence[int]) -> Iterator[AggregationContext]:
        """Yield one AggregationContext for each global model, with the workers that train this model.

        `clusters` contains the index of each worker's model. If `clusters` is empty, there is only one model. A model
        whose workers all have weight 0 is left out.
        """
        if not clusters:
            yield self
        for cluster in sorted(set(clusters)):
            positions = [position for position, of_worker in enumerate(clusters) if of_worker == cluster]
            part = self.of_wave(positions)
            if part.weights is None or part.weights.any():
                yield replace(part, slots=[self.slots[position] for position in positions], cluster=cluster)

    def of_wave(self, positions: Sequence[int]) -> AggregationContext:
        """Return the AggregationContext of only the workers at `positions`, which get the slots 0, 1, ..."""
        weights = None if self.weights is None else self.weights[positions]
        workers, samples = ([values[position] for position in positions] for values in (self.workers, self.samples))
        return AggregationContext(range(len(positions)), workers, samples, weights, self.moment)


def set_cohort_weights(shared: SharedState, weights: Mapping[int, float]) -> None:
    """Store the weights of a round's workers in `shared`.

    Args:
        shared: tensors of the run, changed in place.
        weights: weight of each worker of the round, by worker ID (see `Cohort.weights`).
    """
    workers, n = sorted(weights), len(weights)
    shared.cohort.workers.fill_(torch.iinfo(torch.int64).max)
    shared.cohort.workers[:n] = torch.tensor(workers)
    shared.cohort.weights[:n] = torch.tensor([weights[worker] for worker in workers], dtype=torch.double)


def weights_by_probability(shared: SharedState, workers: Sequence[int]) -> Tensor:
    """Return the weight of each of n `workers` that `set_cohort_weights` has stored, as a tensor [n]."""
    wanted = torch.tensor(workers)
    positions = torch.searchsorted(shared.cohort.workers, wanted).clamp_(max=len(shared.cohort.workers) - 1)
    return torch.where(shared.cohort.workers[positions] == wanted, shared.cohort.weights[positions], 1.0)


def weights_of(task: RunTask, shared: SharedState, workers: Sequence[int], samples: Sequence[int]) -> Tensor | None:
    """Return the weight of each of n workers in the aggregation, as a tensor [n] on the CPU; None for equal weights.

    Args:
        task, shared: run and its tensors.
        workers: IDs of the workers.
        samples: number of samples of each worker.
    """
    by_probability = partial(weights_by_probability, shared, workers)
    return weights_for_rule(task.experiment, task.experiment.rule, workers, samples, by_probability)


def weights_for_rule(
    experiment: Experiment,
    rule: Pipeline,
    workers: Sequence[int],
    samples: Sequence[int],
    by_probability: Callable[[], Tensor],
) -> Tensor | None:
    """Return the weight that each of n workers has under `rule`, as a tensor [n] on the CPU; None for equal weights.

    Args:
        experiment: experiment of the run.
        rule: rule of the experiment, or another one that is applied to the same updates.
        workers: IDs of the workers.
        samples: number of samples of each worker.
        by_probability: function that returns the weights [n] of `aggregate.weights = "inverse_probability"`.
    """
    kind, needed = experiment.weights_for(rule), rule.needs_weights or experiment.weight_total is not None
    if not rule.accepts_weights or (kind == "uniform" and not needed):
        return None
    if kind == "inverse_probability":
        return by_probability()
    values: Sequence[float] = samples
    if kind != "samples":
        values = [1.0] * len(workers) if kind == "uniform" else [kind[worker] for worker in workers]
    return torch.as_tensor(values, dtype=torch.double)


def spoil(task: RunTask, rows: Tensor, of_workers: Tensor) -> None:
    """Set a worker's update to NaN, in place, if the worker's entry in `of_workers` contains NaN or infinity.

    The worker is then excluded from the aggregation. With `nonfinite = "keep"`, nothing changes.

    Args:
        task: run to compute.
        rows: updates or gradients of several workers, [..., d], modified in place.
        of_workers: what the same workers send or keep in addition, such as a control variate, [..., width].
    """
    if task.experiment.nonfinite != "keep":
        rows += (of_workers * 0).sum(-1, keepdim=True).to(rows.dtype)


def linear_shares(task: RunTask, weights: Tensor | None, n: int) -> Tensor | None:
    """Return the coefficients [n] of n workers' updates in the result of a linear aggregation rule.

    Returns None if the rule is not linear. `weights` [n] are the workers' weights; None for equal weights.
    """
    inputs = AggregationInputs(torch.empty(n, 0), weights, weight_total=task.experiment.weight_total)
    return task.experiment.rule.shares(inputs)


def screen(task: RunTask, round: int, inputs: AggregationInputs, bad: list[int]) -> AggregationInputs:
    """Return the inputs of the aggregation rule without the updates at positions `bad`, which have NaN or infinity.

    Raises DivergedError if such updates are not allowed, or if no update is left.
    """
    try:
        return screened(inputs, task.experiment.nonfinite, bad)[0]
    except DivergedError as error:
        remedy = "reduce local.lr, or scale large inputs" if error.remedy == NOTHING_LEFT else error.remedy
        raise DivergedError(error.problem, remedy, round) from None
