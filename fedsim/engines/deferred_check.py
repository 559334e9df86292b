"""A check at the end of a round, not at each step, that all rows were finite."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.engines.task import SharedState


class DeferredCheck:
    """Collects sums of rows on the device and reads them together, because each read waits for the device.

    For aggregations in one process by rules that run to their end even if a row is not finite.

    Attributes:
        usable: False after a row was not finite: then each aggregation is checked.
        active: whether sums are collected now.
    """

    def __init__(self, shared: SharedState) -> None:
        self._changed = [shared.global_row, shared.last, *shared.states.get("gradients", {}).values()]
        self._before: list[Tensor] = []
        self._sums: list[Tensor] = []
        self.usable, self.active = True, False

    def begin(self) -> None:
        """Collect sums from now on."""
        self.active, self._sums, self._before = True, [], [tensor.clone() for tensor in self._changed]

    def add(self, rows: Tensor) -> None:
        """Collect the sums of rows."""
        self._sums.append(rows.sum(1))

    def end(self, *, failed: bool) -> bool:
        """Whether all rows were finite, by their sums, which may overflow.

        If they were not, or the round has `failed`, undo the changes of its aggregations and return False.
        """
        finite = not failed and (not self._sums or bool(torch.cat(self._sums).isfinite().all()))
        if not finite:
            self.usable = False
            for tensor, before in zip(self._changed, self._before, strict=True):
                tensor.copy_(before)
        self.active, self._sums, self._before = False, [], []
        return finite
