"""The contract of client algorithms: what a worker does in a round, keeps, and exchanges with the server.

    server                                              worker k
    send(server state)               -- received -->    start_round(rows, worker) -> state of the steps
                                                        step(rows, gradients, state), for each batch
    receive(server state, sums, ...) <-- messages --    finish(rows, state, worker) -> messages

The rows travel besides. Every method is a function of tensors [..., d] for rows and [..., 1] for numbers, so the same
code works on one worker and on a stack of workers. `step` also works on columns; it is element-wise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedsim.clients.solver import OuterProductGrad, Solver, State


@dataclass
class WorkerRound:
    """One round of a worker, or of a stack of k workers.

    Attributes:
        received: what `send` returned when the workers got their rows, [d] or [1], or [k, d] or [k, 1].
        kept: the workers' own state, [..., d] or [..., 1]. `finish` may change it; `start_round` must not.
        facts: worker, round and number of local steps of each.
        rows: the rows, [d] or [k, d].
    """

    received: State
    kept: State
    facts: Sequence[tuple[int, int, int]]
    rows: Tensor

    @cached_property
    def workers(self) -> Tensor:
        """The numbers of the workers, int64 [..., 1]."""
        return self._column(0)

    @cached_property
    def rounds(self) -> Tensor:
        """The number of the worker's round, from 1, int64 [..., 1]."""
        return self._column(1)

    @cached_property
    def steps(self) -> Tensor:
        """How many local steps the round has, int64 [..., 1]."""
        return self._column(2)

    def _column(self, number: int) -> Tensor:
        values = torch.tensor([fact[number] for fact in self.facts], device=self.rows.device)
        return values.view(*self.rows.shape[:-1], 1)


class ClientAlgorithm:
    """A client algorithm: a frozen dataclass that derives from this class and overrides what it needs.

    The defaults keep nothing, send nothing besides the row, and need `step` only. `fedsim.clients.SGD` is one.

    Cost: each row that `worker_state` names takes d numbers for each worker that has taken part.

    >>> algorithm = fedsim.clients.SGD(lr=0.1)
    >>> algorithm.worker_state(torch.zeros(3)), algorithm.numbers_sent(d=3)
    ({}, (0, 0))
    """

    def worker_state(self, row: Tensor) -> State:
        """What a worker keeps, before its first round: tensors [d] or [1]. `row` [d] is the first global model."""
        return {}

    def server_state(self, row: Tensor) -> State:
        """What the server keeps for the algorithm, before the first round: tensors [d] or [1]."""
        return {}

    def message(self, row: Tensor) -> State:
        """Zeros in the shapes [d] or [1] of what a worker sends besides its row."""
        return {}

    def send(self, server: State) -> State:
        """What the server sends besides the row; by default all that it keeps. Read-only."""
        return server

    def start(self, rows: Tensor) -> State:
        """The state of the steps, of the rows' shape [..., d], for rows that have not moved."""
        return {}

    def start_round(self, rows: Tensor, worker: WorkerRound) -> State:
        """The state of the steps of a round, named as by `start`; `rows` [..., d] are as the server sent them."""
        return self.start(rows)

    def step(self, rows: Tensor, gradients: Tensor, state: State) -> None:
        """Move `rows` one step in place; `gradients` and `state` may change too. Every algorithm must define it."""
        raise NotImplementedError(f"{type(self).__name__} must define `step`")

    def step_fused(self, rows: Tensor, product: OuterProductGrad, state: State) -> None:
        """The same step for weights [k, o, i], along a gradient that is given by its factors."""
        self.step(rows, product.computed(), state)

    def finish(self, rows: Tensor, state: State, worker: WorkerRound) -> State:
        """End a round: the messages, as `message` names them. May change `worker.kept` and `rows` [..., d]."""
        return {}

    def receive(self, server: State, sums: State, workers: int, population: int) -> None:
        """Change the server's state in place.

        Args:
            server: the server's state, [d] and [1].
            sums: the sums of the messages of the workers whose updates were used, [d] and [1].
            workers: how many these are.
            population: how many workers the experiment has.
        """

    def numbers_sent(self, d: int) -> tuple[int, int]:
        """How many numbers a worker receives and sends in a round besides its row [d]."""
        row = torch.empty(d, device="meta")
        received, sent = self.send(self.server_state(row)), self.message(row)
        return sum(tensor.numel() for tensor in received.values()), sum(tensor.numel() for tensor in sent.values())


class SolverOnly(ClientAlgorithm):
    """A solver that has `start` and `step` only, and perhaps `step_fused`, as a client algorithm."""

    def __init__(self, solver: Any) -> None:
        self.solver = solver
        for name in ("start", "step", "step_fused"):
            if hasattr(solver, name):
                setattr(self, name, getattr(solver, name))

    def __repr__(self) -> str:
        return repr(self.solver)


def as_algorithm(solver: Solver) -> ClientAlgorithm:
    """A solver as a client algorithm; unchanged if it is one."""
    return solver if isinstance(solver, ClientAlgorithm) else SolverOnly(solver)


def exchanges(algorithm: ClientAlgorithm) -> bool:
    """Whether an algorithm keeps worker state or sends anything besides rows, either way."""
    row = torch.zeros(2)
    return any((algorithm.worker_state(row), algorithm.server_state(row), algorithm.message(row)))


def step_along(solver: ClientAlgorithm, rows: Tensor, gradients: Tensor | OuterProductGrad, state: State) -> None:
    """A solver's step along gradients [..., d], or along their factors."""
    if isinstance(gradients, Tensor):
        solver.step(rows, gradients, state)
    else:
        solver.step_fused(rows, gradients, state)
