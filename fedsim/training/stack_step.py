"""One local training step of a stack of workers, with or without CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import NamedTuple, cast

import torch
from torch import Tensor

from fedsim.clients import ClientAlgorithm, FeatureLoss, OuterProductGrad, State
from fedsim.core.model_inputs import Inputs, on_each
from fedsim.core.rows import Entry, clip_rows
from fedsim.data import TensorData
from fedsim.errors import ExperimentError
from fedsim.training.sample_gradients import Moment, SampleGradients
from fedsim.training.stacked_module import FeatureTerm, StackedModule, view_of
from fedsim.training.task import RunTask

# The gradient of a linear layer is a product of two factors. For weights of at least this many bytes, a GPU passes the
# factors to the client algorithm instead of computing the product. This saves 4 of 6 passes over the weights (8 us for
# 8 MiB at 4 TB/s), and costs 2 to 4 more kernel launches (2 to 3 us each). A CPU has no launch cost, so it passes the
# factors of all weights.
LEFT_PRODUCT_BYTES = 2**23

Part = tuple[Entry, Tensor | OuterProductGrad]  # (columns of the rows, gradients of these columns)


class Batch(NamedTuple):
    """Training data of m workers for one training step.

    Attributes:
        inputs, targets: samples, [m, batch, ...] each.
        weights: weight of each sample in the loss, [m, batch].
        factors: scaled dropout masks [m, batch, ...], one for each dropout call, in call order.
        moments: round, worker and step of each batch, if the gradients of samples get noise.
    """

    inputs: Inputs
    targets: Tensor
    weights: Tensor
    factors: Sequence[Tensor] = ()
    moments: Sequence[Moment] = ()


@dataclass
class StackState:
    """State of k workers that are trained together. Each training step changes it in place.

    Args:
        module: module that computes all k models at once.
        rows: [k, d], parameters of each worker as a flat vector.
        algorithm_state: state of the client algorithm by name, as returned by `algorithm.start(rows)`, [k, d] each.
        buffers: buffers of the workers' models, [k, ...] each.
        buffers_beside: buffers of personal models that the workers train in addition, [k, ...] each.
        stack_index: positions of the k workers in the whole stack: a slice, or an index tensor on the device.
        settings: settings of the steps that differ between workers, [k, 1] each (see `RunTask.step_settings`).
    """

    module: StackedModule
    rows: Tensor
    algorithm_state: State
    buffers: list[Tensor]
    buffers_beside: list[Tensor] = field(default_factory=list)
    stack_index: slice | Tensor = field(default_factory=partial(slice, None))
    settings: State = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parameters = self.module.views(self.rows)
        self._parts: dict[Entry, tuple[Tensor, State]] = {}
        self._of_some: StackState | None = None

    def of(self, stack_index: slice | list[int]) -> StackState:
        """Return the state of the workers at `stack_index`.

        The result contains views if `stack_index` is a slice, and copies if it is a list.
        """
        if stack_index == slice(0, len(self.rows)):
            return self
        if isinstance(stack_index, list):
            return self._at(torch.tensor(stack_index, device=self.rows.device))  # one transfer instead of one per use
        if self._of_some is None or self._of_some.stack_index != stack_index:
            self._of_some = self._at(stack_index)
        return self._of_some

    def _at(self, stack_index: slice | Tensor) -> StackState:
        state = {name: tensor[stack_index] for name, tensor in self.algorithm_state.items()}
        buffers, beside = ([buffer[stack_index] for buffer in of_all] for of_all in (self.buffers, self.buffers_beside))
        settings = {name: column[stack_index] for name, column in self.settings.items()}
        return StackState(self.module, self.rows[stack_index], state, buffers, beside, stack_index, settings)

    def take_back(self, theirs: StackState, *, moved: bool) -> None:
        """After a step, copy the state of some workers back to this object.

        Args:
            theirs: state of some workers, returned by `of` before the step.
            moved: whether to copy parameters and algorithm state as well as buffers.
        """
        copied = isinstance(theirs.stack_index, Tensor)
        if copied:
            ours, new = self.buffers + self.buffers_beside, theirs.buffers + theirs.buffers_beside
            for buffer, values in zip(ours, new, strict=True):
                buffer[theirs.stack_index] = values
        if not moved:
            return
        if copied:
            self.rows[theirs.stack_index] = theirs.rows
        for name, tensor in theirs.algorithm_state.items():
            if copied or name not in self.algorithm_state:
                self.state_of(name)[theirs.stack_index] = tensor

    def part(self, entry: Entry) -> tuple[Tensor, State]:
        """Return a view of one parameter, and views of the algorithm state for this parameter, by name."""
        if entry not in self._parts:
            state = {name: _view_of_state(tensor, entry, self.rows) for name, tensor in self.algorithm_state.items()}
            self._parts[entry] = view_of(self.rows, entry), state
        rows, state = self._parts[entry]
        return rows, dict(state)

    def state_of(self, name: str) -> Tensor:
        """Return the state tensor `name` [k, d] of the client algorithm. If it does not exist, create it with zeros."""
        if name not in self.algorithm_state:
            self.algorithm_state[name] = torch.zeros_like(self.rows)
            self._parts.clear()
        return self.algorithm_state[name]


def _view_of_state(tensor: Tensor, entry: Entry, rows: Tensor) -> Tensor:
    """Return a view of the columns of a state tensor [k, d] that concern one parameter.

    A state tensor [k, 1] has one number per worker. It is reshaped so that it broadcasts with the parameter.

    Args:
        tensor: state tensor.
        entry: position and shape of the parameter.
        rows: parameters of the workers, [k, d].
    """
    is_number = tensor.shape[1] == 1 and rows.shape[1] > 1
    return tensor.view(-1, *[1] * len(entry.shape)) if is_number else view_of(tensor, entry)


def gather(train: TensorData, positions: Tensor) -> tuple[Inputs, Tensor]:
    """Return the inputs and targets, [m, batch, ...] each, of the samples at `positions` [m, batch] in `train`."""
    inputs, targets = train.gather(positions.flatten())
    return on_each(Tensor.unflatten, inputs, 0, positions.shape), targets.unflatten(0, positions.shape)


class StackStep:
    """Callable that trains several workers for one step: it computes gradients and updates the parameters."""

    def __init__(self, task: RunTask, module: StackedModule) -> None:
        self._task, self._module, self._samples = task, module, SampleGradients.of(task, module)
        self._on_cpu = task.device.type == "cpu"
        self._left_of_rows = 0 if self._on_cpu else None  # `leave_products` for gradients that are copied into rows

    def __call__(
        self, state: StackState, batch: Batch, active: Tensor | None = None, *, moment: tuple[int, int] = (1, 0)
    ) -> Tensor:
        """Train m workers for one step, in place, and return the mean loss of each, [m].

        Args:
            state: state of the workers.
            batch: data of the step.
            active: bool [m], true for the workers that may change; None for all. The other workers keep their
                parameters, algorithm state and buffers.
            moment: (round, step), which determines the learning rate.
        """
        algorithm = self._task.algorithm_at(*moment, settings=state.settings)
        if not algorithm.element_wise:
            return self._whole_rows(algorithm, state, batch)
        if state.settings or self._task.experiment.local.clip_norm is not None:
            losses, clipped = self.row_gradients(state, batch, active)
            move_rows(algorithm, state, clipped, active)
            return losses
        leave_products = None
        if active is None:
            leave_products = 0 if self._on_cpu else LEFT_PRODUCT_BYTES
        losses, gradients = self.gradients(state, batch, active, leave_products=leave_products)
        move(algorithm, state, self._parts(gradients), active)
        return losses

    def _whole_rows(self, algorithm: ClientAlgorithm, state: StackState, batch: Batch) -> Tensor:
        """Train for one step with a client algorithm that needs all parameters at once.

        See `ClientAlgorithm.step_rows`. Returns the mean loss of each worker, [m].
        """

        def gradient_at(points: Tensor) -> Tensor:
            at = self._module.views(points)
            buffers = [buffer.clone() for buffer in state.buffers_beside or state.buffers]  # layers may change them
            _, parameter_gradients = self._module.gradients(
                at, buffers, *batch[:4], leave_products=self._left_of_rows, term=self._feature_term(state)
            )
            for ours, new in zip(state.buffers_beside, buffers, strict=False):
                ours.copy_(new)
            gradients = self._as_rows(parameter_gradients)
            clip_rows(gradients, self._task.clip_norm(state.settings))
            return gradients

        losses, gradients = self.row_gradients(state, batch)
        algorithm.step_rows(state.rows, gradients, state.algorithm_state, gradient_at)
        return losses

    def row_gradients(
        self, state: StackState, batch: Batch, active: Tensor | None = None, *, clips: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return the losses [m] and the gradients [m, d] of m workers.

        Args:
            state: state of the m workers. The buffers of active workers are updated in place.
            batch: one batch for each worker.
            active: bool [m], true for the active workers; None for all.
            clips: whether to clip the gradients to `local.clip_norm`.
        """
        losses, parts = self.gradients(state, batch, active, leave_products=self._left_of_rows)
        gradients = self._as_rows(parts)
        clip_rows(gradients, self._task.clip_norm(state.settings) if clips else None)
        return losses, gradients

    def sum_gradients(self, state: StackState, batch: Batch, shares: Tensor) -> None:
        """Add the gradients of m workers to the state tensor "sum" [m, d]. Buffers are updated in place.

        Each worker's gradient is multiplied by its number in `shares` [m].
        """
        _, gradients = self.gradients(state, batch, leave_products=self._left_of_rows, shares=shares)
        for entry, gradient in self._parts(gradients):
            total = state.part(entry)[1]["sum"]
            if isinstance(gradient, Tensor):
                total.add_(gradient)
            else:
                gradient.add_to(total)

    def _parts(self, gradients: Sequence[Tensor | OuterProductGrad]) -> list[Part]:
        """Return the argument `parts` of `move`: pairs (range in the flat vector, gradient of this range)."""
        entries = self._module.layout.parameters
        return list(zip(entries, gradients, strict=True)) if self._on_cpu else joined(entries, gradients)

    def _as_rows(self, gradients: Sequence[Tensor | OuterProductGrad]) -> Tensor:
        """Flatten and concatenate the gradients of all parameters, for each of m workers, to one tensor [m, d]."""
        if not self._on_cpu:
            return side_by_side(cast(list[Tensor], gradients))
        first = gradients[0]
        like = first if isinstance(first, Tensor) else first.left
        rows = like.new_empty(len(like), self._module.layout.d)
        for entry, gradient in zip(self._module.layout.parameters, gradients, strict=True):
            view = view_of(rows, entry)
            if isinstance(gradient, Tensor):
                view.copy_(gradient)
            else:
                torch.bmm(gradient.left.mT, gradient.right, out=view)
        return rows

    def gradients(
        self,
        state: StackState,
        batch: Batch,
        active: Tensor | None = None,
        *,
        leave_products: int | None = None,
        shares: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor | OuterProductGrad]]:
        """Return the losses [m] of m workers, and a gradient [m, ...] for each parameter.

        Args:
            state: state of the workers. The buffers of active workers are updated in place.
            batch: data of the step.
            active: bool [m], true for the active workers; None for all.
            leave_products: minimum size in bytes of parameters whose gradients are returned as an OuterProductGrad,
                if possible; None to compute all gradients.
            shares: number by which each worker's gradient is multiplied, [m]; None for 1.
        """
        if self._samples is not None:
            losses, private = self._samples(state.rows, state.buffers, *batch)
            return losses, list(self._module.views(private))
        # A forward pass may change buffers and parameters in place, also those of workers that are not active.
        buffers = list(state.buffers) if active is None else [buffer.clone() for buffer in state.buffers]
        term, version = self._feature_term(state), state.rows._version
        losses, gradients = self._module.gradients(
            state.parameters, buffers, *batch[:4], leave_products=leave_products, term=term, shares=shares
        )
        if active is not None and state.rows._version != version:
            line = "a forward pass changes parameters in place, also those of workers that have finished"
            raise ExperimentError(line)
        for ours, new in zip(state.buffers, buffers, strict=True):
            if new is not ours:
                ours.copy_(new if active is None else torch.where(_like(active, new), new, ours))
        return losses, gradients

    def _feature_term(self, state: StackState) -> FeatureTerm | None:
        algorithm = self._task.algorithm
        if not isinstance(algorithm, FeatureLoss):
            return None
        points = algorithm.feature_points(state.algorithm_state)
        return FeatureTerm(points, algorithm.feature_loss) if points else None


