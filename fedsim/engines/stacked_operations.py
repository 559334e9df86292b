"""Operations of a stack of rows for which PyTorch's own batching rule is slow, and dropout, which it draws otherwise.

`torch.func.vmap` turns each operation of a module's forward into one for all rows of a stack. `Substitutes` puts others
in place of some of them; they are used within vmap alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

FEATURE_DROPOUTS = (F.dropout1d, F.dropout2d, F.dropout3d)  # draw once for each channel of each sample
DROPOUTS = (F.dropout, *FEATURE_DROPOUTS)


@dataclass(frozen=True)
class Dropout:
    """One call of a dropout in a forward pass.

    Attributes:
        function: which of `DROPOUTS`.
        p: probability of an element (or a channel) to be zeroed.
        shape: of what it draws for one sample.
        order: in which memory order that is drawn.
    """

    function: Callable[..., Tensor]
    p: float
    shape: tuple[int, ...]
    order: torch.memory_format

    @classmethod
    def of(cls, function: Callable[..., Tensor], inputs: Tensor, p: float) -> Dropout:
        shape, order = tuple(inputs.shape[1:]), torch.contiguous_format
        if function in FEATURE_DROPOUTS:
            shape = (shape[0], *[1] * len(shape[1:]))
        elif inputs.ndim == 4 and not inputs.is_contiguous():
            order = torch.channels_last
        return cls(function, p, shape, order)

    def draw(self, samples: int, like: Tensor) -> Tensor:
        """The factors of a batch [samples, ...], 0 or 1 / (1 - p), as PyTorch draws them from its global generator."""
        ones = torch.ones(samples, *self.shape, dtype=like.dtype, device=like.device)
        return self.function(ones.contiguous(memory_format=self.order), self.p, True)


class Recording(TorchFunctionMode):
    """Leaves dropout out of a forward pass, and notes where it would have been."""

    def __init__(self) -> None:
        super().__init__()
        self.dropouts: list[Dropout] = []

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function in DROPOUTS:
            inputs, p, training, _ = _dropout_arguments(*args, **kwargs or {})
            if training and p:
                self.dropouts.append(Dropout.of(function, inputs, p))
            return inputs
        return function(*args, **kwargs or {})


class Substitutes(TorchFunctionMode):
    """In a forward pass under vmap: what is quicker for a stack, and dropout by factors that were drawn before.

    Args:
        factors: for each call of a dropout in turn, as `Dropout.draw` gives them.
    """

    def __init__(self, factors: Iterable[Tensor]) -> None:
        super().__init__()
        self._factors = iter(factors)

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function in DROPOUTS:
            inputs, p, training, inplace = _dropout_arguments(*args, **kwargs)
            if not (training and p):
                return inputs
            factors = next(self._factors)
            return inputs.mul_(factors) if inplace else inputs * factors
        if function is F.linear:
            return _linear(*args, **kwargs)
        return function(*args, **kwargs)


def _dropout_arguments(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Tensor, float, bool, bool]:
    return input, p, training, inplace


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _VmappedLinear.apply(input, weight, bias) if input.ndim > 1 else F.linear(input, weight, bias)


class _VmappedLinear(torch.autograd.Function):
    """F.linear whose batching rule is `_StackedLinear`."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias)

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple, input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, int]:
        input_dim, weight_dim, bias_dim = in_dims
        if weight_dim is None and bias_dim is None:  # the same for all rows
            return F.linear(input.movedim(input_dim, 0), weight, bias), 0

        def stacked(tensor: Tensor, dim: int | None) -> Tensor:
            return tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)

        input, weight = stacked(input, input_dim), stacked(weight, weight_dim)
        flat = input.flatten(1, -2)
        bias = None if bias is None else stacked(bias, bias_dim)
        return _StackedLinear.apply(flat, weight, bias).unflatten(1, input.shape[1:-1]), 0


class _StackedLinear(torch.autograd.Function):
    """x [k, b, i], weight [k, o, i], bias [k, o] -> [k, b, o].

    PyTorch's own derivative of the batched product gives the transposed weight's gradient, [k, i, o], which a CPU is
    several times slower at, and at adding it to weights that lie the other way.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        context.save_for_backward(x, weight)
        if bias is None:
            return torch.bmm(x, weight.mT)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = context.saved_tensors
        for_x, for_weight, for_bias = context.needs_input_grad
        return (
            torch.bmm(gradient, weight) if for_x else None,
            torch.bmm(gradient.mT, x) if for_weight else None,
            gradient.sum(1) if for_bias else None,
        )
