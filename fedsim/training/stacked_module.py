"""StackedModule: a module that computes the models of many workers at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedsim.clients import OuterProductGrad
from fedsim.core.model_inputs import Inputs, leaves, on_each, outputs_of
from fedsim.core.recorded_features import recorded_features
from fedsim.core.rows import Entry, Layout
from fedsim.core.training import Objective
from fedsim.data.tensors import in_order
from fedsim.training.operations import MergedBatch, NotMergeableError, VmapOverrides, not_stackable

DEFAULT = Objective()

Places = list[tuple[nn.Module, str]]
Stacks = tuple[list[Tensor], list[Tensor], Inputs, list[Tensor]]  # parameters, buffers, inputs, dropout factors

BATCH_DEPENDENT = "the model's operations depend on the size or the values of a batch"


class FeatureTerm(NamedTuple):
    """Loss term that compares a model's features with those of reference models; see `FeatureLoss`.

    Attributes:
        points: parameters of the reference models, such as the global model: tensors [k, d], with one row per worker.
        loss: function of the workers' features [k, batch, f] and of a list with the features of each element of
            `points`. Returns the loss of each sample, [k, batch].
    """

    points: Sequence[Tensor]
    loss: Callable[[Tensor, Sequence[Tensor]], Tensor]


class StackedModule:
    """Module that computes k models of the same architecture at once, each on its own batch, in training mode.

    The results agree with k separate computations up to rounding.

    Args:
        make: function that returns the module in its initial state.
        objective: loss function, and precision of the forward pass.
        merged: whether to merge the batches of all models into one batch, which is faster but not always possible;
            otherwise `torch.func.vmap` is used.
        turns: argument of `way_for`, for convolutions of merged batches.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        objective: Objective = DEFAULT,
        *,
        merged: bool = False,
        turns: bool = False,
    ) -> None:
        self._objective, self._precision, self._merged = objective, objective.precision, merged
        self._turns = turns
        self._module = make().train()
        for module in self._module.modules():
            if isinstance(module, nn.RNNBase):  # on a GPU, it would move the parameters out of their rows
                module.flatten_parameters = lambda: None  # type: ignore[method-assign]
        self.layout = Layout.of(self._module)
        parameters, buffers = dict(self._module.named_parameters()), dict(self._module.named_buffers())
        self._parameters = [_places(self._module, parameters[entry.name]) for entry in self.layout.parameters]
        self._buffers = [_places(self._module, buffers[entry.name]) for entry in self.layout.buffers]
        self._buffer_dtypes = [buffers[entry.name].dtype for entry in self.layout.buffers]

    def views(self, rows: Tensor) -> list[Tensor]:
        """Return a view [k, ...] of `rows` [k, d] for each parameter of the module."""
        return [view_of(rows, entry) for entry in self.layout.parameters]

    def unpack_buffers(self, rows: Tensor) -> list[Tensor]:
        """Return a tensor [k, ...] for each of the module's buffers, copied from the flat vectors `rows` [k, b]."""
        views = [view_of(rows, entry) for entry in self.layout.buffers]
        return [
            (view if dtype.is_floating_point else view.round()).to(dtype, copy=True)
            for view, dtype in zip(views, self._buffer_dtypes, strict=True)
        ]

    def pack_buffers(self, buffers: Sequence[Tensor], rows: Tensor) -> Tensor:
        """Copy buffers [k, ...] to the flat vectors `rows` [k, b], and return `rows`. Reverses `unpack_buffers`."""
        for entry, buffer in zip(self.layout.buffers, buffers, strict=True):
            view_of(rows, entry).copy_(buffer)
        return rows

    def gradients(
        self,
        parameters: Sequence[Tensor],
        buffers: list[Tensor],
        inputs: Inputs,
        targets: Tensor,
        weights: Tensor,
        factors: Sequence[Tensor] = (),
        *,
        leave_products: int | None = None,
        term: FeatureTerm | None = None,
        shares: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor | OuterProductGrad]]:
        """Return each model's loss [k] on its batch, and a gradient [k, ...] for each parameter.

        Args:
            parameters, buffers: results of `views` and `unpack_buffers`. The new buffers are written to the list
                `buffers`.
            inputs, targets: batches of the k models, [k, batch, ...] each.
            weights: weight of each sample in the loss, [k, batch]: 1 / (number of samples in the batch), or 0 for
                padding.
            factors: scaled dropout masks [k, batch, ...], one for each dropout call, in call order.
            leave_products: minimum size in bytes of parameters whose gradients are returned as an OuterProductGrad,
                if possible; None to compute all gradients.
            term: loss term that is added to the loss of each sample.
            shares: number by which each model's gradient is multiplied, [k]; None for 1.
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
            losses = self._objective.means(outputs, targets, weights)
            if term is not None:
                losses = losses + (term.loss(self._precision.widened(features[0]), at_points) * weights).sum(1)
            shares = torch.ones_like(losses) if shares is None else shares.to(losses.dtype)
            parameter_gradients = torch.autograd.grad(losses, leaves, shares, allow_unused=True)
        gradients = [
            _total(parameter, gradient, left or [])
            for parameter, gradient, left in zip(parameters, parameter_gradients, products, strict=True)
        ]
        return losses.detach(), _owned(gradients)

    @torch.no_grad()
    def outputs(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], inputs: Inputs) -> Tensor:
        """Return the outputs [k, batch, ...] of each model in evaluation mode, for its batch in `inputs`."""
        self._module.eval()
        try:
            outputs, _ = self._forward((list(parameters), list(buffers), inputs, []), records=False)
        finally:
            self._module.train()
        return outputs

    @torch.no_grad()
    def _features(
        self, parameters: list[Tensor], buffers: Sequence[Tensor], inputs: Inputs, factors: Sequence[Tensor]
    ) -> Tensor:
        """Return the features [k, batch, f] of `inputs` in k models with the given parameters and copied buffers."""
        stacks = parameters, [buffer.clone() for buffer in buffers], on_each(Tensor.clone, inputs), list(factors)
        *_, features = self._forward(stacks, records=True)
        return self._precision.widened(features)

    def _forward(
        self, stacks: Stacks, products: Sequence[list[OuterProductGrad] | None] = (), *, records: bool
    ) -> list[Any]:
        """Run k models. Return [outputs, new buffers], or [outputs, new buffers, features] if `records` is true.

        Args:
            stacks: parameters, buffers, inputs and dropout masks of the models, [k, ...] each.
            products: see `MergedBatch`.
            records: whether to return the features too.
        """
        parameters, buffers, inputs, factors = stacks
        first = leaves(inputs)[0]
        with self._precision.forward(first.device):
            if not self._merged:
                return vmap(partial(self._forward_one, records=records))(*stacks)
            self._hold(parameters, buffers)
            merged = on_each(lambda tensor: in_order(tensor.flatten(0, 1)), inputs)
            try:
                stacked = [*parameters, *buffers]
                with MergedBatch(factors, stacked, first.shape[:2].numel(), products, turns=self._turns) as batch:
                    results = self._outputs(merged, records)
            except NotMergeableError as error:
                raise not_stackable(f"{BATCH_DEPENDENT} ({error})") from error
        batch.require_all_used()
        outputs, *features = (tensor.unflatten(0, first.shape[:2]) for tensor in results)
        return [outputs, buffers, *features]

    def _forward_one(
        self, parameters: list[Tensor], buffers: list[Tensor], inputs: Inputs, factors: list[Tensor], *, records: bool
    ) -> list[Any]:
        self._hold(parameters, buffers)
        with VmapOverrides(factors) as substitutes:
            outputs, *features = self._outputs(inputs, records)
        substitutes.require_all_used()
        return [outputs, [module.get_buffer(name) for (module, name), *_ in self._buffers], *features]

    def _outputs(self, inputs: Inputs, records: bool) -> list[Tensor]:
        """Run the module. Return [outputs], or [outputs, features] if `records` is true."""
        if not records:
            return [outputs_of(self._module, inputs)]
        with recorded_features(self._module) as recorded:
            outputs = outputs_of(self._module, inputs)
        return [outputs, recorded.of(len(leaves(inputs)[0]))]

    def _hold(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Replace the module's parameters and buffers by the given tensors."""
        for holders, tensor in zip(self._parameters, parameters, strict=True):
            for module, name in holders:
                module._parameters[name] = tensor  # type: ignore[assignment]  # setattr would require an nn.Parameter
        for holders, tensor in zip(self._buffers, buffers, strict=True):
            for module, name in holders:
                module._buffers[name] = tensor


