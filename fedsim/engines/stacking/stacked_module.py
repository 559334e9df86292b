"""A module computed for a stack of rows at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedsim.clients import OuterProductGrad
from fedsim.core.recorded_features import recorded_features
from fedsim.core.rows import Entry, Layout
from fedsim.core.training import Objective
from fedsim.data.tensors import in_order
from fedsim.engines.stacking.operations import MergedBatch, NotMergeableError, VmapOverrides, not_stackable

DEFAULT = Objective()

Places = list[tuple[nn.Module, str]]
Stacks = tuple[list[Tensor], list[Tensor], Tensor, list[Tensor]]  # of parameters, buffers, inputs, factors of dropouts

OTHERWISE = "it treats batches differently (splits large ones, or depends on their values)"


class FeatureTerm(NamedTuple):
    """What a client algorithm adds to the losses: see `ClientAlgorithm.feature_loss`.

    Attributes:
        points: stacks of rows [k, d] at which features are computed too.
        loss: [k, batch], of features [k, batch, f] and those at each of the points.
    """

    points: Sequence[Tensor]
    loss: Callable[[Tensor, Sequence[Tensor]], Tensor]


class StackedModule:
    """A module in training that computes k rows with k buffer rows on k batches, each row as if it were alone.

    Args:
        make: gives the module at its start.
        objective: the loss of a row, and the precision of the forward pass.
        merged: whether to run it on the merged batch of all rows, which only some modules can be (see
            `operations`), or under `torch.func.vmap`, which costs about a millisecond more per call.
    """

    def __init__(self, make: Callable[[], nn.Module], objective: Objective = DEFAULT, *, merged: bool = False) -> None:
        self._objective, self._precision, self._merged = objective, objective.precision, merged
        self._module = make().train()
        self.layout = Layout.of(self._module)
        parameters, buffers = dict(self._module.named_parameters()), dict(self._module.named_buffers())
        self._parameters = [_places(self._module, parameters[entry.name]) for entry in self.layout.parameters]
        self._buffers = [_places(self._module, buffers[entry.name]) for entry in self.layout.buffers]
        self._buffer_dtypes = [buffers[entry.name].dtype for entry in self.layout.buffers]

    def views(self, rows: Tensor) -> list[Tensor]:
        """Rows [k, d] as a stack [k, ...] of each parameter: no copies."""
        return [view_of(rows, entry) for entry in self.layout.parameters]

    def unpack_buffers(self, rows: Tensor) -> list[Tensor]:
        """Buffer rows [k, b] as a stack [k, ...] of each buffer, in the module's own types."""
        views = [view_of(rows, entry) for entry in self.layout.buffers]
        return [
            (view if dtype.is_floating_point else view.round()).to(dtype, copy=True)
            for view, dtype in zip(views, self._buffer_dtypes, strict=True)
        ]

    def pack_buffers(self, buffers: Sequence[Tensor], rows: Tensor) -> Tensor:
        """The reverse of `unpack_buffers`, into `rows` [k, b]; returns them."""
        for entry, buffer in zip(self.layout.buffers, buffers, strict=True):
            view_of(rows, entry).copy_(buffer)
        return rows

    def gradients(
        self,
        parameters: Sequence[Tensor],
        buffers: list[Tensor],
        inputs: Tensor,
        targets: Tensor,
        weights: Tensor,
        factors: Sequence[Tensor] = (),
        *,
        leave_products: int | None = None,
        term: FeatureTerm | None = None,
    ) -> tuple[Tensor, list[Tensor | OuterProductGrad]]:
        """Each row's loss [k] on its batch, and its gradients, a stack [k, ...] for each parameter.

        The gradients share no memory and may be written to. `buffers` are replaced by their new values.

        Args:
            parameters, buffers: stacks as `views` and `unpack_buffers` give them.
            inputs, targets: [k, batch, ...] each.
            weights: [k, batch], of the samples in the loss; 0 for padding, else one over the batch's true size.
            factors: of each dropout in turn, [k, batch, ...].
            leave_products: bytes of a stack of weights from which on a gradient that is a product is left uncomputed;
                None: all are computed.
            term: added to the losses of samples.
        """
        leaves = [parameter.detach().requires_grad_() for parameter in parameters]
        least = leave_products if self._precision.autocast is None else None
        products: list[list[OuterProductGrad] | None] = [
            [] if least is not None and leaf.nbytes >= least else None for leaf in leaves
        ]
        if term is not None:
            at_points = [self._features(self.views(point), buffers, inputs, factors) for point in term.points]
        with torch.enable_grad():
            stacks = leaves, list(buffers), inputs, list(factors)
            outputs, buffers[:], *features = self._forward(stacks, products, records=term is not None)
            losses = self._objective.losses(outputs, targets, weights)
            if term is not None:
                losses = losses + term.loss(self._precision.widened(features[0]), at_points)
            losses = (losses * weights).sum(1)
            found = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        gradients = [
            _total(parameter, gradient, left or [])
            for parameter, gradient, left in zip(parameters, found, products, strict=True)
        ]
        return losses.detach(), _owned(gradients)

    @torch.no_grad()
    def _features(
        self, parameters: list[Tensor], buffers: Sequence[Tensor], inputs: Tensor, factors: Sequence[Tensor]
    ) -> Tensor:
        """The features [k, batch, f] of other rows on the same batches; the buffers stay as they are."""
        stacks = parameters, [buffer.clone() for buffer in buffers], inputs.clone(), list(factors)
        *_, features = self._forward(stacks, records=True)
        return self._precision.widened(features)

    def _forward(
        self, stacks: Stacks, products: Sequence[list[OuterProductGrad] | None] = (), *, records: bool
    ) -> list[Any]:
        """The outputs [k, batch, ...] of the rows, their new buffers, and, if it `records` them, their features."""
        parameters, buffers, inputs, factors = stacks
        with self._precision.forward(inputs.device):
            if not self._merged:
                return vmap(partial(self._forward_one, records=records))(*stacks)
            self._hold(parameters, buffers)
            merged = in_order(inputs.flatten(0, 1))
            try:
                with MergedBatch(factors, [*parameters, *buffers], len(merged), products) as batch:
                    results = self._outputs(merged, records)
            except NotMergeableError as error:
                raise not_stackable(OTHERWISE) from error
        batch.require_all_used()
        outputs, *features = (tensor.unflatten(0, inputs.shape[:2]) for tensor in results)
        return [outputs, buffers, *features]

    def _forward_one(
        self, parameters: list[Tensor], buffers: list[Tensor], inputs: Tensor, factors: list[Tensor], *, records: bool
    ) -> list[Any]:
        self._hold(parameters, buffers)
        with VmapOverrides(factors) as substitutes:
            outputs, *features = self._outputs(inputs, records)
        substitutes.require_all_used()
        return [outputs, [module.get_buffer(name) for (module, name), *_ in self._buffers], *features]

    def _outputs(self, inputs: Tensor, records: bool) -> list[Tensor]:
        """The outputs of the module, and, if they are recorded, its features."""
        if not records:
            return [self._module(inputs)]
        with recorded_features(self._module) as recorded:
            outputs = self._module(inputs)
        return [outputs, recorded.of(len(inputs))]

    def _hold(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Replace the module's parameters and buffers."""
        for places, tensor in zip(self._parameters, parameters, strict=True):
            for module, name in places:
                module._parameters[name] = tensor  # type: ignore[assignment]  # not by setattr, which wants nn.Parameter
        for places, tensor in zip(self._buffers, buffers, strict=True):
            for module, name in places:
                module._buffers[name] = tensor


def _places(module: nn.Module, tensor: Tensor) -> Places:
    """The places where a module registers a parameter or buffer: several for a shared one."""
    return [
        (part, name)
        for part in module.modules()
        for registered in (part._parameters, part._buffers)
        for name, value in registered.items()
        if value is tensor
    ]


def view_of(rows: Tensor, entry: Entry) -> Tensor:
    """The columns of one entry of rows [k, d], as a stack [k, ...] of its shape: no copy."""
    return rows[:, entry.span].unflatten(1, entry.shape) if entry.shape else rows[:, entry.offset]


def _total(parameter: Tensor, gradient: Tensor | None, products: list[OuterProductGrad]) -> Tensor | OuterProductGrad:
    """The sum of the parts of a parameter's gradient."""
    if gradient is None and len(products) == 1:
        return products[0]
    parts = [product.computed() for product in products] + ([] if gradient is None else [gradient])
    return sum(parts[1:], parts[0]) if parts else torch.zeros_like(parameter)


def _owned(gradients: Sequence[Tensor | OuterProductGrad]) -> list[Tensor | OuterProductGrad]:
    """Copies of those gradients that share memory with others, or with themselves (as expanded ones do)."""
    owned, seen = list[Tensor | OuterProductGrad](), set[int]()
    for gradient in gradients:
        if isinstance(gradient, Tensor):
            if not gradient.is_contiguous() or gradient.data_ptr() in seen:
                gradient = gradient.clone(memory_format=torch.contiguous_format)
            seen.add(gradient.data_ptr())
        owned.append(gradient)
    return owned
