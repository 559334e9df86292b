"""A module that is bound to one row after another, and carries no state from one to the next."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.core.rows import Layout
from fedsim.errors import ExperimentError

CONTAINERS = {dict, OrderedDict, list, set}
REGISTERED = {"_parameters", "_buffers", "_modules", "training"}  # of a module's attributes; looked after elsewhere


class RowModule:
    """One module that is bound to one row after another, as if a new one were made for each.

    What is in the row and in the buffer row comes and goes with them. Whatever else a module may change in training
    (attributes of its own, buffers that are not saved) starts afresh with every row, because the next row belongs to
    another worker. Since hardly any module does that, a new one is made only where something has changed.

    Args:
        make: gives the module at its start, always the same.
    """

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self._make = make
        self._start = make()
        self.module = make()
        self.layout = Layout.of(self._start)
        self._frozen = [name for name, p in self._start.named_parameters() if not p.requires_grad]
        self._rows: tuple[Tensor, Tensor] | None = None

    def load(self, row: Tensor, gradient: Tensor, buffers: Tensor) -> None:
        """Bind to `row` [d] and `gradient` [d], and load the buffers [b]."""
        if self.changed():
            self.module, self._rows = self._make(), None
        if self._rows is None or row is not self._rows[0] or gradient is not self._rows[1]:
            self.layout.bind(self.module, row, gradient)
        self._rows = row, gradient
        self.layout.write_buffers(buffers, self.module)

    @contextmanager
    def lent(self) -> Iterator[nn.Module]:
        """Lend the module, without gradients, to code that may also replace the data of its parameters.

        Afterwards the row has their values. Raises ExperimentError if their names or shapes have changed.
        """
        assert self._rows is not None
        (row, gradient), self._rows = self._rows, None  # so that an error leaves no half-bound module
        self.module.zero_grad(set_to_none=True)
        yield self.module.train()
        trainable = {name: parameter.requires_grad for name, parameter in self._start.named_parameters()}
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(trainable.get(name, parameter.requires_grad))
        if Layout.of(self.module) != self.layout:
            raise ExperimentError(
                "local.algorithm: changes the names or shapes of the model's parameters; change values only"
            )
        row.copy_(self.layout.read(self.module))
        self.layout.bind(self.module, row, gradient)
        self._rows = row, gradient

    def store(self, buffers: Tensor) -> None:
        """Copy the buffers of the module to `buffers` [b]. Its parameters are views of the row, which needs no copy.

        Raises ExperimentError if a parameter is no longer a view of the row, or a frozen parameter has changed.
        """
        assert self._rows is not None
        loose = self.layout.unbound(self.module, *self._rows)
        if loose is not None:
            raise ExperimentError(
                f"model: replaces the data of {loose} as it trains, so it is no view of its row; change it in place "
                "(p.data.clamp_() instead of p.data = p.data.clamp(), no flatten_parameters() in forward)"
            )
        start, now = dict(self._start.named_parameters()), dict(self.module.named_parameters())
        moved = [name for name in self._frozen if not torch.equal(start[name], now[name])]
        if moved:
            raise ExperimentError(
                f"model: changes {moved[0]} as it trains, a parameter without gradient; make it a buffer "
                "(register_buffer), so that the key `buffers` says what becomes of it"
            )
        self.layout.read_buffers(self.module, out=buffers)

    def changed(self) -> bool:
        """Whether the module differs from its start in anything that no row holds."""
        return differ(self._start, self.module)


def differ(a: nn.Module, b: nn.Module) -> bool:
    """Whether two modules of one make differ in anything that no row holds: attributes, buffers that are not saved."""
    return not all(
        _equal_attributes(vars(one), vars(other)) and _equal(_unsaved_buffers(one), _unsaved_buffers(other))
        for one, other in zip(a.modules(), b.modules(), strict=True)
    )


def _equal_attributes(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether attributes are equal. The most common cases, identical and empty, come first: it runs for every row."""
    if a.keys() != b.keys():
        return False
    for name, value in a.items():
        other = b[name]
        if value is other or name in REGISTERED:
            continue
        if type(value) in CONTAINERS and not value and type(other) is type(value) and not other:
            continue
        if not _equal(value, other):
            return False
    return True


def _unsaved_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: module._buffers[name] for name in module._non_persistent_buffers_set}


def _equal(a: Any, b: Any) -> bool:
    """Whether two values are equal; False if they cannot be compared."""
    if a is b:  # the most common case: small numbers, names, functions
        return True
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, weakref.ref) and isinstance(b, weakref.ref):  # as nn.LSTM keeps of its parameters
        return _equal(a(), b())
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    try:
        return bool(a == b)
    except Exception:
        return False
