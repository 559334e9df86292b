"""Operations on a stack of k models: under `torch.func.vmap`, or on one merged batch of all models' samples.

`torch.func.vmap` vectorises each operation of a forward pass over the models. The functions in `SUBSTITUTES` replace
operations that are slow or wrong under `vmap`. On a merged batch [k * batch, ...], each call has less overhead.
Operations without parameters run unchanged. The functions in `OPERATIONS` apply the parameters of each model, from a
stack [k, ...], to the samples of this model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.clients import OuterProductGrad
from fedsim.errors import ExperimentError, first_line
from fedsim.system.precision import cast_for_autocast
from fedsim.training.capture import OperationCheck, depends_on_values
from fedsim.training.forward_functions import Dropout, ForwardFunctions

Convolution = Callable[..., Tensor]
DROPOUT_CALLS_VARY = "the model's dropout calls differ between forward passes"


NOT_STACKABLE = 'engine = "batched": the model cannot be trained in stacks of workers: '
NOT_STACKED = "; use engine=processes"


def not_stackable(reason: str) -> ExperimentError:
    """Return an ExperimentError which says that several workers' models cannot be trained at once, and the reason."""
    return ExperimentError(f"{NOT_STACKABLE}{reason}{NOT_STACKED}")


def reason_of(error: BaseException) -> str:
    """Return the `reason` of an error that `not_stackable` made, or the first line of any other error's message."""
    return first_line(error).removeprefix(NOT_STACKABLE).removesuffix(NOT_STACKED)


# Functions that read tensor values for control flow, which cannot be batched across rows.
VALUE_READS = {
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__complex__, Tensor.__index__, Tensor.__contains__),
    *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.equal, Tensor.allclose, Tensor.is_nonzero),
    *(torch.equal, torch.allclose, torch.is_nonzero),
}
# Attributes that a stack [k, ...] has in common with its rows.
SAME_FOR_ROWS = {Tensor.dtype.__get__, Tensor.device.__get__, Tensor.is_cuda.__get__}  # type: ignore[attr-defined]


class PreparedDropout(ForwardFunctions):
    """Context manager in which dropout uses the given masks.

    Args:
        factors: scaled dropout masks [samples, ...], one for each dropout call, in call order.
    """

    def __init__(self, factors: Iterable[Tensor]) -> None:
        super().__init__(self._next)
        self._factors = iter(factors)

    def _next(self, dropout: Dropout, samples: int) -> Tensor:
        factors = next(self._factors, None)
        if factors is None or len(factors) != samples:
            raise not_stackable(DROPOUT_CALLS_VARY)
        return factors

    def require_all_used(self) -> None:
        """Raise ExperimentError if the forward pass made fewer dropout calls than there are masks."""
        if next(self._factors, None) is not None:
            raise not_stackable(DROPOUT_CALLS_VARY)


