"""Convolutions of a stack of rows: each row's samples with that row's kernels.

There are three ways, which give the same up to rounding: `one_by_one`, `grouped` and `windows`. The file
`convolutions.toml` says which is fastest for which shapes on which kind of device.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.system.precision import cast_for_autocast

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = Path(__file__).with_name("convolutions.toml")
WINDOW_BYTES = 2**28  # of windows that exist at a time: they take kernel times the memory of the inputs

Convolution = Callable[..., Tensor]


class Options(NamedTuple):
    """What F.conv1d, F.conv2d and F.conv3d take after the bias."""

    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1


class Shape(NamedTuple):
    """The sizes that decide which way is fastest.

    Attributes:
        rows: of the stack.
        batch: samples of a row.
        groups: of the convolution.
        inputs, outputs: channels of a group.
        kernel: elements of a kernel for one channel.
        positions: elements of an output for one channel.
    """

    rows: int
    batch: int
    groups: int
    inputs: int
    outputs: int
    kernel: int
    positions: int

    @classmethod
    def of(cls, input: Tensor, weight: Tensor, options: Options) -> Shape:
        """The shape of a call of `stacked_convolution`."""
        rows, outputs, inputs, *kernel = weight.shape
        positions = math.prod(geometry(input, weight, options).outputs)
        return cls(
            rows, len(input) // rows, options.groups, inputs, outputs // options.groups, math.prod(kernel), positions
        )

    def distance(self, other: Shape) -> float:
        """How much two shapes differ: the sum of the logarithms of their ratios."""
        pairs = zip(self, other, strict=True)
        return sum(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in pairs)


def stacked_convolution(
    convolution: Convolution, input: Tensor, weight: Tensor, bias: Tensor | None, options: Options
) -> Tensor:
    """input [k * batch, c, ...], weight [k, o, c / groups, ...], bias [k, o] -> [k * batch, o, ...].

    `convolution` is F.conv1d, F.conv2d or F.conv3d. The shape decides on the way.
    """
    alone = len(weight) == 1
    name = "one by one" if alone else fastest_way(input.device.type, Shape.of(input, weight, options))
    return WAYS[name](convolution, input, weight, bias, options)


@cache
def fastest_way(kind: str, shape: Shape) -> str:
    """The name of the way of the nearest shape in the table of a kind of device; "grouped" if it has no table."""
    known = _tables().get(kind)
    return min(known, key=lambda entry: shape.distance(entry[0]))[1] if known else "grouped"


@cache
def _tables() -> dict[str, list[tuple[Shape, str]]]:
    """For each kind of device shapes with their fastest ways."""
    tables = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {
        kind: [(Shape(**{name: entry[name] for name in Shape._fields}), entry["way"]) for entry in table["shapes"]]
        for kind, table in tables.items()
    }


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


def windows(convolution: Convolution, input: Tensor, weight: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """One batched product of all windows of the inputs with the kernels of their rows.

    Windows are copied from a strided view of the inputs. They are made again for the backward pass, and of as many
    samples at a time as fit into `WINDOW_BYTES`.
    """
    form = geometry(input, weight, options)
    operands = cast_for_autocast(input.unflatten(0, (len(weight), -1)), weight, bias)
    found = _Windows.apply(*operands, form, options.groups).flatten(0, 1)
    last = input.ndim == 4 and not input.is_contiguous() and input.is_contiguous(memory_format=torch.channels_last)
    return found.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


WAYS: dict[str, Callable[..., Tensor]] = {"one by one": one_by_one, "grouped": grouped, "windows": windows}


class Geometry(NamedTuple):
    """A convolution's sizes, one number for each of its dimensions.

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


class _Windows(torch.autograd.Function):
    """x [k, batch, c, ...], weight [k, o, c / groups, ...], bias [k, o] or None -> [k, batch, o, ...].

    The derivative by the inputs is the adjoint of the windows, dimension by dimension, without atomic operations.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, form: Geometry, groups: int) -> Tensor:
        context.save_for_backward(x, weight)
        context.form, context.groups = form, groups
        kernels = _matrices(weight, groups)
        products = []
        for part in x.split(_samples_at_a_time(x, form), 1):
            columns = _columns(part, form, groups)
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
            if for_weight:
                of_weight.append(torch.bmm(of_products.mT, _columns(part, form, groups)))
            if for_x:
                of_x.append(_collected(torch.bmm(of_products, kernels), part.shape, form, groups))
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
    of_one = x.shape[0] * x.shape[2] * math.prod(form.kernel) * math.prod(form.outputs) * x.element_size()
    return max(1, WINDOW_BYTES // max(1, of_one))


def _columns(x: Tensor, form: Geometry, groups: int) -> Tensor:
    """The windows of x [k, batch, c, ...] as rows of matrices: [k * groups, batch * positions, c / groups * kernel]."""
    seen, dimensions = F.pad(x, form.padding) if any(form.padding) else x, len(form.kernel)
    for place, (size, stride, step) in enumerate(zip(form.kernel, form.stride, form.dilation, strict=True)):
        seen = seen.unfold(3 + place, step * (size - 1) + 1, stride)[..., ::step]
    seen = seen.unflatten(2, (groups, -1))  # [k, batch, groups, c / groups, *positions, *kernel]
    positions, kernel = (tuple(range(start, start + dimensions)) for start in (4, 4 + dimensions))
    return seen.permute(0, 2, 1, *positions, 3, *kernel).reshape(
        len(x) * groups, x.shape[1] * math.prod(form.outputs), -1
    )


def _collected(columns: Tensor, shape: torch.Size, form: Geometry, groups: int) -> Tensor:
    """The adjoint of `_columns`: each number of an x of this shape is the sum of its copies in the windows."""
    k, samples, _, *sizes = shape
    dimensions = len(sizes)
    seen = columns.view(k, groups, samples, *form.outputs, -1, *form.kernel)
    positions, kernel = (tuple(range(start, start + dimensions)) for start in (3, 4 + dimensions))
    seen = seen.permute(0, 2, 1, 3 + dimensions, *positions, *kernel).flatten(2, 3)
    for place in reversed(range(dimensions)):  # the last dimension of `seen` is the kernel's of this place
        stride, step, size = form.stride[place], form.dilation[place], form.kernel[place]
        span = step * (size - 1) + 1
        if step > 1:
            spread = seen.new_zeros(*seen.shape[:-1], span)
            spread[..., ::step] = seen
            seen = spread
        before, after = form.padding[2 * (dimensions - 1 - place) :][:2]
        wanted = [*seen.shape[:-1]]
        wanted[3 + place] = sizes[place] + before + after
        seen = torch.ops.aten.unfold_backward(seen, wanted, 3 + place, span, stride)
        seen = seen.narrow(3 + place, before, sizes[place])
    return seen


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
