"""Clipping of each update to a norm."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from fedsim.processing.processor import processor


@processor("clip")
def clip(update: Tensor, metrics: dict[str, Any], *, max_norm: Annotated[float, Field(gt=0, examples=[1.0])]) -> Tensor:
    """Scale an update x to x min(1, max_norm / |x|), of L2 norm max_norm at most (McMahan et al. 2018).

    Args:
        update: [d].
        metrics: gets `clipped_share`, the share of updates that were clipped.
        max_norm: largest norm of the result, > 0.

    Returns [d]. Cost: two passes over the update.

    >>> fedsim.processing.clip.clip(torch.tensor([3.0, 4.0]), {}, max_norm=1.0)
    tensor([0.6000, 0.8000])
    """
    factor = (max_norm / torch.linalg.vector_norm(update)).clamp(max=1)
    metrics["clipped_share"] = factor < 1
    return update * factor