class VmapOverrides(PreparedDropout):
    """Context manager that replaces PyTorch functions for which `torch.func.vmap` is slow or wrong."""

    def call_function(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        return SUBSTITUTES.get(function, function)(*args, **kwargs)


def _vmapped_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if input.ndim == 1:
        return F.linear(input, weight, bias)
    return _VmappedLinear.apply(*cast_for_autocast(input, weight, bias))


class EmbeddingOptions(NamedTuple):
    """Optional arguments of `F.embedding`, in the order of its signature."""

    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    sparse: bool = False

    @property
    def computed(self) -> bool:
        """Whether an embedding with these options can be computed for several models at once."""
        return self.max_norm is None and not self.scale_grad_by_freq and not self.sparse

    def without_gradient_at_padding(self, embeddings: Tensor, words: Tensor, count: int) -> Tensor:
        """Return the embeddings, without a gradient for the token `padding_idx`.

        Args:
            embeddings: looked-up vectors, [..., width].
            words: token of each vector, [...].
            count: size of the vocabulary.
        """
        if self.padding_idx is None:
            return embeddings
        return torch.where((words == self.padding_idx % count).unsqueeze(-1), embeddings.detach(), embeddings)


def _vmapped_embedding(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute F.embedding under vmap, without a gradient for `padding_idx`."""
    options = EmbeddingOptions(*args, **kwargs)
    if not options.computed:
        raise not_stackable(
            "the model has an embedding with max_norm, scale_grad_by_freq or sparse, which fedsim can compute only for "
            "one worker at a time"
        )
    return options.without_gradient_at_padding(F.embedding(input, weight), input, len(weight))


def _vmapped_contiguous(function: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Call `function` on a contiguous copy of `input`, because channels_last inputs fail or are slow under vmap."""
    return function(input.contiguous(), *args, **kwargs)


def _vmapped_batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, *args: Any, **kwargs: Any
) -> Tensor:
    """Compute F.batch_norm under vmap. Unlike in PyTorch, inputs and running statistics may differ in dtype."""
    wide = input if running_mean is None else input.to(running_mean.dtype)
    return F.batch_norm(wide, running_mean, running_var, *args, **kwargs).to(input.dtype)


SUBSTITUTES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: _vmapped_linear,
    F.embedding: _vmapped_embedding,
    F.batch_norm: _vmapped_batch_norm,
    F.group_norm: partial(_vmapped_contiguous, F.group_norm),
    F.adaptive_avg_pool2d: partial(_vmapped_contiguous, F.adaptive_avg_pool2d),
}


