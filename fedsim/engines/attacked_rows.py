"""The rows of a cohort under an attack that tries several sets of Byzantine rows with the rule in use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedsim.aggregation import Gram


class AttackedRows:
    """Honest rows, which are multiplied with each other once, and Byzantine rows that change.

    Args:
        rows: of all slots; the honest rows are copied.
        honest: the slots of the h honest workers.
        attackers: whether each worker of the cohort is Byzantine, in the order of their rows.

    Attributes:
        honest: [h, d].
    """

    def __init__(self, rows: Tensor, honest: Tensor, attackers: Sequence[bool]) -> None:
        self._attackers, h = torch.tensor(attackers), len(honest)
        self._distinct = rows.new_empty(len(attackers), rows.shape[1])  # the honest rows, then the Byzantine ones
        self.honest = torch.index_select(rows, 0, honest, out=self._distinct[:h])
        self._of_honest: Gram | None = None

    def gram(self, byzantine: Tensor) -> Gram:
        """The Gram of the cohort's rows with these Byzantine rows: [b, d], or [d] if all attackers send one row."""
        n, h = len(self._attackers), len(self.honest)
        added = 1 if byzantine.ndim == 1 else n - h
        distinct = self._distinct[: h + added]
        distinct[h:] = byzantine
        self._of_honest = self._of_honest or Gram(self.honest)
        places = torch.where(self._attackers, h, self._attackers.logical_not().cumsum(0) - 1)
        if added > 1:
            places += torch.where(self._attackers, self._attackers.cumsum(0) - 1, 0)
        return self._of_honest.extended(distinct).mixed(torch.eye(len(distinct), dtype=torch.double)[places])
