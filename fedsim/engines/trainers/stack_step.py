"""One local step of a stack of rows, for captured steps too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import NamedTuple, cast

import torch
from torch import Tensor

from fedsim.clients import ClientAlgorithm, OuterProductGrad, State, step_along
from fedsim.core.rows import Entry, clip_rows
from fedsim.data import TensorData
from fedsim.engines.stacking.stacked_module import FeatureTerm, StackedModule, view_of
from fedsim.engines.task import RunTask

# If a stack of weights has at least this many bytes, a GPU does not compute its gradient, which is a product of two
# factors, but gives the factors to the client algorithm. This saves 4 of 6 passes over the weights (8 us for 8 MiB at 4
# TB/s), and costs 2 to 4 more kernel launches (2 to 3 us each). A CPU launches no kernels, so it does this for all
# weights.
LEFT_PRODUCT_BYTES = 2**23

Part = tuple[Entry, Tensor | OuterProductGrad]  # columns of rows, and their gradients


class Batch(NamedTuple):
    """What a step of m rows trains on.

    Attributes:
        inputs, targets: [m, batch, ...] each.
        weights: of the samples in the loss, [m, batch].
        factors: of each dropout in turn, [m, batch, ...].
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor
    factors: Sequence[Tensor] = ()


@dataclass
class StackState:
    """What a step of a stack changes in place: rows, the client algorithm's state, and buffers, also those of personal
    models.

    Args:
        module: computes the rows.
        rows: [k, d].
        algorithm_state: as `algorithm.start(rows)` gives it, [k, d] each.
        buffers: [k, ...] each.
        buffers_beside: of personal models that are trained beside the rows, [k, ...] each.
        places: which rows of the whole stack these are: a slice, or an index on the device if they do not lie side by
            side.
    """

    module: StackedModule
    rows: Tensor
    algorithm_state: State
    buffers: list[Tensor]
    buffers_beside: list[Tensor] = field(default_factory=list)
    places: slice | Tensor = field(default_factory=partial(slice, None))

    def __post_init__(self) -> None:
        self.parameters = self.module.views(self.rows)
        self._parts: dict[Entry, tuple[Tensor, State]] = {}
        self._of_some: StackState | None = None

    def of(self, places: slice | list[int]) -> StackState:
        """The state of the members at these places: views for a slice, which stay; copies for a list."""
        if places == slice(0, len(self.rows)):
            return self
        if isinstance(places, list):
            return self._at(torch.tensor(places, device=self.rows.device))  # once, not at each use
        if self._of_some is None or self._of_some.places != places:
            self._of_some = self._at(places)
        return self._of_some

    def _at(self, places: slice | Tensor) -> StackState:
        state = {name: tensor[places] for name, tensor in self.algorithm_state.items()}
        buffers, beside = ([buffer[places] for buffer in of_all] for of_all in (self.buffers, self.buffers_beside))
        return StackState(self.module, self.rows[places], state, buffers, beside, places)

    def take_back(self, theirs: StackState, *, moved: bool) -> None:
        """Copy the buffers of the members at some places back, and if they `moved` all their state.

        What shares memory is not copied.
        """
        copied = isinstance(theirs.places, Tensor)
        if copied:
            ours, new = self.buffers + self.buffers_beside, theirs.buffers + theirs.buffers_beside
            for buffer, values in zip(ours, new, strict=True):
                buffer[theirs.places] = values
        if not moved:
            return
        if copied:
            self.rows[theirs.places] = theirs.rows
        for name, tensor in theirs.algorithm_state.items():
            if copied or name not in self.algorithm_state:
                self.state_of(name)[theirs.places] = tensor

    def part(self, entry: Entry) -> tuple[Tensor, State]:
        """Views of some columns of the rows and of the client algorithm's state; the dictionary may be written to."""
        if entry not in self._parts:
            state = {name: _view_of_state(tensor, entry, self.rows) for name, tensor in self.algorithm_state.items()}
            self._parts[entry] = view_of(self.rows, entry), state
        rows, state = self._parts[entry]
        return rows, dict(state)

    def state_of(self, name: str) -> Tensor:
        """Return the algorithm's state tensor of this name, [k, d]; zeros if no step has created it yet."""
        if name not in self.algorithm_state:
            self.algorithm_state[name] = torch.zeros_like(self.rows)
            self._parts.clear()
        return self.algorithm_state[name]


