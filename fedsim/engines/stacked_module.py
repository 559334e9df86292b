"""A module computed for a stack of rows at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from fedsim.engines.stacked_operations import Substitutes
from fedsim.precision import FULL, Precision
from fedsim.rows import Entry, Layout

Places = list[tuple[nn.Module, str]]


class StackedModule:
    """A module in training that takes k rows, k buffer rows and k batches, and treats each as if it were alone.

    Args:
        make: gives the module at its start.
        precision: of the forward pass.
    """

    def __init__(self, make: Callable[[], nn.Module], precision: Precision = FULL) -> None:
        self._precision = precision
        self._module = make().train()
        self.layout = Layout.of(self._module)
        parameters, buffers = dict(self._module.named_parameters()), dict(self._module.named_buffers())
        self._parameters = [_places(self._module, parameters[entry.name]) for entry in self.layout.parameters]
        self._buffers = [_places(self._module, buffers[entry.name]) for entry in self.layout.buffers]
        self._buffer_dtypes = [buffers[entry.name].dtype for entry in self.layout.buffers]
        self._forward = vmap(self._forward_one)

    def views(self, rows: Tensor) -> list[Tensor]:
        """Rows [k, d] as a stack [k, ...] of each parameter: no copies."""
        return [_view(rows, entry) for entry in self.layout.parameters]

    def unpack_buffers(self, rows: Tensor) -> list[Tensor]:
        """Buffer rows [k, b] as a stack [k, ...] of each buffer, in the module's own types."""
        views = [_view(rows, entry) for entry in self.layout.buffers]
        return [
            (view if dtype.is_floating_point else view.round()).to(dtype, copy=True)
            for view, dtype in zip(views, self._buffer_dtypes, strict=True)
        ]

    def pack_buffers(self, buffers: Sequence[Tensor], rows: Tensor) -> None:
        """The reverse, into `rows` [k, b]."""
        for entry, buffer in zip(self.layout.buffers, buffers, strict=True):
            _view(rows, entry).copy_(buffer)

    def gradients(
        self,
        parameters: Sequence[Tensor],
        buffers: list[Tensor],
        inputs: Tensor,
        targets: Tensor,
        weights: Tensor,
        factors: Sequence[Tensor] = (),
        scales: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Each row's loss [k] on its batch, and its gradients, a stack [k, ...] for each parameter.

        The gradients are tensors of their own, which may be written to. `buffers` are replaced by what becomes of them.

        Args:
            parameters, buffers: stacks as `views` and `unpack_buffers` give them.
            inputs, targets: [k, batch, ...] and [k, batch].
            weights: [k, batch], of the samples in the loss; 0 for padding, else one over the batch's true size.
            factors: of each dropout in turn, [k, batch, ...].
            scales: [k], by which the gradients are multiplied.
        """
        leaves = [parameter.detach().requires_grad_() for parameter in parameters]
        with torch.enable_grad():
            with self._precision.forward(inputs.device):
                outputs, buffers[:] = self._forward(leaves, list(buffers), inputs, list(factors))
            outputs = self._precision.widened(outputs)
            losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
            losses = (losses * weights).sum(1)
            total = (losses if scales is None else losses * scales).sum()
            found = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        return losses.detach(), _owned(found)

    def _forward_one(
        self, parameters: list[Tensor], buffers: list[Tensor], inputs: Tensor, factors: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        for places, tensor in zip(self._parameters, parameters, strict=True):
            for module, name in places:
                module._parameters[name] = tensor  # type: ignore[assignment]  # not by setattr, which wants nn.Parameter
        for places, tensor in zip(self._buffers, buffers, strict=True):
            for module, name in places:
                module._buffers[name] = tensor
        with Substitutes(factors) as substitutes:
            outputs = self._module(inputs)
        substitutes.require_all_used()
        return outputs, [places[0][0]._buffers[places[0][1]] for places in self._buffers]


def _places(module: nn.Module, tensor: Tensor) -> Places:
    """Wherever in a module a parameter or buffer is registered: shared ones in several places."""
    return [
        (part, name)
        for part in module.modules()
        for registered in (part._parameters, part._buffers)
        for name, value in registered.items()
        if value is tensor
    ]


def _view(rows: Tensor, entry: Entry) -> Tensor:
    return rows[:, entry.span].unflatten(1, entry.shape) if entry.shape else rows[:, entry.offset]


def _owned(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Tensors that share memory with none of the others, nor with themselves (as expanded ones do)."""
    owned, seen = [], set[int]()
    for gradient in gradients:
        if not gradient.is_contiguous() or gradient.data_ptr() in seen:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        seen.add(gradient.data_ptr())
        owned.append(gradient)
    return owned
