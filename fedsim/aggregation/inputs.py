"""Inputs of one aggregation, and the check for rows that contain NaN or infinity."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.aggregation.numerics.columns import CPU, Reduce, bad_rows, keep_own
from fedsim.aggregation.numerics.gram import Gram
from fedsim.aggregation.numerics.lazy_rows import LazyRows
from fedsim.aggregation.rule import RuleStage
from fedsim.core.randomness import Draws, numpy_generator
from fedsim.errors import DivergedError, ExperimentError, called
from fedsim.system.devices import to_device, wide_dtype

Nonfinite = Literal["error", "exclude", "keep"]

SHOWN = 5  # maximum number of workers that an error names
NOTHING_LEFT = "correct what computes the updates"  # remedy outside a run
NEEDED = {
    "root": "root: is required by this rule; pass the update [d] computed on the server's own data",
    "losses": "losses: are required by this rule; pass each worker's loss at the global model, [n]",
    "models": "models: are required by this rule; use a policy that uses each result alone, such as policy=asgd",
    "own": "own: is required by this rule; pass the position of the own row, or use policy=d_psgd",
}


@dataclass
class AggregationInputs:
    """All inputs of one aggregation. See `fedsim.aggregation.rule` for the inputs that are not listed here.

    Weights and losses must be on the CPU, even if the updates are on another device.

    Attributes:
        moment: (round,) or (round, step). Seeds the random draws together with `seed`.
        state: state that the rule returned in the previous aggregation, or None.
        weight_total: divisor of a weighted average. None: the sum of the weights.
        local_lr: learning rate of the client algorithm, or None if it has none. `fedsim.aggregate` uses 0.1.
        excluded: number of updates that were excluded because they are not finite. They count as Byzantine.
        gram: distances of the updates (`Gram`), if already computed.
        reduce: function that computes the sum or maximum of a tensor over all processes. Needed if each process has
            only some columns of the updates.
        metrics: dict to which the rule adds numbers.
        staleness: None if no row is stale.

    >>> inputs = fedsim.aggregation.AggregationInputs(torch.tensor([[1.0], [3.0]]))
    >>> pipeline = fedsim.aggregation.make_pipeline(fedsim.aggregation.resolve("mean", {}))
    >>> pipeline(inputs).update
    tensor([2.])
    """

    updates: Tensor
    weights: Tensor | None = None
    root: Tensor | None = None
    losses: Tensor | None = None
    workers: list[int] | None = None
    seed: int = field(default=0, kw_only=True)
    moment: tuple[int, ...] = ()
    state: dict[str, Tensor] | None = None
    last: Tensor | None = None
    local_lr: float | None = 0.1
    sync: Literal["parameters", "gradients"] = "parameters"
    excluded: int = 0
    gram: Gram | None = None
    reduce: Reduce = keep_own
    metrics: dict[str, Any] = field(default_factory=dict)
    weight_total: float | None = None
    staleness: Tensor | None = None
    models: Tensor | None = None
    own: int | None = None

    def __post_init__(self) -> None:
        if self.workers is None:
            self.workers = list(range(self.updates.shape[0]))

    @cached_property
    def rng(self) -> np.random.Generator:
        return numpy_generator(self.seed, "aggregate", *self.moment)

    @cached_property
    def draws(self) -> Draws:
        return Draws.of("aggregate", *self.moment, seed=self.seed, device=self.updates.device)

    def rows(self) -> LazyRows:
        """Return the updates as `LazyRows`, the form in which rules receive them."""
        known = self.gram
        return LazyRows(self.updates, gram=None if known is None else lambda: known, reduce=self.reduce)

    def f_for(self, stage: RuleStage) -> int | None:
        """Return how many Byzantine updates a rule must still tolerate: f minus the number of excluded updates.

        Returns None if the rule has no parameter f.
        """
        return None if stage.f is None else max(0, stage.f - self.excluded)

    def value_of(self, name: str, rows: LazyRows, stage: RuleStage) -> Any:
        """Return the input called `name`, such as "weights", for a rule that is applied to `rows`."""
        if name == "updates":
            return rows.block()
        if name == "gram":
            return rows.gram
        if name == "workers":
            return self.workers if len(rows) == len(self.updates) else list(range(len(rows)))
        if name == "weights":
            return self._weights_on(self.updates.device if "updates" in stage.accepts else CPU)
        if name == "staleness" and self.staleness is None:
            return torch.zeros(len(rows), dtype=torch.int64)
        value = getattr(self, name)
        if value is None and name in NEEDED:
            raise ExperimentError(NEEDED[name])
        if name in ("losses", "own") and len(rows) != len(self.updates):
            needed = "the loss of each worker" if name == "losses" else "the own row"
            raise ExperimentError(
                f"{stage.name}: needs {needed}, but a pre-aggregator has combined the "
                f"{len(self.updates)} updates into {len(rows)} rows; remove this pre-aggregator"
            )
        return value

    def values_of_columns(self, rows: LazyRows, part: Tensor, stage: RuleStage) -> Callable[[str], Any]:
        """Return a function that maps the name of an input, such as "weights", to its value for a block of columns.

        Args:
            rows: all updates that are aggregated, [n, d].
            part: block of columns of the updates, [n, columns].
            stage: columnwise rule for which the inputs are needed.
        """

        def value_of(name: str) -> Any:
            if name == "updates":
                return part
            if name == "weights":
                return self._weights_on(part.device)
            if name == "draws":
                return self.draws.on(part.device)
            value = self.value_of(name, rows, stage)
            return copy.deepcopy(value) if name == "rng" else value

        return value_of

    def _weights_on(self, device: torch.device) -> Tensor | None:
        return None if self.weights is None else to_device(self.weights.to(wide_dtype(device)), device)


def screened(
    inputs: AggregationInputs, nonfinite: Nonfinite, bad: list[int] | None = None
) -> tuple[AggregationInputs, list[int]]:
    """Remove updates that contain NaN or infinity. Returns the remaining inputs and the positions of these updates.

    Args:
        inputs: inputs of an aggregation.
        nonfinite: what to do with updates that are not finite: "error", "exclude" or "keep".
        bad: positions of the updates that are not finite, if known. Required if `inputs.updates` has only some of the
            columns.

    Raises DivergedError if no update is finite, or if `nonfinite` is "error" and an update that is not finite has a
    weight > 0. With "keep", nothing is checked or removed.
    """
    if nonfinite == "keep":
        return inputs, []
    bad = bad_rows(inputs.updates) if bad is None else bad
    if not bad:
        return inputs, []
    if len(bad) == len(inputs.updates):
        raise DivergedError(f"all {len(bad)} updates contain NaN or infinity", NOTHING_LEFT)
    if inputs.own in bad:
        raise DivergedError("the own update contains NaN or infinity", NOTHING_LEFT)
    assert inputs.workers is not None
    weighted = [row for row in bad if inputs.weights is None or inputs.weights[row] > 0]
    if nonfinite == "error" and weighted:
        named = ", ".join(called(inputs.workers[row]) for row in weighted[:SHOWN]) + ", ..." * (len(weighted) > SHOWN)
        raise DivergedError(
            f"{len(weighted)} of {len(inputs.updates)} updates contain NaN or infinity (from workers {named})",
            'exclude such updates with aggregate.nonfinite=exclude (fedsim.aggregate: nonfinite="exclude")',
        )
    good = [row for row in range(len(inputs.updates)) if row not in set(bad)]
    finite_inputs = replace(
        inputs,
        updates=inputs.updates[good],
        weights=None if inputs.weights is None else inputs.weights[good],
        losses=None if inputs.losses is None else inputs.losses[good],
        staleness=None if inputs.staleness is None else inputs.staleness[good],
        models=None if inputs.models is None else inputs.models[good],
        own=None if inputs.own is None else good.index(inputs.own),
        workers=[inputs.workers[row] for row in good],
        excluded=inputs.excluded + len(bad),
        gram=None,
    )
    return finite_inputs, bad
