"""The registry of processors, and a chain of them applied to an update.

A processor is a pure function from an update [d] to an update [d]. Its positional parameters receive these inputs by
name, and must not be changed; its keyword-only parameters are its configuration:

    update   [d], the update of one worker, or with sync = "gradients" its gradient
    draws    Draws, a function of (seed, round, worker) and the place in the chain, on the device of the update; with
             sync = "gradients" also of the step
    metrics  a dict, to which the processor may add numbers or tensors with one element. The record of the round has
             their means over all updates of the round, under their names

It returns the new update [d], or (update, nbytes) with the number of bytes that a network would carry for it. A
processor that returns no number leaves that of the processor before it; the first one gets d numbers of the update's
type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedsim.core.randomness import Draws
from fedsim.core.registry import Component, Registry
from fedsim.errors import ExperimentError


@dataclass(frozen=True)
class UpdateProcessor(Component):
    """A processor with its parameters.

    Attributes:
        error_feedback: whether a worker adds what the processor has left out of its updates so far.
    """

    error_feedback: bool = False

    def __call__(self, **inputs: Any) -> tuple[Tensor, int | None]:
        """The new update and the bytes that the processor declares. Raises ExperimentError for another result."""
        result = self.on(inputs)
        update, nbytes = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        d = len(inputs["update"])
        if not isinstance(update, Tensor) or update.shape != (d,):
            found = f"shape {list(update.shape)}" if isinstance(update, Tensor) else f"type {type(update).__name__}"
            raise ExperimentError(f"processor {self.name}: must return an update of shape [{d}], not of {found}")
        if nbytes is not None and (type(nbytes) is not int or nbytes < 0):
            raise ExperimentError(f"processor {self.name}: the number of bytes must be an int >= 0, not {nbytes!r}")
        return update, nbytes


processor = Registry("processor", given=("update", "draws", "metrics"), component=UpdateProcessor)


def initial_residuals(chain: Sequence[UpdateProcessor], row: Tensor) -> dict[str, Tensor]:
    """What the processors with error feedback have left out at first: zeros [d], by the name of their place."""
    return {f"residual_{place}": torch.zeros_like(row) for place, each in enumerate(chain) if each.error_feedback}


def apply_chain(
    chain: Sequence[UpdateProcessor],
    row: Tensor,
    seed: int,
    coordinates: Sequence[int],
    metrics: dict[str, Any],
    residuals: Mapping[str, Tensor] | None = None,
) -> int:
    """Apply processors to an update [d], in place, one after another.

    A processor C with error feedback gets p = update + e, and returns C(p); then e = p - C(p) (Seide et al. 2014;
    Karimireddy et al. 2019).

    Args:
        coordinates: of random draws: (round, worker) or (round, step, worker).
        metrics: receives the numbers of the processors.
        residuals: the e [d] of the worker, as `initial_residuals` names them; they change.

    Returns the bytes of the processed update.
    """
    update, nbytes = row, row.nbytes
    for place, each in enumerate(chain):
        draws = Draws.of(seed, "process", *coordinates, place, device=row.device)
        residual = residuals[f"residual_{place}"] if residuals and each.error_feedback else None
        given = update if residual is None else update + residual
        update, declared = each(update=given, draws=draws, metrics=metrics)
        if residual is not None:
            torch.sub(given, update, out=residual)
        nbytes = nbytes if declared is None else declared
    row.copy_(update)
    return nbytes
