"""Convolutions of a stack of rows: each row's samples with that row's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Convolution = Callable[..., Tensor]


class Options(NamedTuple):
    """What F.conv1d, F.conv2d and F.conv3d take after the bias."""

    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1


def stacked_convolution(
    convolution: Convolution, input: Tensor, weight: Tensor, bias: Tensor | None, options: Options
) -> Tensor:
    """Convolve the samples of k rows with the kernels of their own row.

    On a CPU one row after another is at most 12 percent slower than one grouped convolution, and mostly faster
    (`benchmarks/convolutions.py`).
    On other devices one grouped convolution takes a number of launches that does not grow with the rows.

    Args:
        convolution: F.conv1d, F.conv2d or F.conv3d.
        input: [k * batch, c, ...].
        weight: [k, o, c / groups, ...].
        bias: [k, o] or None.

    Returns: [k * batch, o, ...].
    """
    way = one_by_one if len(weight) == 1 else WAYS[way_on(input.device)]
    return way(convolution, input, weight, bias, options)


def way_on(device: torch.device) -> str:
    """Return the name of the implementation used on `device`, a key of `WAYS`."""
    return "one by one" if device.type == "cpu" else "grouped"


def one_by_one(
    convolution: Convolution, input: Tensor, weight: Tensor, bias: Tensor | None, options: Options
) -> Tensor:
    """Convolve the rows one after another."""
    biases = [None] * len(weight) if bias is None else bias.unbind()
    parts = zip(input.chunk(len(weight)), weight.unbind(), biases, strict=True)
    outputs = [convolution(part, kernels, offsets, *options) for part, kernels, offsets in parts]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def grouped(convolution: Convolution, input: Tensor, weight: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """Convolve all rows at once, by one grouped convolution with the channels of all rows side by side."""
    k = len(weight)
    side_by_side = input.unflatten(0, (k, -1)).transpose(0, 1).flatten(1, 2)
    offsets = None if bias is None else bias.flatten()
    outputs = convolution(side_by_side, weight.flatten(0, 1), offsets, *options._replace(groups=k * options.groups))
    return outputs.unflatten(1, (k, -1)).transpose(0, 1).flatten(0, 1)


WAYS: dict[str, Callable[..., Tensor]] = {"one by one": one_by_one, "grouped": grouped}
