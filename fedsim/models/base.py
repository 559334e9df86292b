"""The registry of models, and the layers that several models share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from torch import nn

from fedsim.core.registry import Registration, Registry

# Parameters of models that an experiment takes from the data unless it sets them, and the inputs that a model with such
# a parameter needs. The class `fedsim.data.shapes.SampleShape` of a data set yields their values.
DIMENSIONS = {
    "inputs": "numbers",
    "channels": "images",
    "size": "square images",
    "vocabulary": "tokens",
    "context": "tokens",
    "last_only": "tokens",
    "classes": "",
    "outputs": "",
}

Norm = Literal["batch", "group", "none"]

# The trait `stacked` says how the engine `batched` computes a stack of models with default parameters: "merged" (one
# batch with the samples of all workers), "vmap", or the reason from `fedsim.training.probe` why the engine refuses it.
model = Registry("model", traits=("stacked",))


def dimensions_of(registration: Registration) -> Iterable[str]:
    """Return the names of a model's parameters that are determined by the data unless the experiment sets them.

    These are the parameters with a name in `DIMENSIONS`. In a user's own model, they must not have a default value.
    """
    fields = registration.parameters.model_fields if registration.siblings is model else {}
    return [
        name
        for name, field in fields.items()
        if name in DIMENSIONS and (field.is_required() or not registration.imported)
    ]


def norm_layer(norm: Norm, channels: int) -> nn.Module:
    """Return a normalisation layer for images [batch, channels, height, width].

    "group" is GroupNorm with 16 channels per group (Wu & He 2018, table 3). If `channels` is not
    divisible by 16, groups have as many channels as the largest power of two that divides it. "none" is Identity.
    """
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(channels // math.gcd(channels, 16), channels) if norm == "group" else nn.Identity()
