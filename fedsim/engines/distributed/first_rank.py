"""What the first rank alone does: it gathers the rows of all ranks, and computes with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fedsim.core.rows import new_rows
from fedsim.engines.distributed.placement import RowPlacement
from fedsim.engines.distributed.process_group import RankGroup
from fedsim.engines.round_stats import AggregationContext
from fedsim.engines.row_aggregator import RowAggregator
from fedsim.engines.task import SharedState, TaskSpec
from fedsim.errors import ExperimentError


class FirstRank:
    """All ranks call its methods together. The rows are allocated when they are first needed.

    Args:
        shared: of this rank.
        root_slot: the slot of the server's own row, if it has one; its row is always gathered.
        aggregator_of: makes an aggregator of some tensors in place of this rank's own.

    Attributes:
        aggregator: of all rows, in the first rank.
        rows: [n, d] by slot, in the first rank after `gather`.
    """

    def __init__(
        self,
        group: RankGroup,
        task: TaskSpec,
        shared: SharedState,
        n_rows: int,
        root_slot: int | None,
        aggregator_of: Callable[..., RowAggregator],
    ) -> None:
        self._group, self._task, self._shared, self._n_rows, self._root_slot = group, task, shared, n_rows, root_slot
        self._aggregator_of = aggregator_of
        self.aggregator: RowAggregator | None = None
        self.rows = shared.rows[:0]

    def allocate(self) -> None:
        """Allocate the rows, in the first rank."""
        if self._group.first and self.aggregator is None:
            self.rows = new_rows(self._n_rows, len(self._shared.global_row), self._task.dtype, self._task.device)
            self.aggregator = self._aggregator_of(rows=self.rows, unfit=torch.zeros(self._n_rows, dtype=torch.int64))

    def gather(self, context: AggregationContext, placement: RowPlacement) -> None:
        """Send the rows of an aggregation to the first rank."""
        self.allocate()
        group, d, wanted = self._group, len(self._shared.global_row), {*context.slots, self._root_slot}
        slots = [[slot for slot in assignment if slot in wanted] for assignment in placement.assignments]
        own = self._shared.rows[placement.rows_of(slots[group.index])]
        sizes = [len(theirs) * d if group.first else 0 for theirs in slots]
        received = group.exchange([own] + [own[:0]] * (group.count - 1), sizes)
        for theirs, part in zip(slots, received, strict=True):
            if group.first:
                self.rows[theirs] = part.view(len(theirs), d)

    def run(self, work: Callable[[RowAggregator], Any]) -> Any:
        """Do work in the first rank. All ranks get its result, or the ExperimentError that it raises."""
        error: ExperimentError | None = None
        result = None
        if self.aggregator is not None:
            try:
                result = work(self.aggregator)
            except ExperimentError as refusal:
                error = refusal
        error, result = self._group.broadcast_object((error, result))
        if error is not None:
            raise error
        return result
