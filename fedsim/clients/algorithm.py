"""The contract of client algorithms: what a worker does in a round, keeps, and exchanges with the server.

    server                                              worker k
    send(server state)               -- received -->    start_round(rows, worker) -> state of the steps
                                                        step(rows, gradients, state), for each batch
    receive(server state, sums, ...) <-- messages --    finish(rows, state, worker) -> messages
    correct(update, server state, ...)

The rows travel besides. Every method is a function of tensors [..., d] for rows and [..., 1] for numbers, so the same
code works on one worker and on a stack of workers. `step` also works on columns; it is element-wise. An algorithm that
needs whole rows, or more gradients in a step, sets `element_wise = False` and defines `step_rows` in its place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fedsim.clients.base import OuterProductGrad, State
from fedsim.core.rows import ColumnSpans

GradientAt = Callable[[Tensor], Tensor]


class WorkerFacts(NamedTuple):
    """One round of one worker, in numbers.

    Attributes:
        worker: its number.
        round: number of its round, from 1.
        steps: how many local steps the round has.
        steps_per_epoch: how many steps are one pass over the worker's samples.
        samples: how many samples the worker has.
        weight: its weight in the aggregation, before the weights are divided by their sum.
    """

    worker: int
    round: int
    steps: int
    steps_per_epoch: int
    samples: int
    weight: float


@dataclass
class WorkerRound:
    """One round of a worker, or of a stack of k workers.

    Attributes:
        received: what `send` returned when the workers got their rows, [d] or [1], or [k, d] or [k, 1].
        kept: the workers' own state, [..., w]. `finish` may change it; `start_round` must not.
        facts: of each worker.
        rows: the rows, [d] or [k, d].
        full_gradient: the mean gradient of all samples of each worker at the row it was sent, [..., d]; None unless the
            algorithm declares `full_gradient`.
        only_tested: whether the rows are tested after this training and not sent, so that `finish` is not called.
    """

    received: State
    kept: State
    facts: Sequence[WorkerFacts]
    rows: Tensor
    full_gradient: Tensor | None = None
    only_tested: bool = False

    @cached_property
    def workers(self) -> Tensor:
        """Return the numbers of the workers, int64 [..., 1]."""
        return self._column([fact.worker for fact in self.facts])

    @cached_property
    def rounds(self) -> Tensor:
        """Return the number of the worker's round, from 1, int64 [..., 1]."""
        return self._column([fact.round for fact in self.facts])

    @cached_property
    def steps(self) -> Tensor:
        """How many local steps the round has, int64 [..., 1]."""
        return self._column([fact.steps for fact in self.facts])

    @cached_property
    def steps_per_epoch(self) -> Tensor:
        """How many steps are one pass over the worker's samples, int64 [..., 1]."""
        return self._column([fact.steps_per_epoch for fact in self.facts])

    @cached_property
    def weights(self) -> Tensor:
        """Return the weights of the workers in the aggregation, of the rows' type [..., 1]."""
        return self._column([fact.weight for fact in self.facts]).to(self.rows.dtype)

    def _column(self, values: Sequence[float]) -> Tensor:
        dtype = torch.float64 if any(isinstance(value, float) for value in values) else torch.int64
        return torch.tensor(values, dtype=dtype, device=self.rows.device).view(*self.rows.shape[:-1], 1)