def _places(module: nn.Module, tensor: Tensor) -> Places:
    """Return all (submodule, name) pairs under which `module` registers the parameter or buffer `tensor`."""
    return [
        (part, name)
        for part in module.modules()
        for registered in (part._parameters, part._buffers)
        for name, value in registered.items()
        if value is tensor
    ]


def view_of(rows: Tensor, entry: Entry) -> Tensor:
    """Return a view [k, ...] of one parameter or buffer (`entry`) in the flat vectors `rows` [k, d]."""
    return rows[:, entry.span].unflatten(1, entry.shape) if entry.shape else rows[:, entry.offset]


def _total(parameter: Tensor, gradient: Tensor | None, products: list[OuterProductGrad]) -> Tensor | OuterProductGrad:
    """Return the gradient of a parameter: the sum of `gradient` and `products`, or zero if there are none."""
    if gradient is None and len(products) == 1:
        return products[0]
    parts = [product.computed() for product in products] + ([] if gradient is None else [gradient])
    return sum(parts[1:], parts[0]) if parts else torch.zeros_like(parameter)


def _owned(gradients: Sequence[Tensor | OuterProductGrad]) -> list[Tensor | OuterProductGrad]:
    """Return the gradients as contiguous tensors that do not share memory, by copying some of them."""
    owned, seen = list[Tensor | OuterProductGrad](), set[int]()
    for gradient in gradients:
        if isinstance(gradient, Tensor):
            if not gradient.is_contiguous() or gradient.data_ptr() in seen:
                gradient = gradient.clone(memory_format=torch.contiguous_format)
            seen.add(gradient.data_ptr())
        owned.append(gradient)
    return owned
