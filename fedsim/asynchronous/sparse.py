"""Steps that touch only what a batch has used of embeddings: Hogwild's case, in which workers hardly meet.

A dense step writes every coordinate, if only to add zero to it, and so can undo what another process has just written
there. Of an embedding, a batch uses a few rows; a step along plain SGD needs to touch no other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedsim.errors import ExperimentError
from fedsim.local import Solver
from fedsim.rows import Layout

Tables = tuple[tuple[int, int, int], ...]  # of each embedding: where it lies in the row, its rows, their length


def tables_of(module: nn.Module, solver: Solver) -> Tables:
    """The embeddings of a module whose steps can leave unused rows alone; none, where the solver moves them anyway.

    Raises ExperimentError where an embedding wants that (sparse=True), and the solver moves what has no gradient.
    """
    embeddings = {
        f"{path}.weight" if path else "weight": embedding
        for path, embedding in module.named_modules()
        if isinstance(embedding, (nn.Embedding, nn.EmbeddingBag))
    }
    entries = [entry for entry in Layout.of(module).parameters if entry.name in embeddings]
    if _leaves_alone(solver):
        return tuple((entry.offset, *entry.shape) for entry in entries)  # type: ignore[misc]
    for entry in entries:
        if embeddings[entry.name].sparse:
            raise ExperimentError(
                f"local: {entry.name} is a sparse embedding, and without locks its unused rows must stay as they are; "
                "leave out local.momentum and local.weight_decay"
            )
    return ()


def step_where_touched(solver: Solver, row: Tensor, gradient: Tensor, tables: Tables) -> None:
    """A solver's step of a row [d] along a gradient [d] that leaves alone rows of tables whose gradient is zero.

    What it moves it moves to the same bits as a dense step. The solver must keep no state.
    """
    place = 0
    for offset, rows, length in tables:
        _step_of_span(solver, row, gradient, slice(place, offset))
        place = offset + rows * length
        table, its_gradient = (each[offset:place].view(rows, length) for each in (row, gradient))
        used = its_gradient.any(1).nonzero().flatten()
        moved = table.index_select(0, used)
        solver.step(moved, its_gradient.index_select(0, used), {})
        table.index_copy_(0, used, moved)
    _step_of_span(solver, row, gradient, slice(place, len(row)))


def _step_of_span(solver: Solver, row: Tensor, gradient: Tensor, span: slice) -> None:
    if span.start < span.stop:
        solver.step(row[span], gradient[span], {})


def _leaves_alone(solver: Solver) -> bool:
    """Whether a step along zero changes nothing, at first or later."""
    row = torch.ones(2)
    state = solver.start(row)
    solver.step(row, torch.zeros(2), state)
    return not state and bool((row == 1).all())
