"""Base class of client algorithms: what a worker does in a round, keeps between rounds, and exchanges with the server.

    server                                              worker k
    send(server state)               -- received -->    start_round(rows, worker) -> state of the steps
                                                        step(rows, gradients, state), for each batch
    receive(server state, sums, ...) <-- messages --    finish(rows, state, worker) -> messages
    correct(update, server state, ...)

Rows (models and updates) are exchanged in addition to the server state and the messages. All methods work on tensors
[..., d] for rows and [..., 1] for numbers, so the same code handles one worker or a stack of workers. `step` must be
element-wise, because it may be called with some columns only. An algorithm that needs whole rows, or several gradients
per step, sets `element_wise = False` and defines `step_rows` instead.
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
    """Facts about one round of one worker.

    Attributes:
        worker: ID of the worker.
        round: number of the round, from 1.
        steps: number of local steps in the round.
        steps_per_epoch: number of steps in one pass over the worker's samples.
        samples: number of the worker's samples.
        weight: weight of the worker in the aggregation, before normalisation.
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
        received: server state that `send` returned when the workers received the global model: tensors [d] or [1], or
            [k, d] or [k, 1].
        kept: worker state, which the workers keep between rounds: tensors by name, each [..., w] with any length w.
            `finish` may change the state, `start_round` must not.
        facts: facts about the round, for each worker.
        rows: models of the workers, [d] or [k, d].
        full_gradient: mean gradient of all samples of each worker at the model that it received, [..., d]. None unless
            the algorithm declares `full_gradient`.
        only_tested: whether the models are tested after this training instead of being sent. `finish` is then not
            called.
    """

    received: State
    kept: State
    facts: Sequence[WorkerFacts]
    rows: Tensor
    full_gradient: Tensor | None = None
    only_tested: bool = False

    @cached_property
    def workers(self) -> Tensor:
        """IDs of the workers, int64 [..., 1]."""
        return self._column([fact.worker for fact in self.facts])

    @cached_property
    def rounds(self) -> Tensor:
        """Number of each worker's round, from 1, int64 [..., 1]."""
        return self._column([fact.round for fact in self.facts])

    @cached_property
    def steps(self) -> Tensor:
        """Number of local steps in each worker's round, int64 [..., 1]."""
        return self._column([fact.steps for fact in self.facts])

    @cached_property
    def steps_per_epoch(self) -> Tensor:
        """Number of steps in one pass over each worker's samples, int64 [..., 1]."""
        return self._column([fact.steps_per_epoch for fact in self.facts])

    @cached_property
    def weights(self) -> Tensor:
        """Weights of the workers in the aggregation, [..., 1], with the dtype of the rows."""
        return self._column([fact.weight for fact in self.facts]).to(self.rows.dtype)

    def _column(self, values: Sequence[float]) -> Tensor:
        dtype = torch.float64 if any(isinstance(value, float) for value in values) else torch.int64
        return torch.tensor(values, dtype=dtype, device=self.rows.device).view(*self.rows.shape[:-1], 1)


