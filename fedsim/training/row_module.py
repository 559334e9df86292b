"""RowModule: a module whose parameters are replaced by one flat parameter vector (row) after another."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.core.rows import Layout
from fedsim.errors import ExperimentError

CONTAINERS = {dict, OrderedDict, list, set}
SKIPPED_ATTRIBUTES = {"_parameters", "_buffers", "_modules", "training"}  # attributes that are handled elsewhere


class RowModule:
    """Module that trains one worker after another, as if each worker had a new module.

    For each worker, the module's parameters become views of the worker's flat parameter vector [d], and the worker's
    buffers are copied to the module.

    Args:
        make: function that returns the module in its initial state, which must be the same at every call.
    """

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self._make = make
        self._start = make()
        self.module = make()
        self.layout = Layout.of(self._start)
        self._frozen = {name: p._version for name, p in self._start.named_parameters() if not p.requires_grad}
        self._rows: tuple[Tensor, Tensor] | None = None
        for parameter in self._start.parameters():  # their values are in rows
            if parameter.requires_grad:
                parameter.data = parameter.new_zeros(()).expand(parameter.shape)

    def load(self, row: Tensor, gradient: Tensor, buffers: Tensor) -> None:
        """Load a worker's model.

        Args:
            row: parameters [d]. The module's parameters become views of this tensor.
            gradient: gradients [d]. The gradients of the module's parameters become views of this tensor.
            buffers: buffers [b], which are copied.
        """
        if self.changed():
            self.module, self._rows = self._make(), None
        if self._rows is None or row is not self._rows[0] or gradient is not self._rows[1]:
            self.layout.bind(self.module, row, gradient)
        self._rows = row, gradient
        self.layout.write_buffers(buffers, self.module)

    @contextmanager
    def lent(self) -> Iterator[nn.Module]:
        """Return a context manager that provides the module for user code.

        At the end of the block, the module's parameters are copied to the worker's flat parameter vector. Raises
        ExperimentError if names or shapes of parameters have changed.
        """
        assert self._rows is not None
        (row, gradient), self._rows = self._rows, None  # so that the module counts as unbound after an error
        self.module.zero_grad(set_to_none=True)
        yield self.module.train()
        trainable = {name: parameter.requires_grad for name, parameter in self._start.named_parameters()}
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(trainable.get(name, parameter.requires_grad))
        if Layout.of(self.module) != self.layout:
            raise ExperimentError(
                "local.algorithm: changes the names or shapes of the model's parameters; change only their values"
            )
        row.copy_(self.layout.read(self.module))
        self.layout.bind(self.module, row, gradient)
        self._rows = row, gradient

    def store(self, buffers: Tensor) -> None:
        """Copy the module's buffers to the flat vector `buffers` [b]. (The parameters are views and need no copy.)

        Raises ExperimentError if the training has replaced a parameter or changed a frozen parameter.
        """
        assert self._rows is not None
        loose = self.layout.unbound(self.module, *self._rows)
        if loose is not None:
            raise ExperimentError(
                f"model: replaces the data of {loose} during training; change the data in place "
                "(p.data.clamp_() instead of p.data = p.data.clamp(), no flatten_parameters() in forward)"
            )
        start, now = dict(self._start.named_parameters()), dict(self.module.named_parameters())
        moved = [
            name
            for name, version in self._frozen.items()
            if (now[name]._version != version if now[name] is start[name] else not torch.equal(start[name], now[name]))
        ]
        if moved:
            raise ExperimentError(
                f"model: changes the frozen parameter {moved[0]} during training; make it a buffer "
                "(register_buffer), so that the setting `buffers` decides how it is aggregated"
            )
        self.layout.read_buffers(self.module, out=buffers)

    def changed(self) -> bool:
        """Whether attributes or non-persistent buffers differ from those of a new module."""
        return differ(self._start, self.module)


def differ(a: nn.Module, b: nn.Module) -> bool:
    """Whether two modules of the same architecture differ in attributes or non-persistent buffers."""
    return not all(
        _equal_attributes(vars(module_a), vars(module_b))
        and _equal(_unsaved_buffers(module_a), _unsaved_buffers(module_b))
        for module_a, module_b in zip(a.modules(), b.modules(), strict=True)
    )


def _equal_attributes(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two dictionaries of module attributes are equal."""
    if a.keys() != b.keys():
        return False
    for name, value in a.items():
        b_value = b[name]
        if value is b_value or name in SKIPPED_ATTRIBUTES:
            continue
        if type(value) in CONTAINERS and not value and type(b_value) is type(value) and not b_value:
            continue
        if not _equal(value, b_value):
            return False
    return True


def _unsaved_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: module._buffers[name] for name in module._non_persistent_buffers_set}


def _equal(a: Any, b: Any) -> bool:
    """Whether two values are equal, including tensors and nested containers; False if the comparison fails."""
    if a is b:  # the most common case
        return True
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, weakref.ref) and isinstance(b, weakref.ref):  # nn.LSTM has weak references to its parameters
        return _equal(a(), b())
    if isinstance(a, partial) and isinstance(b, partial):  # equal only if identical
        return _equal((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    try:
        return bool(a == b)
    except Exception:
        return False
