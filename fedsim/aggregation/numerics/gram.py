"""Distances and inner products of all pairs of rows, computed with one matrix product."""

from __future__ import annotations

import math
from functools import cached_property
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from fedsim.aggregation.numerics.columns import (
    Reduce,
    all_finite,
    keep_own,
    on_host,
    sampled_columns,
    small_blocks,
    total_of,
    wide_blocks,
)
from fedsim.aggregation.numerics.rough_distances import RoughDistances, Scores, pay_off, rough_distances
from fedsim.aggregation.numerics.threads import FEW_ROWS, alone_if_few
from fedsim.errors import ExperimentError
from fedsim.system.devices import to_device, wide_dtype

STRIP = 48  # columns of a product computed at once, which skips most entries above the diagonal of a symmetric matrix
UNSHARED = 2**18  # maximum multiplications in one product for which NumPy's BLAS uses one thread
CANCELLED = 1e-7  # a difference this small relative to its terms has lost half of its digits
TIED = 1e-12  # maximum relative difference of two sums that count as equal


class Gram:
    """Distances and inner products of all pairs of rows z_i, which are the updates x_j or linear combinations of them.

    With a matrix M, z_i = sum_j M_ij x_j. All results are float64 on the CPU. They are precise even if all updates are
    far from zero or one is an outlier, because an update with a small norm (the centre) is first subtracted from all
    updates. Cost: one matrix product [n, d] x [d, n] in float64.

    Args:
        updates: updates x_j of the n workers, [n, d].
        mixing: matrix M [m, n]. None: the rows are the updates.
        basis: inner products of the n centred updates and the centre itself, [n + 1, n + 1], if already computed.
        reduce: function that sums a tensor over all processes. Needed if each process has only some of the columns.
            All processes must then read the same properties in the same order.

    Raises ExperimentError if the squares of finite updates overflow.

    >>> gram = fedsim.aggregation.Gram(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
    >>> gram.distances
    tensor([[0., 5.],
            [5., 0.]], dtype=torch.float64)
    """

    def __init__(
        self, updates: Tensor, mixing: Tensor | None = None, basis: Tensor | None = None, reduce: Reduce = keep_own
    ) -> None:
        self._updates, self._mixing, self._reduce = updates, mixing, reduce
        self._rough_first = basis is None and reduce is keep_own and pay_off(updates)
        if not self._rough_first:
            self._basis = _products(updates, reduce) if basis is None else basis

    @cached_property
    def _basis(self) -> Tensor:
        return _products(self._updates, self._reduce)

    def mixed(self, matrix: Tensor) -> Gram:
        """Return the `Gram` of the linear combinations `matrix` [m', m] @ rows [m, d]."""
        mixing = matrix if self._mixing is None else matrix @ self._mixing
        return Gram(self._updates, mixing, self._basis, self._reduce)

    def extended(self, updates: Tensor) -> Gram:
        """Return the `Gram` of `updates` [n', d], whose first n rows are the updates of this object.

        Only inner products with the additional updates are computed.
        """
        return Gram(updates, basis=_products(updates, self._reduce, self._basis), reduce=self._reduce)

    def __len__(self) -> int:
        return len(self._updates) if self._mixing is None else len(self._mixing)

    @cached_property
    def _coordinates(self) -> Tensor:
        """Coefficients [m, n + 1] of each row as a linear combination of the n centred updates and the centre."""
        n = len(self._updates)
        mixing = torch.eye(n, dtype=torch.double) if self._mixing is None else self._mixing
        return torch.cat([mixing, mixing.sum(1, keepdim=True)], dim=1)

    @cached_property
    def products(self) -> Tensor:
        """Inner products <z_i, z_j> of all pairs of rows, [m, m]."""
        if self._mixing is None:
            basis = self._basis.numpy()
            to_centre = basis[-1, :-1]
            with np.errstate(all="ignore"):  # rows may be infinite
                return torch.from_numpy(basis[:-1, :-1] + (to_centre + to_centre[:, None]) + basis[-1, -1])
        return self._coordinates @ self._basis @ self._coordinates.t()

    @cached_property
    def norms(self) -> Tensor:
        """Norms |z_i| of the rows, [m]."""
        return self.products.diagonal().clamp(min=0).sqrt()

    @cached_property
    def offsets(self) -> Tensor:
        """Inner products [m, m] of all pairs of rows, after a row near the middle is subtracted from all rows."""
        squares = self.squared_distances.numpy()
        nearness = np.sort(squares, axis=1)[:, (len(self) - 1) // 2]
        # Of two rows, the one nearer the centre is chosen, because the other one may be an outlier.
        middle = int(np.lexsort((self._reach, nearness))[0])
        to_middle = squares[middle]
        reach = self._reach + self._reach[middle]
        with np.errstate(all="ignore"):
            from_distances = (to_middle + to_middle[:, None] - squares) / 2
            inexact = reach * reach[:, None] < np.maximum(to_middle, to_middle[:, None])
            if inexact.any():
                from_distances = np.where(inexact, self._products_from(middle), from_distances)
        return torch.from_numpy(from_distances)

    def _products_from(self, row: int) -> np.ndarray:
        """Return the inner products [m, m] of all pairs of rows, after the row at position `row` is subtracted."""
        if self._mixing is None:
            known = self._basis[:-1, :-1].numpy()
            to_row = known[row]
            return known - to_row - to_row[:, None] + to_row[row]
        away = self._coordinates - self._coordinates[row]
        products = away @ self._basis @ away.t()
        return ((products + products.t()) / 2).numpy()

    @cached_property
    def _reach(self) -> np.ndarray:
        """Distances [m] of the rows from the centre, the update that is subtracted from all updates."""
        if self._mixing is None:
            squares = self._basis.numpy().diagonal()[:-1]
        else:
            away = self._coordinates.clone()
            away[:, -1] -= 1
            squares = (away @ self._basis * away).sum(1).numpy()
        return np.sqrt(np.maximum(squares, 0))

    @cached_property
    def squared_distances(self) -> Tensor:
        """Squared distances |z_i - z_j|^2 of all pairs of rows, [m, m], symmetric, 0 on the diagonal."""
        offsets = self._basis.numpy()[:-1, :-1] if self._mixing is None else self._products_from(0)
        squared_norms = offsets.diagonal()
        with np.errstate(all="ignore"):
            scale = squared_norms + squared_norms[:, None]
            result = np.maximum(scale - 2 * offsets, 0)
            result.flat[:: len(result) + 1] = 0
            inexact = result <= CANCELLED * scale
            result[np.isnan(result)] = np.inf  # an update with infinity is far from all others
        inexact.flat[:: len(result) + 1] = False
        squares = torch.from_numpy(result)
        if inexact.any():
            self._recompute(squares, np.argwhere(np.triu(inexact & (scale > 0))).tolist())
        return squares

    def squares_deciding(self, scores_of: Scores, count: int) -> Tensor:
        """Return squared distances [m, m], precise enough to find the `count` smallest scores.

        On a GPU, this is often faster than `squared_distances`. See `RoughDistances.deciding` for the arguments.
        """
        rough = self._rough if self._rough_first and "_basis" not in vars(self) else None
        squares = None if rough is None else rough.deciding(scores_of, count)
        return self.squared_distances if squares is None else squares

    @cached_property
    def _rough(self) -> RoughDistances | None:
        return rough_distances(self._updates, _short_update(self._updates, self._reduce))

    @cached_property
    def distances(self) -> Tensor:
        """Distances |z_i - z_j| of all pairs of rows, [m, m]."""
        return self.squared_distances.sqrt()

    def distances_to(self, coefficients: np.ndarray) -> np.ndarray:
        """Return the distances [m] of all rows z_i from the point sum_i a_i z_i.

        The coefficients a [m] must sum to one.
        """
        pulled = times(self.offsets, coefficients)
        squared_norms = self.offsets.numpy().diagonal()
        return np.sqrt(np.maximum(squared_norms - 2 * pulled + coefficients @ pulled, 0))

    def _recompute(self, result: Tensor, pairs: list[list[int]]) -> None:
        """Recompute the squared distances of some pairs (i, j) of rows more precisely, and write them to `result`."""
        first_equal: dict[int, int] = {}
        for i, pairs_of_i in groupby(pairs, lambda pair: pair[0]):
            others = [] if i in first_equal else [j for _, j in pairs_of_i if j not in first_equal]
            for j, difference in zip(others, self._squared_differences(i, others), strict=True):
                result[i, j] = result[j, i] = difference
                if difference == 0:
                    first_equal[j] = i
        for j, i in first_equal.items():
            result[j] = result[i]
            result[:, j] = result[:, i]
            result[j, j] = result[i, j] = result[j, i] = 0

    def _squared_differences(self, i: int, others: list[int]) -> list[float]:
        """Return the squared distances of row i from the rows at the positions `others`."""
        if not others:
            return []
        if self._updates.device.type == "cpu":
            totals = torch.stack([self._squared_difference(i, j) for j in others])
        else:
            totals = self._squared_differences_on_gpu(i, others)
        return self._reduce(totals, "sum").tolist()

    def _squared_differences_on_gpu(self, i: int, others: list[int]) -> Tensor:
        """Return the squared distances of row i from the rows `others`, computed on a GPU, as a tensor on the CPU."""
        updates, wide = self._updates, wide_dtype(self._updates.device)
        weights, totals = self._coordinates[i, :-1] - self._coordinates[others, :-1], torch.zeros(len(others)).double()
        differ, chosen = weights.any(1), weights.any(0).nonzero().flatten()
        if not differ.any():  # the same combination of the updates
            return totals
        factors = to_device(weights[differ][:, chosen].to(wide), updates.device)
        chosen = to_device(chosen, updates.device)
        away = (factors @ updates[:, block].index_select(0, chosen).to(wide) for block in small_blocks(updates))
        (totals[differ],) = on_host(total_of(part.square().sum(1) for part in away))
        return totals

    def _squared_difference(self, i: int, j: int) -> Tensor:
        """Return the squared distance of rows i and j on a CPU, over the columns of this process only."""
        updates, total = self._updates, torch.zeros((), dtype=torch.double)
        weights = self._coordinates[i, :-1] - self._coordinates[j, :-1]
        chosen = weights.nonzero().flatten()
        if not len(chosen):  # the same combination of the updates
            return total
        for block in small_blocks(updates):
            away = weights[chosen] @ updates[:, block].index_select(0, chosen).double()
            total += away @ away
        return total


def require_no_overflow(products: Tensor, updates: Tensor, reduce: Reduce = keep_own) -> None:
    """Raise ExperimentError if inner products of finite updates have overflowed."""
    if np.isfinite(products.numpy()).all():
        return
    if not reduce(torch.tensor([float(not all_finite(updates))]), "max").any():
        raise ExperimentError(
            f"updates: their squared norms overflow (values up to {float(updates.abs().max()):.3g}); scale the "
            "updates down"
        )


def _products(updates: Tensor, reduce: Reduce, known: Tensor | None = None) -> Tensor:
    """Return the inner products of the n centred updates and the centre itself, float64 [n + 1, n + 1].

    The centre is an update with a small norm, which is subtracted from all updates.

    Args:
        updates: updates of the n workers, [n, d].
        reduce: function that sums a tensor over all processes, if each process has only some of the columns.
        known: result of this function for the first updates, if already computed.
    """
    # Of the known products, that of the centre is 0.
    centre = _short_update(updates, reduce) if known is None else known.diagonal()[:-1].argmin().reshape(1)
    of_device = _products_of_blocks if updates.device.type == "cpu" else _products_on_gpu
    products = torch.from_numpy(of_device(updates, centre, reduce, known))
    require_no_overflow(products, updates, reduce)
    return products


def _short_update(updates: Tensor, reduce: Reduce) -> Tensor:
    """Return the position of an update with a small norm, int64 [1], on the device of the updates."""
    sample, wide = sampled_columns(updates), wide_dtype(updates.device)
    if updates.device.type != "cpu":
        lengths = torch.linalg.vector_norm(sample, dim=(1, 2), dtype=wide)
        return reduce(lengths, "sum").argmin().reshape(1)
    sample = sample.flatten(1).to(wide)
    return reduce(torch.linalg.vecdot(sample, sample), "sum").argmin().reshape(1)


def _products_of_blocks(updates: Tensor, centre: Tensor, reduce: Reduce, known: Tensor | None) -> np.ndarray:
    """Compute the result of `_products` on a CPU, with the same arguments.

    `centre` is the position of the update that is subtracted, int64 [1].
    """
    n, first, row = len(updates), 0 if known is None else len(known) - 1, int(centre)
    total = torch.zeros(n - first, n, dtype=torch.double)
    with alone_if_few(n):
        for _, rows in wide_blocks(updates):
            middle = rows.index_select(0, centre)
            rows.sub_(middle).index_copy_(0, centre, middle)  # the centre itself replaces its difference of 0
            _add_products(total, rows)
    lower = torch.zeros(n, n, dtype=torch.double)
    lower[first:] = reduce(total, "sum")
    if known is not None:
        lower[:first, :first] = known[:first, :first]
        lower[row, :first] = lower[:first, row] = known[first, :first]
        lower[row, row] = known[first, first]
    lower = lower.tril()
    products = lower + lower.tril(-1).t()
    basis = np.zeros((n + 1, n + 1))
    basis[:n, :n] = products
    basis[n, :n] = basis[:n, n] = products[row]
    basis[n, n] = products[row, row]
    basis[row] = basis[:, row] = 0
    return basis


def _products_on_gpu(updates: Tensor, centre: Tensor, reduce: Reduce, known: Tensor | None) -> np.ndarray:
    """Compute the result of `_products_of_blocks` on a GPU, with few kernel launches and one wait for the GPU."""
    n, first, wide = len(updates), 0 if known is None else len(known) - 1, wide_dtype(updates.device)
    centre, parts = to_device(centre, updates.device), []
    for block in small_blocks(updates):
        part = updates[:, block]
        rows = part.new_empty(n + 1, part.shape[1], dtype=wide)
        rows[n:] = part.index_select(0, centre)
        torch.sub(part, rows[n:], out=rows[:n])  # in double precision; the last row is the centre itself
        parts.append(rows[first:] @ rows.t())
    (total,) = on_host(total_of(parts))
    of_last = reduce(total, "sum").numpy()
    basis, corner = np.empty((n + 1, n + 1)), of_last[:, first:]
    basis[first:, first:] = (corner + corner.T) / 2  # exactly symmetric
    basis[first:, :first] = of_last[:, :first]
    basis[:first, first:] = of_last[:, :first].T
    if known is not None:
        basis[:first, :first] = known[:first, :first]
        basis[n, :first] = basis[:first, n] = known[first, :first]
        basis[n, n] = known[first, first]
    return basis


def _add_products(total: Tensor, rows: Tensor) -> None:
    """Add the inner products between the last m rows and all n rows to `total` [m, n], in place.

    Most entries above the diagonal of the [n, n] product are omitted, because the product is symmetric.
    """
    if len(rows) <= FEW_ROWS and len(total) == len(rows):
        _add_few_products(total.numpy(), rows.numpy())
        return
    first = len(rows) - len(total)
    for start in range(0, len(rows), STRIP):
        end, below = start + STRIP, max(start, first)
        total[below - first :, start:end].addmm_(rows[below:], rows[start:end].t())


def _add_few_products(total: np.ndarray, rows: np.ndarray) -> None:
    """Add the inner products of all pairs of n rows to `total` [n, n], in place. Fast for small n."""
    n, width = rows.shape
    parts = math.ceil(width / min(512, UNSHARED // n**2))
    step = width // parts
    whole = parts * step
    stack = rows[:, :whole].reshape(n, parts, step).transpose(1, 0, 2)
    with np.errstate(all="ignore"):  # overflow gives infinity
        # The last row is excluded on the right, because NumPy multiplies a matrix with itself more slowly.
        total[:, :-1] += np.matmul(stack, stack[:, :-1].transpose(0, 2, 1)).sum(0)
        total[:, :-1] += rows[:, whole:] @ rows[:-1, whole:].T
        total[-1, -1] += rows[-1] @ rows[-1]


def times(matrix: Tensor, values: np.ndarray) -> np.ndarray:
    """Return the product matrix [m, m] @ values [m]."""
    return (matrix @ torch.from_numpy(values)).numpy()


def stable_order(values: Tensor) -> Tensor:
    """Return the indices that sort `values` [..., n] in ascending order along the last dimension.

    Values that differ only by rounding count as equal, and keep their order.
    """
    numbers = values.numpy()
    order = numbers.argsort(axis=-1, kind="stable")
    ascending = numbers[order] if numbers.ndim == 1 else np.take_along_axis(numbers, order, -1)
    with np.errstate(all="ignore"):  # relative to the lower value, which may be next to infinity
        step = ascending[..., 1:] - ascending[..., :-1] > TIED * np.abs(ascending[..., :-1])
    if not step.all():  # ties
        rank = np.zeros(numbers.shape, dtype=int)
        np.put_along_axis(rank, order[..., 1:], step.cumsum(-1), -1)
        order = rank.argsort(axis=-1, kind="stable")
    return torch.from_numpy(order)
