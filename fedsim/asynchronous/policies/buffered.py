"""Policies in which the server collects the workers' gradients in several buffers, and combines the buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch

from fedsim.asynchronous.policies.policy import Policy, policy
from fedsim.asynchronous.policies.server import Arrival, AsyncServer
from fedsim.clients import State
from fedsim.core.numbers import Example, PositiveInt
from fedsim.core.rows import index_of
from fedsim.errors import ExperimentError


@policy("basgd")
@dataclass(frozen=True)
class BufferedSGD(Policy):
    """Buffered asynchronous SGD (BASGD): each step combines the means of b buffers. Yang and Li 2021.

    A gradient of worker s is added to buffer s mod b, which holds the mean of its gradients since the last step. When
    no buffer is empty, the server takes a step along the result of `aggregate.rule` for the b means, such as `median`
    or `trimmed_mean`, and empties the buffers. Workers never wait. With at most q Byzantine workers, at most q of the
    means are Byzantine, so the rule must tolerate f = q < b / 2.

    For the rule, the sender of a mean is its buffer, and its staleness is the largest of its gradients. The server does
    not wait for buffers whose workers have all left.

    Args:
        b: number of buffers, from 1 to the number of workers. 1 is `asgd`.

    >>> BufferedSGD(b=3).sizes(n_workers=10)
    (3,)
    """

    b: Annotated[PositiveInt, Example(2)]

    def sizes(self, n_workers: int) -> tuple[int, ...]:
        return (self.b,)

    def check(self, n_workers: int) -> None:
        if self.b > n_workers:
            raise ExperimentError(
                f"policy.b = {self.b}: must be at most {n_workers}, the number of concurrent workers (cohort)"
            )

    def start(self, server: AsyncServer) -> State:
        counts = {name: torch.zeros(self.b, dtype=torch.int64) for name in ("counts", "staleness")}
        return {"means": server.global_row.new_zeros(self.b, len(server.global_row)), **counts}

    def sender(self, worker: int) -> int:
        return worker % self.b

    def take(self, server: AsyncServer, arrival: Arrival) -> None:
        means, counts, staleness = (server.policy_state[name] for name in ("means", "counts", "staleness"))
        buffer = self.sender(arrival.worker)
        counts[buffer] += 1
        share = 1 / int(counts[buffer])
        means[buffer].mul_(1 - share).add_(server.rows[arrival.slot], alpha=share)
        staleness[buffer] = max(int(staleness[buffer]), arrival.staleness)
        server.mix_buffers([arrival.slot])
        filled = np.flatnonzero(counts)
        if np.isin(server.alive % self.b, filled).all():
            rows = means[index_of(filled, means.device)].clone()
            server.step(server.combine(rows, filled.tolist(), staleness[filled]) if server.combines else rows.mean(0))
            for tensor in (means, counts, staleness):
                tensor.zero_()

    def buffered(self, server: AsyncServer) -> int:
        return int(server.policy_state["counts"].sum())
