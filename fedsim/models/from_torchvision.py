"""Classification models of torchvision."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from fedsim.core.numbers import PositiveInt
from fedsim.errors import ExperimentError, show
from fedsim.hints.meanings import nearest
from fedsim.models.base import Norm, model, norm_layer
from fedsim.system.packages import import_torchvision


@model.family("torchvision")
def torchvision_model(name: str) -> Any:
    """Classification model of torchvision, such as torchvision:resnet18, with random initial parameters.

    Args:
        name: name of a function of `torchvision.models`.

    Raises LookupError for an unknown name.
    """
    models = import_torchvision().models
    names = models.list_models(module=models)
    if name not in names:
        raise LookupError(f"torchvision has no such classification model; {nearest(name, names)}")
    component: Any = functools.partial(build, name)
    component.__doc__ = build.__doc__
    component.stacked = _stacked(name)
    return component


def _stacked(name: str) -> str:
    """Return how several torchvision models are computed at once: "merged", "vmap", or the reason why they cannot be.

    "merged" means on one batch with the samples of all models, "vmap" means by `torch.func.vmap`.
    """
    if name.startswith(("convnext", "efficientnet", "maxvit", "swin")):  # models with stochastic depth
        return "the model draws random numbers outside of torch.nn.functional.dropout"
    plain = name.startswith(("alexnet", "squeezenet", "vgg")) and not name.endswith("_bn")
    return "merged" if plain else "vmap"  # the others have BatchNorm or torch.nn.MultiheadAttention


def build(
    name: str, *, classes: PositiveInt = 10, channels: PositiveInt = 3, norm: Norm = "batch", **params: Any
) -> nn.Module:
    """Classification model of torchvision with random initial parameters.

    Args:
        classes: number of classes.
        channels: number of channels of the images. If it is not 3, the filters of the first convolution are repeated
            or left out.
        norm: "batch" keeps each BatchNorm2d. "group" replaces it by GroupNorm with 16 channels per group (Wu & He
            2018). "none" removes it.
        params: further arguments of the function of `torchvision.models`. googlenet and inception_v3 need
            `aux_logits = false` to return only logits in training.
    """
    module = import_torchvision().models.get_model(name, weights=None, num_classes=classes, **params)
    if channels != 3:
        first = next(layer for layer in module.modules() if isinstance(layer, nn.Conv2d))
        first.weight = nn.Parameter(first.weight.detach()[:, torch.arange(channels) % 3])
        first.in_channels = channels
    if norm == "batch":
        return module
    layers = [
        (parent, place, layer)
        for parent in module.modules()
        for place, layer in parent.named_children()
        if isinstance(layer, nn.BatchNorm2d)
    ]
    if not layers:
        raise ExperimentError(f"model.norm = {show(norm)}: torchvision:{name} has no BatchNorm2d to replace; omit it")
    for parent, place, layer in layers:
        setattr(parent, place, norm_layer(norm, layer.num_features))
    return module