class ClientAlgorithm:
    """Base class of client algorithms.

    A client algorithm is a frozen dataclass that derives from this class, defines `step` and overrides other methods as
    needed. By default, workers keep no state and send only their update. An example is `fedsim.clients.SGD`.

    Attributes:
        element_wise: whether `step` works on any subset of columns. If false, `step_rows` is called with whole rows.
        uses_start_row: whether steps use the model that the worker received at the start of the round.
        personal_columns: columns of the row that are sent neither to nor by workers. Updates must be 0 there.
        personal_buffers: columns of the buffers, such as BatchNorm statistics, that are sent neither to nor by workers.
        personal_beside: whether each worker trains a personal model in addition to the row, with `gradient_at`. The
            worker then keeps all buffers of its personal model, and only forward passes of `gradient_at` change them.
        starts_from_current: whether a worker that takes part for the first time gets its `worker_state` and personal
            buffers from the current global model instead of the initial one. Requires synchronous rounds.
        gradients_per_step: number of gradients that a local step computes for its batch, which determines the time of
            the step on the virtual clock. It is a property if it depends on parameters. Forward passes do not count.

    `personal_columns`, `personal_buffers`, `personal_beside`, `starts_from_current` and the method `personal_rows` tell
    the engine how to train, keep, send and test personal models.

    Cost: each row in `worker_state` takes d numbers for each worker that has taken part.

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
        """The setting to blame in error messages if required local steps are missing. "" means `local.algorithm`."""
        return ""

    @property
    def full_gradient(self) -> bool:
        """Whether each worker computes the gradient over all its samples at the start of a round.

        The gradient is then available as `WorkerRound.full_gradient`, and costs one pass over the samples. Subclasses
        may declare `full_gradient: ClassVar[bool] = True`.
        """
        return False

    def gradients(self, steps: int, batches: int) -> int:
        """Return the number of mini-batch gradients that a worker computes in a round, its cost on the virtual clock.

        Args:
            steps: number of local steps, one per batch.
            batches: number of batches in one pass over the worker's samples, for which `full_gradient` computes
                gradients.
        """
        return steps * self.gradients_per_step + (batches if self.full_gradient else 0)

    def check_work(self, epochs: int | None, steps: int | None) -> None:
        """Raise ExperimentError if rounds can be too short for the algorithm.

        One argument is None. The other is the minimum number of epochs, or of local steps, in a round.
        """

    def check_steps(self, worker: int, steps: int) -> None:
        """Raise ExperimentError if `steps` local steps in a round of `worker` are too few for the algorithm."""

    def for_model(self, module: nn.Module) -> ClientAlgorithm:
        """Return this algorithm, or a copy that is adapted to a model, for example with its personal columns."""
        return self

    def buffers_kept(self, b: int) -> ColumnSpans:
        """Return the columns of a buffer row [`b`] that each worker keeps for its personal model."""
        return ColumnSpans(((0, b),)) if self.personal_beside else self.personal_buffers

    def with_lr(self, lr: float) -> ClientAlgorithm:
        """Return a copy of the algorithm with the learning rate `lr`, for learning-rate schedules."""
        return replace(self, lr=lr)  # type: ignore[type-var]

    def worker_state(self, row: Tensor) -> State:
        """Return the worker state before a worker's first round: tensors by name, each [w] with any length w.

        `row` [d] is the initial global model, or the current one if the algorithm declares `starts_from_current`.
        """
        return {}

    def server_state(self, row: Tensor) -> State:
        """Return the state that the server keeps for the algorithm before the first round: tensors [d] or [1] by name.

        `row` [d] is the initial global model.
        """
        return {}

    def message(self, row: Tensor) -> State:
        """Return zeros by name, which give the shape [w] of each message that a worker sends besides its update."""
        return {}

    def send(self, server: State) -> State:
        """Return what the server sends in addition to the global model, by default its whole state.

        Receivers must not change the result.
        """
        return server

    def start(self, rows: Tensor) -> State:
        """Return the optimizer state before the first step: tensors of the shape [..., d] of `rows`, by name."""
        return {}

    def start_round(self, rows: Tensor, worker: WorkerRound) -> State:
        """Return the optimizer state at the start of a round, with the same names as the result of `start`.

        `rows` [..., d] are the models that the workers received. They may be changed in place.
        """
        return self.start(rows)

    def step(self, rows: Tensor, gradients: Tensor, state: State) -> None:
        """Move `rows` by one step, in place. `gradients` and `state` may be changed too.

        Every client algorithm must define this method.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `step`")

    def step_fused(self, rows: Tensor, product: OuterProductGrad, state: State) -> None:
        """Move stacked weights `rows` [k, o, i] by one step, in place, as `step` does, with the gradient `product`."""
        self.step(rows, product.computed(), state)

    def step_rows(self, rows: Tensor, gradients: Tensor, state: State, gradient_at: GradientAt) -> None:
        """Move whole `rows` by one step, in place. Called instead of `step` if `element_wise` is false.

        Args:
            rows: models of the workers, [..., d].
            gradients: gradients of the batches at `rows`, [..., d].
            state: optimizer state, which is changed in place.
            gradient_at: function that returns the gradients [..., d] of the same batches at other points [..., d], with
                the same dropout masks. Its forward passes change only the buffers of personal models, and only if the
                algorithm declares `personal_beside`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `step_rows`")

    def feature_points(self, state: State) -> Sequence[Tensor]:
        """Return the rows [..., d] at which `feature_loss` needs the model's features.

        Returns () if the algorithm has no feature loss.
        """
        return ()

    def feature_loss(self, features: Tensor, at_points: Sequence[Tensor]) -> Tensor:
        """Return a term that is added to the loss of each sample, [..., batch].

        Args:
            features: the f features of each sample in the workers' models, [..., batch, f] (see
                `fedsim.core.recorded_features`).
            at_points: features of the samples at each of the `feature_points`, without gradients.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `feature_loss`")

    def finish(self, rows: Tensor, state: State, worker: WorkerRound) -> State:
        """End a round, and return the workers' messages, with the same names as the result of `message`.

        May change `worker.kept` and `rows` [..., d] in place.
        """
        return {}

    def receive(self, server: State, sums: State, workers: int, population: int) -> None:
        """Update the server state in place after a round.

        Args:
            server: server state, tensors [d] and [1].
            sums: sums of the messages over the workers whose updates are aggregated, [d] and [1].
            workers: number of workers whose updates are aggregated.
            population: number of all workers in the experiment.
        """

    def receive_gradients(self, server: State, mean: Tensor) -> None:
        """Update the server state in place before a round, with the `mean` [d] of the cohort's full gradients.

        Called before `send`, if the algorithm declares `full_gradient` and the workers of a cohort start together.
        """

    def correct(self, update: Tensor, server: State, workers: int, population: int) -> None:
        """Correct the aggregated update in place, before the server optimizer moves the global model by it.

        This method must be element-wise. It is called after `receive`.

        Args:
            update: some columns of the aggregated update, [columns].
            server: server state: the same columns of tensors [d], which may be changed, and tensors [1], which must not
                be changed.
            workers: number of workers whose updates were aggregated.
            population: number of all workers in the experiment.
        """

    def send_gradients(self, gradients: Tensor, worker_state: State) -> None:
        """Change the gradients [..., d] that workers send with `sync = "gradients"`, and their state, in place."""

    def personal_rows(self, rows: Tensor, worker_state: State) -> Tensor:
        """Return the personal models [..., d] of workers, from the global model `rows` [..., d] and the worker state.

        Personal models are tested with the buffers that the workers keep, or otherwise with the global model's buffers.
        """
        return rows

    def _copy(self, **changes: Any) -> ClientAlgorithm:
        """Return a copy of the algorithm with changed attributes, which need not be fields of the dataclass."""
        copied = copy.copy(self)
        vars(copied).update(changes)
        return copied

    def has(self, method: str) -> bool:
        """Whether the algorithm overrides the optional method with this name."""
        return getattr(type(self), method) is not getattr(ClientAlgorithm, method)

    @property
    def alters_gradients(self) -> bool:
        """Whether workers send something other than their gradients with `sync = "gradients"`."""
        return self.has("send_gradients")

    def numbers_sent(self, d: int) -> tuple[int, int]:
        """Return how many numbers a worker receives in addition to the model, and sends in addition to its update.

        Both counts are for one round, and `d` is the number of parameters.
        """
        row = torch.empty(d, device="meta")
        received, sent = self.send(self.server_state(row)), self.message(row)
        return sum(tensor.numel() for tensor in received.values()), sum(tensor.numel() for tensor in sent.values())


