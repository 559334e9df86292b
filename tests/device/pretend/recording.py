"""A captured graph: the operations of a step, replayed on the same memory without the step's Python code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


@dataclass
class Operation:
    """One operation of a graph, with its input tensors, its result, and whether gradients were enabled.

    A recurrent network on a CPU keeps results for the backward pass only if gradients are enabled.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    differentiated: bool = field(default_factory=torch.is_grad_enabled)

    def execute(self) -> None:
        with torch.set_grad_enabled(self.differentiated):
            results = self.function(*self.args, **self.kwargs)
        for new, recorded in zip(tensors_in(results), tensors_in(self.result), strict=True):
            if new.data_ptr() != recorded.data_ptr():
                recorded.copy_(new)


class Recording:
    """The operations of a graph, the number of launches among them, and whether CUDA refused one."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.launches = 0
        self.broken = False

    def add(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, on_gpu: Callable) -> None:
        """Record an operation. Numbers on the host become constants of the graph."""
        if function.is_view or torch.Tag.inplace_view in function.tags:
            return  # a view of memory that does not move

        def constant(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(map(constant, value))
            if not isinstance(value, Tensor):
                return value
            return value.detach() if on_gpu(value) else value.clone()  # `value` may get another shape in place

        with _disable_current_modes():
            constants = constant(args), {name: constant(value) for name, value in kwargs.items()}
            results = [tensor.detach() for tensor in tensors_in(result)]
        self.operations.append(Operation(function, *constants, results))

    @cached_property
    def memory(self) -> list[Tensor]:
        """One tensor for each memory that a replay uses."""
        tensors = (t for each in self.operations for t in tensors_in(each.args, *each.kwargs.values(), each.result))
        return [*{tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}.values()]

    def replay(self) -> None:
        below_autograd = torch._C._AutoDispatchBelowAutograd()
        with torch._C.DisableTorchFunction(), torch.no_grad(), _disable_current_modes(), below_autograd:
            for operation in self.operations:
                operation.execute()


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """Yield the tensors among the values and in the lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(*value)
