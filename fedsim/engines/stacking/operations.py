"""Operations of a stack of rows: under `torch.func.vmap`, and on the merged batch of all rows.

vmap turns each operation of a module's forward into one for all rows of a stack; `SUBSTITUTES` replace those whose
batching rules are slow or wrong. A merged batch, [rows * batch, ...], has less to do per call: operations without
parameters treat every sample alike, so they run unchanged, and `OPERATIONS` apply each row's parameters, a stack
[k, ...], to that row's samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.clients import OuterProductGrad
from fedsim.engines.trainers.capture import OperationCheck, depends_on_values
from fedsim.engines.trainers.dropout import Dropout, DropoutMode
from fedsim.errors import ExperimentError
from fedsim.system.precision import cast_for_autocast

Convolution = Callable[..., Tensor]
OTHER_DROPOUTS = "which dropouts it calls is not always the same"


def not_stackable(reason: str) -> ExperimentError:
    """The error where the rows of a model cannot be stacked; new each time, since it keeps the frames it passes."""
    return ExperimentError(f'engine = "batched": the rows of this model cannot be stacked: {reason}; use engine=spawn')


# Data-dependent control flow, which cannot be batched across rows.
READINGS = {
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__complex__, Tensor.__index__, Tensor.__contains__),
    *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.equal, Tensor.allclose, Tensor.is_nonzero),
    *(torch.equal, torch.allclose, torch.is_nonzero),
}


class PreparedDropout(DropoutMode):
    """In a forward pass of a stack: dropout by factors that were drawn before.

    Args:
        factors: for each call of a dropout in turn, what it multiplies by, [samples, ...].
    """

    def __init__(self, factors: Iterable[Tensor]) -> None:
        super().__init__(self._next)
        self._factors = iter(factors)

    def _next(self, dropout: Dropout, samples: int) -> Tensor:
        factors = next(self._factors, None)
        if factors is None or len(factors) != samples:
            raise not_stackable(OTHER_DROPOUTS)
        return factors

    def require_all_used(self) -> None:
        """Raise ExperimentError where factors are left when the forward pass has ended."""
        if next(self._factors, None) is not None:
            raise not_stackable(OTHER_DROPOUTS)


class VmapOverrides(PreparedDropout):
    """In a forward pass under vmap: calls the replacements of operations whose batching rules are slow or wrong."""

    def other(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        return SUBSTITUTES.get(function, function)(*args, **kwargs)


def _vmapped_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if input.ndim == 1:
        return F.linear(input, weight, bias)
    return _VmappedLinear.apply(*cast_for_autocast(input, weight, bias))


class EmbeddingOptions(NamedTuple):
    """What F.embedding takes after the weight."""

    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    sparse: bool = False

    @property
    def computed(self) -> bool:
        """Whether embeddings of this sort are computed for stacks."""
        return self.max_norm is None and not self.scale_grad_by_freq and not self.sparse

    def without_gradient_at_padding(self, found: Tensor, words: Tensor, count: int) -> Tensor:
        """The embeddings `found` of `words`, out of `count` words, without gradient for the word `padding_idx`."""
        if self.padding_idx is None:
            return found
        return torch.where((words == self.padding_idx % count).unsqueeze(-1), found.detach(), found)


def _vmapped_embedding(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """PyTorch's batching rule computes a gradient of the word `padding_idx`."""
    options = EmbeddingOptions(*args, **kwargs)
    if not options.computed:
        raise not_stackable("it has an embedding with max_norm, scale_grad_by_freq or sparse")
    return options.without_gradient_at_padding(F.embedding(input, weight), input, len(weight))


def _vmapped_group_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """PyTorch's batching rule fails where the input is in channels_last order."""
    return F.group_norm(input.contiguous(), *args, **kwargs)


def _vmapped_batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, *args: Any, **kwargs: Any
) -> Tensor:
    """PyTorch's batching rule fails where the input is of another type than the statistics, as under autocast."""
    wide = input if running_mean is None else input.to(running_mean.dtype)
    return F.batch_norm(wide, running_mean, running_var, *args, **kwargs).to(input.dtype)


SUBSTITUTES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: _vmapped_linear,
    F.embedding: _vmapped_embedding,
    F.batch_norm: _vmapped_batch_norm,
    F.group_norm: _vmapped_group_norm,
}


class _VmappedLinear(torch.autograd.Function):
    """F.linear whose batching rule is `StackedLinear`."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias)

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple, input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, int]:
        input_dim, weight_dim, bias_dim = in_dims

        def stacked(tensor: Tensor, dim: int | None) -> Tensor:
            return tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)

        input, weight = stacked(input, input_dim), stacked(weight, weight_dim)
        flat = input.flatten(1, -2)
        bias = None if bias is None else stacked(bias, bias_dim)
        return StackedLinear.apply(flat, weight, bias, None).unflatten(1, input.shape[1:-1]), 0


class StackedLinear(torch.autograd.Function):
    """x [k, b, i], weight [k, o, i], bias [k, o] -> [k, b, o].

    The weight's gradient is left in `products` where there is such a list, and not computed.

    PyTorch's own derivative of the batched product gives the transposed weight's gradient, [k, i, o], which a CPU is
    several times slower at, and at adding it to weights that lie the other way.
    """

    @staticmethod
    def forward(
        context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, products: list[OuterProductGrad] | None
    ) -> Tensor:
        context.save_for_backward(x, weight)
        context.products = products
        if bias is None:
            return torch.bmm(x, weight.mT)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = context.saved_tensors
        for_x, for_weight, for_bias, _ = context.needs_input_grad
        for_weight = OuterProductGrad(gradient, x.detach()) if for_weight else None
        if for_weight is not None and context.products is not None:
            context.products.append(for_weight)
            for_weight = None
        return (
            torch.bmm(gradient, weight) if for_x else None,
            None if for_weight is None else for_weight.computed(),
            gradient.sum(1) if for_bias else None,
            None,
        )


# Convolutions: each row's samples with that row's kernels


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


# On the merged batch of all rows


class NotMergeableError(Exception):
    """A model does what cannot be done on a merged batch."""


class DataDependenceCheck(OperationCheck):
    """Raises NotMergeableError if a model reads values of its batch, or derives shapes from them; for probes.

    An example is a mixture of experts: the samples that a mask selects from a merged batch have no known rows.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if depends_on_values(function, args, (torch.ops.aten.index.Tensor,)):
            raise NotMergeableError(f"{function} depends on values of a batch of several rows")
        return function(*args, **kwargs or {})


