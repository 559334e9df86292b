"""Residual networks for images of 32x32 pixels."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.core.numbers import PositiveInt
from fedsim.models.base import Norm, model, norm_layer


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions, each followed by a normalisation, whose output is added to the block's input.

    The parameter-free shortcut (option A of He et al. 2016) takes every `stride`-th pixel and adds channels of zeros.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.norm1 = _convolution(inputs, outputs, stride, norm), norm_layer(norm, outputs)
        self.conv2, self.norm2 = _convolution(outputs, outputs, 1, norm), norm_layer(norm, outputs)
        self.stride, self.added_channels = stride, outputs - inputs

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(images)))))
        if self.stride > 1 or self.added_channels:
            before = self.added_channels // 2
            padding = (0, 0, 0, 0, before, self.added_channels - before)
            images = F.pad(images[:, :, :: self.stride, :: self.stride], padding)
        return F.relu(hidden + images)


def _convolution(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Conv2d:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=norm == "none")
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution


def _resnet(blocks: int, channels: int, classes: int, norm: Norm) -> nn.Module:
    """Return a residual network with 6 * blocks + 2 layers, for images with `channels` channels."""
    layers: list[Any] = [_convolution(channels, 16, 1, norm), norm_layer(norm, 16), nn.ReLU()]
    width = 16
    for outputs in (16, 32, 64):
        for block in range(blocks):
            layers.append(ResidualBlock(width, outputs, 1 if block or outputs == 16 else 2, norm))
            width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


@model("resnet20", stacked="vmap")
def resnet20(*, channels: PositiveInt = 3, classes: PositiveInt = 10, norm: Norm = "batch") -> nn.Module:
    """Residual network with 20 layers for images of 32x32 pixels (He et al. 2016, section 4.2; 269,722 parameters).

    A 3x3 convolution is followed by three stages of residual blocks with 16, 32 and 64 channels, whose shortcuts have
    no parameters (option A), average pooling and a linear layer. The output is logits.

    Args:
        channels: number of channels of the images [batch, channels, 32, 32].
        classes: number of classes.
        norm: "batch" for BatchNorm. "group" for GroupNorm with 16 channels per group (Wu & He 2018), which has no
            buffers. "none" for convolutions with biases and no normalisation. With "group" and "none", the engine
            `batched` merges the batches of all workers.

    >>> fedsim.models.resnet20(norm="group")(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    return _resnet(3, channels, classes, norm)


@model("resnet32", stacked="vmap")
def resnet32(*, channels: PositiveInt = 3, classes: PositiveInt = 10, norm: Norm = "batch") -> nn.Module:
    """`resnet20` with 32 layers (464,154 parameters).

    Args:
        channels: number of channels of the images [batch, channels, 32, 32].
        classes: number of classes.
        norm: "batch", "group" or "none" (see `resnet20`).

    >>> fedsim.models.resnet32()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    return _resnet(5, channels, classes, norm)


@model("resnet56", stacked="vmap")
def resnet56(*, channels: PositiveInt = 3, classes: PositiveInt = 10, norm: Norm = "batch") -> nn.Module:
    """`resnet20` with 56 layers (853,018 parameters).

    Args:
        channels: number of channels of the images [batch, channels, 32, 32].
        classes: number of classes.
        norm: "batch", "group" or "none" (see `resnet20`).

    >>> fedsim.models.resnet56()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    return _resnet(9, channels, classes, norm)
