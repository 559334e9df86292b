"""The buffers of personal models, such as BatchNorm statistics, as a part of what workers keep between their rounds."""

from __future__ import annotations

from torch import Tensor

from fedsim.clients.algorithm import ClientAlgorithm
from fedsim.clients.solver import State

PERSONAL_BUFFERS = "personal.buffers"  # their name, which no state of an algorithm has


def state_at_first(algorithm: ClientAlgorithm, row: Tensor, buffers: Tensor) -> State:
    """What a worker keeps before its first round: the algorithm's state, and the buffers of its personal model.

    Args:
        row, buffers: of the global model, [d] and [b].
    """
    personal = algorithm.buffers_kept(len(buffers)).of(buffers)
    return ({PERSONAL_BUFFERS: personal} if len(personal) else {}) | algorithm.worker_state(row)


def personal_model(algorithm: ClientAlgorithm, row: Tensor, buffers: Tensor, kept: State) -> tuple[Tensor, Tensor]:
    """The row [d] and the buffers [b] of a worker's personal model, from those of the global one and what it keeps."""
    of_algorithm = {name: tensor for name, tensor in kept.items() if name != PERSONAL_BUFFERS}
    if PERSONAL_BUFFERS in kept:
        buffers = buffers.clone()
        algorithm.buffers_kept(len(buffers)).write(buffers, kept[PERSONAL_BUFFERS])
    return algorithm.personal_rows(row, of_algorithm), buffers
