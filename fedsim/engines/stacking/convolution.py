"""Convolutions of a stack of rows: each row's samples with that row's kernels.

There are two ways, which agree up to rounding. `one_by_one` convolves one row after another, which is the fastest way
on a CPU (docs/performance.md). `windows` multiplies the windows of all inputs by the kernels of their rows in one
batched product, which launches few kernels on a GPU, where it has not been measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.system.precision import cast_for_autocast

WINDOW_BYTES = 2**28  # of windows that exist at a time: they take kernel times the memory of the inputs

Convolution = Callable[..., Tensor]


class Options(NamedTuple):
    """The arguments of F.conv1d, F.conv2d and F.conv3d after the bias."""

    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1


def stacked_convolution(
    convolution: Convolution, input: Tensor, weight: Tensor, bias: Tensor | None, options: Options
) -> Tensor:
    """Convolve the samples of each row with the kernels of that row, in the way that suits device and shapes.

    Args:
        convolution: F.conv1d, F.conv2d or F.conv3d.
        input: [k * batch, c, ...], the samples of k rows one after another.
        weight: [k, o, c / groups, ...].
        bias: [k, o] or None.

    Returns a tensor [k * batch, o, ...].
    """
    return WAYS[way_for(input, weight, options)](convolution, input, weight, bias, options)


def way_for(input: Tensor, weight: Tensor, options: Options) -> str:
    """The name of the way: windows on a GPU, unless the convolution of one row is large enough to fill it."""
    k = len(weight)
    if k == 1 or input.device.type == "cpu":
        return "one by one"
    of_a_row = len(input) // k * _window_bytes(input, geometry(input, weight, options))
    return "windows" if of_a_row <= WINDOW_BYTES else "one by one"


def one_by_one(
    convolution: Convolution, input: Tensor, weight: Tensor, bias: Tensor | None, options: Options
) -> Tensor:
    """One convolution after another."""
    biases = [None] * len(weight) if bias is None else bias.unbind()
    parts = zip(input.chunk(len(weight)), weight.unbind(), biases, strict=True)
    found = [convolution(part, kernels, offsets, *options) for part, kernels, offsets in parts]
    return found[0] if len(found) == 1 else torch.cat(found)


def windows(convolution: Convolution, input: Tensor, weight: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """One batched product of all windows of the inputs with the kernels of their rows.

    Windows are copied from a strided view of the inputs. They are copied again in the backward pass, and for as many
    samples at a time as fit into `WINDOW_BYTES`.
    """
    form = geometry(input, weight, options)
    last = input.ndim == 4 and not input.is_contiguous() and input.is_contiguous(memory_format=torch.channels_last)
    operands = cast_for_autocast(input.unflatten(0, (len(weight), -1)), weight, bias)
    found = _Windows.apply(*operands, form, options.groups).flatten(0, 1)
    return found.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


WAYS: dict[str, Callable[..., Tensor]] = {"one by one": one_by_one, "windows": windows}


class Geometry(NamedTuple):
    """The sizes of a convolution, one number for each of its dimensions.

    Attributes:
        kernel, stride, dilation: as of the convolution.
        padding: before and after each dimension, the last dimension first, as F.pad takes it.
        outputs: sizes of the output.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    outputs: tuple[int, ...]


