"""Rows: the model of each worker is one flat parameter vector, and all models together are the rows of one matrix.

A `Layout` stores the position of each module parameter in a row of d numbers. `bind` makes the parameters of a module
views of one row, and their gradients views of another row. Training the module then changes the row in place, an
optimizer step is one operation on a flat vector, and averaging N models is arithmetic on an [N, d] matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.errors import DivergedError, ExperimentError
from fedsim.system.devices import to_device

ALIGNMENT = 64  # bytes; rows start on a cache line, so results do not depend on the position in the matrix


@dataclass(frozen=True)
class Entry:
    """Position of a module's parameter or buffer in a row (a flat vector): its name, shape and offset."""

    name: str
    shape: torch.Size
    offset: int

    @property
    def span(self) -> slice:
        """The slice of the row that contains the parameter or buffer."""
        return slice(self.offset, self.offset + math.prod(self.shape))


@dataclass(frozen=True)
class Layout:
    """How a module's trainable parameters are stored in a row: one flat vector [d] with all values.

    A parameter shared by two modules is stored once. Buffers (such as BatchNorm statistics) have their own row.

    In a run: `fedsim.training.shared_state.SharedState.allocate` calls `Layout.of`.
    """

    parameters: tuple[Entry, ...]
    buffers: tuple[Entry, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """Return the layout of a module. Raises ExperimentError for any other object."""
        if not isinstance(module, nn.Module):
            raise ExperimentError(f"module: must be a torch.nn.Module, not {type(module).__name__}")
        persistent = module.state_dict(keep_vars=True).keys()
        trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        buffers = [(name, b) for name, b in module.named_buffers() if name in persistent]
        return cls(_entries(trainable), _entries(buffers))

    @property
    def d(self) -> int:
        """The length of a row: the total number of trainable values."""
        return _length(self.parameters)

    @property
    def n_buffer_values(self) -> int:
        """The length of a buffer row, which is the total number of buffer values."""
        return _length(self.buffers)

    def outside(self, columns: ColumnSpans) -> list[Entry]:
        """Return the parameters that are not stored in `columns`."""
        return [entry for entry in self.parameters if not any(a <= entry.offset < b for a, b in columns.spans)]

    def read(self, module: nn.Module) -> Tensor:
        """Return the module's parameters as a new row [d]."""
        values = dict(module.named_parameters())
        return _flat([values[entry.name] for entry in self.parameters])

    def write(self, row: Tensor, module: nn.Module) -> None:
        """Copy a row [d] into the module's parameters, which do not become views of the row."""
        values = dict(module.named_parameters())
        with torch.no_grad():
            for entry in self.parameters:
                values[entry.name].copy_(row[entry.span].view(entry.shape))

    def read_buffers(self, module: nn.Module, out: Tensor | None = None) -> Tensor:
        """Copy the module's buffers into the row `out` (default: a new float64 row), and return it."""
        if out is None:
            out = torch.zeros(self.n_buffer_values, dtype=torch.double, device="cpu")
        if self.buffers:
            values = dict(module.named_buffers())
            out.copy_(_flat([values[entry.name].to(out.dtype) for entry in self.buffers]))
        return out

    def write_buffers(self, row: Tensor, module: nn.Module) -> None:
        """Copy a buffer row into the module. Values of integer buffers are rounded."""
        if not self.buffers:
            return
        values = dict(module.named_buffers())
        with torch.no_grad():
            for entry in self.buffers:
                buffer, source = values[entry.name], row[entry.span].view(entry.shape)
                buffer.copy_(source if buffer.is_floating_point() else source.round())

    def bind(self, module: nn.Module, row: Tensor, grad_row: Tensor | None = None) -> None:
        """Make the module's parameters views of `row` [d], and their `.grad` views of `grad_row` [d].

        `backward` adds gradients to `grad_row`, so the caller must set `grad_row` to zero first. If `grad_row` is
        None, PyTorch allocates the gradients, as for any module.
        """
        for row_or_grad in (row, row if grad_row is None else grad_row):
            if row_or_grad.shape != (self.d,):
                raise ValueError(f"a row of this module must have shape ({self.d},), not {tuple(row_or_grad.shape)}")
        values = dict(module.named_parameters())
        for entry in self.parameters:
            parameter = values[entry.name]
            parameter.grad = None  # otherwise PyTorch refuses data with a different dtype or device
            parameter.data = row[entry.span].view(entry.shape)
            if grad_row is not None:
                parameter.grad = grad_row[entry.span].view(entry.shape)

    def unbound(self, module: nn.Module, row: Tensor, grad_row: Tensor) -> str | None:
        """Return the name of the first parameter that is not a view of `row`, or None if there is none.

        A parameter whose `.grad` is not a view of `grad_row` counts too.
        """
        values = dict(module.named_parameters())
        for entry in self.parameters:
            parameter = values[entry.name]
            for tensor, whole in ((parameter, row), (parameter.grad, grad_row)):
                address = whole.data_ptr() + entry.offset * whole.element_size()
                if tensor is None or (tensor.numel() and tensor.data_ptr() != address):
                    return entry.name
        return None


@dataclass(frozen=True)
class ColumnSpans:
    """A selection of columns of rows, stored as ascending ranges (start, stop).

    >>> columns = fedsim.core.rows.ColumnSpans(((0, 1), (3, 5)))
    >>> columns.of(torch.arange(5))
    tensor([0, 3, 4])
    """

    spans: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_entries(cls, entries: Iterable[Entry]) -> ColumnSpans:
        """Return the columns that contain these parameters in a row, in the order of `entries`."""
        spans: list[tuple[int, int]] = []
        for span in (entry.span for entry in entries):
            start = spans.pop()[0] if spans and spans[-1][1] == span.start else span.start
            spans.append((start, span.stop))
        return cls(tuple(spans))

    @property
    def width(self) -> int:
        """The number of selected columns."""
        return sum(stop - start for start, stop in self.spans)

    def others(self, d: int) -> ColumnSpans:
        """Return the columns that are not selected, for rows [..., d]."""
        cuts = [0, *(cut for span in self.spans for cut in span), d]
        return ColumnSpans(tuple((a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=True) if a < b))

    def of(self, rows: Tensor) -> Tensor:
        """Return a copy [..., width] of the selected columns of rows [..., d]."""
        if rows.is_meta:  # torch.cat imports torch._dynamo for these tensors, which takes seconds
            return rows.new_empty(*rows.shape[:-1], self.width)
        return torch.cat([rows[..., :0], *(rows[..., start:stop] for start, stop in self.spans)], -1)

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Set the selected columns of rows [..., d] to values [..., width]."""
        done = 0
        for start, stop in self.spans:
            rows[..., start:stop] = values[..., done : done + stop - start]
            done += stop - start


def bind(module: nn.Module, row: Tensor, grad_row: Tensor | None = None) -> Layout:
    """Make the module's parameters views of `row` [d], and their `.grad` views of `grad_row` [d].

    Returns the layout, which says where each parameter is stored. See `Layout.bind`.
    In a run: `fedsim.training.row_module.RowModule.load` calls `Layout.bind`.
    """
    layout = Layout.of(module)
    layout.bind(module, row, grad_row)
    return layout


def new_rows(n: int, d: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return a zero matrix [n, d]. For speed, each row starts on a cache line, so the row stride may exceed d.

    In a run: `fedsim.training.shared_state._rows_of_a_cohort` calls `new_rows`.
    """
    per_line = ALIGNMENT // dtype.itemsize
    stride = max(1, math.ceil(d / per_line)) * per_line
    return torch.zeros(n, stride, dtype=dtype, device=device)[:, :d]


def require_finite(global_row: Tensor, round: int) -> None:
    """Raise DivergedError, which names `round`, if the global model's parameters contain NaN or infinity."""
    finite = global_row.isfinite()
    if not bool(finite.all()):
        lost = f"{int((~finite).sum()):,} of {len(finite):,} numbers are NaN or infinite"
        remedy = "reduce local.lr or server.lr, or set aggregate.nonfinite=keep to continue"
        raise DivergedError(f"the global model has diverged ({lost})", remedy, round)


def require_finite_buffers(global_buffers: Tensor, finite_at_start: Tensor, round: int) -> None:
    """Raise DivergedError if a buffer of the global model has become NaN or infinite.

    Args:
        global_buffers: [b], the values of all buffers.
        finite_at_start: bool [b], which values were finite initially (an attention mask, for example, may not be).
        round: for the error message.
    """
    finite = global_buffers.isfinite() | ~finite_at_start
    if not bool(finite.all()):
        lost = f"{int((~finite).sum()):,} of {len(finite):,} numbers are NaN or infinite"
        problem = f"the global buffers (such as BatchNorm statistics) have diverged ({lost})"
        remedy = "check the inputs for NaN and infinity, or set aggregate.nonfinite=keep to continue"
        raise DivergedError(problem, remedy, round)


def pull_down(global_row: Tensor, rows: Tensor, index: slice | Tensor = slice(None)) -> None:
    """Copy the global model's parameters to rows of workers: rows[index] = global_row.

    Args:
        global_row: [d].
        rows: [n, d] (or one row [d]), overwritten.
        index: rows to overwrite. See `index_of`.

    Raises ExperimentError if an argument is not a tensor.

    In a run: `fedsim.rounds.round_kind.RoundKind.copy_model` calls `pull_down`.
    """
    for name, tensor, shape in (("global_row", global_row, "[d]"), ("rows", rows, "[n, d]")):
        if not isinstance(tensor, Tensor):
            raise ExperimentError(
                f"{name}: must be a tensor {shape} of parameters, not {type(tensor).__name__}; to copy the "
                "parameters of a module to another module, use target.load_state_dict(source.state_dict())"
            )
    rows[index] = global_row


def clip_rows(gradients: Tensor, max_norm: float | Tensor | None) -> None:
    """Scale each row to an L2 norm of at most `max_norm`, in place, as `torch.nn.utils.clip_grad_norm_` does.

    Args:
        gradients: [..., d].
        max_norm: maximum norm, > 0: a number, or one per row as a tensor [..., 1]. None: do not clip.

    >>> from fedsim.core.rows import clip_rows
    >>> rows = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    >>> clip_rows(rows, 1.0)
    >>> rows
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    if max_norm is not None:
        norms = torch.linalg.vector_norm(gradients, dim=-1, keepdim=True)
        gradients.mul_((max_norm / (norms + 1e-6)).clamp(max=1.0))


def index_of(slots: Sequence[int] | np.ndarray, device: torch.device) -> slice | Tensor:
    """Return an index that selects the rows with the numbers `slots` from a matrix on `device`.

    Evenly spaced numbers give a slice, which selects a view. Other numbers give an int64 tensor [n] on the device.
    """
    numbers = np.asarray(slots, dtype=np.int64)
    if not len(numbers):
        return slice(0, 0)
    gaps = np.diff(numbers)
    step = int(gaps[0]) if len(gaps) else 1
    if step > 0 and (gaps == step).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1, step)
    return to_device(torch.from_numpy(numbers), device)


def _entries(tensors: Sequence[tuple[str, Tensor]]) -> tuple[Entry, ...]:
    entries, offset = [], 0
    for name, tensor in tensors:
        entries.append(Entry(name, tensor.shape, offset))
        offset += tensor.numel()
    return tuple(entries)


def _length(entries: tuple[Entry, ...]) -> int:
    return entries[-1].span.stop if entries else 0


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]) if tensors else torch.zeros(0)
