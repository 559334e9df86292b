"""Pipelines: any number of pre-aggregators, followed by an aggregation rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.aggregation.inputs import AggregationInputs
from fedsim.aggregation.numerics.columns import (
    BLOCK,
    NonfiniteError,
    all_finite,
    column_blocks,
    combine,
    reading,
    small_blocks,
)
from fedsim.aggregation.numerics.lazy_rows import LazyRows
from fedsim.aggregation.numerics.threads import alone_if_small
from fedsim.aggregation.rule import LinearCombination, RuleStage
from fedsim.errors import DivergedError, ExperimentError

MOST_TRIED = 500  # maximum number of rows of a dry run; bulyan takes half a minute for a thousand rows
WHOLE = {"updates", "root", "last"}  # inputs that contain whole rows, not only some columns


@dataclass(frozen=True)
class AggregationResult:
    """Result of one aggregation.

    Attributes:
        update: aggregated update, [d].
        shares: coefficient of each worker's update in the result, float64 [n]. None if the result is not known to be a
            linear combination of the updates.
        state: state that the rule needs in the next aggregation.
    """

    update: Tensor
    shares: Tensor | None = None
    state: dict[str, Tensor] = field(default_factory=dict)


class ResultError(ExperimentError):
    """Error of a rule or pre-aggregator that returns something other than a tensor of the required shape."""


@dataclass(frozen=True)
class Pipeline:
    """Aggregation rule, with the pre-aggregators that are applied before it, if any. Pipelines can be pickled.

    >>> stages = fedsim.aggregation.resolve(["nnm", "median"], {"f": 1})
    >>> pipeline = fedsim.aggregation.make_pipeline(stages)
    >>> pipeline.name
    'nnm + median'
    """

    pre: tuple[RuleStage, ...]
    rule: RuleStage

    @property
    def name(self) -> str:
        """Names of the pre-aggregators and the rule, such as `nnm + trimmed_mean`."""
        return " + ".join(stage.name for stage in (*self.pre, self.rule))

    @cached_property
    def built_in(self) -> bool:
        """Whether the rule and all pre-aggregators belong to fedsim."""
        return all(stage.built_in for stage in (*self.pre, self.rule))

    @cached_property
    def columnwise(self) -> bool:
        """Whether each coordinate of the result depends only on this coordinate of the updates."""
        return self.rule.columnwise and not self.pre

    @cached_property
    def accepts_weights(self) -> bool:
        return "weights" in self.rule.accepts and not self.pre

    @cached_property
    def needs_weights(self) -> bool:
        return self.accepts_weights and self.rule.accepts["weights"]

    @cached_property
    def linear_by_weights(self) -> bool:
        """Whether the result is a linear combination of the updates whose coefficients depend only on the weights."""
        return (
            self.columnwise and self.rule.linear and self.rule.accepts.keys() <= {"updates", "weights", "weight_total"}
        )

    @property
    def is_mean(self) -> bool:
        """Whether the rule is a weighted mean of fedsim, without pre-aggregators."""
        return self.linear_by_weights and self.built_in

    @property
    def by_parts(self) -> bool:
        """Whether the columns can be divided among processes, because no input contains whole updates."""
        of_rule = self.rule.accepts.keys() - ({"updates"} if self.rule.columnwise else set())
        return not any(WHOLE & accepts for accepts in (*(stage.accepts.keys() for stage in self.pre), of_rule))

    def accepts(self, name: str) -> bool:
        """Whether the rule or a pre-aggregator has an input called `name`."""
        return any(name in stage.accepts for stage in (*self.pre, self.rule))

    def __call__(self, inputs: AggregationInputs) -> AggregationResult:
        """Aggregate the updates of `inputs`.

        Raises ExperimentError for a violated constraint on n and f, or if a stage returns a result of the wrong shape.
        """
        # If the updates are on a GPU, the host only computes with matrices [n, n].
        with alone_if_small(inputs.updates.numel() if inputs.updates.device.type == "cpu" else 0):
            rows = self.rows(inputs)
            if self.rule.columnwise:
                return AggregationResult(self.by_columns(rows, inputs), self._linear_shares(rows, inputs))
            result = self.rule(lambda name: inputs.value_of(name, rows, self.rule), inputs.f_for(self.rule))
            result, state = result if isinstance(result, tuple) else (result, {})
            if not isinstance(result, LinearCombination):
                return AggregationResult(check_result(result, self.rule, rows, rows.shape[1:]), state=state)
            shape = (*result.coefficients.shape[:-1], len(rows))
            check_result(result.coefficients, self.rule, rows, shape, "a LinearCombination with coefficients [n]")
            if result.coefficients.ndim == 2 and result.then is None:  # the result of a pre-aggregator
                result = LinearCombination(result.coefficients.mean(0))
            return AggregationResult(rows.row(result), rows.shares(result), state)

    def without_check(self, inputs: AggregationInputs) -> tuple[AggregationResult | None, bool]:
        """Aggregate updates on a GPU that have not been checked for NaN and infinity, with a built-in rule.

        Returns the result and whether all updates are known to be finite. The result is None if they are not, or if
        their norms overflow. It is also None if the rule may not be applied to unchecked updates.
        """
        if not self.built_in:
            return None, False
        with reading() as progress:
            try:
                return self(inputs), progress.has_read
            except NonfiniteError:
                return None, False

    def require_finite_result(self, update: Tensor, round: int | None = None) -> None:
        """Raise DivergedError if a rule of the user returned NaN or infinity for finite updates (in `round`)."""
        if not self.built_in and not all_finite(update):
            problem = f"{self.name}: returned NaN or infinity, although all updates are finite"
            raise DivergedError(problem, "correct the rule", round)

    def rows(self, inputs: AggregationInputs) -> LazyRows:
        """Return the rows to which the rule is applied: the updates, or the result of the pre-aggregators."""
        rows = inputs.rows()
        for stage in self.pre:
            result = stage(partial(inputs.value_of, rows=rows, stage=stage), inputs.f_for(stage))
            is_combination = isinstance(result, LinearCombination)
            matrix = result.coefficients if is_combination else result
            width = len(rows) if is_combination else rows.shape[1]
            m = len(matrix) if isinstance(matrix, Tensor) and matrix.ndim == 2 else len(rows)
            expected = "a LinearCombination with coefficients [m, n] or rows [m, d]"
            check_result(matrix, stage, rows, (m, width), expected)
            rows = rows.mixed(matrix) if is_combination else rows.replaced(matrix)
        return rows

    def by_columns(self, rows: LazyRows, inputs: AggregationInputs) -> Tensor:
        """Apply a columnwise rule to one block of columns after another. Returns [d]."""
        updates, (n, d) = inputs.updates, inputs.updates.shape
        is_mean = self.linear_by_weights and inputs.weights is None
        shares = None if updates.device.type == "cpu" or is_mean else self._linear_shares(rows, inputs)
        if shares is not None:
            return combine(shares, updates)
        averages = self.rule.linear and inputs.weights is None  # weights of 0 would copy the other rows
        if not rows.are_mixed and (averages or d < 2 * BLOCK):
            return self.of_columns(rows.block(), rows, inputs)
        blocks = list(small_blocks(updates) if rows.are_mixed else column_blocks(d, n=n, device=updates.device))
        if len(blocks) == 1:
            return self.of_columns(rows.block(), rows, inputs).to(updates.dtype)
        result = updates.new_empty(d)
        for block in blocks:
            result[block] = self.of_columns(rows.block(block), rows, inputs)
        return result

    def of_columns(
        self, part: Tensor, rows: LazyRows, inputs: AggregationInputs, shares: Tensor | None = None
    ) -> Tensor:
        """Apply a columnwise rule to one block of columns. Returns [columns].

        Args:
            part: block of columns, [n, columns].
            rows: all rows that are aggregated, [n, d].
            inputs: inputs of the aggregation.
            shares: coefficients [n] of the rows in the result, if known. On a GPU, they replace a call of the rule.
        """
        if shares is not None and part.device.type != "cpu":
            return combine(shares, part)
        result = self.rule(inputs.values_of_columns(rows, part, self.rule), inputs.f_for(self.rule))
        return check_result(result, self.rule, part, part.shape[1:])

    def shares(self, inputs: AggregationInputs) -> Tensor | None:
        """Return the coefficients [n] of the updates in the result of a columnwise rule, or None if unknown."""
        return self._linear_shares(inputs.rows(), inputs) if self.columnwise else None

    def _linear_shares(self, rows: LazyRows, inputs: AggregationInputs) -> Tensor | None:
        if not self.rule.linear:
            return None
        first, group = self._equal_rows(len(rows), inputs.weights)
        units = torch.zeros(len(rows), len(first), dtype=torch.double)
        units[first, torch.arange(len(first))] = 1
        shares = self.rule(inputs.values_of_columns(rows, units, self.rule), inputs.f_for(self.rule))
        shares = check_result(shares, self.rule, units, units.shape[1:])
        return rows.shares(LinearCombination(shares.double()[group]))

    def _equal_rows(self, n: int, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Group the rows by coefficient. Return the first row of each group, and the group of each row, [n].

        In an average, these are the rows with the same weight. For other linear rules, each row is a group. `weights`
        are the weights of the rows, [n]; None for equal weights.
        """
        on_host = weights is None or weights.device.type == "cpu"
        if self.pre or self.rule.name not in ("mean", "weighted_mean") or not on_host:
            return torch.arange(n), torch.arange(n)
        values = np.zeros(n) if weights is None else weights.numpy()
        _, first, group = np.unique(values, return_index=True, return_inverse=True)
        return torch.from_numpy(first), torch.from_numpy(group)

    def dry_run(
        self,
        n: int,
        local_lr: float | None = 1.0,
        weights: Tensor | None = None,
        workers: list[int] | None = None,
        place: str = "aggregate.rule, with a cohort of {}",
        **more: Any,
    ) -> None:
        """Raise ExperimentError if the rule cannot aggregate n updates, for example because it needs n >= 2f + 3.

        Only built-in rules are checked, by applying them to random updates, and only for n <= 500.

        Args:
            n: number of updates.
            local_lr: learning rate of the client algorithm, or None if it has none.
            weights: weight of each update, [n]. None: equal weights.
            workers: IDs of the workers that send the updates, if they are known.
            place: format string for error messages, with {} for n.
            more: further inputs of the rule, by name.
        """
        if n > MOST_TRIED or any(":" in stage.name or stage.name.startswith("<") for stage in (*self.pre, self.rule)):
            return
        updates = torch.randn(n, 8, generator=torch.Generator().manual_seed(0), dtype=torch.double)
        ones = torch.ones(n, dtype=torch.double)
        weights = ones if weights is None and self.needs_weights else weights
        try:
            self(AggregationInputs(updates, weights, updates[0], ones, workers=workers, local_lr=local_lr, **more))
        except ResultError:  # a rule may accept only rows of a certain length
            return
        except ExperimentError as error:
            raise ExperimentError(*(f"{place.format(n)}: {line}" for line in error.lines)) from None
        except Exception:
            return


def check_result(
    result: Any, stage: RuleStage, rows: LazyRows | Tensor, shape: Sequence[int], expected: str = "a row [d]"
) -> Any:
    """Return `result`. Raises ResultError unless it is a tensor of shape `shape`.

    Args:
        result: what the rule or pre-aggregator returned.
        stage: the rule or pre-aggregator.
        rows: rows to which `stage` was applied. The error message contains their shape.
        shape: required shape of the result.
        expected: description of the required result, for the error message.
    """
    if isinstance(result, Tensor) and result.shape == tuple(shape):
        return result
    actual = f"a tensor of shape {list(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
    raise ResultError(
        f"{stage.name}: must return {expected}, which is a tensor of shape {list(shape)} for updates [n, d] = "
        f"{list(rows.shape)}; it returned {actual}"
    )
