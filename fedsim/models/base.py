"""The registry of models, and the layers that several models share."""

from __future__ import annotations

import math
from typing import Literal

from torch import nn

from fedsim.core.registry import Registry

Norm = Literal["batch", "group", "none"]

# The trait `stacked` says how the engine `batched` computes the rows of a model with its default parameters: "merged"
# (one batch with the samples of all rows), "vmap", or the reason from
# `fedsim.training.probe` why the engine refuses the model.
model = Registry("model", traits=("stacked",))


def norm_layer(norm: Norm, channels: int) -> nn.Module:
    """Return a normalisation layer for images [batch, channels, height, width].

    "group" is GroupNorm with 16 channels per group (Wu & He 2018, table 3). If `channels` is not
    divisible by 16, groups have as many channels as the largest power of two that divides it. "none" is Identity.
    """
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(channels // math.gcd(channels, 16), channels) if norm == "group" else nn.Identity()
