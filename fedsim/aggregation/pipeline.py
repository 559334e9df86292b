"""Pre-aggregators and a rule, one after another: from a cohort's updates to one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedsim.aggregation.cohort import Cohort
from fedsim.aggregation.columns import BLOCK, column_blocks, combine, small_blocks
from fedsim.aggregation.rows import Rows
from fedsim.aggregation.rule import BoundRule, Mix
from fedsim.aggregation.threads import alone_if_small
from fedsim.errors import ExperimentError

MOST_REHEARSED = 500  # rows; of a thousand bulyan takes half a minute
WHOLE = {"updates", "root", "last"}  # what is [d], or has rows [d]


@dataclass(frozen=True)
class Pipeline:
    """Pre-aggregators, if any, and the rule that ends them; pickles to other processes."""

    pre: tuple[BoundRule, ...]
    rule: BoundRule

    @property
    def name(self) -> str:
        """`nnm + trimmed_mean`."""
        return " + ".join(stage.name for stage in (*self.pre, self.rule))

    @property
    def columnwise(self) -> bool:
        """Whether each column of the result depends on that column of the updates alone."""
        return self.rule.columnwise and not self.pre

    @property
    def takes_weights(self) -> bool:
        return "weights" in self.rule.takes and not self.pre

    @property
    def needs_weights(self) -> bool:
        return self.takes_weights and self.rule.takes["weights"]

    @property
    def linear_by_weights(self) -> bool:
        """Whether it is linear, with coefficients that depend on the number of rows and their weights alone."""
        return self.columnwise and self.rule.linear and self.rule.takes.keys() <= {"updates", "weights"}

    @property
    def by_parts(self) -> bool:
        """Whether it can be applied to columns by several processes that share nothing but products of pairs.

        Not so where a stage looks at whole rows.
        """
        ends = self.rule.takes.keys() - ({"updates"} if self.rule.columnwise else set())
        return not any(WHOLE & takes for takes in (*(stage.takes.keys() for stage in self.pre), ends))

    def takes(self, name: str) -> bool:
        """Whether any stage takes what is called so."""
        return any(name in stage.takes for stage in (*self.pre, self.rule))

    def __call__(self, cohort: Cohort) -> Outcome:
        """What the rule makes of a cohort's updates."""
        with alone_if_small(cohort.updates.numel()):
            return self._applied(cohort)

    def _applied(self, cohort: Cohort) -> Outcome:
        rows = self.rows(cohort)
        if self.rule.columnwise:
            return Outcome(self._by_columns(rows, cohort), self._linear_shares(rows, cohort))
        result = self.rule(lambda name: cohort.menu(name, rows, self.rule), cohort.f_for(self.rule))
        result, state = result if isinstance(result, tuple) else (result, {})
        if not isinstance(result, Mix):
            return Outcome(check_result(result, self.rule, rows, rows.shape[1:]), state=state)
        shape = (*result.coefficients.shape[:-1], len(rows))
        check_result(result.coefficients, self.rule, rows, shape, "a Mix of coefficients [n]")
        return Outcome(rows.row(result), rows.shares(result), state)

    def rows(self, cohort: Cohort) -> Rows:
        """The rows that the rule is applied to: a cohort's updates, or what pre-aggregators make of them."""
        rows = cohort.rows()
        for stage in self.pre:
            result = stage(lambda name, stage=stage, rows=rows: cohort.menu(name, rows, stage), cohort.f_for(stage))
            made = result.coefficients if isinstance(result, Mix) else result
            width = len(rows) if isinstance(result, Mix) else rows.shape[1]
            m = len(made) if isinstance(made, Tensor) and made.ndim == 2 else len(rows)
            check_result(made, stage, rows, (m, width), "a Mix of coefficients [m, n] or rows [m, d]")
            rows = rows.mixed(made) if isinstance(result, Mix) else rows.replaced(made)
        return rows

    def by_columns(self, cohort: Cohort) -> Tensor:
        """The result of a pipeline that is columnwise, without anything else that could be said of it."""
        return self._by_columns(cohort.rows(), cohort)

    def _by_columns(self, rows: Rows, cohort: Cohort) -> Tensor:
        updates, (n, d) = cohort.updates, cohort.updates.shape
        shares = None if updates.device.type == "cpu" else self._linear_shares(rows, cohort)
        if shares is not None:
            return combine(shares, updates)
        if not rows.are_mixed and d < 2 * BLOCK:  # few columns, and nobody to share them with
            return self.of_columns(rows.block(), rows, cohort)
        result = updates.new_empty(d)
        blocks = small_blocks(updates) if rows.are_mixed else column_blocks(d, n=n, device=updates.device)
        for block in blocks:
            result[block] = self.of_columns(rows.block(block), rows, cohort)
        return result

    def of_columns(self, part: Tensor, rows: Rows, cohort: Cohort, shares: Tensor | None = None) -> Tensor:
        """The result of a columnwise rule in some columns, `part` [n, columns] of `rows`.

        Args:
            shares: the result of `shares`, if it is known. Off the CPU it takes the place of a linear rule, which might
                read weights from the device.
        """
        if shares is not None and part.device.type != "cpu":
            return combine(shares, part)
        result = self.rule(cohort.menu_of_columns(rows, part, self.rule), cohort.f_for(self.rule))
        return check_result(result, self.rule, part, part.shape[1:])

    def shares(self, cohort: Cohort) -> Tensor | None:
        """The coefficient with which each row goes into the result [n], where the rule is linear in all columns."""
        return self._linear_shares(cohort.rows(), cohort) if self.columnwise else None

    def _linear_shares(self, rows: Rows, cohort: Cohort) -> Tensor | None:
        if not self.rule.linear:
            return None
        units = torch.eye(len(rows), dtype=torch.double)
        shares = self.rule(cohort.menu_of_columns(rows, units, self.rule), cohort.f_for(self.rule))
        return rows.shares(Mix(check_result(shares, self.rule, units, units.shape[1:]).double()))

    def rehearse(self, n: int, local_lr: float | None = 1.0) -> None:
        """Try it on n short rows, so that a constraint that n and f break is found out before anything is trained.

        `local_lr` is the learning rate of the local solver, None if it has none.

        Raises the ExperimentError that a stage raises; what else goes wrong may be due to the rows. Very many
        rows, of which some rules take long, are not tried.
        """
        if n > MOST_REHEARSED:
            return
        updates = torch.randn(n, 8, generator=torch.Generator().manual_seed(0), dtype=torch.double)
        ones = torch.ones(n, dtype=torch.double)
        cohort = Cohort(updates, ones if self.needs_weights else None, root=updates[0], losses=ones, local_lr=local_lr)
        try:
            self(cohort)
        except ResultError:  # some rules are made for one length of rows
            return
        except ExperimentError as error:
            raise ExperimentError(*(f"aggregate.rule, with a cohort of {n}: {line}" for line in error.lines)) from None
        except Exception:
            return


class ResultError(ExperimentError):
    """A stage has returned what is no row, or no rows."""


def check_result(
    result: Any, stage: BoundRule, rows: Rows | Tensor, shape: Sequence[int], what: str = "a row [d]"
) -> Any:
    """What a stage has returned. Raises ResultError unless it is a tensor of that shape."""
    if isinstance(result, Tensor) and result.shape == tuple(shape):
        return result
    given = f"a tensor of shape {list(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
    raise ResultError(
        f"{stage.name}: for updates [n, d] = {list(rows.shape)} it must return {what}, here a tensor of shape "
        f"{list(shape)}; it returned {given}"
    )


@dataclass(frozen=True)
class Outcome:
    """What an aggregation gave.

    Attributes:
        update: [d].
        shares: the coefficient with which each row went into it, float64 [n]; None where a rule has no such thing.
        state: what a rule with a state wants to see next time.
    """

    update: Tensor
    shares: Tensor | None = None
    state: dict[str, Tensor] = field(default_factory=dict)
