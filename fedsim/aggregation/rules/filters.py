"""Rules that accept or reject each row on its own, so that they also work where the server receives one row at a time.

A rejected row has the coefficient 0. If all rows are rejected, the result is zero.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from torch import Tensor

from fedsim.aggregation.numerics.columns import distances_on_device, distances_to, on_host, products_with
from fedsim.aggregation.rule import ByzantineCount, LinearCombination, rule
from fedsim.core.numbers import Example, NonNegativeFloat, PositiveFloat
from fedsim.errors import ExperimentError


@rule("zeno_plus_plus")
def zeno_plus_plus(
    updates: Tensor,
    root: Tensor,
    local_lr: float | None,
    *,
    gamma: PositiveFloat | None = None,
    rho: NonNegativeFloat = 0.001,
    epsilon: NonNegativeFloat = 0.0,
) -> LinearCombination:
    """Accept gradients that would reduce the loss of the server's own samples (Zeno++, Xie et al. 2020).

    Let v = `root`. Each gradient is first scaled to the norm of v, g = x |v| / |x|. It is accepted if its score
    gamma <v, g> - rho |g|^2 is at least -gamma epsilon. The score estimates by how much a step with learning rate gamma
    along g reduces the loss. With epsilon = 0, a gradient is accepted if its cosine with v is at least rho / gamma.

    The paper accepts one gradient at a time. For several rows, the result is the mean of the accepted g.

    Args:
        updates: gradients or updates of the n workers, [n, d].
        root: gradient or update computed on the server's own data, [d].
        local_lr: learning rate of the client algorithm, or None if it has none.
        gamma: learning rate in the score, > 0. None: `local_lr`, which is 0.1 in `fedsim.aggregate`.
        rho: weight of the squared norm, >= 0.
        epsilon: tolerance of the score, >= 0.

    Returns the mean of the accepted, scaled rows [d]. Raises ExperimentError without a learning rate. Cost: three
    passes over the updates.

    >>> updates = torch.tensor([[2.0, 0.0], [-9.0, 0.0]])
    >>> fedsim.aggregate(updates, "zeno_plus_plus", root=torch.tensor([1.0, 0.0]))
    tensor([1., 0.])
    """
    gamma = local_lr if gamma is None else gamma
    if gamma is None:
        raise ExperimentError("zeno_plus_plus: needs the parameter gamma, because the client algorithm has no lr")
    of_root = distances_on_device(root.unsqueeze(0), None)
    lengths, length, products = on_host(distances_on_device(updates, None), of_root, products_with(updates, root))
    scale = torch.where(lengths > 0, length / lengths, 0.0)
    accepted = gamma * scale * products - rho * length**2 >= -gamma * epsilon
    return _mean_of(accepted & (lengths > 0), scale)


@rule("afl_guard")
def afl_guard(updates: Tensor, root: Tensor, *, lam: Annotated[PositiveFloat, Example(1.0)]) -> LinearCombination:
    """Accept rows that are near the server's own update (AFLGuard, Fang et al. 2022).

    A row x is accepted if |x - root| <= lam |root|. The paper accepts one update at a time. For several rows, the
    result is the mean of the accepted rows.

    Args:
        updates: updates of the n workers, [n, d].
        root: update computed on the server's own data, [d].
        lam: maximum distance, relative to the norm of `root`, > 0.

    Returns the mean of the accepted rows [d]. Cost: two passes over the updates.

    >>> updates = torch.tensor([[1.5, 0.0], [-9.0, 0.0]])
    >>> fedsim.aggregate(updates, "afl_guard", root=torch.tensor([1.0, 0.0]), lam=1.0)
    tensor([1.5000, 0.0000])
    """
    of_root = distances_on_device(root.unsqueeze(0), None)
    distances, length = on_host(distances_on_device(updates, root), of_root)
    return _mean_of(distances <= lam * length)


@rule("kardam")
def kardam(
    updates: Tensor,
    models: Tensor,
    staleness: Tensor,
    workers: list[int],
    state: dict[str, Tensor] | None,
    *,
    f: ByzantineCount,
    against: Literal["server", "worker"] = "server",
    dampening: Literal["exponential", "inverse"] = "exponential",
    alpha: NonNegativeFloat = 0.2,
) -> tuple[LinearCombination, dict[str, Tensor]]:
    """Accept gradients that changed no faster than the gradients of most workers (Kardam, Damaskinos et al. 2018).

    The empirical Lipschitz coefficient of two gradients g and h, computed at the models x and y, is |g - h| / |x - y|.
    The coefficient of a worker is that of its last two gradients. Gradients at equal models do not change it.

    A gradient is accepted if its coefficient is at most the (m - f)-th smallest of the m workers' coefficients known so
    far, the quantile (m - f) / m. (If m <= f, it is the smallest one.) With `against` = "server", the coefficient is
    that of the new gradient and the gradient that the server accepted last. With "worker", it is the coefficient of the
    gradient's worker. The gradient is also accepted if no coefficient is known yet, or after as many rejections in a
    row as there are workers that have sent a gradient.

    A gradient with staleness tau is multiplied by exp(-alpha tau), or by 1 / (1 + tau) with `dampening` = "inverse".

    This follows the authors' code (github.com/LPD-EPFL/kardam), with these differences. The models x and y are those at
    which the gradients were computed, not the server's models before and after its last step, which are the same
    without delay. A worker's coefficient is the latest one, not the largest of the last 25, and it is computed without
    learning rate and dampening. The quantile depends on f, and is not fixed at 2/3. The paper's frequency filter, which
    limits how often a worker is accepted, is left out.

    The paper accepts one gradient at a time. Several rows are accepted or rejected one after another, in their order.
    The result is the mean of the accepted rows.

    Args:
        updates: gradients of the n workers, [n, d].
        models: model at which each gradient was computed, [n, d].
        staleness: number of updates of the global model since each worker read it, int64 [n].
        workers: IDs of the n workers.
        state: each worker's last gradient and model, its coefficient, and what the server accepted last. None: no
            gradients were sent before.
        f: number of Byzantine workers.
        against: what the gradient is compared with: "server" or "worker".
        dampening: how the weight depends on the staleness: "exponential" or "inverse".
        alpha: rate of the exponential dampening, >= 0. 0 is no dampening.

    Returns the mean of the accepted, dampened rows [d] and the next state. Cost: the gradients and models of all
    workers in memory, and five passes over the updates and models.

    >>> inputs = fedsim.aggregation.AggregationInputs(
    ...     updates=torch.tensor([[0.0], [1.0], [2.0], [3.0], [-40.0]]),  # gradients of x^2 / 2, except the last one
    ...     models=torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0]]),
    ...     workers=[0, 1, 0, 1, 0],
    ... )
    >>> pipeline = fedsim.aggregation.make_pipeline(fedsim.aggregation.resolve("kardam", {"f": 1}))
    >>> pipeline(inputs).update
    tensor([1.5000])
    """
    state = dict(state or {})
    distances_to(updates, None)  # reads all rows, see `on_host`
    accepted = torch.zeros(len(updates), dtype=torch.bool)
    rejections = int(state.get("rejections", 0))
    for row, worker in enumerate(workers):
        sent = torch.stack([updates[row], models[row]])
        before, last = state.get(f"worker {worker}"), state.get("server")
        if before is None or not torch.equal(before[1], sent[1]):
            state[f"worker {worker}"] = sent
            if before is not None:
                state[f"coefficient {worker}"] = torch.tensor([_lipschitz(sent, before)], dtype=torch.double)
        known = sorted(float(value) for name, value in state.items() if name.startswith("coefficient"))
        if against == "worker":
            coefficient = float(state.get(f"coefficient {worker}", -math.inf))
        else:
            coefficient = -math.inf if last is None else _lipschitz(sent, last)
        senders = sum(name.startswith("worker") for name in state)
        if not known or coefficient <= known[max(len(known) - f, 1) - 1] or rejections >= senders:
            state["server"], accepted[row], rejections = sent, True, 0
        else:
            rejections += 1
    state["rejections"] = torch.tensor([rejections])
    tau = staleness.double()
    return _mean_of(accepted, (-alpha * tau).exp() if dampening == "exponential" else 1 / (1 + tau)), state


def _lipschitz(sent: Tensor, before: Tensor) -> float:
    """Return |g - h| / |x - y| for two pairs of a gradient and a model, `sent` = (g, x) and `before` = (h, y), [2, d].

    It is infinite if only the models are equal, and 0 if both are.
    """
    change, moved = (float(distances_to(now.unsqueeze(0), then)) for now, then in zip(sent, before, strict=True))
    return change / moved if moved else math.inf if change else 0.0


def _mean_of(accepted: Tensor, factors: Tensor | None = None) -> LinearCombination:
    """Return the mean of the accepted rows (a mask [n]), each multiplied by its factor [n]. It is zero if none is."""
    coefficients = accepted.double() / max(1, int(accepted.sum()))
    return LinearCombination(coefficients if factors is None else torch.where(accepted, factors * coefficients, 0))
