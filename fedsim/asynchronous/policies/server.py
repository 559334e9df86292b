"""The server of an asynchronous run, as policies see it: its tensors, and the operations that change them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsim.aggregation import column_blocks
from fedsim.aggregation.rules.averages import mean
from fedsim.clients import State, Stepper
from fedsim.core.rows import index_of


class Arrival(NamedTuple):
    """The result of one worker, which has arrived at the server as `server.rows[slot]`.

    Attributes:
        slot: position of the worker among the workers that train at the same time.
        worker: ID of the worker.
        unit: number of steps or rounds that were started in this slot before this one.
        staleness: number of updates of the global model since the worker read it.
    """

    slot: int
    worker: int
    unit: int
    staleness: int


class AsyncServer(ABC):
    """Server of an asynchronous run: the tensors and operations that policies may use.

    n workers train at the same time, and the model has d parameters and b buffers. A slot is the position of one of the
    n workers. A row is a flat parameter vector.

    Attributes:
        n: number of workers that train at the same time.
        seed: seed of the run.
        round: number of the current round, counted from 1.
        buffers: the setting `buffers`: "average", "local" or "frozen".
        has_buffers: whether the model has buffers.
        stepper: client algorithm that takes steps along gradients on the server's models.
        global_row: global model, [d].
        global_buffers: buffers of the global model, [b], float64.
        worker_rows: results of the workers (models or gradients), [n, d].
        worker_buffers: buffers of the workers' models, [n, b], float64.
        rows: the rows [d] of `worker_rows`.
        replicas: start model of each worker, [n, d] if the policy needs it, else [0, d].
        models: start model of each worker, a list of rows [d].
        step_state: optimizer state of `stepper` for the global model, tensors [d].
        worker_step_states: optimizer state of `stepper` for each worker's model, tensors [n, d].
        policy_state: tensors that the policy keeps between arrivals.
        step_seconds: seconds per local step of each worker, float64 [n] on the CPU.
        read: number of updates when each worker last read the model, int64 [n], or -1.
        units: number of steps or rounds that were started in each slot, int64 [n].
        alive_mask: whether each worker is present (1) or has left (0), int64 [n].
        combines: whether `aggregate.rule` combines the vectors that the policy collects. False if the rule is a mean,
            so that the policy's own average is used, or if the rule is a filter of single vectors.
    """

    n: int
    seed: int
    round: int
    buffers: str
    has_buffers: bool
    stepper: Stepper
    global_row: Tensor
    global_buffers: Tensor
    worker_rows: Tensor
    worker_buffers: Tensor
    rows: list[Tensor]
    replicas: Tensor
    models: list[Tensor]
    step_state: State
    worker_step_states: State
    policy_state: State
    step_seconds: Tensor
    read: np.ndarray
    units: np.ndarray
    alive_mask: np.ndarray
    combines: bool
    _version: np.ndarray

    @property
    def version(self) -> int:
        """Number of updates of the global model so far."""
        return int(self._version[0])

    @version.setter
    def version(self, version: int) -> None:
        self._version[0] = version

    def increment_version(self) -> None:
        """Count one more update of the global model."""
        self._version[0] += 1

    @property
    def alive(self) -> np.ndarray:
        """Positions (slots) of the workers that have not left."""
        return np.flatnonzero(self.alive_mask)

    def staleness(self, slot: int) -> int:
        """Return the number of updates of the global model since the worker in `slot` last read it."""
        return int(self._version[0] - self.read[slot])

    @abstractmethod
    def pull(self, slot: int) -> None:
        """Copy the server's current model to the worker in `slot`."""

    def keep_model(self, slot: int) -> None:
        """Let the worker in `slot` continue from its own model instead of the global model.

        The worker's own model begins as a copy of the initial global model.
        """
        if self.read[slot] < 0:
            self.read[slot] = self._version[0]

    def step(self, gradient: Tensor, slot: int | None = None) -> None:
        """Take a step on the global model along `gradient` [d]. The gradient may be overwritten.

        The step uses the optimizer state of the worker in `slot`. None: the optimizer state shared by all workers.
        """
        state = self.step_state if slot is None else self._worker_state(slot)
        self.stepper.step(self.global_row, gradient, state)
        self.increment_version()

    def step_replica(self, slot: int, gradient: Tensor) -> None:
        """Take a step on the server's copy of a worker's model along `gradient` [d], which may be overwritten."""
        self.stepper.step(self.replicas[slot], gradient, self._worker_state(slot))

    @abstractmethod
    def mixing_matrix(self) -> np.ndarray:
        """Return the mixing matrix of `policy.topology` in the current round, float64 [n, n]. Do not change it."""

    def neighbours(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the present neighbours of the worker in `slot` in this round, ascending, and their weights in W."""
        weights = self.mixing_matrix()[slot] * self.alive_mask
        weights[slot] = 0
        slots = np.flatnonzero(weights)
        return slots, weights[slots]

    @abstractmethod
    def root(self) -> Tensor:
        """Return the vector [d] that the server computes from its own samples: a gradient or an update.

        It is computed again every `aggregate.root_every` updates of the global model.
        """

    @abstractmethod
    def admit(self, arrival: Arrival, vector: Tensor) -> bool:
        """Apply the attack and the rule to the vector [d] that a worker sends, in place.

        A rule only applies to a single vector if the policy does not combine several ones. Only policies with
        `sends_results = False` call this method. Returns False if the rule rejects the vector, or if it is excluded
        because it contains NaN or infinity. The policy must not use the vector then.
        """

    @abstractmethod
    def combine(self, vectors: Tensor, workers: Sequence[int], staleness: Tensor) -> Tensor:
        """Return the result [d] of the rule for k vectors.

        Args:
            vectors: the vectors, [k, d].
            workers: IDs of the workers that have sent them.
            staleness: staleness of each vector, int64 [k] on the CPU.
        """

    @property
    @abstractmethod
    def mixes(self) -> bool:
        """Whether workers on a graph move by `mix`, because of the rule or of an attack, and not by W alone."""

    @abstractmethod
    def mix(
        self, models: Tensor, slot: int, others: Sequence[int], weights: np.ndarray, moment: tuple[int, ...]
    ) -> Tensor:
        """Return the vector [d] by which the rule moves the model of a worker that receives the models of `others`.

        Args:
            models: model of each worker, [n, d].
            slot: slot of the worker.
            others: slots of the k workers whose models it receives.
            weights: weights of `others` and, last, of the worker itself, float64 [k + 1].
            moment: key for random numbers, which differs between all calls with the same slot.
        """

    @property
    @abstractmethod
    def tested(self) -> np.ndarray:
        """Slots of the present workers whose mean model is tested on a graph: those that send their own model."""

    @abstractmethod
    def update(self, update: Tensor) -> None:
        """Let the server optimizer update the global model along an aggregated update [d]."""

    def combine_gradients(self, slots: Sequence[int]) -> Tensor:
        """Return the result [d] of the rule, by default the mean, for the gradients of the workers in `slots`."""
        rows = self.worker_rows[index_of(sorted(slots), self.worker_rows.device)]
        if self.combines:
            return self.combine(rows, sorted(slots), torch.tensor([self.staleness(slot) for slot in sorted(slots)]))
        blocks = column_blocks(rows.shape[1], n=len(rows), device=rows.device)
        return torch.cat([mean(rows[:, block]) for block in blocks])

    def delta(self, slot: int) -> Tensor:
        """Return a worker's trained model minus its start model, [d].

        For float32 models, the result is float64, so that no digits are lost.
        """
        return self.rows[slot].to(self.worker_buffers.dtype) - self.replicas[slot]

    def mix_buffers(self, slots: Sequence[int], share: float | None = None) -> None:
        """Move the server's buffers (BatchNorm statistics) towards the mean of the buffers of some workers.

        Args:
            slots: positions of the workers.
            share: weight of the mean, from 0 to 1. None: the fraction of the present workers that are in `slots`.
        """
        if self.has_buffers:
            share = min(1.0, len(slots) / len(self.alive)) if share is None else share
            self.move_buffers(self.worker_buffers[index_of(slots, self.worker_buffers.device)].mean(0), share)

    def move_buffers(self, target: Tensor, share: float) -> None:
        """Set the server's buffers to (1 - share) * buffers + share * target, unless `buffers = "frozen"` is set."""
        if self.has_buffers and self.buffers != "frozen":
            self.global_buffers.lerp_(target, share)

    def _worker_state(self, slot: int) -> State:
        return {name: tensor[slot] for name, tensor in self.worker_step_states.items()}
