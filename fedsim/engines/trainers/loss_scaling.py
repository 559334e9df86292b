"""Scaling of losses, without which small gradients vanish in float16; the same for one row and for a stack of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedsim.clients import Solver, State

START, LEAST = 2.0**16, 2.0**-24  # of a scale
PATIENCE = 2000  # good steps after which a scale is doubled


class GradScaler:
    """For each of some rows the factor of its loss, by which gradients stay within the range of float16.

    A row's scale is 2^16 at its start, is halved by a gradient that is not finite, and is doubled after 2,000 steps
    without one. All of it stays on the device.

    Args:
        shape: (k,) for a stack of k rows, () for one row.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self._scales = torch.full(shape, START, dtype=torch.float32, device=device)
        self._good_steps = torch.zeros(shape, dtype=torch.int32, device=device)

    def reset(self) -> None:
        """Be as new, in the same memory."""
        self._scales.fill_(START)
        self._good_steps.zero_()

    def of(self, places: Any = ...) -> Tensor:
        """The scales of the rows at these places."""
        return self._scales[places]

    def unscale(self, gradients: Sequence[Tensor], places: Any = ...) -> Tensor:
        """Undo the scaling of gradients [m, ...] in place; whether each row's are finite, bool [m].

        The scales follow. Gradients that are not finite must not be used.
        """
        scales, good = self._scales[places], self._good_steps[places]
        finite = torch.ones_like(scales, dtype=torch.bool)
        for gradient in gradients:
            finite &= gradient.isfinite().reshape(*finite.shape, -1).all(-1)
            gradient.div_(_like(scales, gradient))
        good = torch.where(finite, good + 1, 0)
        enough = good >= PATIENCE
        self._scales[places] = torch.where(finite, torch.where(enough, 2 * scales, scales), scales / 2).clamp(min=LEAST)
        self._good_steps[places] = torch.where(enough, 0, good)
        return finite


@dataclass(frozen=True)
class ScaledSolver:
    """A local solver for a row whose losses are scaled: gradients that are not finite move nothing."""

    solver: Solver
    scale: GradScaler

    def start(self, rows: Tensor) -> State:
        return self.solver.start(rows)

    def step(self, rows: Tensor, gradients: Tensor, state: State) -> None:
        step_where(self.scale.unscale([gradients]), self.solver, rows, gradients, state)


def step_where(finite: Tensor, solver: Solver, rows: Tensor, gradients: Tensor, state: State) -> None:
    """A solver's step of rows [m, ...] that moves only those whose gradients are `finite` [m], and their state."""
    before = {name: tensor.clone() for name, tensor in state.items()}
    rows_before = rows.clone()
    solver.step(rows, gradients, state)
    torch.where(_like(finite, rows), rows, rows_before, out=rows)
    for name, tensor in state.items():
        tensor_before = before[name] if name in before else torch.zeros_like(tensor)
        torch.where(_like(finite, tensor), tensor, tensor_before, out=tensor)


def zero_where_not(finite: Tensor, gradients: Sequence[Tensor]) -> None:
    """Zeros in place of the gradients [m, ...] of rows that are not `finite` [m]."""
    for gradient in gradients:
        gradient.masked_fill_(~_like(finite, gradient), 0)


def _like(values: Tensor, tensor: Tensor) -> Tensor:
    """Values [m] so that they go with a tensor [m, ...]."""
    return values.view(values.shape + (1,) * (tensor.ndim - values.ndim))
