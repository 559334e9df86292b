"""Distances and inner products of all pairs of rows, from one matrix product that all rules of a comparison share."""

from __future__ import annotations

import math
from functools import cached_property
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from fedsim.aggregation.columns import (
    Reduce,
    distances_to,
    joined_lengths,
    norms,
    own_columns,
    sampled_columns,
    small_blocks,
    wide_blocks,
)
from fedsim.aggregation.magnitude import limits, unit_for
from fedsim.errors import ExperimentError
from fedsim.system.devices import to_device, wide_dtype

STRIP = 48  # columns of the product at once: with its symmetry, half of it need not be computed
FEW = 32  # rows whose products NumPy makes in half of PyTorch's time
UNSHARED = 2**18  # multiplications in one product, beyond which NumPy's BLAS would start threads of its own
CANCELLED = 1e-7  # a squared distance this small beside what it is the difference of has lost half its digits
TIED = 1e-12  # relative: sums that differ by less were equal before rounding


class Gram:
    """What the pairs of rows z_i = sum_j M_ij x_j of n updates x have to do with each other.

    Rows are centred at the one of least norm and multiplied in float64, block by block of columns, so that neither a
    common offset of all rows nor an outlier costs digits; a distance that cancellation has spoilt all the same is
    computed again from differences. Cost: one [n, d] x [d, n] product. All results are float64 on the CPU.

    Args:
        updates: [n, d].
        mixing: M [m, n], or None for the updates themselves.
        reduce: where several processes have some columns each: sums (or maxima) over them all, which every one of them
            gets, so that all come to the same results. They have to ask for the same things in the same order.

    Attributes:
        unit: what lengths are counted in here, and products in its square: 1, but where squares would leave the range
            of float64 another power of two (and the products are made once more).

    Raises ExperimentError where rows differ so much in size that no unit will do.
    """

    def __init__(
        self,
        updates: Tensor,
        mixing: Tensor | None = None,
        basis: Basis | None = None,
        reduce: Reduce = own_columns,
    ) -> None:
        self._updates, self._mixing, self._reduce = updates, mixing, reduce
        self._whole = _basis(updates, reduce) if basis is None else basis
        self._basis, self.unit = self._whole

    def mixed(self, matrix: Tensor) -> Gram:
        """Of the rows matrix [m', m] @ rows; costs no further pass over the updates."""
        mixing = matrix if self._mixing is None else matrix @ self._mixing
        return Gram(self._updates, mixing, self._whole, self._reduce)

    def __len__(self) -> int:
        return len(self._updates) if self._mixing is None else len(self._mixing)

    @cached_property
    def _coordinates(self) -> Tensor:
        """The rows in terms of the centred updates and the centre, [m, n + 1]."""
        n = len(self._updates)
        mixing = torch.eye(n, dtype=torch.double) if self._mixing is None else self._mixing
        return torch.cat([mixing, mixing.sum(1, keepdim=True)], dim=1)

    @cached_property
    def products(self) -> Tensor:
        """Inner products <z_i, z_j>, [m, m]."""
        if self._mixing is None:
            basis = self._basis.numpy()
            to_centre = basis[-1, :-1]
            return torch.from_numpy(basis[:-1, :-1] + (to_centre + to_centre[:, None]) + basis[-1, -1])
        return self._coordinates @ self._basis @ self._coordinates.t()

    @cached_property
    def norms(self) -> Tensor:
        """|z_i|, [m]."""
        return self.products.diagonal().clamp(min=0).sqrt()

    @cached_property
    def offsets(self) -> Tensor:
        """Inner products of the rows as seen from one in their midst, [m, m], as exact as the distances are.

        Made of distances, which loses what is small beside the longer of the two; of products where that keeps more.
        """
        squares = self.squared_distances.numpy()
        nearness = np.sort(squares, axis=1)[:, (len(self) - 1) // 2]
        middle = int(np.lexsort((self._reach, nearness))[0])  # of two rows the shorter one, so that no outlier is it
        to_middle = squares[middle]
        reach = self._reach + self._reach[middle]
        with np.errstate(all="ignore"):
            from_distances = (to_middle + to_middle[:, None] - squares) / 2
            spoilt = reach * reach[:, None] < np.maximum(to_middle, to_middle[:, None])
        if not spoilt.any():
            return torch.from_numpy(from_distances)
        return torch.from_numpy(np.where(spoilt, self._products_from(middle), from_distances))

    def _products_from(self, row: int) -> np.ndarray:
        """Inner products of the rows as seen from one of them, [m, m], of the centred updates' products."""
        if self._mixing is None:
            products = self._basis[:-1, :-1].numpy()
            to_row = products[row]
            return products - to_row - to_row[:, None] + to_row[row]
        away = self._coordinates - self._coordinates[row]
        products = away @ self._basis @ away.t()
        return ((products + products.t()) / 2).numpy()

    @cached_property
    def _reach(self) -> np.ndarray:
        """How far the rows are from the centre, [m]: the digits of products go by that."""
        if self._mixing is None:
            squares = self._basis.numpy().diagonal()[:-1]
        else:
            away = self._coordinates.clone()
            away[:, -1] -= 1
            squares = (away @ self._basis * away).sum(1).numpy()
        return np.sqrt(np.maximum(squares, 0))

    @cached_property
    def squared_distances(self) -> Tensor:
        """|z_i - z_j|^2, [m, m], symmetric, 0 on the diagonal."""
        offsets = self._basis.numpy()[:-1, :-1] if self._mixing is None else self._products_from(0)
        own = offsets.diagonal()
        with np.errstate(all="ignore"):
            scale = own + own[:, None]
            result = np.maximum(scale - 2 * offsets, 0)
            np.fill_diagonal(result, 0)
            spoilt = result <= CANCELLED * scale
        np.fill_diagonal(spoilt, False)
        squares = torch.from_numpy(result)
        if spoilt.any():
            self._recompute(squares, np.argwhere(np.triu(spoilt & (scale > 0))).tolist())
        return squares

    @cached_property
    def distances(self) -> Tensor:
        """|z_i - z_j|, [m, m]."""
        return self.squared_distances.sqrt()

    def squared_distances_to(self, coefficients: Tensor) -> Tensor:
        """Of every row from the point sum_i a_i z_i, [m]; the coefficients a [m] sum to one."""
        pulled = self.offsets @ coefficients
        return (self.offsets.diagonal() - 2 * pulled + coefficients @ pulled).clamp(min=0)

    def squared_norm(self, coefficients: Tensor) -> float:
        """|sum_i a_i z_i|^2."""
        return max(0.0, float(coefficients @ self.products @ coefficients))

    def _recompute(self, result: Tensor, pairs: list[list[int]]) -> None:
        """Put squared distances from differences in place of spoilt ones; equal rows get equal ones from others."""
        twin: dict[int, int] = {}
        for i, of_one in groupby(pairs, lambda pair: pair[0]):
            others = [] if i in twin else [j for _, j in of_one if j not in twin]
            for j, difference in zip(others, self._squared_differences(i, others), strict=True):
                result[i, j] = result[j, i] = difference
                if difference == 0:
                    twin[j] = i
        for j, i in twin.items():
            result[j] = result[i]
            result[:, j] = result[:, i]
            result[j, j] = result[i, j] = result[j, i] = 0

    def _squared_differences(self, i: int, others: list[int]) -> list[float]:
        """Of row i from others."""
        if not others:
            return []
        totals = torch.stack([self._squared_difference(i, j) for j in others]).cpu().double()
        return self._reduce(totals, "sum").tolist()

    def _squared_difference(self, i: int, j: int) -> Tensor:
        """Of two rows, in these columns; stays on the device."""
        device, wide, factor = self._updates.device, wide_dtype(self._updates.device), 1 / self.unit
        total = torch.zeros((), dtype=wide, device=device)
        weights = None
        if self._mixing is not None:
            weights = to_device((self._mixing[i] - self._mixing[j]).to(wide), device)
        for block in small_blocks(self._updates):
            if weights is None:
                away = self._updates[i, block].to(wide) - self._updates[j, block].to(wide)
            else:
                away = weights @ self._updates[:, block].to(wide)
            if factor != 1:
                away = away * factor
            total += away @ away
        return total


Basis = tuple[Tensor, float]  # products, and the unit of length that they are counted in


def _basis(updates: Tensor, reduce: Reduce) -> Basis:
    """The products of the centred updates, in such a unit that they are in range."""
    wide = wide_dtype(updates.device)
    products = _products(updates, 1.0, reduce)
    low, high = limits(wide)
    if low < products.numpy().diagonal().max() < high:
        return products, 1.0
    peak = float(torch.linalg.vector_norm(updates, torch.inf)) if updates.numel() else 0.0
    peak = float(reduce(torch.tensor([peak], dtype=torch.double), "max"))
    values = int(reduce(torch.tensor([updates.numel()], dtype=torch.double), "sum"))
    unit = unit_for(peak, values, wide)
    if unit == 1.0:  # all rows are zero, or one of them is not finite
        return products, unit
    products = _products(updates, unit, reduce)
    _require_digits(updates, unit, peak, reduce)
    return products, unit


def _require_digits(updates: Tensor, unit: float, peak: float, reduce: Reduce) -> None:
    """Raise ExperimentError where what rows differ by is lost in a unit that their largest values ask for."""
    shortest = int(joined_lengths(norms(updates), reduce).argmin())
    away = joined_lengths(distances_to(updates, updates[shortest]), reduce)
    least = float(away[away > 0].min()) if bool(away.any()) else peak
    low, high = limits(wide_dtype(updates.device))
    if not low < (least / unit) ** 2 < high:
        raise ExperimentError(
            f"updates: values up to {peak:.3g} beside rows that are {least:.3g} apart leave no digits for distances"
        )


def _products(updates: Tensor, unit: float, reduce: Reduce) -> Tensor:
    """Inner products of the centred updates and, in the last place, the centre itself: float64 [n + 1, n + 1]."""
    n = len(updates)
    wide = wide_dtype(updates.device)
    sample = sampled_columns(updates).to(wide) / unit
    centre = reduce(torch.linalg.vecdot(sample, sample), "sum").argmin().reshape(1)  # [1], so that the device keeps it
    del sample  # before there are wide blocks as well
    total = torch.zeros(n, n, dtype=wide, device=updates.device)
    for _, rows in wide_blocks(updates):
        if unit != 1:
            rows.mul_(1 / unit)
        middle = rows.index_select(0, centre)
        rows.sub_(middle).index_copy_(0, centre, middle)  # in place of the zeros that its own difference would be
        _add_products(total, rows)
    on_host = torch.cat([total.flatten(), centre.to(wide)]).cpu().double()  # together, to wait for the device once
    lower, centre = reduce(on_host[:-1].view(n, n), "sum").tril(), int(on_host[-1])
    products = lower + lower.tril(-1).t()
    basis = np.zeros((n + 1, n + 1))
    basis[:n, :n] = products
    basis[n, :n] = basis[:n, n] = products[centre]
    basis[n, n] = products[centre, centre]
    basis[centre] = basis[:, centre] = 0
    return torch.from_numpy(basis)


def _add_products(total: Tensor, rows: Tensor) -> None:
    """total [n, n] += rows @ rows^T, of which only the lower triangle counts."""
    if len(rows) <= FEW and rows.device.type == "cpu":
        _add_few_products(total.numpy(), rows.numpy())
        return
    if len(rows) <= STRIP:
        total.addmm_(rows, rows.t())
        return
    for start in range(0, len(rows), STRIP):
        end = start + STRIP
        total[start:, start:end].addmm_(rows[start:], rows[start:end].t())


def _add_few_products(total: np.ndarray, rows: np.ndarray) -> None:
    """The same, as a stack of products that are too small to be shared out."""
    n, width = rows.shape
    parts = math.ceil(width / min(512, UNSHARED // n**2))
    step = width // parts
    whole = parts * step
    stack = rows[:, :whole].reshape(n, parts, step).transpose(1, 0, 2)
    with np.errstate(all="ignore"):  # what overflows is dealt with by those who ask
        # All rows by all but the last: for the product of a matrix with itself NumPy takes a slower way.
        total[:, :-1] += np.matmul(stack, stack[:, :-1].transpose(0, 2, 1)).sum(0)
        total[:, :-1] += rows[:, whole:] @ rows[:-1, whole:].T
        total[-1, -1] += rows[-1] @ rows[-1]


def stable_order(values: Tensor) -> Tensor:
    """Positions of `values` [n] in ascending order; of equal ones the lowest index first.

    Values that differ by rounding alone count as equal.
    """
    numbers = values.numpy()
    order = numbers.argsort(kind="stable")
    ascending = numbers[order]
    with np.errstate(all="ignore"):
        step = np.diff(ascending) > TIED * np.abs(ascending[:-1])  # of the lower one, or infinity would equal all
    if not step.all():  # ties
        rank = np.zeros(len(numbers), dtype=int)
        rank[order[1:]] = step.cumsum()
        order = rank.argsort(kind="stable")
    return torch.from_numpy(order)
