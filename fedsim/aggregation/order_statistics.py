"""Rules that look at each coordinate by itself."""

from __future__ import annotations

from torch import Tensor

from fedsim.aggregation.columns import map_columns
from fedsim.aggregation.rule import Count, require, rule
from fedsim.aggregation.sorting import map_sorted_columns, mean_nearest, middle, middle_places


@rule("median", columnwise=True)
def median(updates: Tensor) -> Tensor:
    """The median of each coordinate; between the two middle values for even n (Yin et al. 2018).

    Any n >= 1. Updates [n, d], result [d]. Cost: n log n comparisons per coordinate.
    """
    return map_sorted_columns(updates, lambda ascending, _: middle(ascending), middle_places(len(updates)))


@rule("trimmed_mean", columnwise=True)
def trimmed_mean(updates: Tensor, *, f: Count) -> Tensor:
    """Per coordinate the mean without the f largest and the f smallest values (Yin et al. 2018).

    Needs 2f < n; f = 0 is the mean. Updates [n, d], result [d]. Cost: n log n comparisons per coordinate.
    """
    n = len(updates)
    require(2 * f < n, "trimmed_mean", "2f < n", f=f, n=n)
    return map_sorted_columns(updates, lambda ascending, _: ascending.mean(0), range(f, n - f))


@rule("meamed", columnwise=True)
def meamed(updates: Tensor, *, f: Count) -> Tensor:
    """Mean around median: per coordinate the mean of the n - f values nearest the median (Xie et al. 2018).

    Needs 2f < n. Of equally near values those of the first rows count. Updates [n, d], result [d]. Cost: n log n
    comparisons per coordinate.
    """
    n = len(updates)
    require(2 * f < n, "meamed", "2f < n", f=f, n=n)
    return map_sorted_columns(
        updates, lambda ascending, block: mean_nearest(ascending, block, middle(ascending), n - f)
    )


@rule("phocas", columnwise=True)
def phocas(updates: Tensor, *, f: Count) -> Tensor:
    """Per coordinate the mean of the n - f values nearest the f-trimmed mean (Xie et al. 2018, "Phocas").

    Needs 2f < n. Of equally near values those of the first rows count. Updates [n, d], result [d]. Cost: n log n
    comparisons per coordinate.
    """
    n = len(updates)
    require(2 * f < n, "phocas", "2f < n", f=f, n=n)

    def around_trimmed_mean(ascending: Tensor, block: Tensor) -> Tensor:
        return mean_nearest(ascending, block, ascending[f : n - f].mean(0), n - f)

    return map_sorted_columns(updates, around_trimmed_mean)


@rule("sign_vote", columnwise=True)
def sign_vote(updates: Tensor) -> Tensor:
    """Majority vote on the sign of each coordinate: sign(sum_k sign(x_k)), ties 0 (signSGD, Bernstein et al. 2019).

    The result is -1, 0 or 1, so it needs a small server learning rate. Cost: one pass over the [n, d] updates.
    """
    return map_columns(updates, lambda block: block.sign().sum(0).sign())
