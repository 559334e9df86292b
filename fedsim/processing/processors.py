"""Processors, which change each update before it is aggregated: clipping, compression, quantization and noise.

A processor is a pure function from an update [d] to an update [d]. Its positional parameters receive these inputs by
name, and must not be changed. Its keyword-only parameters are its configuration:

    update   update of one worker, or its gradient with sync = "gradients", [d]
    draws    Draws on the device of the update, seeded by (seed, round, worker), by the position in the chain and, with
             sync = "gradients", by the step
    metrics  dict to which the processor may add numbers or one-element tensors. Their means over all updates of a round
             are recorded under their keys

A processor returns the new update [d], or (update, nbytes), where nbytes is the number of bytes to send. If a processor
returns no number, the number of the previous processor in the chain is kept. Before the first processor it is the size
of d numbers of the update's dtype.

A processor can set the attribute `sums` to true if its updates can be summed by secure aggregation.
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
    """Processor with its parameters.

    Attributes:
        error_feedback: whether each worker adds the error that the processor made (the residual) to its next update.
    """

    error_feedback: bool = False

    def __call__(self, **inputs: Any) -> tuple[Tensor, int | None]:
        """Apply the processor to an update. Returns the new update [d], and the number of bytes to send, or None.

        Raises ExperimentError if the processor returns an update of another shape or an invalid number of bytes.
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
    """Return the initial residuals of all processors with error feedback: zeros [d], named `residual_{position}`."""
    return {f"residual_{place}": torch.zeros_like(row) for place, step in enumerate(chain) if step.error_feedback}


def apply_chain(
    chain: Sequence[UpdateProcessor],
    row: Tensor,
    seed: int,
    coordinates: Sequence[int],
    metrics: dict[str, Any],
    residuals: Mapping[str, Tensor] | None = None,
) -> int:
    """Apply a chain of processors to an update, in place, one after another.

    With error feedback, a processor C is applied to p = update + e, where e is the worker's residual. The new residual
    is e = p - C(p) (Seide et al. 2014, Karimireddy et al. 2019).

    Args:
        chain: processors, in order.
        row: update of a worker, [d], which is changed.
        seed: seed of random draws, together with `coordinates`.
        coordinates: (round, worker) or (round, step, worker).
        metrics: dict that receives the numbers that the processors record.
        residuals: residuals e [d] of the worker, named as by `initial_residuals`, which are changed.

    Returns the number of bytes to send for the processed update.
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
    """Clip an update x to an L2 norm of at most max_norm: x min(1, max_norm / |x|) (McMahan et al. 2018).

    Args:
        update: update of a worker, [d].
        metrics: receives `clipped_share`, the fraction of updates that are clipped.
        max_norm: maximum L2 norm, > 0.

    Returns the clipped update [d]. Cost: two passes over the update.

    >>> fedsim.processing.processors.clip(torch.tensor([3.0, 4.0]), {}, max_norm=1.0)
    tensor([0.6000, 0.8000])
    """
    factor = (max_norm / torch.linalg.vector_norm(update)).clamp(max=1)
    metrics["clipped_share"] = factor < 1
    return update * factor


INDEX_BYTES = 4  # bytes of a position in an update of less than 2^32 numbers


@processor("top_k")
def top_k(
    update: Tensor, metrics: dict[str, Any], *, k: Annotated[PositiveInt, Field(examples=[100])]
) -> tuple[Tensor, int]:
    """Keep the k numbers with the largest magnitudes, and set all other numbers to zero (Stich et al. 2018).

    The other numbers are lost, unless `error_feedback = true` adds them to the worker's next update.

    Args:
        update: update of a worker, [d].
        metrics: receives `kept_energy`, the fraction of the squared norm that is kept.
        k: number of values to keep, >= 1. With k >= d the update is not changed, and `kept_energy` is not recorded.

    Returns the sparse update [d] and its size in bytes, for k numbers and k indices. Cost: a partial sort of d numbers.

    >>> fedsim.processing.processors.top_k(torch.tensor([1.0, -3.0, 2.0]), {}, k=1)
    (tensor([ 0., -3.,  0.]), 8)
    """
    if k >= len(update):
        return update, update.nbytes
    positions = update.abs().topk(k, sorted=False).indices
    sparse = torch.zeros_like(update)
    sparse[positions] = update[positions]
    energy = update.square().sum().clamp(min=torch.finfo(update.dtype).tiny)  # avoids 0 / 0 for an update of zeros
    metrics["kept_energy"] = sparse.square().sum() / energy
    return sparse, k * (update.element_size() + INDEX_BYTES)


@processor("qsgd")
def qsgd(update: Tensor, draws: Draws, *, levels: PositiveInt = 16) -> tuple[Tensor, int]:
    """Quantize each number by unbiased random rounding to multiples of norm / levels (QSGD, Alistarh et al. 2017).

    x_i becomes sign(x_i) |x| floor(levels |x_i| / |x| + u_i) / levels, with u_i uniform in [0, 1).

    Args:
        update: update x of a worker, [d].
        draws: draws the u_i.
        levels: number of quantization levels, >= 1.

    Returns the quantized update [d] and its size in bytes: one number for the norm, and ceil(log2(2 levels + 1)) bits
    for each coordinate, without entropy coding. Cost: d draws, and three passes over the update.

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
    """Compress an update to one bit per number: x becomes sign(x) times the mean of |x| (Karimireddy et al. 2019).

    With `error_feedback = true` the algorithm is EF-SGD.

    Args:
        update: update x of a worker, [d]. The sign of zero is +1.

    Returns the compressed update [d] and its size in bytes, for d bits and the mean. Cost: two passes over the update.

    >>> fedsim.processing.processors.sign(torch.tensor([1.0, -3.0]))
    (tensor([ 2., -2.]), 5)
    """
    scale = update.abs().mean()
    return torch.where(update < 0, -scale, scale), math.ceil(len(update) / 8) + update.element_size()


@processor("gaussian_noise")
def gaussian_noise(
    update: Tensor, draws: Draws, *, std: Annotated[float, Field(ge=0, examples=[0.01])]
) -> tuple[Tensor, int]:
    """Add independent Gaussian noise to each number of an update (Gaussian mechanism, Dwork and Roth 2014).

    Differential privacy also requires bounded updates: put `clip` before `gaussian_noise` in the chain (McMahan et al.
    2018). No privacy budget is computed.

    Args:
        update: update of a worker, [d].
        draws: draws the noise.
        std: standard deviation of the noise, >= 0.

    Returns the noisy update [d] and its size in bytes, for d numbers. Cost: d draws, and one pass over the update.

    >>> draws = fedsim.Draws.of(0, "example")
    >>> fedsim.processing.processors.gaussian_noise(torch.ones(2), draws, std=0.0)
    (tensor([1., 1.]), 8)
    """
    noisy = update + std * draws.normal(len(update), dtype=update.dtype)
    return noisy, noisy.nbytes


clip.sums = gaussian_noise.sums = True  # allowed with aggregate.secure, because their updates can be summed encrypted
gaussian_noise.compresses = False  # error feedback is not allowed, because it would subtract the noise again