def geometry(input: Tensor, weight: Tensor, options: Options) -> Geometry:
    """The sizes of a convolution of input [k * batch, c, ...] with weight [k, o, c / groups, ...]."""
    kernel, sizes = tuple(weight.shape[3:]), input.shape[2:]
    stride, dilation = (_each(value, len(kernel)) for value in (options.stride, options.dilation))
    if options.padding == "same":
        totals = [d * (n - 1) for d, n in zip(dilation, kernel, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(p, p) for p in _each(0 if options.padding == "valid" else options.padding, len(kernel))]
    each = zip(sizes, sides, kernel, stride, dilation, strict=True)
    outputs = tuple((size + sum(side) - d * (n - 1) - 1) // s + 1 for size, side, n, s, d in each)
    return Geometry(kernel, stride, dilation, tuple(p for side in reversed(sides) for p in side), outputs)


def _each(value: Any, count: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


def _window_bytes(x: Tensor, form: Geometry) -> int:
    """Bytes of the windows of one sample of x [..., c, *sizes]."""
    channels = x.shape[-1 - len(form.kernel)]
    return channels * math.prod(form.kernel) * math.prod(form.outputs) * x.element_size()


class _Windows(torch.autograd.Function):
    """x [k, batch, c, ...], weight [k, o, c / groups, ...], bias [k, o] or None -> [k, batch, o, ...]."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, form: Geometry, groups: int) -> Tensor:
        context.save_for_backward(x, weight)
        context.form, context.groups = form, groups
        kernels = _matrices(weight, groups)
        products = []
        for part in x.split(_samples_at_a_time(x, form), 1):
            columns = _columns(_padded(part, form), form, groups)
            if bias is None:
                found = torch.bmm(columns, kernels.mT)
            else:
                found = torch.baddbmm(bias.reshape(len(kernels), 1, -1), columns, kernels.mT)
            products.append(_outputs(found, len(weight), groups, form))
        return _whole(products)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        (x, weight), form, groups = context.saved_tensors, context.form, context.groups
        for_x, for_weight, for_bias, *_ = context.needs_input_grad
        kernels = _matrices(weight, groups)
        step = _samples_at_a_time(x, form)
        of_x, of_weight = list[Tensor](), list[Tensor]()
        for part, of_part in zip(x.split(step, 1), gradient.split(step, 1), strict=True):
            of_products = _products(of_part, groups)
            with torch.set_grad_enabled(for_x):
                padded = _padded(part, form).detach().requires_grad_(for_x)
                columns = _columns(padded, form, groups)
            if for_weight:
                of_weight.append(torch.bmm(of_products.mT, columns.detach()))
            if for_x:
                (of_padded,) = torch.autograd.grad(columns, padded, torch.bmm(of_products, kernels))
                for place, before in enumerate(reversed(form.padding[::2]), start=3):
                    of_padded = of_padded.narrow(place, before, x.shape[place])
                of_x.append(of_padded)
        return (
            _whole(of_x) if for_x else None,
            sum(of_weight[1:], of_weight[0]).view(weight.shape) if for_weight else None,
            gradient.flatten(3).sum((1, 3)) if for_bias else None,
            None,
            None,
        )


def _whole(parts: list[Tensor]) -> Tensor:
    """Parts [k, samples, ...] of a batch as one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _samples_at_a_time(x: Tensor, form: Geometry) -> int:
    """How many samples of each row have windows at a time."""
    return max(1, WINDOW_BYTES // max(1, len(x) * _window_bytes(x, form)))


def _padded(x: Tensor, form: Geometry) -> Tensor:
    return F.pad(x, form.padding) if any(form.padding) else x


def _columns(padded: Tensor, form: Geometry, groups: int) -> Tensor:
    """Windows of [k, batch, c, ...] as rows of matrices: [k * groups, batch * positions, c / groups * kernel]."""
    seen, dimensions = padded, len(form.kernel)
    for place, (size, stride, step) in enumerate(zip(form.kernel, form.stride, form.dilation, strict=True)):
        seen = seen.unfold(3 + place, step * (size - 1) + 1, stride)
        seen = seen[..., ::step] if step > 1 else seen  # a slice costs two kernels in the backward pass
    seen = seen.unflatten(2, (groups, -1))  # [k, batch, groups, c / groups, *positions, *kernel]
    positions, kernel = (tuple(range(start, start + dimensions)) for start in (4, 4 + dimensions))
    rows = padded.shape[1] * math.prod(form.outputs)
    return seen.permute(0, 2, 1, *positions, 3, *kernel).reshape(len(padded) * groups, rows, -1)


def _matrices(weight: Tensor, groups: int) -> Tensor:
    """Kernels [k, o, c / groups, ...] as matrices [k * groups, o / groups, c / groups * kernel]."""
    return weight.flatten(2).unflatten(1, (groups, -1)).flatten(0, 1)


def _outputs(products: Tensor, k: int, groups: int, form: Geometry) -> Tensor:
    """[k * groups, batch * positions, o / groups] -> [k, batch, o, ...]: a view, with channels last, without groups."""
    apart = products.view(k, groups, -1, math.prod(form.outputs), products.shape[2])
    return apart.permute(0, 2, 1, 4, 3).flatten(2, 3).unflatten(3, form.outputs)


def _products(outputs: Tensor, groups: int) -> Tensor:
    """The reverse of `_outputs`."""
    apart = outputs.flatten(3).unflatten(2, (groups, -1))  # [k, batch, groups, o / groups, positions]
    return apart.permute(0, 2, 1, 4, 3).flatten(2, 3).flatten(0, 1)
