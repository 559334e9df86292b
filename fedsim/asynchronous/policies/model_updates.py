"""Policies in which workers send a model after each round of local training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from fedsim.asynchronous.policies.buffer import collect, new_buffer
from fedsim.asynchronous.policies.policy import Policy, policy
from fedsim.asynchronous.policies.server import Arrival, AsyncServer
from fedsim.clients import State
from fedsim.core.numbers import FractionBelowOne, NonNegativeFloat, NonNegativeInt, PositiveFraction, PositiveInt
from fedsim.errors import ExperimentError

WEIGHTINGS: dict[str, Callable[[int, float, int], float]] = {
    "constant": lambda tau, a, b: 1.0,
    "hinge": lambda tau, a, b: 1.0 if tau <= b else 1 / (a * (tau - b) + 1),
    "polynomial": lambda tau, a, b: (tau + 1) ** -a,
}


@policy("fedasync")
@dataclass(frozen=True)
class FedAsync(Policy):
    """FedAsync: W = (1 - alpha s(tau)) W + alpha s(tau) x for a worker's model x with staleness tau.

    Xie et al. 2019. For the paper's proximal term, set `local.algorithm = "fedprox"`.

    Args:
        alpha: weight of a model with staleness 0, 0 < alpha <= 1.
        staleness: the function s. "constant": s(tau) = 1. "hinge": s(tau) = 1 for tau <= b, else
            1 / (a (tau - b) + 1). "polynomial": s(tau) = (tau + 1)^-a.
        a, b: parameters of s.

    >>> WEIGHTINGS["polynomial"](3, 0.5, 4)  # s(tau = 3) with a = 0.5
    0.5
    """

    work, allows_sampling = "model", True

    alpha: PositiveFraction = 0.6
    staleness: Literal["constant", "hinge", "polynomial"] = "polynomial"
    a: NonNegativeFloat = 0.5
    b: NonNegativeInt = 4

    def __post_init__(self) -> None:
        if self.staleness == "constant" and self.a != FedAsync.a:
            raise ExperimentError(
                f'policy.a = {self.a:g}: is only used with policy.staleness = "hinge" or "polynomial"; set one of '
                "these or remove policy.a"
            )
        if self.staleness != "hinge" and self.b != FedAsync.b:
            raise ExperimentError(
                f'policy.b = {self.b}: is only used with policy.staleness = "hinge"; set this value or remove policy.b'
            )

    @property
    def needs_replicas(self) -> bool:
        return False

    def take(self, server: AsyncServer, arrival: Arrival) -> None:
        share = self.alpha * WEIGHTINGS[self.staleness](arrival.staleness, self.a, self.b)
        server.global_row.lerp_(server.rows[arrival.slot], share)
        server.increment_version()
        server.mix_buffers([arrival.slot], share)


@policy("fedbuff")
@dataclass(frozen=True)
class FedBuff(Policy):
    """FedBuff: the server optimizer takes a step along the weighted sum of k buffered model deltas, divided by k.

    Nguyen et al. 2022. A delta is a worker's trained model minus its start model. With staleness tau it has the weight
    (1 + tau)^-exponent. The paper's concurrency is the setting `cohort`. Each step also updates the server's BatchNorm
    statistics B: B += sum s_i (b_i - B) / k, where the i-th delta in the buffer has the weight s_i, and b_i are the
    statistics of its worker.

    Args:
        k: number of deltas in the buffer. None: the number of concurrent workers.
        exponent: staleness exponent, at least 0. 0 weights all deltas equally.

    >>> FedBuff(k=10).uses_server_optimizer
    True
    """

    work, allows_sampling, uses_server_optimizer = "model", True, True

    k: PositiveInt | None = None
    exponent: NonNegativeFloat = 0.5

    def sizes(self, n_workers: int) -> tuple[int, ...]:
        return (self.k or n_workers,)

    def start(self, server: AsyncServer) -> State:
        return {
            **new_buffer(server, self.k or server.n, server.worker_buffers.dtype),
            "buffers": torch.zeros_like(server.global_buffers),
            "weight": torch.zeros(1, dtype=torch.double),  # sum of the weights in `buffers`
        }

    def take(self, server: AsyncServer, arrival: Arrival) -> None:
        buffers, weight, slot = server.policy_state["buffers"], server.policy_state["weight"], arrival.slot
        k = self.k or server.n
        scale = (1 + arrival.staleness) ** -self.exponent
        total = collect(server, server.delta(slot), scale, k, arrival)
        buffers.add_(server.worker_buffers[slot], alpha=scale / k)
        weight += scale / k
        if total is not None:
            server.update(total)
            server.move_buffers(buffers / float(weight), float(weight))
            buffers.zero_()
            weight.zero_()

    def buffered(self, server: AsyncServer) -> int:
        return int(server.policy_state["count"])


@policy("async_local_sgd")
@dataclass(frozen=True)
class AsyncLocalSGD(Policy):
    """Asynchronous local SGD: steps along pseudo-gradients g = W_read - x with delayed Nesterov momentum m.

    Liu et al. 2024. W_read is the global model that a worker started from, and x is its trained model. Most arrivals
    cause a step W -= lr (g / n + c beta m). Every n-th arrival first updates the momentum, m = beta m + (sum of the
    last n g) / n, and then causes the step W -= lr (g / n + (1 - c n + c) beta m). So n arrivals together apply the
    momentum once.

    Args:
        lr: outer learning rate, at least 0.
        beta: momentum factor, 0 <= beta < 1.
        n: number of arrivals between two momentum updates. None: the number of concurrent workers.
        c: share of the momentum that each arrival applies between two momentum updates, 0 <= c <= 1/n.
        dylu: whether slow workers take fewer local steps (dynamic local updates). A worker whose steps take r times as
            long as the fastest worker's takes 1/r of the scheduled steps, at least one.

    >>> AsyncLocalSGD(c=0.3).check(n_workers=4)
    Traceback (most recent call last):
    fedsim.errors.ExperimentError: policy.c = 0.3: must be at most 1/policy.n = 1/4
    """

    work = "model"

    lr: NonNegativeFloat = 0.7
    beta: FractionBelowOne = 0.9
    n: PositiveInt | None = None
    c: NonNegativeFloat = 0.0
    dylu: bool = False

    def check(self, n_workers: int) -> None:
        n = self.n or n_workers
        if self.c > 1 / n:
            raise ExperimentError(f"policy.c = {self.c:g}: must be at most 1/policy.n = 1/{n}")

    def start(self, server: AsyncServer) -> State:
        wide = server.worker_buffers.dtype
        rows = {name: torch.zeros_like(server.global_row, dtype=wide) for name in ("sum", "momentum")}
        return {**rows, "count": torch.zeros(1, dtype=torch.int64)}

    def local_steps(self, server: AsyncServer, slot: int, scheduled: int) -> int | None:
        if not self.dylu:
            return None
        taken = server.step_seconds.numpy()
        return max(1, int(scheduled * taken[server.alive].min() / taken[slot] + 1e-9))

    def take(self, server: AsyncServer, arrival: Arrival) -> None:
        total, momentum, count = (server.policy_state[name] for name in ("sum", "momentum", "count"))
        delta, n = server.delta(arrival.slot), self.n or server.n
        total.add_(delta)
        count += 1
        share = self.c
        if int(count) == n:
            momentum.mul_(self.beta).add_(total, alpha=1 / n)
            share = 1 - self.c * n + self.c
            total.zero_()
            count.zero_()
        server.global_row.add_(delta.div_(n).add_(momentum, alpha=share * self.beta), alpha=self.lr)
        server.increment_version()
        server.mix_buffers([arrival.slot])
