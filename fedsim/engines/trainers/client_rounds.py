"""The rounds of a client algorithm in a trainer: what a worker received and keeps goes in, messages come out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedsim.clients import State, WorkerRound
from fedsim.engines.task import SharedState, TaskSpec
from fedsim.engines.trainers.batches import BatchSource, WorkItem


class ClientRounds:
    """Starts and finishes the rounds of workers, of one row [d] or of a stack [k, d].

    The `index` of rows in the `SharedState` is a slot, or what selects a stack.
    """

    def __init__(self, task: TaskSpec, shared: SharedState, batch_source: BatchSource) -> None:
        self._algorithm, self._shared, self._batch_source = task.solver, shared, batch_source

    def start(self, rows: Tensor, index: int | slice | Tensor, members: Sequence[WorkItem]) -> State:
        """The state of the steps; `rows` are as they were sent."""
        return self._algorithm.start_round(rows, self._round_of(rows, index, members))

    def finish(self, rows: Tensor, state: State, index: int | slice | Tensor, members: Sequence[WorkItem]) -> None:
        """Store what the workers keep and their messages; may change the rows."""
        worker = self._round_of(rows, index, members)
        for name, message in self._algorithm.finish(rows, state, worker).items():
            self._shared.messages[name][index] = message.to(self._shared.messages[name].dtype)
        for name, kept in worker.kept.items():
            self._shared.kept[name][index] = kept

    def _round_of(self, rows: Tensor, index: int | slice | Tensor, members: Sequence[WorkItem]) -> WorkerRound:
        shared = self._shared
        received = {name: sent[index] for name, sent in shared.received.items()}
        if not received:  # all workers of a round are sent the same
            received = self._algorithm.send(shared.server_state)
        facts = [(member.worker, member.round, self._batch_source.steps_of(member)) for member in members]
        return WorkerRound(received, {name: kept[index] for name, kept in shared.kept.items()}, facts, rows)
