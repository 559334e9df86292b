"""Server of a run: sends parameters to the workers, and updates the global model with the aggregated update."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsim.aggregation import column_blocks
from fedsim.aggregation.rules.averages import mean
from fedsim.clients import UpdateCorrection
from fedsim.core.rows import ColumnSpans
from fedsim.processes.team import Team
from fedsim.processing import apply_chain
from fedsim.system.devices import synchronize
from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask, Sync
from fedsim.training.weights import AggregationContext


@dataclass(frozen=True)
class AggregatedUpdate:
    """The part of an aggregated update that this process computes or applies.

    Attributes:
        parts: pairs (columns, aggregated update in these columns).
        workers: number of workers whose updates are aggregated.
        complete: whether every process has the whole aggregated update.
    """

    parts: list[tuple[slice, Tensor]]
    workers: int = 0
    complete: bool = False

    def plus(self, row: Tensor | None) -> AggregatedUpdate:
        """Return the sum of the aggregated update and `row` [d], which must be equal in all processes; None adds 0."""
        if row is None:
            return self
        return replace(self, parts=[(columns, update + row[columns]) for columns, update in self.parts])

    def within(self, spans: ColumnSpans) -> AggregatedUpdate:
        """Return only those columns of the update that workers have sent, so that the others are not moved."""
        parts = list[tuple[slice, Tensor]]()
        for columns, update in self.parts:
            for a, b in spans.spans:
                start, stop = max(a, columns.start), min(b, columns.stop)
                if start < stop:
                    parts.append((slice(start, stop), update[start - columns.start : stop - columns.start]))
        return replace(self, parts=parts)


class ParameterServer:
    """Sends the global parameters to the workers, and updates the global model.

    Each process has one server. All processes must call each method at the same time. Each process updates a part of
    the parameters.

    Args:
        team: processes that compute together.
        task: run to compute.
        shared: tensors of the run.

    Attributes:
        columns: range of the parameters [d] whose optimizer state this process stores.
        blocks: ranges of the parameters [d] that this process aggregates and updates, one after another.
        sent: parameters [d] from which the workers of the current round start, read-only.
        has_last: whether the aggregated update of the previous aggregation is available to rules and attacks.
        broadcast_bytes: bytes that every worker received in the current round; 0 without the setting `downlink`.
    """

    def __init__(self, team: Team, task: RunTask, shared: SharedState) -> None:
        self._team, self._task, self._shared = team, task, shared
        n, process, self.columns = len(shared.cohort.workers), team.process, team.columns(len(shared.server.row))
        start, width = self.columns.start, self.columns.stop - self.columns.start
        blocks = column_blocks(width, process.index, process.count, n=n, device=task.device)
        self.blocks = [moved(block, start) for block in blocks]
        self._own_row = shared.server.row[self.columns]
        self.sent, self.has_last, self.broadcast_bytes = shared.server.row, False, 0

    @property
    def last_row(self) -> Tensor:
        """Aggregated update [d] of the previous aggregation, zeros before the first one; [0] if nothing uses it."""
        return self._shared.server.last

    @property
    def last(self) -> Tensor | None:
        """Aggregated update [d] of the previous aggregation; None if there is none, or if nothing uses it."""
        return self._shared.server.last if self.has_last else None

    def send(self, round: int) -> Tensor:
        """Send parameters to the workers. Return the parameters [d] from which they start in `round`, read-only."""
        start = self._task.server_at(round).broadcast(self._own_row, self._shared.server.states["parameters"])
        self.sent = self._shared.server.row
        if start is not self._own_row:
            self.sent = torch.empty_like(self.sent)
            self.sent[self.columns] = start
            self._team.complete(self.sent)
        if self._task.experiment.downlink:
            self.broadcast_bytes = self._team.from_first(self._update_copy(round) if self._team.computes else 0)
            self.sent = self._shared.server.downlink["copy"]
        return self.sent

    def _update_copy(self, round: int) -> int:
        """Compress the difference between the parameters to send and the workers' copy, and add it to the copy.

        This is EF21-P (Gruntkowska et al. 2023). Returns the number of bytes that each worker receives.
        """
        task, state = self._task, self._shared.server.downlink
        columns, shapes, _ = fragment = task.fragment_received(round)
        difference = columns.of(self.sent - state["copy"])
        chain, seed = task.experiment.downlink_chain, task.experiment.seed
        nbytes = apply_chain(chain, difference, (round,), {}, fragment.states_of(state), shapes, "broadcast", seed=seed)
        columns.write(state["copy"], columns.of(state["copy"]).add_(difference))
        return nbytes

    def nothing(self) -> AggregatedUpdate:
        """Return the aggregated update of a round without updates: zeros, to which noise can be added."""
        return AggregatedUpdate([(block, torch.zeros_like(self._shared.server.row[block])) for block in self.blocks])

    def step(self, aggregate: AggregatedUpdate, moment: tuple[int, ...], cluster: int = 0) -> None:
        """Update the global model of `cluster` with the aggregated update of `moment`: (round,) or (round, step)."""
        task, server, workers = self._task, self._shared.server, len(self._shared.data.shards)
        of_cluster = server.model(cluster)[0]
        sync, algorithm = task.sync_in(moment[0]), task.algorithm_at(*moment)
        correction = algorithm if isinstance(algorithm, UpdateCorrection) else None
        hides_cohort = task.experiment.privacy.component.at_server  # epsilon does not cover its actual size
        counted = task.experiment.expected_updates if hides_cohort else aggregate.workers
        row_state = {name: row for name, row in server.algorithm.items() if correction and len(row) == len(server.row)}
        for block, update in aggregate.parts:
            if task.keeps_last:
                server.last[block] = update
            if correction:
                columns = {name: row[block] for name, row in row_state.items()}
                correction.correct(update, server.algorithm | columns, counted, workers)
            task.stepper_at(moment).step(of_cluster[block], update, self._state_of(sync, block))
        for row in (
            (of_cluster, *[server.last] * task.keeps_last, *row_state.values()) if not aggregate.complete else ()
        ):
            self._team.complete(row)
        self.has_last = task.keeps_last

    def combine_buffers(self, context: AggregationContext, excluded: Collection[int]) -> None:
        """Set the global model's buffers to the weighted mean of the workers' buffers.

        The buffers of `excluded` workers are left out. If no worker is left, the global buffers do not change.
        """
        task, shared = self._task, self._shared
        if not self._team.computes or not shared.server.buffers.numel() or task.experiment.buffers == "frozen":
            return
        workers, weights = context.workers, context.weights
        buffers = self._team.of_all(shared.cohort.buffers, context.slots)
        if task.experiment.nonfinite == "exclude":
            unfit = {worker for worker, fit in zip(workers, buffers.isfinite().all(1).tolist(), strict=True) if not fit}
            excluded = unfit.union(excluded)
        if excluded:
            counted = [position for position, worker in enumerate(workers) if worker not in excluded]
            workers, buffers = [workers[position] for position in counted], buffers[counted]
            weights = None if weights is None else weights[counted]
        if workers and (weights is None or weights.any()):
            shared.server.model(context.cluster)[1].copy_(mean(buffers, weights))

    def begin_with_parameters(self) -> None:
        """Reset the server optimizer when a run changes from aggregating gradients to aggregating parameters."""
        self.has_last = False
        for block in self.blocks:
            start = self._task.experiment.server.component.start(self._shared.server.row[block])
            for name, tensor in self._state_of("parameters", block).items():
                tensor.copy_(start[name])
        synchronize(self._task.device)

    def _state_of(self, sync: Sync, block: slice) -> dict[str, Tensor]:
        """Return the part of an optimizer's state that concerns some parameters: views of the state tensors, by name.

        Args:
            sync: "parameters" for the server optimizer, "gradients" for the client algorithm.
            block: positions of the parameters in the flat vector of all parameters.
        """
        own = moved(block, -self.columns.start)
        return {name: tensor[own] for name, tensor in self._shared.server.states[sync].items()}


def moved(block: slice, by: int) -> slice:
    """Return a slice whose start and stop are increased by `by`."""
    return slice(block.start + by, block.stop + by)
