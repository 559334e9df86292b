"""Attacks that depend on earlier rounds. What they remember is their state, in float64."""

from __future__ import annotations

import torch
from pydantic import NonNegativeFloat, NonNegativeInt
from torch import Tensor

from fedsim.byzantine.base import attack_strategy
from fedsim.byzantine.crafted import z_max
from fedsim.byzantine.statistics import blocks_of, mean_and_std, mean_of
from fedsim.core.randomness import Draws
from fedsim.errors import ExperimentError

State = dict[str, Tensor]


@attack_strategy("mimic")
def mimic(
    honest: Tensor,
    workers: list[int],
    state: State,
    draws: Draws,
    *,
    epsilon: NonNegativeInt = 0,
    warmup: NonNegativeInt = 0,
) -> tuple[Tensor, State]:
    """All attackers copy one honest worker, which gets a higher weight (Karimireddy et al. 2022).

    With `warmup` they choose the worker: in so many aggregations they estimate the direction z in which the honest rows
    differ most, and the mean m of these rows, both by running averages:

        m <- (t m + mean_i x_i) / (t + 1)
        z <- t z + sum_i (x_i - m) <x_i - m, z>, divided by its norm

    t counts the aggregations from 0, and z begins with a random direction. The attackers copy the worker with the
    greatest |sum over the warm-up of <z, x_i>| among the honest workers of the cohort, also during the warm-up.

    Args:
        honest: [h, d].
        workers: the numbers of the h honest workers.
        state: the direction [d], the mean [d], the sums [w] of workers 0 to w - 1, and t.
        draws: draws the first direction.
        epsilon: without warm-up, the index of the honest row, 0 <= epsilon < h.
        warmup: aggregations; 0: no choice.

    Returns [d]. Raises ExperimentError for another index. Cost: a copy for each attacker; in the warm-up also four
    passes over the honest rows.

    >>> fedsim.attack(torch.tensor([[1.0], [3.0]]), 2, "mimic", epsilon=1)
    tensor([[3.],
            [3.]])
    """
    if not warmup:
        if epsilon >= len(honest):
            raise ExperimentError(f"attack.epsilon = {epsilon}: must be below the number of honest rows, {len(honest)}")
        return honest[epsilon], {}
    if not state or state["t"] < warmup:
        state = _direction_of(honest, workers, state, draws)
    sums = [float(state["sums"][worker].abs()) if worker < len(state["sums"]) else 0.0 for worker in workers]
    return honest[max(range(len(sums)), key=sums.__getitem__)], state


def _direction_of(honest: Tensor, workers: list[int], state: State, draws: Draws) -> State:
    """Return the next state of a warm-up."""
    mean = mean_of(honest)
    if not state:
        direction = draws.normal(len(mean), dtype=mean.dtype)
        zero = torch.zeros(1, dtype=torch.double)
        state = {"direction": direction / direction.norm(), "mean": torch.zeros_like(mean), "sums": zero, "t": zero}
    t, direction = state["t"].item(), state["direction"]
    mean = (t * state["mean"] + mean) / (t + 1)
    products = mean.new_zeros(len(honest))
    for columns, centred in blocks_of(honest, mean):
        products.addmv_(centred, direction[columns])
    pulled = t * direction
    for columns, centred in blocks_of(honest, mean):
        pulled[columns] += products @ centred
    direction = torch.where(pulled.norm() > 0, pulled / pulled.norm(), direction)
    along = mean.new_zeros(len(honest))
    for columns, block in blocks_of(honest):
        along.addmv_(block, direction[columns])
    sums = torch.zeros(max(*workers, len(state["sums"]) - 1) + 1, dtype=torch.double)
    sums[: len(state["sums"])] = state["sums"]
    sums[workers] += along.cpu()
    return {"direction": direction, "mean": mean, "sums": sums, "t": state["t"] + 1}


@attack_strategy("time_coupled")
def time_coupled(
    honest: Tensor, n_byzantine: int, state: State, *, z: NonNegativeFloat | None = None
) -> tuple[Tensor, State]:
    """mean - z sign(s) std of the honest rows per coordinate, where s is the sum of their means up to this round.

    In each round the row is as near the mean as that of alie, but the deviations of all rounds have one direction,
    against the path of the model, so that they add up. A rule without memory cannot see that (Karimireddy et al. 2021).

    Args:
        honest: [h, d], h >= 2.
        n_byzantine: b.
        state: the sum [d].
        z: None: that of alie.

    Returns [d]. Raises ExperimentError as alie does. Cost: one pass over the honest rows.

    >>> fedsim.attack(torch.tensor([[1.0], [2.0], [3.0]]), 1, "time_coupled", z=2.0)
    tensor([[0.]])
    """
    mean, std = mean_and_std(honest, ddof=1)
    path = state["path"] + mean if state else mean.clone()
    factor = z_max(len(honest) + n_byzantine, n_byzantine) if z is None else z
    return mean - factor * path.sign() * std, {"path": path}
