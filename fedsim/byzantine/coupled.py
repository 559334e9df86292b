"""Attacks that depend on earlier rounds. They keep a state between rounds, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.byzantine.base import attack_strategy
from fedsim.byzantine.crafted import z_max
from fedsim.byzantine.statistics import blocks_of, mean_and_std, mean_of
from fedsim.core.numbers import NonNegativeFloat, NonNegativeInt
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
    """Return a copy of one honest worker's update, which thereby gets a higher weight (Karimireddy et al. 2022).

    With `warmup` = 0, the attackers copy the honest worker at position `epsilon`. Otherwise they choose the worker
    themselves. In the first `warmup` aggregations they estimate the direction z in which the honest updates x_i differ
    most, and the mean m of these updates, with running averages:

        m <- (t m + mean_i x_i) / (t + 1)
        z <- t z + sum_i (x_i - m) <x_i - m, z>, divided by its norm

    t counts the aggregations from 0, and z starts as a random direction. The score of honest worker i is the absolute
    value of the sum of <z, x_i> over the aggregations of the warm-up so far. In every round, also during the warm-up,
    the attackers copy the honest worker of the cohort with the highest score.

    Args:
        honest: updates of the h honest workers, [h, d].
        workers: IDs of the h honest workers.
        state: direction z [d], mean m [d], sums of <z, x_i> by worker ID, and t.
        draws: draws the first direction.
        epsilon: position of the honest update to copy, 0 <= epsilon < h, if `warmup` = 0.
        warmup: number of aggregations in which z and m are estimated, >= 0.

    Returns the update [d] that all attackers send, and the next state. Raises ExperimentError if epsilon >= h. Cost: a
    copy for each attacker, and four passes over the honest updates in each aggregation of the warm-up.

    >>> fedsim.attack(torch.tensor([[1.0], [3.0]]), "mimic", 2, epsilon=1)
    tensor([[3.],
            [3.]])
    """
    if not warmup:
        if epsilon >= len(honest):
            h = len(honest)
            raise ExperimentError(f"attack.epsilon = {epsilon}: must be less than {h}, the number of honest workers")
        return honest[epsilon], {}
    if not state or state["t"] < warmup:
        state = _direction_of(honest, workers, state, draws)
    sums = [float(state["sums"][worker].abs()) if worker < len(state["sums"]) else 0.0 for worker in workers]
    return honest[max(range(len(sums)), key=sums.__getitem__)], state


def _direction_of(honest: Tensor, workers: list[int], state: State, draws: Draws) -> State:
    """Return the state of `mimic` after one more aggregation of the warm-up."""
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
    """Return small deviations from the honest mean that add up over the rounds (Karimireddy et al. 2021).

    Each coordinate of the result is mean - z sign(s) std of the honest updates, where s is the sum of the honest means
    up to this round. As with `alie`, the result is near the mean in each round. But all deviations point against the
    direction in which the model has moved so far. A rule that does not remember earlier rounds cannot detect this.

    Args:
        honest: updates of the h honest workers, [h, d], h >= 2.
        n_byzantine: number of attackers.
        state: sum s of the honest means in earlier rounds, [d].
        z: number of standard deviations, >= 0. None: the z of `alie`.

    Returns the update [d] that all attackers send, and the next state. Raises ExperimentError if h < 2, or if z is None
    and the z of `alie` is undefined. Cost: one pass over the honest updates.

    >>> fedsim.attack(torch.tensor([[1.0], [2.0], [3.0]]), "time_coupled", 1, z=2.0)
    tensor([[0.]])
    """
    mean, std = mean_and_std(honest, ddof=1)
    path = state["path"] + mean if state else mean.clone()
    factor = z_max(len(honest) + n_byzantine, n_byzantine) if z is None else z
    return mean - factor * path.sign() * std, {"path": path}
