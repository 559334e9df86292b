"""Noise that is added to each update."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from fedsim.core.randomness import Draws
from fedsim.processing.processor import processor


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
    >>> fedsim.processing.noise.gaussian_noise(torch.ones(2), draws, std=0.0)
    (tensor([1., 1.]), 8)
    """
    noisy = update + std * draws.normal(len(update), dtype=update.dtype)
    return noisy, noisy.nbytes


gaussian_noise.compresses = False  # so error feedback would take the noise back