def joined(entries: Sequence[Entry], gradients: Sequence[Tensor | OuterProductGrad]) -> list[Part]:
    """Concatenate gradients of successive parameters. Return pairs (range in the flat vector, gradient of this range).

    Args:
        entries: position of each parameter in the flat vector of a model, and its shape.
        gradients: gradients of each parameter in m models: a tensor [m, ...], or an OuterProductGrad (their factors),
            which is not concatenated.
    """
    parts = list[Part]()
    for are_products, pairs in groupby(
        zip(entries, gradients, strict=True), lambda pair: isinstance(pair[1], OuterProductGrad)
    ):
        neighbours = list(pairs)
        if not are_products and len(neighbours) > 1:
            columns = side_by_side([gradient for _, gradient in neighbours if isinstance(gradient, Tensor)])
            first = neighbours[0][0]
            neighbours = [(Entry(f"{first.name} ...", columns.shape[1:], first.offset), columns)]
        parts += neighbours
    return parts


def side_by_side(stacks: Sequence[Tensor]) -> Tensor:
    """Flatten tensors [m, ...], and concatenate them to one matrix [m, columns]."""
    return torch.cat([stack.unsqueeze(-1).flatten(1) for stack in stacks], 1)


def move(algorithm: ClientAlgorithm, state: StackState, parts: Sequence[Part], moving: Tensor | None = None) -> None:
    """Apply the client algorithm's step to the parameters of m workers, part by part, in place.

    Args:
        algorithm: client algorithm.
        state: state of the workers.
        parts: pairs (range of columns in the parameters [m, d], gradient of these columns).
        moving: bool [m], true for the workers that may change; None for all.
    """
    new = list[tuple[str, Entry, Tensor]]()
    for entry, gradient in parts:
        rows, column_state = state.part(entry)
        before = dict(column_state)
        if isinstance(gradient, OuterProductGrad):
            algorithm.step_fused(rows, gradient, column_state)
        elif moving is None:
            algorithm.step(rows, gradient, column_state)
        else:
            step_where(moving, algorithm, rows, gradient, column_state)
        new += [(name, entry, tensor) for name, tensor in column_state.items() if tensor is not before.get(name)]
    # Some client algorithms replace the tensors of their state, or add tensors in the first step.
    for name, entry, tensor in new:
        view_of(state.state_of(name), entry).copy_(tensor)


