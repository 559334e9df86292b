"""Rows to which a rule is applied: the updates, or linear combinations of updates that pre-aggregators return."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from fedsim.aggregation.numerics.columns import Reduce, at_least_float32, combine, keep_own, small_blocks
from fedsim.aggregation.numerics.gram import Gram
from fedsim.aggregation.numerics.threads import alone_if_few
from fedsim.aggregation.rule import LinearCombination
from fedsim.system.devices import to_device


class LazyRows:
    """The matrix product M @ updates [m, d], whose rows are computed only when needed.

    Args:
        updates: updates of the n workers, or the result of a pre-aggregator, [n, d].
        mixing: matrix M [m, n], float64. None: the rows are the updates themselves.
        gram: function that returns the distances of the rows (`Gram`).
        reduce: function that sums a tensor over all processes, if each process has only some of the columns.
        are_combinations: whether each row is a known linear combination of the workers' updates. False if a
            pre-aggregator has returned `updates` as a tensor.
    """

    def __init__(
        self,
        updates: Tensor,
        mixing: Tensor | None = None,
        gram: Callable[[], Gram] | None = None,
        reduce: Reduce = keep_own,
        are_combinations: bool = True,
    ) -> None:
        self.are_combinations = are_combinations
        self._updates, self._mixing = updates, mixing
        self._make_gram = gram or (lambda: Gram(updates, reduce=reduce))

    def __len__(self) -> int:
        return (self._updates if self._mixing is None else self._mixing).shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self._updates.shape[1]

    @property
    def are_mixed(self) -> bool:
        """Whether these rows are linear combinations of the updates, instead of the updates themselves."""
        return self._mixing is not None

    @cached_property
    def gram(self) -> Gram:
        return self._make_gram()

    def mixed(self, matrix: Tensor) -> LazyRows:
        """Return the linear combinations `matrix` [m', m] @ rows [m, d]."""
        return LazyRows(
            self._updates,
            self._of_updates(matrix),
            lambda: self.gram.mixed(matrix),
            are_combinations=self.are_combinations,
        )

    def replaced(self, rows: Tensor) -> LazyRows:
        """Return `rows` [m, d], which a pre-aggregator has computed, as `LazyRows` with the dtype of the updates."""
        return LazyRows(rows.to(self._updates.dtype), are_combinations=False)

    def block(self, columns: slice | None = None) -> Tensor:
        """Return the given columns of all rows, [m, columns]. None: all columns."""
        part = self._updates if columns is None else self._updates[:, columns]
        return part if self._mixing is None else (self._factors @ part.to(self._factors.dtype)).to(part.dtype)

    @cached_property
    def _factors(self) -> Tensor:
        assert self._mixing is not None
        return self._as_factors(self._mixing)

    def _as_factors(self, matrix: Tensor) -> Tensor:
        """Move `matrix` to the device of the updates, and convert it to their dtype (at least float32)."""
        dtype = torch.promote_types(self._updates.dtype, torch.float32)
        return to_device(matrix.to(dtype), self._updates.device)

    def row(self, combination: LinearCombination) -> Tensor:
        """Compute a linear combination of these rows. Returns [d]."""
        coefficients = self._of_updates(combination.coefficients)
        if combination.then is None:
            row = combine(coefficients, self._updates)
            return row if combination.base is None else row + combination.base
        rows_of = self._rows_of(coefficients)
        result = self._updates.new_empty(self._updates.shape[1])
        with alone_if_few(len(self._updates)):
            for block in small_blocks(self._updates):
                result[block] = combination.then(at_least_float32(rows_of(self._updates[:, block]))).to(result.dtype)
        return result

    def _rows_of(self, matrix: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function that multiplies `matrix` [m, n] by a block of the updates [n, columns].

        Updates whose coefficients are all 0 are skipped, so they may contain NaN.
        """
        device = self._updates.device
        if bool((matrix.count_nonzero(1) == 1).all()) and bool(((matrix == 0) | (matrix == 1)).all()):
            choice = to_device(matrix.argmax(1), device)
            return lambda block: block[choice]
        chosen = matrix.any(0).nonzero().flatten()
        factors, chosen = self._as_factors(matrix[:, chosen]), to_device(chosen, device)
        return lambda block: (factors @ block[chosen].to(factors.dtype)).to(block.dtype)

    def shares(self, combination: LinearCombination) -> Tensor | None:
        """Return the coefficients [n] of the workers' updates in a linear combination of these rows.

        Returns None if they are unknown.
        """
        if not self.are_combinations:
            return None
        coefficients = self._of_updates(combination.coefficients)
        return coefficients if coefficients.ndim == 1 else coefficients.mean(0)

    def _of_updates(self, coefficients: Tensor) -> Tensor:
        return coefficients if self._mixing is None else coefficients @ self._mixing