class ClientAlgorithm:
    """A client algorithm: a frozen dataclass that derives from this class and overrides what it needs.

    The defaults keep nothing, send nothing besides the row, and need `step` only. `fedsim.clients.SGD` is one.

    Attributes:
        element_wise: whether `step` works on any columns of rows. If not, `step_rows` is called, with whole rows.
        uses_start_row: whether the steps use the row that the worker was sent.
        personal_columns: columns of the rows that are not sent either way. The updates must be 0 there.
        personal_buffers: columns of the buffers, such as BatchNorm statistics, that are not sent either way.
        personal_beside: whether the personal model is trained beside the row, by `gradient_at`. Each worker then keeps
            all buffers of its personal model, which only the forward passes of `gradient_at` change.
        starts_from_current: whether a worker that has not taken part has the `worker_state` and the personal buffers of
            the current global model, not of the first one. Needs synchronous rounds.
        gradients_per_step: number of gradients of a batch that a local step computes, which is its time on the virtual
            clock; a property where it depends on the parameters. Forward passes without a gradient do not count.

    The attributes from `personal_columns` to `starts_from_current` and `personal_rows` declare the personal model. The
    engine trains, keeps, sends and tests its parameters and buffers accordingly.

    Cost: each row that `worker_state` names takes d numbers for each worker that has taken part.

    >>> algorithm = fedsim.clients.SGD(lr=0.1)
    >>> algorithm.worker_state(torch.zeros(3)), algorithm.numbers_sent(d=3)
    ({}, (0, 0))
    """

    element_wise: ClassVar[bool] = True
    uses_start_row: ClassVar[bool] = False
    personal_columns: ClassVar[ColumnSpans] = ColumnSpans()
    personal_buffers: ClassVar[ColumnSpans] = ColumnSpans()
    personal_beside: ClassVar[bool] = False
    starts_from_current: ClassVar[bool] = False
    gradients_per_step: ClassVar[int] = 1

    @property
    def setting(self) -> str:
        """For errors: the key and value of [local] that need local steps, if that is not `local.algorithm`."""
        return ""

    @property
    def full_gradient(self) -> bool:
        """Whether a round begins with the gradient of each worker over all its samples, which costs one pass over them.

        It is then `WorkerRound.full_gradient`. A subclass may declare `full_gradient: ClassVar[bool] = True`.
        """
        return False

    def gradients(self, steps: int, batches: int) -> int:
        """Return the number of mini-batch gradients that a worker computes in a round: its cost on the virtual clock.

        Args:
            steps: number of local steps, one for each batch.
            batches: number of batches of one pass over the worker's samples, which `full_gradient` computes.
        """
        return steps * self.gradients_per_step + (batches if self.full_gradient else 0)

    def check_work(self, epochs: int | None, steps: int | None) -> None:
        """Raise ExperimentError if rounds are too short; they have at least so many epochs, or else so many steps."""

    def check_steps(self, worker: int, steps: int) -> None:
        """Raise ExperimentError if a round of so many local steps is too short for the algorithm."""

    def for_model(self, module: nn.Module) -> ClientAlgorithm:
        """Return the algorithm for a model: itself, or a copy that knows, for example, which columns are personal."""
        return self

    def buffers_kept(self, b: int) -> ColumnSpans:
        """Return the columns of the buffers [b] of a personal model that a worker keeps."""
        return ColumnSpans(((0, b),)) if self.personal_beside else self.personal_buffers

    def with_lr(self, lr: float) -> ClientAlgorithm:
        """Return a copy with another learning rate `lr`, for learning-rate schedules."""
        return replace(self, lr=lr)  # type: ignore[type-var]

    def worker_state(self, row: Tensor) -> State:
        """What a worker keeps, before its first round: tensors [w].

        `row` [d] is the first global model, or the current one if the algorithm declares `starts_from_current`.
        """
        return {}

    def server_state(self, row: Tensor) -> State:
        """What the server keeps for the algorithm, before the first round: tensors [d] or [1]."""
        return {}

    def message(self, row: Tensor) -> State:
        """Zeros in the shapes [w] of what a worker sends besides its row."""
        return {}

    def send(self, server: State) -> State:
        """What the server sends besides the row; by default all that it keeps. Read-only."""
        return server

    def start(self, rows: Tensor) -> State:
        """Return the state of the steps, of the rows' shape [..., d], for rows that have not moved."""
        return {}

    def start_round(self, rows: Tensor, worker: WorkerRound) -> State:
        """Return the state of the steps of a round, named as by `start`.

        `rows` [..., d] are as the server sent them.
        """
        return self.start(rows)

    def step(self, rows: Tensor, gradients: Tensor, state: State) -> None:
        """Move `rows` one step in place; `gradients` and `state` may change too. Every algorithm must define it."""
        raise NotImplementedError(f"{type(self).__name__} must define `step`")

    def step_fused(self, rows: Tensor, product: OuterProductGrad, state: State) -> None:
        """The same step for weights [k, o, i], along a gradient that is given by its factors."""
        self.step(rows, product.computed(), state)

    def step_rows(self, rows: Tensor, gradients: Tensor, state: State, gradient_at: GradientAt) -> None:
        """One step of whole rows, in place, instead of `step` where `element_wise` is False.

        Args:
            rows, gradients: [..., d].
            state: is changed in place.
            gradient_at: the gradients [..., d] of the same batches at other points [..., d], with the same masks. Its
                forward passes change the buffers of the personal model if that is `personal_beside`, and no others.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `step_rows`")

    def feature_points(self, state: State) -> Sequence[Tensor]:
        """Rows [..., d] of the state at which `feature_loss` needs the model's features; () without a feature loss."""
        return ()

    def feature_loss(self, features: Tensor, at_points: Sequence[Tensor]) -> Tensor:
        """Term added to the loss of each sample, [..., batch].

        Args:
            features: of the samples at the rows, [..., batch, f]; see `fedsim.core.recorded_features`.
            at_points: the features at each of the `feature_points`, without gradient.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `feature_loss`")

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

    def receive_gradients(self, server: State, mean: Tensor) -> None:
        """Change the server's state in place before a round; `mean` [d] is that of the cohort's full gradients.

        `send` comes afterwards. Only if `full_gradient`, and only where a cohort begins its round together.
        """

    def correct(self, update: Tensor, server: State, workers: int, population: int) -> None:
        """Change the aggregated update [columns] in place, before the server optimizer moves the global row by it.

        Element-wise. `server` has the same columns of the server's rows, which may change too, and its numbers [1],
        which must not; `workers` and `population` as in `receive`, which comes before.
        """

    def send_gradients(self, gradients: Tensor, worker_state: State) -> None:
        """Change what workers send at a step of a round of gradients, [..., d], and what they keep, in place."""

    def personal_rows(self, rows: Tensor, worker_state: State) -> Tensor:
        """Return the personal models [..., d] of workers, from the global model `rows` [..., d] and what they keep.

        They are tested with the buffers that the workers keep for them, and else with those of the global model.
        """
        return rows

    def _copy(self, **changes: Any) -> ClientAlgorithm:
        """Return a copy with changed attributes. `dataclasses.replace` would lose attributes that are not fields."""
        copied = copy.copy(self)
        vars(copied).update(changes)
        return copied

    def has(self, method: str) -> bool:
        """Whether the algorithm overrides an optional method, which then has to be called."""
        return getattr(type(self), method) is not getattr(ClientAlgorithm, method)

    @property
    def alters_gradients(self) -> bool:
        """Whether workers send something other than their gradients with `sync = "gradients"`."""
        return self.has("send_gradients")

    def numbers_sent(self, d: int) -> tuple[int, int]:
        """Numbers that a worker receives and sends in a round in addition to the shared columns of its row."""
        row = torch.empty(d, device="meta")
        received, sent = self.send(self.server_state(row)), self.message(row)
        return sum(tensor.numel() for tensor in received.values()), sum(tensor.numel() for tensor in sent.values())


def exchanges(algorithm: ClientAlgorithm) -> bool:
    """Whether workers keep state, or exchange anything but rows with the server."""
    row = torch.zeros(2)
    return any((algorithm.worker_state(row), algorithm.server_state(row), algorithm.message(row)))


def needs_local_steps(algorithm: ClientAlgorithm) -> bool:
    """Whether an algorithm needs rounds of local steps: does it do more than send gradients and step along them?"""
    row = torch.zeros(2)
    needs = (algorithm.uses_start_row, not algorithm.element_wise, algorithm.full_gradient, algorithm.has("correct"))
    state = algorithm.worker_state(row) and not algorithm.alters_gradients
    return any(needs) or any((state, algorithm.server_state(row), algorithm.message(row)))


def step_along(algorithm: ClientAlgorithm, rows: Tensor, gradients: Tensor | OuterProductGrad, state: State) -> None:
    """A client algorithm's step along gradients [..., d], or along their factors."""
    if isinstance(gradients, Tensor):
        algorithm.step(rows, gradients, state)
    else:
        algorithm.step_fused(rows, gradients, state)


PERSONAL_BUFFERS = "personal.buffers"  # their name, which no state of an algorithm has


def state_at_first(algorithm: ClientAlgorithm, row: Tensor, buffers: Tensor) -> State:
    """What a worker keeps before its first round: the algorithm's state, and the buffers of its personal model.

    Args:
        row, buffers: of the global model, [d] and [b].
    """
    personal = algorithm.buffers_kept(len(buffers)).of(buffers)
    return ({PERSONAL_BUFFERS: personal} if len(personal) else {}) | algorithm.worker_state(row)


def personal_model(
    algorithm: ClientAlgorithm, row: Tensor, buffers: Tensor, worker_state: State
) -> tuple[Tensor, Tensor]:
    """The row [d] and the buffers [b] of a worker's personal model, from those of the global one and what it keeps."""
    of_algorithm = {name: tensor for name, tensor in worker_state.items() if name != PERSONAL_BUFFERS}
    if PERSONAL_BUFFERS in worker_state:
        buffers = buffers.clone()
        algorithm.buffers_kept(len(buffers)).write(buffers, worker_state[PERSONAL_BUFFERS])
    return algorithm.personal_rows(row, of_algorithm), buffers
