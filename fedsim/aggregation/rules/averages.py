"""Rules that average all updates: the mean, the weighted mean, and q-fair federated averaging."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.aggregation.numerics.columns import squared_norms
from fedsim.aggregation.numerics.threads import alone_if_few
from fedsim.aggregation.rule import LinearCombination, rule
from fedsim.core.numbers import NonNegativeFloat, PositiveFloat
from fedsim.errors import ExperimentError
from fedsim.system.devices import to_device

LEAST_LOSS = 1e-10  # replaces a loss of zero, which cannot be raised to a negative power


@rule("mean", columnwise=True, linear=True)
def mean(updates: Tensor, weights: Tensor | None = None, weight_total: float | None = None) -> Tensor:
    """Return the mean of the updates, or their weighted mean if weights are given.

    Args:
        updates: updates of the n workers, [n, d], n >= 1.
        weights: weight of each update, [n], not all zero. None: equal weights.
        weight_total: divisor of the weighted sum. None: the sum of the weights.

    Returns the mean [d]. Cost: one pass over the updates.

    >>> fedsim.aggregate(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "mean")
    tensor([2., 3.])
    """
    if weights is not None:
        return weighted_mean(updates, weights, weight_total)
    if updates.element_size() < 4 or updates.device.type != "cpu":  # sums may overflow in half precision
        return updates.mean(0)  # one launch
    n = updates.shape[0]
    with alone_if_few(n):  # on a CPU the product uses one thread, and the division is too short for several
        return torch.mv(updates.t(), updates.new_ones(n)).div_(n)  # faster than updates.mean(0)


@rule("weighted_mean", columnwise=True, linear=True)
def weighted_mean(updates: Tensor, weights: Tensor, weight_total: float | None = None) -> Tensor:
    """Return the weighted mean of the updates, sum_k p_k x_k, as in FedAvg (McMahan et al. 2017).

    p_k is the weight of update x_k divided by the sum of all weights. With `aggregate.weights =
    "inverse_probability"`, the divisor is 1 instead, which gives the estimator of Horvitz and Thompson (1952). With
    central differential privacy, the divisor is the expected number of updates.

    Args:
        updates: updates of the n workers, [n, d].
        weights: weight of each update, [n], on the CPU or on the device of the updates.
        weight_total: divisor of the weighted sum. None: the sum of the weights.

    Returns the weighted mean [d]. Raises ExperimentError if all weights are zero. Cost: one pass over the updates.

    >>> fedsim.aggregate(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "weighted_mean", weights=[3, 1])
    tensor([1.5000, 2.5000])
    """
    total = weights.sum() if weight_total is None else weight_total
    if weights.sum() <= 0:
        raise ExperimentError("weighted_mean: all weights of this cohort are zero; at least one must be > 0")
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
    q: NonNegativeFloat = 1.0,
    lr: PositiveFloat | None = None,
) -> LinearCombination:
    """Average the updates with higher weights for workers with a higher loss (q-FedAvg, Li et al. 2020).

    The paper is "Fair resource allocation in federated learning". Let x_k be the update of worker k, and F_k its loss
    at the global model. With g_k = -x_k / lr and h_k = q F_k^(q-1) |g_k|^2 + F_k^q / lr, the result is
    -sum_k F_k^q g_k / sum_k h_k. q = 0 is the mean.

    With sync = "gradients" the rule is q-FedSGD. g_k is the gradient that worker k sends, and the result is
    sum_k F_k^q g_k / sum_k h_k / lr. The client algorithm takes a step with learning rate lr along this result.

    Args:
        updates: workers' updates, or gradients with sync = "gradients", [n, d].
        losses: loss of each worker at the global model, [n], >= 0.
        local_lr: learning rate of the client algorithm, or None if it has none.
        sync: "parameters" or "gradients".
        q: exponent of the losses, >= 0. Higher values increase fairness.
        lr: learning rate, 1 / L in the paper, > 0. None: `local_lr`, which is 0.1 in `fedsim.aggregate`.

    Returns the aggregate [d]. Raises ExperimentError for a negative loss, or without a learning rate. Cost: two passes
    over the updates.

    >>> updates = torch.tensor([[1.0], [2.0]])
    >>> fedsim.aggregate(updates, "qfedavg", losses=[0.1, 5.0])
    tensor([0.1833])
    """
    lr = local_lr if lr is None else lr
    if lr is None:
        raise ExperimentError("qfedavg: needs the parameter lr, because the client algorithm has no learning rate")
    if bool((losses < 0).any()):
        raise ExperimentError(f"qfedavg: losses must be >= 0; the smallest one is {float(losses.min()):g}")
    raised = torch.where(losses == 0, LEAST_LOSS, losses).cpu()
    steps = raised**q / lr
    if q:  # otherwise the squared norms, which may overflow, are not needed
        squares = squared_norms(updates)
        steps += q * raised ** (q - 1) * (squares if sync == "gradients" else squares / lr**2)
    return LinearCombination(raised**q / lr / steps.sum())
