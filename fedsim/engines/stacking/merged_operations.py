"""Operations of a stack of rows on their merged batch, [rows * batch, ...]: what vmap does, with less to do per call.

Operations without parameters treat every sample alike, so they run on a merged batch unchanged. Those here have a stack
[k, ...] of each parameter, and apply each row's parameters to that row's samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.clients import OuterProductGrad
from fedsim.engines.operation_check import OperationCheck, depends_on_values
from fedsim.engines.stacking.convolution import Convolution, Options, stacked_convolution
from fedsim.engines.stacking.vmap_operations import EmbeddingOptions, PreparedDropout, StackedLinear
from fedsim.system.precision import cast_for_autocast

# Data-dependent control flow, which cannot be batched across rows.
READINGS = {
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__complex__, Tensor.__index__, Tensor.__contains__),
    *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.equal, Tensor.allclose, Tensor.is_nonzero),
    *(torch.equal, torch.allclose, torch.is_nonzero),
}


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


class LeftProducts:
    """Gradients of weights that are products and have not been computed, by the place of the weight among the stacks.

    Args:
        least: bytes of a stack of weights from which on its gradient is left.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._lists: dict[int, list[OuterProductGrad]] = {}

    def list_for(self, place: int, weight: Tensor) -> list[OuterProductGrad] | None:
        """Where a layer leaves the product for a weight; None if it is to compute the gradient."""
        return self._lists.setdefault(place, []) if weight.nbytes >= self._least else None

    def of(self, place: int) -> list[OuterProductGrad]:
        """What has been left for the weight at a place."""
        return self._lists.get(place, [])


class MergedBatch(PreparedDropout):
    """In a forward pass on a merged batch: gives operations with stacked parameters what they need.

    Raises NotMergeableError where a function takes a stack and is not one of `OPERATIONS`, or is one of `READINGS`.

    Args:
        factors: for each call of a dropout in turn, [rows, batch, ...].
        stacks: the parameters and buffers, one stack [k, ...] for each.
        size: how many samples there are, rows * batch.
        products: takes gradients of weights that are products, in place of computing them; None: all are computed.
    """

    def __init__(
        self,
        factors: Iterable[Tensor],
        stacks: Sequence[Tensor],
        size: int,
        products: LeftProducts | None = None,
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

    def require_whole(self, input: Tensor, stack: Tensor) -> None:
        """Raise NotMergeableError unless the first dimension is of all samples, not of some that a model picked."""
        self.require(len(stack) == 1 or len(input) % self._size == 0)

    def products_of(self, weight: Tensor) -> list[OuterProductGrad] | None:
        return None if self._products is None else self._products.list_for(self._places[id(weight)], weight)

    def _has_stack(self, value: object) -> bool:
        if isinstance(value, (list, tuple)):
            return any(self._has_stack(item) for item in value)
        return self.is_stack(value)


def _linear(batch: MergedBatch, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    batch.require(input.ndim > 1 and batch.is_stack(weight) and (bias is None or batch.is_stack(bias)))
    batch.require_whole(input, weight)
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
    batch.require(input.ndim == weight.ndim - 1 and batch.is_stack(weight) and (bias is None or batch.is_stack(bias)))
    batch.require_whole(input, weight)
    return stacked_convolution(convolution, input, weight, bias, Options(*args, **kwargs))


def _embedding(batch: MergedBatch, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    options = EmbeddingOptions(*args, **kwargs)
    batch.require(batch.is_stack(weight) and options.computed)
    batch.require_whole(input, weight)
    rows, words = weight.shape[:2]
    # An index beyond the words of a row would select a word of the next row.
    torch._assert_async(((input >= 0) & (input < words)).all(), "index out of range in embedding")
    of_rows = input.reshape(rows, -1)
    start = torch.arange(0, rows * words, words, device=input.device).unsqueeze(1)
    found = F.embedding((of_rows + start).view(input.shape), weight.flatten(0, 1))
    return options.without_gradient_at_padding(found, input, words)


def _layer_norm(
    batch: MergedBatch,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    batch.require(all(part is None or batch.is_stack(part) for part in (weight, bias)))
    normal = F.layer_norm(input, normalized_shape, eps=eps)
    return _scaled(batch, normal, weight, bias, [1] * (input.ndim - 1 - len(normalized_shape)), [])


def _group_norm(
    batch: MergedBatch,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    batch.require(all(part is None or batch.is_stack(part) for part in (weight, bias)))
    normal = F.group_norm(input, num_groups, eps=eps)
    return _scaled(batch, normal, weight, bias, [], [1] * (input.ndim - 2))


def _scaled(
    batch: MergedBatch,
    normal: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    before: Sequence[int],
    after: Sequence[int],
) -> Tensor:
    """normal [k * batch, ...] times weight plus bias, [k, ...] each; dimensions of 1 go before and after their own."""
    for stack, combine in ((weight, torch.mul), (bias, torch.add)):
        if stack is not None:
            batch.require_whole(normal, stack)
            of_rows = normal.unflatten(0, (len(stack), -1))
            normal = combine(of_rows, stack.view(len(stack), 1, *before, *stack.shape[1:], *after)).flatten(0, 1)
    return normal


OPERATIONS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.linear: _linear,
    F.conv1d: partial(_convolution, F.conv1d),
    F.conv2d: partial(_convolution, F.conv2d),
    F.conv3d: partial(_convolution, F.conv3d),
    F.embedding: _embedding,
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
}
