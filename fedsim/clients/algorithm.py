"""Client algorithms: what a worker does in a round, keeps between rounds, and exchanges with the server.

    server                                              worker k
    send(server state)               -- received -->    start_round(rows, worker) -> state of the steps
                                                        step(rows, gradients, state), for each batch
    receive(server state, sums, ...) <-- messages --    finish(rows, state, worker) -> messages
    correct(update, server state, ...)

Rows (models and updates) are exchanged in addition to the server state and the messages. All methods work on tensors
[..., d] for rows and [..., 1] for numbers, so the same code handles one worker or a stack of workers. `step` must be
element-wise, because it may be called with only some columns. An algorithm that needs whole rows, or several gradients
per step, sets `element_wise = False` and defines `step_rows` instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.clients.base import OuterProductGrad, State
from fedsim.clients.schedule import Schedule
from fedsim.core.rows import ColumnSpans, Entry, Layout
from fedsim.system.devices import to_device

GradientAt = Callable[[Tensor], Tensor]


class SampleNoise(NamedTuple):
    """Clipping norm and noise multiplier for private gradients.

    Each per-sample gradient is clipped, and Gaussian noise is added to the sum of the clipped gradients.

    Attributes:
        clip: maximum L2 norm C of a per-sample gradient.
        noise: noise multiplier z. The standard deviation of the noise is z C.
    """

    clip: float
    noise: float


class RoundNumbers(NamedTuple):
    """Numbers of one round of k workers, as arrays [k] on the CPU, int64 except for `weights`.

    Attributes:
        workers: IDs of the workers.
        rounds: number of each worker's round, from 1.
        steps: number of local steps in the round.
        steps_per_epoch: number of steps in one pass over the worker's samples.
        samples: number of the worker's samples.
        weights: weight of each worker in the aggregation, before normalisation, float64.
    """

    workers: np.ndarray
    rounds: np.ndarray
    steps: np.ndarray
    steps_per_epoch: np.ndarray
    samples: np.ndarray
    weights: np.ndarray


@dataclass
class WorkerRound:
    """Data of one worker in one round, or of k workers that are trained together.

    Attributes:
        received: what the server sent besides the global model: tensors by name.
        kept: state that the workers keep between rounds: tensors by name. `finish` may change it, `start_round` must
            not.
        read_numbers: function that returns the numbers of each worker's round, called when `numbers` is first read.
        rows: models of the workers, [d] or [k, d].
        full_gradient: gradient over all samples of each worker at the model that it received, [..., d]. None unless the
            algorithm sets `full_gradient`.
        only_tested: whether the trained models are only tested, and not sent to the server. `finish` is then not
            called.
    """

    received: State
    kept: State
    read_numbers: Callable[[], RoundNumbers]
    rows: Tensor
    full_gradient: Tensor | None = None
    only_tested: bool = False

    @cached_property
    def numbers(self) -> RoundNumbers:
        """Numbers of each worker's round."""
        return self.read_numbers()

    @cached_property
    def workers(self) -> Tensor:
        """IDs of the workers, int64 [..., 1]."""
        return self._column(self.numbers.workers)

    @cached_property
    def rounds(self) -> Tensor:
        """Number of each worker's round, from 1, int64 [..., 1]."""
        return self._column(self.numbers.rounds)

    @cached_property
    def steps(self) -> Tensor:
        """Number of local steps in each worker's round, int64 [..., 1]."""
        return self._column(self.numbers.steps)

    @cached_property
    def steps_per_epoch(self) -> Tensor:
        """Number of steps in one pass over each worker's samples, int64 [..., 1]."""
        return self._column(self.numbers.steps_per_epoch)

    @cached_property
    def weights(self) -> Tensor:
        """Weights of the workers in the aggregation, [..., 1], with the dtype of the models."""
        return self._column(self.numbers.weights).to(self.rows.dtype)

    def _column(self, values: np.ndarray) -> Tensor:
        """Return `values` as a new tensor [..., 1], which algorithms may change."""
        return to_device(torch.tensor(values).view(*self.rows.shape[:-1], 1), self.rows.device)


