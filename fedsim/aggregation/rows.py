"""The rows that a rule is applied to: the updates, or what pre-aggregators mix of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from torch import Tensor

from fedsim.aggregation.columns import Reduce, combine, own_columns, small_blocks, widened, working_dtype
from fedsim.aggregation.gram import Gram
from fedsim.aggregation.rule import Mix
from fedsim.system.devices import to_device


class Rows:
    """The updates, or rows that pre-aggregators make of them; mixed ones are made block by block, as they are needed.

    Attributes:
        are_combinations: whether each row is a linear combination of the updates that is known.
    """

    def __init__(
        self,
        updates: Tensor,
        mixing: Tensor | None = None,
        gram: Callable[[], Gram] | None = None,
        reduce: Reduce = own_columns,
        are_combinations: bool = True,
    ) -> None:
        self.are_combinations = are_combinations
        self._updates, self._mixing = updates, mixing
        self._make_gram = gram or (lambda: Gram(updates, reduce=reduce))

    def __len__(self) -> int:
        return len(self._updates) if self._mixing is None else len(self._mixing)

    @property
    def shape(self) -> tuple[int, int]:
        """How many rows there are, and how many columns they have."""
        return len(self), self._updates.shape[1]

    @property
    def are_mixed(self) -> bool:
        """Whether rows are yet to be computed."""
        return self._mixing is not None

    @cached_property
    def gram(self) -> Gram:
        return self._make_gram()

    def mixed(self, matrix: Tensor) -> Rows:
        """The rows matrix [m', m] @ rows."""
        mixing = matrix if self._mixing is None else matrix @ self._mixing
        return Rows(self._updates, mixing, lambda: self.gram.mixed(matrix), are_combinations=self.are_combinations)

    def replaced(self, rows: Tensor) -> Rows:
        """Other rows [m, d] in their place, of which nothing is known."""
        return Rows(rows.to(self._updates.dtype), are_combinations=False)

    def block(self, columns: slice = slice(None)) -> Tensor:
        """The rows at these columns."""
        part = self._updates[:, columns]
        return part if self._mixing is None else (self._matrix @ part.to(self._matrix.dtype)).to(part.dtype)

    @cached_property
    def _matrix(self) -> Tensor:
        """The mixing, ready to be multiplied with updates."""
        assert self._mixing is not None
        return self._ready(self._mixing)

    def _ready(self, matrix: Tensor) -> Tensor:
        updates = self._updates
        return to_device(matrix.to(working_dtype(matrix, updates.dtype, updates.device)), updates.device)

    def row(self, mix: Mix) -> Tensor:
        """The one row [d] that a mix of these rows is."""
        if mix.then is None:
            row = combine(self._of_updates(mix.coefficients), self._updates)
            return row if mix.base is None else row + mix.base
        rows_of = self._rows_of(self._of_updates(mix.coefficients))
        result = self._updates.new_empty(self._updates.shape[1])
        for block in small_blocks(self._updates):
            result[block] = mix.then(widened(rows_of(self._updates[:, block]))).to(result.dtype)
        return result

    def _rows_of(self, matrix: Tensor) -> Callable[[Tensor], Tensor]:
        """The function that makes matrix [m, n] @ block of a block of updates; of mere choices it makes no products.

        A row with coefficients of 0 alone does not count, even if it is not finite.
        """
        device = self._updates.device
        if bool((matrix.count_nonzero(1) == 1).all()) and bool(((matrix == 0) | (matrix == 1)).all()):
            choice = to_device(matrix.argmax(1), device)
            return lambda block: block[choice]
        chosen = matrix.any(0).nonzero().flatten()
        factors, chosen = self._ready(matrix[:, chosen]), to_device(chosen, device)
        return lambda block: (factors @ block[chosen].to(factors.dtype)).to(block.dtype)

    def shares(self, mix: Mix) -> Tensor | None:
        """The coefficient of each update in a mix, [n]; None where rows are no combinations of updates."""
        if not self.are_combinations:
            return None
        coefficients = self._of_updates(mix.coefficients)
        return coefficients if coefficients.ndim == 1 else coefficients.mean(0)

    def _of_updates(self, coefficients: Tensor) -> Tensor:
        return coefficients if self._mixing is None else coefficients @ self._mixing
