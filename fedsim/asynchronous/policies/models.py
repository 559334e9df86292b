"""Policies whose workers bring a model that they have trained for a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt

from fedsim.asynchronous.policy import Arrival, Policy, policy
from fedsim.asynchronous.server import Server
from fedsim.errors import ExperimentError
from fedsim.local import NonNegative, State

Fraction = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]

WEIGHTINGS: dict[str, Callable[[int, float, int], float]] = {
    "constant": lambda tau, a, b: 1.0,
    "hinge": lambda tau, a, b: 1.0 if tau <= b else 1 / (a * (tau - b) + 1),
    "polynomial": lambda tau, a, b: (tau + 1) ** -a,
}


@policy("fedasync")
@dataclass(frozen=True)
class FedAsync(Policy):
    """W = (1 - alpha s(tau)) W + alpha s(tau) x for a worker's model x of staleness tau. Xie et al. 2019.

    staleness: s(tau) is 1 ("constant"); 1 up to b and 1 / (a (tau - b) + 1) beyond ("hinge"); or (tau + 1)^-a
        ("polynomial").
    The paper's proximal term is local.solver = "fedprox".
    """

    work, samples = "model", True

    alpha: Fraction = 0.6
    staleness: Literal["constant", "hinge", "polynomial"] = "polynomial"
    a: NonNegative = 0.5
    b: NonNegativeInt = 4

    def __post_init__(self) -> None:
        if self.staleness == "constant" and self.a != FedAsync.a:
            raise ExperimentError(f'policy.a = {self.a:g}: goes with policy.staleness = "hinge" or "polynomial"')
        if self.staleness != "hinge" and self.b != FedAsync.b:
            raise ExperimentError(f'policy.b = {self.b}: goes with policy.staleness = "hinge"')

    @property
    def replicas(self) -> bool:
        return False

    def take(self, server: Server, arrival: Arrival) -> None:
        share = self.alpha * WEIGHTINGS[self.staleness](arrival.staleness, self.a, self.b)
        server.global_row.lerp_(server.rows[arrival.slot], share)
        server.moved()
        server.mix_buffers([arrival.slot], share)


@policy("fedbuff")
@dataclass(frozen=True)
class FedBuff(Policy):
    """Deltas times 1 / sqrt(1 + tau) are summed up; every k of them, that over k is the update. Nguyen et al. 2022.

    How many workers are at work at a time, the paper's concurrency, is the key `cohort`. The server optimizer takes the
    step along the update. Buffers (BatchNorm statistics) B of the server move with each update too: with the weights
    s_i of the k workers' buffers b_i, B += sum s_i (b_i - B) / k.

    k: of the buffer; None: as many as are at work.
    exponent: of (1 + tau); 0 weights all alike.
    """

    work, samples, steps_server = "model", True, True

    k: PositiveInt | None = None
    exponent: NonNegative = 0.5

    def start(self, server: Server) -> State:
        wide = server.memory.buffers.dtype
        return {
            "sum": torch.zeros_like(server.global_row, dtype=wide),
            "held": torch.zeros(1, dtype=torch.int64),
            "buffers": torch.zeros_like(server.memory.global_buffers),
            "weight": torch.zeros(1, dtype=torch.double),  # of what `buffers` sums up
        }

    def take(self, server: Server, arrival: Arrival) -> None:
        total, held, buffers, weight = (server.remembered[name] for name in ("sum", "held", "buffers", "weight"))
        k, slot = self.k or server.n, arrival.slot
        share = (1 + arrival.staleness) ** -self.exponent / k
        total.add_(server.delta(slot), alpha=share)
        buffers.add_(server.memory.buffers[slot], alpha=share)
        weight += share
        held += 1
        if int(held) == k:
            server.update(total)
            server.move_buffers(buffers / float(weight), float(weight))
            for tensor in (total, held, buffers, weight):
                tensor.zero_()

    def held(self, server: Server) -> int:
        return int(server.remembered["held"])


@policy("async_local_sgd")
@dataclass(frozen=True)
class AsyncLocalSGD(Policy):
    """Pseudo-gradients g = W_read - x on arrival, with delayed Nesterov momentum. Liu et al. 2024.

    W -= lr (g / n + c beta m), and at every n-th arrival m = beta m + (sum of the last n) / n first, and then
    W -= lr (g / n + (1 - c n + c) beta m): so momentum, too, acts once for n pseudo-gradients.

    n: None: as many as are at work.
    c: from 0 to 1/n, how much of the momentum acts in between.
    dylu: dynamic local updates: a worker that takes r times as long for a step as the fastest takes 1/r of the
        schedule's steps, at least one.
    """

    work = "model"

    lr: NonNegative = 0.7
    beta: Decay = 0.9
    n: PositiveInt | None = None
    c: NonNegative = 0.0
    dylu: bool = False

    def check(self, n_workers: int) -> None:
        n = self.n or n_workers
        if self.c > 1 / n:
            raise ExperimentError(f"policy.c = {self.c:g}: must be at most 1/n, 1/{n}")

    def start(self, server: Server) -> State:
        wide = server.memory.buffers.dtype
        rows = {name: torch.zeros_like(server.global_row, dtype=wide) for name in ("sum", "momentum")}
        return {**rows, "held": torch.zeros(1, dtype=torch.int64)}

    def steps(self, server: Server, slot: int, scheduled: int) -> int | None:
        if not self.dylu:
            return None
        taken = server.step_seconds.numpy()
        return max(1, int(scheduled * taken[server.alive].min() / taken[slot] + 1e-9))

    def take(self, server: Server, arrival: Arrival) -> None:
        total, momentum, held = (server.remembered[name] for name in ("sum", "momentum", "held"))
        delta, n = server.delta(arrival.slot), self.n or server.n
        total.add_(delta)
        held += 1
        share = self.c
        if int(held) == n:
            momentum.mul_(self.beta).add_(total, alpha=1 / n)
            share = 1 - self.c * n + self.c
            total.zero_()
            held.zero_()
        server.global_row.add_(delta.div_(n).add_(momentum, alpha=share * self.beta), alpha=self.lr)
        server.moved()
        server.mix_buffers([arrival.slot])