class ClientAlgorithm:
    """Base class of client algorithms, which define how a worker trains.

    A client algorithm is a frozen dataclass that derives from this class and defines `step`. All other methods are
    optional. An example is `fedsim.clients.SGD`.

    Attributes:
        element_wise: whether `step` treats each parameter separately. If false, `step_rows` is called instead.
        uses_start_row: whether steps use the model that the worker received at the start of the round.
        personal_columns: which parameters are personal: each worker keeps its own and does not send them. Their
            updates must be 0.
        personal_buffers: which buffer values, such as BatchNorm statistics, are personal.
        personal_beside: whether each worker trains a complete personal model in addition to its copy of the global
            model, with `gradient_at` (see `step_rows`). The worker then keeps all buffers of its personal model.
        starts_from_current: whether a worker that takes part for the first time starts its personal state from the
            current global model instead of the initial one. Requires synchronous rounds.
        gradients_per_step: number of gradients that a local step computes, which determines its simulated duration.
        sample_noise: clipping and noise of the gradients that `step` receives, or None for ordinary gradients.
        full_gradient: whether each worker computes the gradient over all its samples at the start of a round. This
            costs one pass over the samples.
        alters_gradients: whether workers send something other than their gradients if `sync = "gradients"`.
        clusters: number of global models. If there are several, each worker trains the one with the least loss on its
            training samples, and the server aggregates the updates of each model separately. `server_state` must then
            contain a tensor "clusters" [clusters - 1, d] for the models after the first.
        setting: the setting to blame in error messages about incompatible settings. "" stands for `local.algorithm`.

    Some algorithms need further methods, which are declared by the base classes `UpdateCorrection`, `CohortGradient`,
    `GradientMessage`, `FeatureLoss` and `PersonalModel` (see `fedsim.clients.capabilities`).

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
    sample_noise: ClassVar[SampleNoise | None] = None
    full_gradient: ClassVar[bool] = False
    alters_gradients: ClassVar[bool] = False
    clusters: ClassVar[int] = 1
    setting: ClassVar[str] = ""

    @property
    def shares_model(self) -> bool:
        """Whether all workers use one global model, without personal parameters or buffers."""
        return self.clusters == 1 and not self.personal_columns.width

    def gradients(self, steps: int, batches: int) -> int:
        """Return how many mini-batch gradients a worker computes in a round, which determines its simulated duration.

        Args:
            steps: number of local steps.
            batches: number of batches in one pass over the worker's samples.
        """
        return steps * self.gradients_per_step + (batches if self.full_gradient else 0)

    def fragments(self, layout: Layout) -> list[list[Entry]]:
        """Return the parameters that workers send: one list if they send the same in all rounds, as by default.

        With several lists (fragments), workers send one of them in each round (see `fragment_at`).
        """
        return [layout.outside(self.personal_columns)]

    def fragment_at(self, round: int) -> int:
        """Return the index of the fragment that workers send at the end of `round`, or of the only one."""
        return 0

    def check_work(self, schedule: Schedule, sizes: Mapping[int, int]) -> None:
        """Raise ExperimentError if rounds are too short for the algorithm.

        Args:
            schedule: how much each worker trains in a round.
            sizes: number of training samples of each worker, by ID.
        """

    def for_model(self, module: nn.Module) -> ClientAlgorithm:
        """Return the algorithm for a model: a copy with changed attributes if they depend on the model's layers."""
        return self

    def buffers_kept(self, b: int) -> ColumnSpans:
        """Return which of a model's `b` buffer values are personal, that is, kept by each worker and not sent."""
        return ColumnSpans(((0, b),)) if self.personal_beside else self.personal_buffers

    def having(self, **values: Any) -> ClientAlgorithm:
        """Return a copy of the algorithm with other values of the parameters `lr` and `momentum`.

        Each value is a number, or one number per worker as a tensor [k, 1], for `step` on rows [k, d].
        """
        return replace(self, **values)  # type: ignore[type-var]

    def worker_state(self, row: Tensor) -> State:
        """Return the initial value of the state that a worker keeps between rounds: tensors by name.

        `row` [d] are the parameters of the initial global model (of the current one, if `starts_from_current` is set).
        """
        return {}

    def server_state(self, row: Tensor) -> State:
        """Return the initial value of the state that the server keeps for the algorithm: tensors [d] or [1] by name.

        `row` [d] are the parameters of the initial global model.
        """
        return {}

    def message(self, row: Tensor) -> State:
        """Return zeros with the names and shapes of the tensors that a worker sends besides its update."""
        return {}

    def send(self, server: State) -> State:
        """Return what the server sends besides the global model: by default, its whole state.

        Callers must not change the result.
        """
        return server

    def start(self, rows: Tensor) -> State:
        """Return the optimizer state before the first step: tensors by name, with the shape of `rows`."""
        return {}

    def start_round(self, rows: Tensor, worker: WorkerRound) -> State:
        """Return the optimizer state at the start of a round, with the same names as in `start`.

        By default, this is the state of `start`, but tensors that workers keep (see `worker_state`) have their kept
        values. `rows` [..., d] are the models that the workers received, which may be changed in place.
        """
        state = self.start(rows)
        for name in worker.kept.keys() & state.keys():
            state[name].copy_(worker.kept[name])
        return state

    def step(self, rows: Tensor, gradients: Tensor, state: State) -> None:
        """Move the models `rows` by one step, in place. `gradients` and `state` may be changed too.

        Every client algorithm must define this method.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `step`")

    def step_fused(self, rows: Tensor, product: OuterProductGrad, state: State) -> None:
        """Like `step`, for the weights [k, o, i] of a linear layer in k models (o outputs, i inputs).

        `product` is the gradient as an `OuterProductGrad`.
        """
        self.step(rows, product.computed(), state)

    def step_rows(self, rows: Tensor, gradients: Tensor, state: State, gradient_at: GradientAt) -> None:
        """Move the models `rows` by one step, in place. Called instead of `step` if `element_wise` is false.

        Args:
            rows: models of the workers, [..., d].
            gradients: gradients of the batches at `rows`, [..., d].
            state: optimizer state, which is changed in place.
            gradient_at: function that maps models [..., d] to the gradients [..., d] of the same batches there.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `step_rows`")

    def finish(self, rows: Tensor, state: State, worker: WorkerRound) -> State:
        """End a round, and return what the workers send besides their updates, with the same names as in `message`.

        May change `worker.kept` and the models `rows` [..., d] in place. By default, workers keep the tensors of the
        optimizer state whose names are in `worker_state`, and send nothing.
        """
        worker.kept.update({name: state[name] for name in worker.kept.keys() & state.keys()})
        return {}

    def receive(self, server: State, sums: State, workers: int, population: int) -> None:
        """Update the server's state after a round, in place.

        Args:
            server: state of the server, tensors [d] and [1].
            sums: sum of each message over all workers whose updates are aggregated, [d] and [1].
            workers: number of workers whose updates are aggregated.
            population: number of all workers in the experiment.
        """

    def _copy(self, **changes: Any) -> ClientAlgorithm:
        """Return a copy of the algorithm with changed attributes."""
        copied = copy.copy(self)
        vars(copied).update(changes)
        return copied

    def numbers_sent(self, d: int) -> tuple[int, int]:
        """Return how many numbers a worker receives besides the model, and sends besides its update, in a round.

        `d` is the number of parameters of the model.
        """
        row = torch.empty(d, device="meta")
        received, sent = self.send(self.server_state(row)), self.message(row)
        return sum(tensor.numel() for tensor in received.values()), sum(tensor.numel() for tensor in sent.values())


def exchanges(algorithm: ClientAlgorithm) -> bool:
    """Whether workers keep a state between rounds, or exchange more than models and updates with the server."""
    row = torch.zeros(2)
    return any((algorithm.worker_state(row), algorithm.server_state(row), algorithm.message(row)))


PERSONAL_BUFFERS = "personal.buffers"  # name of the personal buffers in a worker state


def state_at_first(algorithm: ClientAlgorithm, row: Tensor, buffers: Tensor) -> State:
    """Return the state of a worker before its first round, including the buffers of its personal model.

    Args:
        algorithm: client algorithm.
        row: parameters of the global model, [d].
        buffers: buffers of the global model, [b].
    """
    personal = algorithm.buffers_kept(len(buffers)).of(buffers)
    return ({PERSONAL_BUFFERS: personal} if len(personal) else {}) | algorithm.worker_state(row)
