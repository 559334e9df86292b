"""From the workers' updates to the next global row: attack, screening, rule, server step, buffers.

The methods of `Aggregator` stand in the order in which a round calls them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from fedsim.aggregation import AggregationInputs, column_blocks, screened
from fedsim.aggregation.rules.averages import mean
from fedsim.engines.pool.process_context import ProcessContext
from fedsim.engines.round_stats import AggregationContext, AggregationStats
from fedsim.engines.task import SharedState, Sync, TaskSpec
from fedsim.errors import ExperimentError
from fedsim.system.devices import synchronize, to_device


class Aggregator:
    """One process's share of an aggregation. Rules that look at whole rows, and attacks, are the first process's work.

    Args:
        root_slot: where the server's own row lies, if it has one.
    """

    def __init__(self, process: ProcessContext, task: TaskSpec, shared: SharedState, root_slot: int | None) -> None:
        self._process, self._task, self._shared, self._root_slot = process, task, shared, root_slot
        d = len(shared.global_row)
        cuts = column_blocks(d, process.index, process.count, n=len(shared.rows), device=task.device)
        self._blocks = list(cuts)
        self._first = process.index == 0
        self._state: dict[str, Tensor] = {}  # of the rule
        self._number = 0  # of aggregations so far, the same in every process
        self._sync: Sync = task.sync_in(1)  # of the current aggregation
        self._has_last = False
        self._result: list[tuple[slice, Tensor]] = []  # the aggregated update, in this process's columns
        self._sent = shared.global_row  # what the workers were sent
        self._known_shares: tuple[Tensor | None, int, Tensor | None] = (None, 0, None)  # weights, rows, their shares
        # A look at each step's rows waits for the device. In one process, rows can be checked at the end of a round
        # instead, if a row that is not finite does the rule no harm.
        self.may_check_later = (
            task.device.type != "cpu" and process.count == 1 and task.nonfinite != "keep" and task.rule.columnwise
        )
        self._sums: list[Tensor] | None = None  # of the rows of each aggregation since `check_later`, on the device
        self._before: list[tuple[Tensor, Tensor]] = []  # what aggregations change, and its values at `check_later`
        self._had_last = False  # at `check_later`

    def weights(self, workers: Sequence[int], samples: Sequence[int]) -> Tensor | None:
        """The weights [n] that the rule is given for these workers, on the CPU, or None for equal ones.

        `samples` are what each of them went through, for weights by samples.
        """
        task = self._task
        if not task.rule.accepts_weights or (task.weights == "uniform" and not task.rule.needs_weights):
            return None
        if task.weights == "samples":
            values: Sequence[float] = samples
        else:
            values = [1.0 if task.weights == "uniform" else task.weights[worker] for worker in workers]
        return torch.tensor(values, dtype=torch.double)

    def sent_row(self) -> Tensor:
        """What the workers are sent, [d], in a round in which parameters are aggregated; only to be read."""
        self._sent = self._task.server.broadcast(self._shared.global_row, self._shared.states["parameters"])
        return self._sent

    def begin(self, round: int, slots: Sequence[int]) -> None:
        """Begin an aggregation with the rows that this process has trained: their slots.

        Rows of parameters become updates, in place: the difference from the row that the workers were sent.
        """
        self._number += 1
        self._sync = self._task.sync_in(round)
        for rows in _views(self._shared.rows, slots):
            if self._sync == "parameters":
                rows -= self._sent
        if self._checks_now:
            self._note_nonfinite(slots)

    def _note_nonfinite(self, slots: Sequence[int]) -> None:
        """Note the rows whose sum is not finite. A sum may overflow, so this is a suspicion only."""
        for rows, of_rows in zip(_views(self._shared.rows, slots), _runs(slots), strict=True):
            suspects = (~rows.sum(1).cpu().isfinite()).nonzero().flatten() + of_rows.start
            self._shared.unfit[suspects] = self._number

    def rows_processed(self, slots: Sequence[int]) -> None:
        """Processors have changed the rows at these slots, which this process has trained."""
        if self._checks_now:
            self._note_nonfinite(slots)

    def attack(self, context: AggregationContext) -> None:
        """Replace the rows of the Byzantine workers, once the rows of all processes are ready."""
        if self._first and any(worker in self._task.byzantine for worker in context.workers):
            self._attack(context)

    def aggregate(self, context: AggregationContext) -> AggregationStats:
        """Apply the rule to the rows, once those of all processes are ready. The first process gives the stats."""
        if self._task.rule.columnwise:
            return self._aggregate_columns(context, *self._screened(context))
        return self._aggregate_rows(context, *self._screened(context)) if self._first else AggregationStats()

    def server_step(self) -> None:
        """Move the global row along the aggregated update, each process in its columns."""
        for block, update in self._result:
            self._step(block, update)
        self._result = []
        self._has_last = self._task.keeps_last

    def remembered(self) -> tuple[dict[str, Tensor], bool]:
        """The state of the rule, where it was applied to rows here; and whether there is a last update."""
        return {name: tensor.clone() for name, tensor in self._state.items()}, self._has_last

    def remember(self, state: dict[str, Tensor], has_last: bool) -> None:
        """Go on from there."""
        here = self._task.device
        self._state = {name: tensor.to(here, copy=True) for name, tensor in state.items()} if self._first else {}
        self._has_last = has_last

    def begin_with_parameters(self) -> None:
        """Forget the gradients, after the last round of them: what rule, attack and server keep belongs to updates.

        The server optimizer starts at the global row as it has become, each process's columns of it.
        """
        self._state, self._has_last, self._sync = {}, False, "parameters"
        for block in self._blocks:
            start = self._task.server.start(self._shared.global_row[block])
            for name, tensor in self._state_of(block).items():
                tensor.copy_(start[name])
        synchronize(self._task.device)

    def check_later(self) -> None:
        """From now on, do not look at which rows are finite, until `check` is called."""
        shared = self._shared
        changed = [shared.global_row, shared.last, *shared.states["gradients"].values()]
        self._sums, self._before = [], [(tensor, tensor.clone()) for tensor in changed]
        self._had_last = self._has_last

    def check(self, *, undo: bool) -> bool:
        """Whether all rows since `check_later` were finite, as far as their sums tell, which may overflow.

        If not, or with `undo`, undo these aggregations, and check each of them from now on; the result is False.
        """
        finite = not undo and (not self._sums or bool(torch.cat(self._sums).isfinite().all()))
        if not finite:
            for tensor, before in self._before:
                tensor.copy_(before)
            self._has_last, self.may_check_later = self._had_last, False
        self._sums, self._before = None, []
        return finite

    @property
    def _checks_now(self) -> bool:
        """Whether to find out, in each aggregation, which rows are not finite."""
        return self._task.nonfinite != "keep" and self._sums is None

    def _attack(self, context: AggregationContext) -> None:
        """Put the Byzantine rows in place of what those workers computed."""
        task, shared = self._task, self._shared
        attackers = [worker in task.byzantine for worker in context.workers]
        byzantine = [slot for slot, attacks in zip(context.slots, attackers, strict=True) if attacks]
        honest = [slot for slot, attacks in zip(context.slots, attackers, strict=True) if not attacks]
        if not honest and task.attack.needs_honest:
            return  # the Byzantine workers send what they have trained
        theirs = to_device(torch.tensor(byzantine), task.device)

        def aggregate(rows: Tensor) -> Tensor:
            shared.rows[theirs] = rows
            kept, _ = screened(self._cohort(context), "exclude")
            return task.rule(kept).update

        rows = task.attack(
            _copies_of(shared.rows, honest),
            shared.rows[theirs],
            seed=task.seed,
            moment=context.moment,
            last=shared.last if self._has_last else None,
            aggregate=aggregate,
        )
        shared.rows[theirs] = rows
        if self._checks_now:
            shared.unfit[byzantine] = torch.where(rows.isfinite().all(1).cpu(), 0, self._number)

    def _cohort(self, context: AggregationContext) -> AggregationInputs:
        task, shared = self._task, self._shared
        slots = list(context.slots)
        return AggregationInputs(
            updates=self._updates(slots),
            weights=context.weights,
            root=None if self._root_slot is None else shared.rows[self._root_slot],
            losses=shared.losses[slots] if task.rule.accepts("losses") else None,
            workers=list(context.workers),
            seed=task.seed,
            moment=context.moment,
            state=self._state,
            last=shared.last if self._has_last else None,
            local_lr=task.local_lr,
            sync=task.sync_in(context.moment[0]),
        )

    def _updates(self, slots: list[int]) -> Tensor:
        """The rows at these slots."""
        rows = self._shared.rows
        return rows if slots == list(range(len(rows))) else _rows_at(rows, slots)

    def _aggregate_rows(
        self, context: AggregationContext, cohort: AggregationInputs, bad: list[int]
    ) -> AggregationStats:
        """A rule that looks at whole rows: the first process applies it."""
        outcome = self._task.rule(cohort)
        self._state = outcome.state
        self._result = [(slice(None), outcome.update)]
        stats = self._stats(context, bad, outcome.shares)
        stats.metrics.record(cohort.metrics)
        return stats

    @staticmethod
    def _stats(context: AggregationContext, bad: list[int], shares: Tensor | None) -> AggregationStats:
        """Of rows of which those at the places `bad` were left out, and the others had these shares."""
        excluded = [context.workers[place] for place in bad]
        if shares is None:
            return AggregationStats(None, excluded)
        values = iter(shares.tolist())
        return AggregationStats(
            [0.0 if place in bad else next(values) for place in range(len(context.slots))], excluded
        )

    def _aggregate_columns(
        self, context: AggregationContext, cohort: AggregationInputs, bad: list[int]
    ) -> AggregationStats:
        """A rule that looks at columns: each process applies it to its own."""
        rule, rows, shares = self._task.rule, cohort.rows(), self._shares(context, cohort, bad)
        self._result = [
            (block, rule.of_columns(cohort.updates[:, block], rows, cohort, shares)) for block in self._blocks
        ]
        return self._stats(context, bad, shares)

    def _shares(self, context: AggregationContext, cohort: AggregationInputs, bad: list[int]) -> Tensor | None:
        """The shares of a linear rule. Those of the step before are used again if only the weights decide on them."""
        if bad or not self._task.rule.linear_by_weights:
            return self._task.rule.shares(cohort)
        weights, n, shares = self._known_shares
        if context.weights is not weights or len(context.slots) != n:
            shares = self._task.rule.shares(cohort)
            self._known_shares = context.weights, len(context.slots), shares
        return shares

    def _screened(self, context: AggregationContext) -> tuple[AggregationInputs, list[int]]:
        """The cohort without rows that are not finite, and their places in it."""
        cohort = self._cohort(context)
        if self._sums is not None:
            self._sums.append(cohort.updates.sum(1))
            return cohort, []
        if self._task.nonfinite == "keep" or not (self._shared.unfit[list(context.slots)] == self._number).any():
            return cohort, []
        try:
            return screened(cohort, self._task.nonfinite)
        except ExperimentError as error:
            raise ExperimentError(f"round {context.moment[0]}: {error}") from None

    def _step(self, block: slice, update: Tensor) -> None:
        """Move the global row, in these columns, by the aggregated update."""
        task, shared = self._task, self._shared
        if task.keeps_last:
            shared.last[block] = update
        task.stepper(self._sync).step(shared.global_row[block], update, self._state_of(block))

    def _state_of(self, block: slice) -> dict[str, Tensor]:
        return {name: tensor[block] for name, tensor in self._shared.states[self._sync].items()}

    def combine_buffers(self, context: AggregationContext, excluded: Collection[int]) -> None:
        """Update the buffers from those of the whole cohort, by policy. Called in one process.

        Args:
            excluded: workers whose rows were left out; their buffers are left out too.
        """
        if self._keeps_buffers:
            self._take_buffers(context, excluded, self._shared.buffers[: len(context.slots)])

    @property
    def _keeps_buffers(self) -> bool:
        """Whether anything becomes of the workers' buffers."""
        return self._shared.global_buffers.numel() > 0 and self._task.buffers != "server"

    def _take_buffers(self, context: AggregationContext, excluded: Collection[int], buffers: Tensor) -> None:
        """The global buffers become the mean of `buffers` [n, b], weighted as rows are.

        Where no worker is left that counts, they stay as they are.
        """
        shared, workers, weights = self._shared, context.workers, context.weights
        if excluded := set(excluded):
            kept = [place for place, worker in enumerate(workers) if worker not in excluded]
            workers, buffers = [workers[place] for place in kept], buffers[kept]
            weights = None if weights is None else weights[kept]
        if workers and (weights is None or weights.any()):
            shared.global_buffers.copy_(mean(buffers, weights))


def _rows_at(rows: Tensor, slots: list[int]) -> Tensor:
    """The rows at these slots; a view where they lie side by side."""
    if slots == list(range(slots[0], slots[-1] + 1)):
        return rows[slots[0] : slots[-1] + 1]
    return _copies_of(rows, slots)


def _copies_of(rows: Tensor, slots: list[int]) -> Tensor:
    return rows[to_device(torch.tensor(slots, dtype=torch.int64), rows.device)]


def _runs(slots: Sequence[int]) -> list[range]:
    """Slots in ascending order as ranges of consecutive ones."""
    runs = list[range]()
    for slot in slots:
        if runs and runs[-1].stop == slot:
            runs[-1] = range(runs[-1].start, slot + 1)
        else:
            runs.append(range(slot, slot + 1))
    return runs


def _views(rows: Tensor, slots: Sequence[int]) -> list[Tensor]:
    """The rows at these slots, as few views of consecutive ones."""
    return [rows[run.start : run.stop] for run in _runs(slots)]


def meet(process: ProcessContext, device: torch.device) -> None:
    """Wait until all processes have come, and the device has finished the work that the others are to see."""
    if process.count > 1:
        synchronize(device)
    process.barrier.wait()
