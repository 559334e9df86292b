"""Replacements of operations whose batching rules in PyTorch's vmap are slow or wrong, and of dropout.

`torch.func.vmap` turns each operation of a module's forward into one for all rows of a stack. `VmapOverrides` replaces
some of them; they are used within vmap alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedsim.clients import OuterProductGrad
from fedsim.errors import ExperimentError
from fedsim.system.precision import cast_for_autocast

FEATURE_DROPOUTS = (F.dropout1d, F.dropout2d, F.dropout3d)  # draw once for each channel of each sample
DROPOUTS = (F.dropout, *FEATURE_DROPOUTS)
WITHOUT_SAMPLES = {F.dropout1d: 2, F.dropout3d: 4}  # dimensions of an input that is one sample, by PyTorch's reading
OTHER_DROPOUTS = "which dropouts it calls is not always the same"


def not_stackable(reason: str) -> ExperimentError:
    """The error where the rows of a model cannot be stacked; new each time, since it keeps the frames it passes."""
    return ExperimentError(f'engine = "batched": the rows of this model cannot be stacked: {reason}; use engine=spawn')


@dataclass(frozen=True)
class Dropout:
    """One call of a dropout in a forward pass. What it draws: `fedsim.engines.trainers.dropout`.

    Attributes:
        function: which of `DROPOUTS`.
        p: probability of an element (or a channel) to be zeroed.
        shape: of what it draws for one sample.
    """

    function: Callable[..., Tensor]
    p: float
    shape: tuple[int, ...]

    @classmethod
    def of(cls, function: Callable[..., Tensor], inputs_shape: torch.Size, p: float) -> Dropout:
        shape = tuple(inputs_shape[1:])
        if function in FEATURE_DROPOUTS:  # without a dimension of samples, channels stand first
            channels = shape[:1] if len(inputs_shape) != WITHOUT_SAMPLES.get(function) else (1,)
            shape = (*channels, *[1] * (len(inputs_shape) - 2))
        return cls(function, p, shape)


class Recording(TorchFunctionMode):
    """Leaves dropout out of a forward pass, and notes where it would have been, and of how many samples."""

    def __init__(self) -> None:
        super().__init__()
        self.dropouts: list[Dropout] = []
        self.samples: list[int] = []

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function in DROPOUTS:
            inputs, p, training, _ = _dropout_arguments(*args, **kwargs or {})
            function(inputs, p, False)  # raises what PyTorch raises for these arguments
            if training and p:
                self.dropouts.append(Dropout.of(function, inputs.shape, p))
                self.samples.append(len(inputs))
            return inputs
        return function(*args, **kwargs or {})


class PreparedDropout(TorchFunctionMode):
    """In a forward pass of a stack: dropout by factors that were drawn before. `other` calls all other functions.

    Args:
        factors: for each call of a dropout in turn, what it multiplies by, [samples, ...].
    """

    def __init__(self, factors: Iterable[Tensor]) -> None:
        super().__init__()
        self._factors = iter(factors)

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function not in DROPOUTS:
            return self.other(function, args, kwargs)
        inputs, p, training, inplace = _dropout_arguments(*args, **kwargs)
        if not (training and p):
            return inputs
        if not 0 < p <= 1:
            return function(*args, **kwargs)  # raises ValueError
        return multiplied(inputs, self.factors_of(Dropout.of(function, inputs.shape, p), inputs.shape[0]), inplace)

    def factors_of(self, dropout: Dropout, samples: int) -> Tensor:
        """What the next call of a dropout multiplies by. Raises ExperimentError where it is not the one foreseen."""
        factors = next(self._factors, None)
        if factors is None or len(factors) != samples:
            raise not_stackable(OTHER_DROPOUTS)
        return factors

    def other(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call of any function but dropout."""
        return function(*args, **kwargs)

    def require_all_used(self) -> None:
        """Raise ExperimentError where factors are left when the forward pass has ended."""
        if next(self._factors, None) is not None:
            raise not_stackable(OTHER_DROPOUTS)


class VmapOverrides(PreparedDropout):
    """In a forward pass under vmap: calls the replacements of operations whose batching rules are slow or wrong."""

    def other(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        return SUBSTITUTES.get(function, function)(*args, **kwargs)


def multiplied(inputs: Tensor, factors: Tensor, inplace: bool) -> Tensor:
    """The result of a dropout with these factors."""
    if factors.dtype != inputs.dtype:
        factors = factors.to(inputs.dtype)
    return inputs.mul_(factors) if inplace else inputs * factors


def _dropout_arguments(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Tensor, float, bool, bool]:
    return input, p, training, inplace


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
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


def _embedding(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """PyTorch's batching rule computes a gradient of the word `padding_idx`."""
    options = EmbeddingOptions(*args, **kwargs)
    if not options.computed:
        raise not_stackable("it has an embedding with max_norm, scale_grad_by_freq or sparse")
    return options.without_gradient_at_padding(F.embedding(input, weight), input, len(weight))


def _group_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """PyTorch's batching rule fails where the input is in channels_last order."""
    return F.group_norm(input.contiguous(), *args, **kwargs)


def _batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, *args: Any, **kwargs: Any
) -> Tensor:
    """PyTorch's batching rule fails where the input is of another type than the statistics, as under autocast."""
    wide = input if running_mean is None else input.to(running_mean.dtype)
    return F.batch_norm(wide, running_mean, running_var, *args, **kwargs).to(input.dtype)


SUBSTITUTES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    F.batch_norm: _batch_norm,
    F.group_norm: _group_norm,
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
