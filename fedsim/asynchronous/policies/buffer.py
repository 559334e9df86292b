"""The buffer of policies that collect k vectors, and then combine them by the aggregation rule."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.asynchronous.policies.server import Arrival, AsyncServer
from fedsim.clients import State


def new_buffer(server: AsyncServer, k: int, dtype: torch.dtype) -> State:
    """Return an empty buffer for k vectors, as part of a policy's state. A mean only needs the sum of the vectors."""
    counts = {"count": torch.zeros(1, dtype=torch.int64)}
    if not server.combines:
        return {"sum": torch.zeros_like(server.global_row, dtype=dtype), **counts}
    rows = server.global_row.new_zeros(k, len(server.global_row), dtype=dtype)
    return {"vectors": rows, "senders": torch.zeros(k, 2, dtype=torch.int64), **counts}


def collect(server: AsyncServer, vector: Tensor, scale: float, k: int, arrival: Arrival) -> Tensor | None:
    """Add a vector to the buffer. Return the result of the rule if k vectors are in the buffer, which is then emptied.

    Args:
        server: server of the run, with the buffer in `policy_state`.
        vector: vector that a worker has sent, [d].
        scale: number by which the policy multiplies the vector, because of its staleness.
        k: number of vectors that are combined.
        arrival: the worker that has sent the vector.

    Returns the result of the rule for the scaled vectors, [d], or None. By default, the result is their sum divided
    by k.
    """
    state = server.policy_state
    position = int(state["count"])
    if server.combines:
        state["vectors"][position] = vector * scale
        state["senders"][position] = torch.tensor([arrival.worker, arrival.staleness])
    else:
        state["sum"].add_(vector, alpha=scale / k)
    state["count"] += 1
    if position + 1 < k:
        return None
    state["count"].zero_()
    if server.combines:
        workers, staleness = state["senders"].T
        return server.combine(state["vectors"], workers.tolist(), staleness)
    total = state["sum"].clone()
    state["sum"].zero_()
    return total
