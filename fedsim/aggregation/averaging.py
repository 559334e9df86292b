"""Averages: the plain one, the weighted one, and q-fair federated averaging."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedsim.aggregation.columns import squared_norms
from fedsim.aggregation.rule import Mix, Positive, rule
from fedsim.errors import ExperimentError
from fedsim.system.devices import to_device

LEAST_LOSS = 1e-10  # so that a loss of zero can be raised to a negative power


@rule("mean", columnwise=True, linear=True)
def mean(updates: Tensor, weights: Tensor | None = None) -> Tensor:
    """The plain average of the rows, or their weighted average where weights are given.

    Updates [n, d], result [d]. Any n >= 1; all weights zero is an error. Cost: one pass over the updates.
    """
    if weights is not None:
        return weighted_mean(updates, weights)
    if updates.element_size() < 4:  # sums of half precision may be too large for it
        return updates.mean(0)
    return (updates.new_ones(len(updates)) @ updates).div_(len(updates))  # faster than updates.mean(0)


@rule("weighted_mean", columnwise=True, linear=True)
def weighted_mean(updates: Tensor, weights: Tensor) -> Tensor:
    """Sum of p_k x_k with p_k = weight_k / sum of weights: FedAvg's average (McMahan et al. 2017).

    The weights may lie on the CPU, whatever the device of the updates; then nothing here waits for that device.

    All weights zero is an error. Cost: one pass over the [n, d] updates.
    """
    total = weights.sum()
    if total <= 0:
        raise ExperimentError("weighted_mean: all weights of this cohort are zero")
    if (weights == 0).any():  # such a row does not count even where it is not finite
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
) -> Mix:
    """q-FedAvg: workers with a higher loss count for more (Li et al. 2020, "Fair resource allocation").

    With g_k = -x_k / lr, lr the workers' learning rate, and F_k worker k's loss at the global row:
    h_k = q F_k^(q-1) |g_k|^2 + F_k^q / lr, and the result is -sum F_k^q g_k / sum h_k; q = 0 is the plain mean.
    With sync = "gradients" this is q-FedSGD: g_k is the row itself, and the result is sum F_k^q g_k / sum h_k / lr,
    along which the local solver takes its step of rate lr. lr is that of the local solver (1 / L in the paper) unless
    it is given; in `fedsim.aggregate` it is 0.1. Needs `losses` [n], >= 0. Cost: two passes over the [n, d] updates.
    """
    lr = local_lr if lr is None else lr
    if lr is None:
        raise ExperimentError("qfedavg: needs lr, since the local solver has none")
    if bool((losses < 0).any()):
        raise ExperimentError(f"qfedavg: losses must be >= 0; the least here is {float(losses.min()):g}")
    raised = torch.where(losses == 0, LEAST_LOSS, losses).cpu()
    steps = raised**q / lr
    if q:  # or nothing depends on the squares, even where they overflow
        squares = squared_norms(updates).cpu().double()
        steps += q * raised ** (q - 1) * (squares if sync == "gradients" else squares / lr**2)
    return Mix(raised**q / lr / steps.sum())