def exchanges(algorithm: ClientAlgorithm) -> bool:
    """Whether workers keep a state between rounds, or exchange more than models and updates with the server."""
    row = torch.zeros(2)
    return any((algorithm.worker_state(row), algorithm.server_state(row), algorithm.message(row)))


def needs_local_steps(algorithm: ClientAlgorithm) -> bool:
    """Whether an algorithm requires local steps between communications, so that `sync = "gradients"` is impossible."""
    row = torch.zeros(2)
    needs = (algorithm.uses_start_row, not algorithm.element_wise, algorithm.full_gradient, algorithm.has("correct"))
    state = algorithm.worker_state(row) and not algorithm.alters_gradients
    return any(needs) or any((state, algorithm.server_state(row), algorithm.message(row)))


def step_along(algorithm: ClientAlgorithm, rows: Tensor, gradients: Tensor | OuterProductGrad, state: State) -> None:
    """Move `rows` by one step of a client algorithm, in place. Gradients are [..., d] or an `OuterProductGrad`."""
    if isinstance(gradients, Tensor):
        algorithm.step(rows, gradients, state)
    else:
        algorithm.step_fused(rows, gradients, state)


PERSONAL_BUFFERS = "personal.buffers"  # name of the personal buffers in a worker state


def state_at_first(algorithm: ClientAlgorithm, row: Tensor, buffers: Tensor) -> State:
    """Return the worker state before a worker's first round, including the buffers of its personal model.

    Args:
        algorithm: client algorithm.
        row: parameters of the global model, [d].
        buffers: buffers of the global model, [b].
    """
    personal = algorithm.buffers_kept(len(buffers)).of(buffers)
    return ({PERSONAL_BUFFERS: personal} if len(personal) else {}) | algorithm.worker_state(row)


def personal_model(
    algorithm: ClientAlgorithm, row: Tensor, buffers: Tensor, worker_state: State
) -> tuple[Tensor, Tensor]:
    """Return the parameters [d] and the buffers [b] of a worker's personal model.

    Args:
        algorithm: client algorithm.
        row: parameters of the global model, [d].
        buffers: buffers of the global model, [b].
        worker_state: state that the worker keeps between rounds.
    """
    of_algorithm = {name: tensor for name, tensor in worker_state.items() if name != PERSONAL_BUFFERS}
    if PERSONAL_BUFFERS in worker_state:
        buffers = buffers.clone()
        algorithm.buffers_kept(len(buffers)).write(buffers, worker_state[PERSONAL_BUFFERS])
    return algorithm.personal_rows(row, of_algorithm), buffers
