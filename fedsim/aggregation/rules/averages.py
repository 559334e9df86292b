"""Averages: the plain one, the weighted one, and q-fair federated averaging."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedsim.aggregation.numerics.columns import squared_norms
from fedsim.aggregation.numerics.threads import alone_if_few
from fedsim.aggregation.rule import LinearCombination, Positive, rule
from fedsim.errors import ExperimentError
from fedsim.system.devices import to_device

LEAST_LOSS = 1e-10  # so that a loss of zero can be raised to a negative power


@rule("mean", columnwise=True, linear=True)
def mean(updates: Tensor, weights: Tensor | None = None, weight_total: float | None = None) -> Tensor:
    """The plain average of the rows, or their weighted average if weights are given.

    Args:
        updates: [n, d], n >= 1.
        weights: [n], not all zero; None: equal weights.
        weight_total: as in `weighted_mean`.

    Returns [d]. Cost: one pass over the updates.

    >>> fedsim.aggregate(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), rule="mean")
    tensor([2., 3.])
    """
    if weights is not None:
        return weighted_mean(updates, weights, weight_total)
    if updates.element_size() < 4:  # sums of half precision may be too large for it
        return updates.mean(0)
    n = updates.shape[0]
    with alone_if_few(n):  # on a CPU the product has one thread, and a division is too short for several
        return torch.mv(updates.t(), updates.new_ones(n)).div_(n)  # faster than updates.mean(0)


@rule("weighted_mean", columnwise=True, linear=True)
def weighted_mean(updates: Tensor, weights: Tensor, weight_total: float | None = None) -> Tensor:
    """Sum of p_k x_k with p_k = weight_k / sum of weights: the average of FedAvg (McMahan et al. 2017).

    Weights by inverse probability are divided by 1, not by their sum: the estimator of Horvitz and Thompson (1952).

    Args:
        updates: [n, d].
        weights: [n]; they may be on the CPU, whatever the device of the updates.
        weight_total: divides the weights; None: their sum.

    Returns [d]. Raises ExperimentError if all weights are zero. Cost: one pass over the updates.

    >>> fedsim.aggregate(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [3, 1], "weighted_mean")
    tensor([1.5000, 2.5000])
    """
    total = weights.sum() if weight_total is None else weight_total
    if weights.sum() <= 0:
        raise ExperimentError("weighted_mean: all weights of this cohort are zero")
    if (weights == 0).any():  # 0 times infinity would be NaN
        updates, weights = updates[weights > 0], weights[weights > 0]
    return to_device((weights / total).to(updates.dtype), updates.device) @ updates


@rule("qfedavg")
def qfedavg(
    updates: Tensor,
    losses: Tensor,
    local_lr: float | None,
    sync: str,
    *,
    q: Annotated[float, Field(ge=0)] = 1.0,
    lr: Positive | None = None,
) -> LinearCombination:
    """q-FedAvg: workers with a higher loss get a higher weight (Li et al. 2020, "Fair resource allocation").

    With g_k = -x_k / lr and the loss F_k of worker k at the global row, h_k = q F_k^(q-1) |g_k|^2 + F_k^q / lr, and the
    result is -sum F_k^q g_k / sum h_k. q = 0 is the plain mean. With sync = "gradients" this is q-FedSGD: g_k is the
    row itself, and the result is sum F_k^q g_k / sum h_k / lr, along which the client algorithm steps with the learning
    rate lr.

    Args:
        updates: [n, d].
        losses: [n], >= 0.
        q: >= 0.
        lr: 1 / L in the paper; None: the client algorithm's learning rate, or 0.1 in `fedsim.aggregate`.

    Returns [d]. Raises ExperimentError for a negative loss, or without a learning rate. Cost: two passes over the
    updates.

    >>> updates = torch.tensor([[1.0], [2.0]])
    >>> fedsim.aggregate(updates, rule="qfedavg", losses=[0.1, 5.0])
    tensor([0.1833])
    """
    lr = local_lr if lr is None else lr
    if lr is None:
        raise ExperimentError("qfedavg: needs lr, since the client algorithm has none")
    if bool((losses < 0).any()):
        raise ExperimentError(f"qfedavg: losses must be >= 0; the least here is {float(losses.min()):g}")
    raised = torch.where(losses == 0, LEAST_LOSS, losses).cpu()
    steps = raised**q / lr
    if q:  # else the squares, which may overflow, are not needed
        squares = squared_norms(updates).cpu().double()
        steps += q * raised ** (q - 1) * (squares if sync == "gradients" else squares / lr**2)
    return LinearCombination(raised**q / lr / steps.sum())
