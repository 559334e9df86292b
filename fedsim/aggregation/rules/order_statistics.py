"""Rules that aggregate each coordinate separately."""

from __future__ import annotations

from torch import Tensor

from fedsim.aggregation.numerics.columns import map_columns
from fedsim.aggregation.numerics.sorting import map_sorted_columns, mean_nearest, middle, middle_positions
from fedsim.aggregation.rule import ByzantineCount, require, rule


@rule("median", columnwise=True)
def median(updates: Tensor) -> Tensor:
    """Return the coordinate-wise median: for even n, the mean of the two middle values (Yin et al. 2018).

    Args:
        updates: updates of the n workers, [n, d], n >= 1.

    Returns the median [d]. Cost: n log n comparisons per coordinate.

    >>> fedsim.aggregate(torch.tensor([[1.0, 9.0], [2.0, 8.0], [99.0, -99.0]]), "median")
    tensor([2., 8.])
    """
    return map_sorted_columns(updates, lambda ascending, _: middle(ascending), middle_positions(len(updates)))


@rule("trimmed_mean", columnwise=True)
def trimmed_mean(updates: Tensor, *, f: ByzantineCount) -> Tensor:
    """Return the mean of each coordinate without its f largest and f smallest values (Yin et al. 2018).

    Args:
        updates: updates of the n workers, [n, d].
        f: number of values to drop at each end, 2f < n. 0 is the mean.

    Returns the trimmed mean [d]. Cost: n log n comparisons per coordinate.

    >>> fedsim.aggregate(torch.tensor([[1.0], [2.0], [3.0], [99.0]]), "trimmed_mean", f=1)
    tensor([2.5000])
    """
    n = len(updates)
    require(2 * f < n, "trimmed_mean", "2f < n", f=f, n=n)
    return map_sorted_columns(updates, lambda ascending, _: ascending.mean(0), range(f, n - f))


@rule("meamed", columnwise=True)
def meamed(updates: Tensor, *, f: ByzantineCount) -> Tensor:
    """Return the mean of the n - f values nearest the median, for each coordinate (Xie et al. 2018).

    Of equally near values, those of the first workers are chosen.

    Args:
        updates: updates of the n workers, [n, d].
        f: number of Byzantine workers, 2f < n.

    Returns the mean around the median [d]. Cost: n log n comparisons per coordinate.

    >>> fedsim.aggregate(torch.tensor([[1.0], [2.0], [3.0], [99.0]]), "meamed", f=1)
    tensor([2.])
    """
    n = len(updates)
    require(2 * f < n, "meamed", "2f < n", f=f, n=n)
    return map_sorted_columns(
        updates, lambda ascending, block: mean_nearest(ascending, block, middle(ascending), n - f)
    )


@rule("phocas", columnwise=True)
def phocas(updates: Tensor, *, f: ByzantineCount) -> Tensor:
    """Return the mean of the n - f values nearest the f-trimmed mean, for each coordinate (Xie et al. 2018, "Phocas").

    Of equally near values, those of the first workers are chosen.

    Args:
        updates: updates of the n workers, [n, d].
        f: number of Byzantine workers, 2f < n.

    Returns the mean around the trimmed mean [d]. Cost: n log n comparisons per coordinate.

    >>> fedsim.aggregate(torch.tensor([[1.0], [2.0], [3.0], [99.0]]), "phocas", f=1)
    tensor([2.])
    """
    n = len(updates)
    require(2 * f < n, "phocas", "2f < n", f=f, n=n)
    return map_sorted_columns(
        updates, lambda ascending, block: mean_nearest(ascending, block, ascending[f : n - f].mean(0), n - f)
    )


@rule("sign_vote", columnwise=True)
def sign_vote(updates: Tensor) -> Tensor:
    """Return the majority sign of each coordinate, sign(sum_k sign(x_k)) (signSGD, Bernstein et al. 2019).

    The result is 0 for ties. Its values of -1, 0 and 1 require a small server learning rate.

    Args:
        updates: updates x_k of the n workers, [n, d].

    Returns the majority signs [d]. Cost: one pass over the updates.

    >>> fedsim.aggregate(torch.tensor([[0.1, 0.1], [0.2, -0.2], [-90.0, 0.0]]), "sign_vote")
    tensor([1., 0.])
    """
    return map_columns(updates, lambda block: block.sign().sum(0).sign())
