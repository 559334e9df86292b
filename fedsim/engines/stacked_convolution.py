"""Convolutions of a stack: each row's samples with that row's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Convolution = Callable[..., Tensor]


class Options(NamedTuple):
    """What F.conv1d, F.conv2d and F.conv3d take behind the bias."""

    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1


def stacked_convolution(
    convolution: Convolution, input: Tensor, weight: Tensor, bias: Tensor | None, options: Options
) -> Tensor:
    """input [k * batch, c, ...], weight [k, o, c / groups, ...], bias [k, o] -> [k * batch, o, ...].

    `convolution` is F.conv1d, F.conv2d or F.conv3d. On a CPU docs/performance.md has the figures that decided
    between the ways; on a card, where launching k kernels costs more than one, neither has been measured.
    """
    way = one_by_one if len(weight) == 1 or input.device.type == "cpu" else grouped
    return way(convolution, input, weight, bias, options)


def one_by_one(
    convolution: Convolution, input: Tensor, weight: Tensor, bias: Tensor | None, options: Options
) -> Tensor:
    """One convolution after another."""
    biases = [None] * len(weight) if bias is None else bias.unbind()
    parts = zip(input.chunk(len(weight)), weight.unbind(), biases, strict=True)
    found = [convolution(part, kernels, offsets, *options) for part, kernels, offsets in parts]
    return found[0] if len(found) == 1 else torch.cat(found)


def grouped(convolution: Convolution, input: Tensor, weight: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """One convolution whose channels are those of all rows side by side, in groups that do not see each other."""
    k = len(weight)
    side_by_side = input.unflatten(0, (k, -1)).transpose(0, 1).flatten(1, 2)
    offsets = None if bias is None else bias.flatten()
    found = convolution(side_by_side, weight.flatten(0, 1), offsets, *options._replace(groups=k * options.groups))
    return found.unflatten(1, (k, -1)).transpose(0, 1).flatten(0, 1)
