"""Order statistics of each column: sorted values, the median, the mean of the values nearest a point."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BY_NUMPY = (torch.float32, torch.float64)  # its sort of short columns is vectorised, PyTorch's is not


def sorted_columns(block: Tensor) -> Tensor:
    """The values of each column in ascending order, NaN last: a new tensor [n, columns]."""
    if block.device.type != "cpu" or block.dtype not in BY_NUMPY:
        return block.t().sort(dim=1).values.t()
    columns = np.array(block.detach().numpy().T, order="C", copy=True)  # always a copy, also of a column-major block
    columns.sort(axis=1)
    return torch.from_numpy(columns).t()


def middle(ascending: Tensor) -> Tensor:
    """The median [columns] of sorted values [n, columns]: the mean of the two middle values for even n."""
    n = len(ascending)
    return (ascending[(n - 1) // 2] + ascending[n // 2]) / 2


def mean_around_median(block: Tensor, keep: int) -> Tensor:
    """Per column the mean of the `keep` values nearest the median, ties by row."""
    ascending = sorted_columns(block)
    return mean_nearest(ascending, block, middle(ascending), keep)


def mean_nearest(ascending: Tensor, block: Tensor, centre: Tensor, keep: int) -> Tensor:
    """Per column the mean of the `keep` values nearest `centre` [columns], ties by row.

    `ascending` [n, columns] are the sorted values of `block` [n, columns]; they are overwritten.
    """
    n = len(ascending)
    if keep == n:
        return ascending.mean(0)
    if block.device.type != "cpu":  # a search for ties would wait for the device
        return _mean_of_first(block, centre, keep)
    away = (ascending - centre).abs_()
    # The nearest values are adjacent. For each place where they may begin: the distance of the farthest value.
    reach = torch.maximum(away[: n - keep + 1], away[keep - 1 :]).amin(0)
    far = away.gt_(reach)  # 1 or 0, which is faster than true or false
    result = ascending.addcmul_(ascending, far, value=-1).sum(0) / keep
    tied = ((far.sum(0) != n - keep) | ~result.isfinite()).nonzero().flatten()
    if len(tied):  # rare, unless rows repeat or are not finite; then the rows of the values matter
        result[tied] = _mean_of_first(block[:, tied], centre[tied], keep)
    return result


def _mean_of_first(values: Tensor, centre: Tensor, keep: int) -> Tensor:
    """`mean_nearest` by a stable sort of the distances from the centre."""
    order = (values - centre).abs_().argsort(dim=0, stable=True)[:keep]
    return values.gather(0, order).mean(0)
