"""Start and end of a worker's local training.

At the start, the worker loads its state and the server's message. At the end, it stores its state and its own message.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from fedsim.clients import ClientAlgorithm, GradientMessage, RoundNumbers, State, WorkerRound
from fedsim.clients.algorithm import PERSONAL_BUFFERS
from fedsim.errors import ExperimentError, show
from fedsim.training.batches import BatchSource, WorkItem
from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask
from fedsim.training.weights import spoil, weights_of

Index = int | slice | Tensor  # selects rows in the `SharedState`: one slot, or the rows of a stack


class ClientRounds:
    """Start and end of local training, for one worker (rows [d]) or for a stack of k workers (rows [k, d])."""

    def __init__(self, task: RunTask, shared: SharedState, batch_source: BatchSource) -> None:
        self._task, self._algorithm, self._shared, self._batch_source = task, task.algorithm, shared, batch_source

    def start(self, rows: Tensor, index: Index, members: Sequence[WorkItem]) -> State:
        """Prepare local training, and return the client algorithm's initial state.

        Args:
            rows: parameters that the workers have received, [d] or [k, d].
            index: index of the workers in the tensors of the cohort.
            members: the workers, each as a `WorkItem`.
        """
        shared, columns = self._shared, self._algorithm.personal_buffers
        if columns.width:
            buffers = shared.cohort.buffers[index]
            columns.write(buffers, shared.cohort.kept[PERSONAL_BUFFERS][index])
            shared.cohort.buffers[index] = buffers
        first = members[0]
        settings = self._settings(rows, members)
        settings.pop("momentum", None)  # the optimizer state does not depend on its value
        algorithm = self._task.algorithm_at(first.round, settings=settings)
        return algorithm.start_round(rows, self._round_of(algorithm, rows, index, members, only_tested=not first.ends))

    def finish(self, rows: Tensor, state: State, index: Index, members: Sequence[WorkItem]) -> None:
        """End local training: store what the workers send and what they keep. The method may change `rows`.

        Args:
            rows: parameters after training, [d] or [k, d].
            state: state of the client algorithm.
            index: index of the workers in the tensors of the cohort.
            members: the workers, each as a `WorkItem`.
        """
        first = members[0]
        if not first.ends:
            return
        columns = self._algorithm.personal_buffers
        if columns.width:
            self._shared.cohort.kept[PERSONAL_BUFFERS][index] = columns.of(self._shared.cohort.buffers[index])
        algorithm = self._task.algorithm_at(first.round, settings=self._settings(rows, members))
        worker = self._round_of(algorithm, rows, index, members, only_tested=False)
        sent, messages = algorithm.finish(rows, state, worker), self._shared.cohort.messages
        if sent.keys() != messages.keys():
            raise ExperimentError(
                f"{self._task.experiment.local.setting}: `finish` returned the messages {show(list(sent))}, but "
                f"`message` declares {show(list(messages))}; return the same names"
            )
        for name, message in sent.items():
            messages[name][index] = message.to(messages[name].dtype)
            spoil(self._task, rows, message)
        for tensor in worker.kept.values():
            spoil(self._task, rows, tensor)
        self._keep(worker.kept, index)

    def buffers_beside(self) -> Tensor | None:
        """Return the buffers [cohort, b] of personal models that workers train in addition; None if there are none."""
        return self._shared.cohort.kept.get(PERSONAL_BUFFERS) if self._algorithm.personal_beside else None

    def send_gradients(self, index: Index) -> None:
        """Replace workers' gradients, in place, by the values that the client algorithm sends instead.

        `index` selects the workers in the tensors of the cohort.
        """
        if not (isinstance(self._algorithm, GradientMessage) and self._algorithm.alters_gradients):
            return
        rows, worker_state = self._shared.cohort.rows[index], self._kept(index)
        self._algorithm.send_gradients(rows, worker_state)
        self._keep(worker_state, index)
        if isinstance(index, Tensor):  # `rows` is a copy
            self._shared.cohort.rows[index] = rows

    def _settings(self, rows: Tensor, members: Sequence[WorkItem]) -> dict[str, Any]:
        if rows.ndim == 1:
            return self._task.step_settings(members[0].worker, members[0].round)
        work = self._batch_source.work(members)
        return self._task.step_settings(work.workers, work.rounds)

    def _kept(self, index: Index) -> State:
        return {name: kept[index] for name, kept in self._shared.cohort.kept.items() if name != PERSONAL_BUFFERS}

    def _keep(self, worker_state: State, index: Index) -> None:
        for name, tensor in worker_state.items():
            self._shared.cohort.kept[name][index] = tensor

    def _round_of(
        self, algorithm: ClientAlgorithm, rows: Tensor, index: Index, members: Sequence[WorkItem], *, only_tested: bool
    ) -> WorkerRound:
        shared = self._shared
        received = {name: sent[index] for name, sent in shared.cohort.received.items()}
        if not received:  # every worker of a round receives the same message
            received = algorithm.send(shared.server.algorithm)
        full_gradient = shared.cohort.full_gradients[index] if self._algorithm.full_gradient else None
        return WorkerRound(
            received, self._kept(index), partial(self._numbers, members), rows, full_gradient, only_tested
        )

    def _numbers(self, members: Sequence[WorkItem]) -> RoundNumbers:
        """Return the `RoundNumbers` of several workers."""
        task, work = self._task, self._batch_source.work(members)
        weights, has_weight = np.ones(len(work)), work.workers < len(self._shared.data.shards)  # the server has none
        of_workers = weights_of(task, self._shared, work.workers[has_weight].tolist(), work.sizes[has_weight].tolist())
        if of_workers is not None:
            weights[has_weight] = of_workers.numpy()
        schedule = task.schedule.of(work.workers, work.rounds)
        steps = schedule.local_steps(work.steps)
        steps_per_epoch = schedule.local_steps(schedule.batches_per_epoch(work.sizes))
        return RoundNumbers(work.workers, work.rounds, steps, steps_per_epoch, work.sizes, weights)