class _VmappedLinear(torch.autograd.Function):
    """Version of `F.linear` that is fast under `torch.func.vmap`."""

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
    """Linear layer with separate weights for each of k models.

    Shapes: input [k, batch, i], weight [k, o, i], bias [k, o], output [k, batch, o], for i inputs and o outputs. If
    `products` is a list, the weight gradient is not computed, but appended to the list as an OuterProductGrad.
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


# Convolutions of each row's samples with that row's kernels


# On an NVIDIA H200 (PyTorch 2.11, float32, 2026-11-26), a forward convolution of cuDNN took 19 us with 250 products per
# output, and 73 us with 800. cuDNN's input gradient, including two transposes, took 91 us for a layer whose turned
# convolution sums 500 products per output, and 34 us for a layer with 1,600.
MOST_TURNED_PRODUCTS = 1000  # maximum number of products per input gradient that a forward kernel sums


class Options(NamedTuple):
    """Arguments that follow `bias` in F.conv1d, F.conv2d and F.conv3d, in the order of their signatures."""

    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1

    def turnable(self, size: Sequence[int]) -> Options | None:
        """Return these options with one number per dimension if `_TurnedConvolution` supports them, otherwise None.

        A forward convolution with flipped kernels computes the input gradient if the stride is 1, and if the padding is
        equal on both sides and smaller than the (dilated) kernels.

        Args:
            size: kernel size in each dimension.
        """

        def numbers(value: Any) -> tuple[int, ...]:
            values = (value,) if isinstance(value, int) else tuple(value)
            return values * len(size) if len(values) == 1 else values

        stride, dilation = numbers(self.stride), numbers(self.dilation)
        reach = tuple(step * (length - 1) for step, length in zip(dilation, size, strict=True))
        if self.padding == "same" and any(length % 2 for length in reach):
            return None
        named = {"valid": 0, "same": [length // 2 for length in reach]}
        padding = numbers(named[self.padding] if isinstance(self.padding, str) else self.padding)
        if any(step != 1 for step in stride) or any(pad > length for pad, length in zip(padding, reach, strict=True)):
            return None
        return Options(stride, padding, dilation, self.groups)


def way_for(weight: Tensor, groups: int = 1, *, turns: bool) -> str:
    """Return the key in `WAYS` of the implementation to use for a convolution.

    Args:
        weight: kernels of the k models, [k, o, c / groups, ...], for c input and o output channels.
        groups: number of groups of channels.
        turns: whether the implementation "turned" may be used on a GPU.
    """
    if len(weight) == 1 or weight.device.type == "cpu":
        return "one by one"
    products = math.prod(weight.shape[3:]) * weight.shape[1] // groups
    is_depthwise = weight.shape[2] == 1  # PyTorch has special kernels for depthwise convolutions
    return "turned" if turns and not is_depthwise and products <= MOST_TURNED_PRODUCTS else "grouped"


def one_by_one(
    convolution: Convolution, input: Tensor, weight: Tensor, bias: Tensor | None, options: Options
) -> Tensor:
    """Convolve each model's samples with the model's own kernels, by one convolution per model.

    Args:
        convolution: F.conv1d, F.conv2d or F.conv3d.
        input: samples of the k models, [k * batch, c, ...], with c channels.
        weight: kernels of the k models, [k, o, c / groups, ...], for o output channels.
        bias: biases of the k models, [k, o], or None.
        options: stride, padding, dilation and groups.

    Returns the output, [k * batch, o, ...].
    """
    biases = [None] * len(weight) if bias is None else bias.unbind()
    parts = zip(input.chunk(len(weight)), weight.unbind(), biases, strict=True)
    outputs = [convolution(part, kernels, offsets, *options) for part, kernels, offsets in parts]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def grouped(convolution: Convolution, input: Tensor, weight: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """Compute the result of `one_by_one` by one grouped convolution over the concatenated channels of all models."""
    k = len(weight)
    side_by_side = input.unflatten(0, (k, -1)).transpose(0, 1).flatten(1, 2)
    offsets = None if bias is None else bias.flatten()
    outputs = convolution(side_by_side, weight.flatten(0, 1), offsets, *options._replace(groups=k * options.groups))
    return outputs.unflatten(1, (k, -1)).transpose(0, 1).flatten(0, 1)


def turned(convolution: Convolution, input: Tensor, weight: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """Compute the result of `grouped`, and its input gradient by `_TurnedConvolution` if the options allow this."""
    numbers = options.turnable(weight.shape[3:])
    if numbers is None or not input.requires_grad:
        return grouped(convolution, input, weight, bias, options)

    def convolve(*arguments: Any) -> Tensor:
        return _TurnedConvolution.apply(convolution, *cast_for_autocast(*arguments[:3]), Options(*arguments[3:]))

    return grouped(convolve, input, weight, bias, numbers)


class _TurnedConvolution(torch.autograd.Function):
    """Convolution whose input gradient is computed by a forward convolution of the output gradient.

    The kernels of this forward convolution are flipped in all dimensions, and input and output channels are exchanged.
    """

    @staticmethod
    def forward(
        context: Any, convolution: Convolution, input: Tensor, weight: Tensor, bias: Tensor | None, options: Options
    ) -> Tensor:
        context.save_for_backward(input, weight)
        context.convolution, context.options = convolution, options
        context.bias_size = None if bias is None else bias.shape
        return convolution(input, weight, bias, *options)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = context.saved_tensors
        stride, padding, dilation, groups = context.options
        _, for_input, for_weight, for_bias, _ = context.needs_input_grad
        of_input = None
        if for_input:
            of_groups = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
            kernels = of_groups.flip(tuple(range(2, weight.ndim)))
            reach = zip(padding, dilation, weight.shape[2:], strict=True)
            pads = [step * (length - 1) - pad for pad, step, length in reach]
            of_input = context.convolution(gradient, kernels, None, stride, pads, dilation, groups)
        mask = [False, for_weight, for_bias]
        zeros = [0] * len(stride)
        _, of_weight, of_bias = torch.ops.aten.convolution_backward(
            gradient, input, weight, context.bias_size, stride, padding, dilation, False, zeros, groups, mask
        )
        return None, of_input, of_weight, of_bias, None


WAYS: dict[str, Callable[..., Tensor]] = {"one by one": one_by_one, "grouped": grouped, "turned": turned}


# Operations on the merged batch of all rows


class NotMergeableError(Exception):
    """Error for a model that cannot process the batches of several workers as one merged batch."""


class DataDependenceCheck(OperationCheck):
    """Context manager that raises NotMergeableError if the shape of a result depends on the values in a batch.

    For example, a mixture of experts selects samples by a mask. It is then unknown which worker each sample belongs to.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if depends_on_values(function, args, (torch.ops.aten.index.Tensor,)):
            raise NotMergeableError(
                f"the shape of the result of {function} depends on the values in the batch, so one forward pass cannot "
                "train several workers"
            )
        return function(*args, **kwargs or {})


