"""Processors: clipping, compression (sparse, quantized, or signs only) and noise; and a chain of them.

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

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt
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
        """Return the new update and the bytes that the processor declares.

        Raises ExperimentError for another result.
        """
        result = self.on(inputs)
        update, nbytes = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        d = len(inputs["update"])
        if not isinstance(update, Tensor) or update.shape != (d,):
            actual = f"shape {list(update.shape)}" if isinstance(update, Tensor) else f"type {type(update).__name__}"
            raise ExperimentError(f"processor {self.name}: must return an update of shape [{d}], not of {actual}")
        if nbytes is not None and (type(nbytes) is not int or nbytes < 0):
            raise ExperimentError(f"processor {self.name}: the number of bytes must be an int >= 0, not {nbytes!r}")
        return update, nbytes


processor = Registry("processor", inputs=("update", "draws", "metrics"), component=UpdateProcessor)


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
    for place, processor in enumerate(chain):
        draws = Draws.of(seed, "process", *coordinates, place, device=row.device)
        residual = residuals[f"residual_{place}"] if residuals and processor.error_feedback else None
        compensated = update if residual is None else update + residual
        update, declared = processor(update=compensated, draws=draws, metrics=metrics)
        if residual is not None:
            torch.sub(compensated, update, out=residual)
        nbytes = nbytes if declared is None else declared
    row.copy_(update)
    return nbytes


@processor("clip")
def clip(update: Tensor, metrics: dict[str, Any], *, max_norm: Annotated[float, Field(gt=0, examples=[1.0])]) -> Tensor:
    """Scale an update x to x min(1, max_norm / |x|), of L2 norm max_norm at most (McMahan et al. 2018).

    Args:
        update: [d].
        metrics: gets `clipped_share`, the share of updates that were clipped.
        max_norm: largest norm of the result, > 0.

    Returns [d]. Cost: two passes over the update.

    >>> fedsim.processing.processors.clip(torch.tensor([3.0, 4.0]), {}, max_norm=1.0)
    tensor([0.6000, 0.8000])
    """
    factor = (max_norm / torch.linalg.vector_norm(update)).clamp(max=1)
    metrics["clipped_share"] = factor < 1
    return update * factor


INDEX_BYTES = 4  # of a position in an update of less than 2^32 numbers


@processor("top_k")
def top_k(
    update: Tensor, metrics: dict[str, Any], *, k: Annotated[PositiveInt, Field(examples=[100])]
) -> tuple[Tensor, int]:
    """Keep the k numbers of largest magnitude; all others become zero (Stich et al. 2018).

    What is left out is lost, unless `error_feedback = true` adds it to the worker's next update.

    Args:
        update: [d].
        metrics: gets `kept_energy`, the share of the squared norm that is kept.
        k: >= 1. With k >= d the update and its bytes stay as they are, and `kept_energy` is not recorded.

    Returns [d] and its bytes, those of k numbers and k indices. Cost: a partial sort of d numbers.

    >>> fedsim.processing.processors.top_k(torch.tensor([1.0, -3.0, 2.0]), {}, k=1)
    (tensor([ 0., -3.,  0.]), 8)
    """
    if k >= len(update):
        return update, update.nbytes
    positions = update.abs().topk(k, sorted=False).indices
    sparse = torch.zeros_like(update)
    sparse[positions] = update[positions]
    energy = update.square().sum().clamp(min=torch.finfo(update.dtype).tiny)  # no 0 / 0 for an update of zeros
    metrics["kept_energy"] = sparse.square().sum() / energy
    return sparse, k * (update.element_size() + INDEX_BYTES)


@processor("qsgd")
def qsgd(update: Tensor, draws: Draws, *, levels: PositiveInt = 16) -> tuple[Tensor, int]:
    """Round each number at random to one of `levels` fractions of the norm, without bias (QSGD; Alistarh et al. 2017).

    x_i becomes sign(x_i) |x| floor(levels |x_i| / |x| + u_i) / levels, with u_i uniform in [0, 1).

    Args:
        update: [d].
        draws: draws u.
        levels: >= 1.

    Returns [d] and its bytes: the norm, and ceil(log2(2 levels + 1)) bits for each number, without entropy coding.
    Cost: d draws, and three passes over the update.

    >>> quantized, nbytes = fedsim.processing.processors.qsgd(
    ...     torch.tensor([0.0, -2.0]), fedsim.Draws.of(0, "example"), levels=1)
    >>> quantized, nbytes
    (tensor([ 0., -2.]), 5)
    """
    norm = torch.linalg.vector_norm(update)
    scaled = levels * (update.abs() / norm.clamp(min=torch.finfo(update.dtype).tiny))
    rounded = (scaled + draws.uniform(len(update), dtype=update.dtype)).floor()
    bits = math.ceil(math.log2(2 * levels + 1))
    return update.sign() * rounded * (norm / levels), update.element_size() + math.ceil(len(update) * bits / 8)


@processor("sign")
def sign(update: Tensor) -> tuple[Tensor, int]:
    """Send one bit for each number: x becomes sign(x) times the mean of |x| (Karimireddy et al. 2019).

    With `error_feedback = true` it is EF-SGD.

    Args:
        update: [d]; the sign of zero is +1.

    Returns [d] and its bytes: d bits and the mean. Cost: two passes over the update.

    >>> fedsim.processing.processors.sign(torch.tensor([1.0, -3.0]))
    (tensor([ 2., -2.]), 5)
    """
    scale = update.abs().mean()
    return torch.where(update < 0, -scale, scale), math.ceil(len(update) / 8) + update.element_size()


@processor("gaussian_noise")
def gaussian_noise(
    update: Tensor, draws: Draws, *, std: Annotated[float, Field(ge=0, examples=[0.01])]
) -> tuple[Tensor, int]:
    """Add independent normal numbers of mean 0 (the Gaussian mechanism; Dwork and Roth 2014).

    Differential privacy also needs bounded updates: put `clip` before it in the chain (McMahan et al. 2018). No privacy
    budget is computed.

    Args:
        update: [d].
        draws: draws the noise.
        std: standard deviation, >= 0.

    Returns [d] and its bytes, which are those of d numbers. Cost: d draws, and one pass over the update.

    >>> draws = fedsim.Draws.of(0, "example")
    >>> fedsim.processing.processors.gaussian_noise(torch.ones(2), draws, std=0.0)
    (tensor([1., 1.]), 8)
    """
    noisy = update + std * draws.normal(len(update), dtype=update.dtype)
    return noisy, noisy.nbytes


gaussian_noise.compresses = False  # so error feedback would take the noise back
