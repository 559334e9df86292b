"""One aggregation as the rules see it: a cohort's updates, and all else that a rule may ask for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedsim.aggregation.columns import CPU, Reduce, bad_rows, own_columns
from fedsim.aggregation.gram import Gram
from fedsim.aggregation.rows import Rows
from fedsim.aggregation.rule import BoundRule
from fedsim.errors import ExperimentError
from fedsim.randomness import Draws, numpy_generator
from fedsim.system.devices import to_device, wide_dtype

Nonfinite = Literal["error", "exclude", "keep"]

SHOWN = 5  # rows named in an error


@dataclass
class Cohort:
    """Everything that a rule may be given about one aggregation; see `fedsim.aggregation.rule`.

    Weights and losses are best given on the CPU, wherever the updates are: what is decided by them needs no wait.
    """

    updates: Tensor
    weights: Tensor | None = None
    root: Tensor | None = None
    losses: Tensor | None = None
    workers: list[int] | None = None
    seed: int = 0
    moment: tuple[int, ...] = ()  # (round,) or (round, step): coordinates of random draws, beside the seed
    state: dict[str, Tensor] | None = None  # None: nobody will see it again
    last: Tensor | None = None
    local_lr: float | None = 0.1  # in `fedsim.aggregate`, which knows no local solver
    sync: Literal["parameters", "gradients"] = "parameters"
    excluded: int = 0  # rows that were screened out, which count among the f
    gram: Gram | None = None  # of the updates, if it has been computed already
    reduce: Reduce = own_columns  # where the updates are some columns only; see Gram

    def __post_init__(self) -> None:
        if self.workers is None:
            self.workers = list(range(len(self.updates)))

    @cached_property
    def rng(self) -> np.random.Generator:
        return numpy_generator(self.seed, "aggregate", *self.moment)

    @cached_property
    def draws(self) -> Draws:
        return Draws.of(self.seed, "aggregate", *self.moment, device=self.updates.device)

    def rows(self) -> Rows:
        """The updates, before anything has been mixed of them."""
        return Rows(self.updates, gram=None if self.gram is None else lambda: self.gram, reduce=self.reduce)

    def f_for(self, stage: BoundRule) -> int | None:
        return None if stage.f is None else max(0, stage.f - self.excluded)

    def menu(self, name: str, rows: Rows, stage: BoundRule) -> Any:
        """What a stage takes under this name, where `rows` have come so far."""
        if name == "updates":
            return rows.block()
        if name == "gram":
            return rows.gram
        if name == "workers":
            return self.workers if len(rows) == len(self.updates) else list(range(len(rows)))
        if name == "weights":
            return self._weights_on(self.updates.device if "updates" in stage.takes else CPU)
        value = getattr(self, name)
        if value is None and name == "root":
            raise ExperimentError("this rule needs root [d], the update that the server's own data gives")
        if value is None and name == "losses":
            raise ExperimentError("this rule needs losses [n], each worker's loss at the global row")
        return value

    def menu_of_columns(self, rows: Rows, part: Tensor, stage: BoundRule) -> Callable[[str], Any]:
        """What a columnwise rule takes whose updates are `part`, some columns [n, columns] of `rows`.

        The rule draws the same numbers for every part.
        """

        def menu(name: str) -> Any:
            if name == "updates":
                return part
            if name == "weights":
                return self._weights_on(part.device)
            if name == "draws":
                return self.draws.on(part.device)
            value = self.menu(name, rows, stage)
            return copy.deepcopy(value) if name == "rng" else value

        return menu

    def _weights_on(self, device: torch.device) -> Tensor | None:
        return None if self.weights is None else to_device(self.weights.to(wide_dtype(device)), device)


def screened(cohort: Cohort, nonfinite: Nonfinite, bad: list[int] | None = None) -> tuple[Cohort, list[int]]:
    """The cohort without rows that hold a NaN or an infinity, and which rows those were; it may be the same cohort.

    Where the updates are some columns only, `bad` says which rows those are.
    Raises ExperimentError where there are any and the policy is "error", or where no row is left.
    """
    if nonfinite == "keep":
        return cohort, []
    bad = bad_rows(cohort.updates) if bad is None else bad
    if not bad:
        return cohort, []
    if len(bad) == len(cohort.updates):
        raise ExperimentError(
            f"all {len(bad)} updates hold NaN or infinity; the step size is the likely cause, so reduce local.lr"
        )
    assert cohort.workers is not None
    counted = [row for row in bad if cohort.weights is None or cohort.weights[row] > 0]
    if nonfinite == "error" and counted:
        bad = counted
        named = ", ".join(str(cohort.workers[row]) for row in bad[:SHOWN]) + (", ..." if len(bad) > SHOWN else "")
        raise ExperimentError(
            f"{len(bad)} of {len(cohort.updates)} updates hold NaN or infinity (rows of workers {named}); "
            'nonfinite = "exclude" leaves such rows out'
        )
    good = [row for row in range(len(cohort.updates)) if row not in set(bad)]
    kept = Cohort(
        updates=cohort.updates[good],
        weights=None if cohort.weights is None else cohort.weights[good],
        root=cohort.root,
        losses=None if cohort.losses is None else cohort.losses[good],
        workers=[cohort.workers[row] for row in good],
        seed=cohort.seed,
        moment=cohort.moment,
        state=cohort.state,
        last=cohort.last,
        local_lr=cohort.local_lr,
        sync=cohort.sync,
        excluded=cohort.excluded + len(bad),
        reduce=cohort.reduce,
    )
    return kept, bad