class MergedBatch(PreparedDropout):
    """Context manager for a forward pass of k models on one batch that contains the samples of all of them.

    Functions with parameters, such as F.linear, apply each model's parameters to the samples of this model. Functions
    that do not support this raise NotMergeableError.

    Args:
        factors: scaled dropout masks [k, batch, ...], one for each dropout call, in call order.
        stacks: parameters and buffers of the k models, [k, ...] each.
        size: total number of samples, k * batch.
        products: for each tensor in `stacks`, a list to which the backward pass appends the tensor's gradient as an
            OuterProductGrad. None instead of a list: the tensor gets an ordinary gradient.
        turns: argument of `way_for`.
    """

    def __init__(
        self,
        factors: Iterable[Tensor],
        stacks: Sequence[Tensor],
        size: int,
        products: Sequence[list[OuterProductGrad] | None] = (),
        *,
        turns: bool = False,
    ) -> None:
        super().__init__(factor.flatten(0, 1) for factor in factors)
        self.turns = turns
        self._size = size
        self._positions = {id(stack): position for position, stack in enumerate(stacks)}
        self._products = products

    def call_function(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        if function in VALUE_READS:
            raise NotMergeableError(
                "the model converts a tensor to Python numbers, so the batches of several workers cannot be merged"
            )
        if not any(self._has_stack(value) for value in (*args, *kwargs.values())) or function in SAME_FOR_ROWS:
            return super().call_function(function, args, kwargs)
        if function not in OPERATIONS:
            name = getattr(function, "__name__", str(function))
            raise NotMergeableError(
                f"{name} is called with parameters or buffers, which fedsim can compute only for one worker at a time"
            )
        return OPERATIONS[function](self, *args, **kwargs)

    def is_stack(self, value: object) -> bool:
        """Whether `value` is one of the tensors `stacks`: parameters or buffers [k, ...] of the k models."""
        return id(value) in self._positions

    def require(self, holds: bool) -> None:
        """Raise NotMergeableError unless the condition `holds` is true."""
        if not holds:
            raise NotMergeableError(
                "a layer gets arguments that fedsim can use only for one worker at a time, such as an input without a "
                "batch dimension"
            )

    def require_stacks(self, input: Tensor, *stacks: Tensor | None) -> None:
        """Raise NotMergeableError unless `stacks` are parameters of the k models and `input` is the merged batch."""
        for stack in stacks:
            if stack is not None:
                self.require(self.is_stack(stack) and (len(stack) == 1 or len(input) % self._size == 0))

    def products_of(self, weight: Tensor) -> list[OuterProductGrad] | None:
        """Return the list that receives the OuterProductGrad of `weight`; None if it gets an ordinary gradient."""
        return self._products[self._positions[id(weight)]] if self._products else None

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
    options = Options(*args, **kwargs)
    return WAYS[way_for(weight, options.groups, turns=batch.turns)](convolution, input, weight, bias, options)


def _embedding(batch: MergedBatch, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    options = EmbeddingOptions(*args, **kwargs)
    batch.require(options.computed)
    batch.require_stacks(input, weight)
    rows, words = weight.shape[:2]
    # An out-of-range index would select a word of the next row.
    torch._assert_async(((input >= 0) & (input < words)).all(), "index out of range in embedding")
    of_rows = input.reshape(rows, -1)
    start = torch.arange(0, rows * words, words, device=input.device).unsqueeze(1)
    embeddings = F.embedding((of_rows + start).view(input.shape), weight.flatten(0, 1))
    return options.without_gradient_at_padding(embeddings, input, words)


def _normalized(
    norm: Callable[..., Tensor],
    batch: MergedBatch,
    input: Tensor,
    groups: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise the samples of k models by `norm(input, groups)`, then apply each model's weight and bias.

    Args:
        norm: F.layer_norm or F.group_norm.
        batch: merged batch of the models.
        input: samples of all models.
        groups: second argument of `norm`.
        weight, bias: parameters of the k models, [k, ...]; None to omit them.
        eps: number that is added to the variance.
    """
    normal = norm(input, groups, eps=eps)
    for stack, combine in ((weight, torch.mul), (bias, torch.add)):
        if stack is not None:
            batch.require_stacks(normal, stack)
            ones, shape = [1] * (input.ndim - stack.ndim), stack.shape[1:]
            shape_of_row = (*shape, *ones) if norm is F.group_norm else (*ones, *shape)
            of_rows = normal.unflatten(0, (len(stack), -1))
            normal = combine(of_rows, stack.view(len(stack), 1, *shape_of_row)).flatten(0, 1)
    return normal


def _recurrent(
    network: Callable[..., tuple[Tensor, ...]],
    batch: MergedBatch,
    input: Tensor,
    state: Tensor | Sequence[Tensor],
    parameters: Sequence[Tensor],
    *args: Any,
) -> tuple[Tensor, ...]:
    """Run the recurrent networks of the k models one after another, which is faster on a CPU.

    Args:
        network: torch.lstm, torch.gru, torch.rnn_tanh or torch.rnn_relu.
        batch: merged batch of the models.
        input: samples of all models, [k * batch, length, inputs].
        state, parameters, args: further arguments of `network`.
    """
    *_, dropout, _, _, batch_first = args
    batch.require(not dropout and batch_first)
    stacks = [parameter for parameter in parameters if batch.is_stack(parameter)]
    batch.require_stacks(input, *stacks)
    k = len(stacks[0])
    of_rows = zip(*(p.unbind() if batch.is_stack(p) else [p] * k for p in parameters), strict=True)
    states = [state] if isinstance(state, Tensor) else state
    outputs = []
    for x, *start, weights in zip(input.chunk(k), *(tensor.chunk(k, 1) for tensor in states), of_rows, strict=True):
        if input.is_cuda:  # cuDNN requires contiguous states, and copies weights that are not in one chunk
            start, weights = [tensor.contiguous() for tensor in start], in_one_chunk(weights)
        outputs.append(network(x, start[0] if isinstance(state, Tensor) else start, weights, *args))
    dims = 0, *[1] * len(states)
    return tuple(torch.cat(tensors, dim) for tensors, dim in zip(zip(*outputs, strict=True), dims, strict=True))


def in_one_chunk(weights: Sequence[Tensor]) -> list[Tensor]:
    """Copy the weights of a recurrent network to one chunk of memory, in cuDNN's order: all matrices, then all biases.

    Returns a view of this memory for each weight.
    """
    order = sorted(range(len(weights)), key=lambda position: -weights[position].ndim)
    chunk = torch.cat([weights[position].flatten() for position in order])
    parts = chunk.split([weights[position].numel() for position in order])
    part_at = dict(zip(order, parts, strict=True))
    return [part_at[position].view_as(weight) for position, weight in enumerate(weights)]


OPERATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: _linear,
    F.conv1d: partial(_convolution, F.conv1d),
    F.conv2d: partial(_convolution, F.conv2d),
    F.conv3d: partial(_convolution, F.conv3d),
    F.embedding: _embedding,
    **{network: partial(_recurrent, network) for network in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
    F.layer_norm: partial(_normalized, F.layer_norm),
    F.group_norm: partial(_normalized, F.group_norm),
}
