"""Steps that change only the embedding rows that a batch uses: the sparse case of Hogwild, in which conflicts are rare.

A dense step writes every coordinate, even if it only adds zero, and so can undo what another process has just written.
A batch uses a few rows of an embedding; a step of plain SGD needs to write no other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedsim.clients import Solver
from fedsim.core.rows import Layout
from fedsim.errors import ExperimentError

Tables = tuple[tuple[int, int, int], ...]  # of each embedding: offset in the row, number of rows, row length


def tables_of(module: nn.Module, solver: Solver) -> Tables:
    """The embeddings of a module, if the solver leaves coordinates without a gradient as they are; else ().

    Raises ExperimentError if an embedding is sparse (sparse=True) and the solver changes such coordinates.
    """
    embeddings = {
        f"{path}.weight" if path else "weight": embedding
        for path, embedding in module.named_modules()
        if isinstance(embedding, (nn.Embedding, nn.EmbeddingBag))
    }
    entries = [entry for entry in Layout.of(module).parameters if entry.name in embeddings]
    if _ignores_zero_gradients(solver):
        return tuple((entry.offset, *entry.shape) for entry in entries)
    for entry in entries:
        if embeddings[entry.name].sparse:
            raise ExperimentError(
                f"local: {entry.name} is a sparse embedding, and without locks its unused rows must stay as they are; "
                "leave out local.momentum and local.weight_decay"
            )
    return ()


def step_where_touched(solver: Solver, row: Tensor, gradient: Tensor, tables: Tables) -> None:
    """One solver step of a row [d] along a gradient [d], without the table rows whose gradient is zero.

    All other coordinates get the bits of a dense step. The solver must be stateless.
    """
    end = 0
    for offset, rows, length in tables:
        _step_span(solver, row, gradient, slice(end, offset))
        end = offset + rows * length
        table, table_gradient = (each[offset:end].view(rows, length) for each in (row, gradient))
        used = table_gradient.any(1).nonzero().flatten()
        moved = table.index_select(0, used)
        solver.step(moved, table_gradient.index_select(0, used), {})
        table.index_copy_(0, used, moved)
    _step_span(solver, row, gradient, slice(end, len(row)))


def _step_span(solver: Solver, row: Tensor, gradient: Tensor, span: slice) -> None:
    if span.start < span.stop:
        solver.step(row[span], gradient[span], {})


def _ignores_zero_gradients(solver: Solver) -> bool:
    row = torch.ones(2)
    state = solver.start(row)
    solver.step(row, torch.zeros(2), state)
    return not state and bool((row == 1).all())