def _view_of_state(tensor: Tensor, entry: Entry, rows: Tensor) -> Tensor:
    """The columns of an entry of a state [k, d]; a number for each row, [k, 1], is given a shape that broadcasts."""
    is_number = tensor.shape[1] == 1 and rows.shape[1] > 1
    return tensor.view(-1, *[1] * len(entry.shape)) if is_number else view_of(tensor, entry)


def gather(train: TensorData, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets [m, batch, ...] at these positions [m, batch] of the data."""
    inputs, targets = train.gather(positions.flatten())
    return inputs.unflatten(0, positions.shape), targets.unflatten(0, positions.shape)


class StackStep:
    """One step of the client algorithm for the rows of a stack."""

    def __init__(self, task: RunTask, module: StackedModule) -> None:
        self._task, self._module = task, module
        self._on_cpu = task.device.type == "cpu"
        self._left_of_rows = 0 if self._on_cpu else None  # `leave_products` for gradients that become rows

    def __call__(
        self, state: StackState, batch: Batch, active: Tensor | None = None, *, moment: tuple[int, int] = (1, 0)
    ) -> Tensor:
        """Move the rows of a state along their gradients, in place; returns the losses [m].

        Args:
            moment: the round and the step, for the learning rate.
            active: bool [m], which rows may change, with their client algorithm's state and buffers; None: all.
        """
        algorithm = self._task.algorithm_at(*moment)
        if not algorithm.element_wise:
            return self._whole_rows(algorithm, state, batch)
        if self._task.experiment.local.clip_norm is not None:
            losses, clipped = self.clipped_gradients(state, batch, active)
            move_rows(algorithm, state, clipped, active)
            return losses
        leave_products = None
        if active is None:
            leave_products = 0 if self._on_cpu else LEFT_PRODUCT_BYTES
        losses, gradients = self.gradients(state, batch, active, leave_products=leave_products)
        move(algorithm, state, self._parts(gradients), active)
        return losses

    def _whole_rows(self, algorithm: ClientAlgorithm, state: StackState, batch: Batch) -> Tensor:
        """A step that gets whole rows, and may ask for gradients at other points: see `ClientAlgorithm.step_rows`."""

        def gradient_at(points: Tensor) -> Tensor:
            at = self._module.views(points)
            buffers = [buffer.clone() for buffer in state.buffers_beside or state.buffers]  # layers may change them
            _, found = self._module.gradients(
                at, buffers, *batch, leave_products=self._left_of_rows, term=self._feature_term(state)
            )
            for ours, new in zip(state.buffers_beside, buffers, strict=False):
                ours.copy_(new)
            gradients = self._as_rows(found)
            clip_rows(gradients, self._task.experiment.local.clip_norm)
            return gradients

        losses, gradients = self.clipped_gradients(state, batch)
        algorithm.step_rows(state.rows, gradients, state.algorithm_state, gradient_at)
        return losses

    def clipped_gradients(self, state: StackState, batch: Batch, active: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The losses [m] and the gradients [m, d], clipped to `local.clip_norm`; buffers change as in `gradients`."""
        losses, gradients = self.whole_gradients(state, batch, active)
        clip_rows(gradients, self._task.experiment.local.clip_norm)
        return losses, gradients

    def whole_gradients(self, state: StackState, batch: Batch, active: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The losses [m] and the gradients [m, d]; buffers change as in `gradients`."""
        losses, gradients = self.gradients(state, batch, active, leave_products=self._left_of_rows)
        return losses, self._as_rows(gradients)

    def sum_gradients(self, state: StackState, batch: Batch) -> None:
        """Add the gradients to the state "sum" [m, d]; buffers change as in `gradients`."""
        _, gradients = self.gradients(state, batch, leave_products=self._left_of_rows)
        for entry, gradient in self._parts(gradients):
            total = state.part(entry)[1]["sum"]
            if isinstance(gradient, Tensor):
                total.add_(gradient)
            else:
                gradient.add_to(total)

    def _parts(self, gradients: Sequence[Tensor | OuterProductGrad]) -> list[Part]:
        """The gradients of all parameters with their columns: few on a GPU, where each is a kernel."""
        entries = self._module.layout.parameters
        return list(zip(entries, gradients, strict=True)) if self._on_cpu else joined(entries, gradients)

    def _as_rows(self, gradients: Sequence[Tensor | OuterProductGrad]) -> Tensor:
        """The gradients of all parameters as rows [m, d]: on a GPU by one kernel, on a CPU without a second copy."""
        if not self._on_cpu:
            return side_by_side(cast(list[Tensor], gradients))
        first = gradients[0]
        like = first if isinstance(first, Tensor) else first.left
        rows = like.new_empty(len(like), self._module.layout.d)
        for entry, gradient in zip(self._module.layout.parameters, gradients, strict=True):
            place = view_of(rows, entry)
            if isinstance(gradient, Tensor):
                place.copy_(gradient)
            else:
                torch.bmm(gradient.left.mT, gradient.right, out=place)
        return rows

    def gradients(
        self, state: StackState, batch: Batch, active: Tensor | None = None, *, leave_products: int | None = None
    ) -> tuple[Tensor, list[Tensor | OuterProductGrad]]:
        """The losses [m] and the gradients, a stack [m, ...] for each parameter.

        The buffers change in place, of the active rows. `leave_products` as for `StackedModule.gradients`.
        """
        buffers = list(state.buffers)
        term = self._feature_term(state)
        losses, gradients = self._module.gradients(
            state.parameters, buffers, *batch, leave_products=leave_products, term=term
        )
        for ours, new in zip(state.buffers, buffers, strict=True):
            if new is not ours:
                ours.copy_(new if active is None else torch.where(_like(active, new), new, ours))
        return losses, gradients

    def _feature_term(self, state: StackState) -> FeatureTerm | None:
        algorithm = self._task.algorithm
        points = algorithm.feature_points(state.algorithm_state)
        return FeatureTerm(points, algorithm.feature_loss) if points else None


def joined(entries: Sequence[Entry], gradients: Sequence[Tensor | OuterProductGrad]) -> list[Part]:
    """Join neighbouring gradients that are not products to one [m, columns], so that a step takes fewer kernels."""
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
    """Stacks [m, ...] as the columns of one matrix [m, columns]."""
    return torch.cat([stack.unsqueeze(-1).flatten(1) for stack in stacks], 1)


def move(algorithm: ClientAlgorithm, state: StackState, parts: Sequence[Part], moving: Tensor | None = None) -> None:
    """Step the rows of a state along gradients in place; only the `moving` rows [m], if given."""
    step = partial(step_along, algorithm) if moving is None else partial(step_where, moving, algorithm)
    new = list[tuple[str, Entry, Tensor]]()
    for entry, gradient in parts:
        rows, kept = state.part(entry)
        before = dict(kept)
        step(rows, gradient, kept)
        new += [(name, entry, tensor) for name, tensor in kept.items() if tensor is not before.get(name)]
    for (
        name,
        entry,
        tensor,
    ) in new:  # some client algorithms replace the tensors of their state, or add them in the first step
        view_of(state.state_of(name), entry).copy_(tensor)


def move_rows(algorithm: ClientAlgorithm, state: StackState, gradients: Tensor, moving: Tensor | None = None) -> None:
    """The same along gradients [m, d] of whole rows."""
    move(algorithm, state, [(Entry("row", gradients.shape[1:], 0), gradients)], moving)


def step_where(moving: Tensor, algorithm: ClientAlgorithm, rows: Tensor, gradients: Tensor, state: State) -> None:
    """A client algorithm's step of rows [m, ...] that changes only the rows that are `moving` [m], and their state."""
    before = {name: tensor.clone() for name, tensor in state.items()}
    rows_before = rows.clone()
    algorithm.step(rows, gradients, state)
    torch.where(_like(moving, rows), rows, rows_before, out=rows)
    for name, tensor in state.items():
        tensor_before = before[name] if name in before else torch.zeros_like(tensor)
        torch.where(_like(moving, tensor), tensor, tensor_before, out=tensor)


def _like(values: Tensor, tensor: Tensor) -> Tensor:
    """Values [m] as [m, 1, ...], to broadcast with a tensor [m, ...]."""
    return values.view(-1, *[1] * (tensor.ndim - 1))