def move_rows(algorithm: ClientAlgorithm, state: StackState, gradients: Tensor, moving: Tensor | None = None) -> None:
    """Apply the client algorithm's step to all parameters of m workers at once, in place.

    Args:
        algorithm: client algorithm.
        state: state of the workers.
        gradients: gradients of the workers, [m, d].
        moving: bool [m], true for the workers that may change; None for all.
    """
    move(algorithm, state, [(Entry("row", gradients.shape[1:], 0), gradients)], moving)


def step_where(moving: Tensor, algorithm: ClientAlgorithm, rows: Tensor, gradients: Tensor, state: State) -> None:
    """Apply a client algorithm's step, in place, only to the workers for which the mask `moving` [m] is true.

    `rows`, `gradients` and the tensors in `state` have one entry for each of m workers.
    """
    before = {name: tensor.clone() for name, tensor in state.items()}
    rows_before = rows.clone()
    algorithm.step(rows, gradients, state)
    torch.where(_like(moving, rows), rows, rows_before, out=rows)
    for name, tensor in state.items():
        tensor_before = before[name] if name in before else torch.zeros_like(tensor)
        torch.where(_like(moving, tensor), tensor, tensor_before, out=tensor)


def _like(values: Tensor, tensor: Tensor) -> Tensor:
    """Reshape `values` [m] to [m, 1, ..., 1], so that they broadcast with `tensor` [m, ...]."""
    return values.view(-1, *[1] * (tensor.ndim - 1))