class MergedBatch(PreparedDropout):
    """In a forward pass on a merged batch: gives operations with stacked parameters what they need.

    Raises NotMergeableError where a function takes a stack and is not one of `OPERATIONS`, or is one of `READINGS`.

    Args:
        factors: for each call of a dropout in turn, [rows, batch, ...].
        stacks: the parameters and buffers, one stack [k, ...] for each.
        size: how many samples there are, rows * batch.
        products: by the place of a weight among the stacks, a list that takes its gradient as factors; None: the
            gradient is computed.
    """

    def __init__(
        self,
        factors: Iterable[Tensor],
        stacks: Sequence[Tensor],
        size: int,
        products: Sequence[list[OuterProductGrad] | None] = (),
    ) -> None:
        super().__init__(factor.flatten(0, 1) for factor in factors)
        self._size = size
        self._places = {id(stack): place for place, stack in enumerate(stacks)}
        self._products = products

    def other(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        if function in READINGS:
            raise NotMergeableError("reads values of a batch of several rows")
        if not any(self._has_stack(value) for value in (*args, *kwargs.values())):
            return function(*args, **kwargs)
        if function not in OPERATIONS:
            raise NotMergeableError(getattr(function, "__name__", str(function)))
        return OPERATIONS[function](self, *args, **kwargs)

    def is_stack(self, value: object) -> bool:
        return id(value) in self._places

    def require(self, holds: bool) -> None:
        """Raise NotMergeableError unless the arguments of an operation are as its form here takes them."""
        if not holds:
            raise NotMergeableError

    def require_stacks(self, input: Tensor, *stacks: Tensor | None) -> None:
        """Raise NotMergeableError unless these are stacks, and `input` has all samples, not some of them."""
        for stack in stacks:
            if stack is not None:
                self.require(self.is_stack(stack) and (len(stack) == 1 or len(input) % self._size == 0))

    def products_of(self, weight: Tensor) -> list[OuterProductGrad] | None:
        return self._products[self._places[id(weight)]] if self._products else None

    def _has_stack(self, value: object) -> bool:
        if isinstance(value, (list, tuple)):
            return any(self._has_stack(item) for item in value)
        return self.is_stack(value)


def _linear(batch: MergedBatch, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    batch.require(input.ndim > 1)
    batch.require_stacks(input, weight, bias)
    products = batch.products_of(weight)
    of_rows = input.reshape(len(weight), -1, input.shape[-1])
    outputs = StackedLinear.apply(*cast_for_autocast(of_rows, weight, bias), products)
    return outputs.view(*input.shape[:-1], outputs.shape[-1])


def _convolution(
    convolution: Convolution,
    batch: MergedBatch,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    batch.require(input.ndim == weight.ndim - 1)
    batch.require_stacks(input, weight, bias)
    return stacked_convolution(convolution, input, weight, bias, Options(*args, **kwargs))


def _embedding(batch: MergedBatch, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    options = EmbeddingOptions(*args, **kwargs)
    batch.require(options.computed)
    batch.require_stacks(input, weight)
    rows, words = weight.shape[:2]
    # An index beyond the words of a row would select a word of the next row.
    torch._assert_async(((input >= 0) & (input < words)).all(), "index out of range in embedding")
    of_rows = input.reshape(rows, -1)
    start = torch.arange(0, rows * words, words, device=input.device).unsqueeze(1)
    found = F.embedding((of_rows + start).view(input.shape), weight.flatten(0, 1))
    return options.without_gradient_at_padding(found, input, words)


def _normalized(
    norm: Callable[..., Tensor],
    batch: MergedBatch,
    input: Tensor,
    groups: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """F.layer_norm or F.group_norm of `groups`, times weight [k, ...] plus bias [k, ...]."""
    normal = norm(input, groups, eps=eps)
    for stack, combine in ((weight, torch.mul), (bias, torch.add)):
        if stack is not None:
            batch.require_stacks(normal, stack)
            ones, shape = [1] * (input.ndim - stack.ndim), stack.shape[1:]
            shape_of_row = (*shape, *ones) if norm is F.group_norm else (*ones, *shape)
            of_rows = normal.unflatten(0, (len(stack), -1))
            normal = combine(of_rows, stack.view(len(stack), 1, *shape_of_row)).flatten(0, 1)
    return normal


OPERATIONS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.linear: _linear,
    F.conv1d: partial(_convolution, F.conv1d),
    F.conv2d: partial(_convolution, F.conv2d),
    F.conv3d: partial(_convolution, F.conv3d),
    F.embedding: _embedding,
    F.layer_norm: partial(_normalized, F.layer_norm),
    F.group_norm: partial(_normalized, F.group_norm),
}
