"""Checks of the operations that PyTorch executes within a block: the base of capture and merging checks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class OperationCheck(TorchDispatchMode):
    """A dispatch mode that does not import PyTorch's compiler, which takes more than a second."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class FlopCount(OperationCheck):
    """Counts the floating-point operations in a block, `total`, as torch.utils.flop_counter.FlopCounterMode does."""

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry  # takes a tenth of a second, and not every run needs it

        super().__init__()
        self._formulas, self.total = flop_registry, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if formula := self._formulas.get(function.overloadpacket):
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


def depends_on_values(function: Any, args: tuple, indexing: Collection[Any]) -> bool:
    """Whether an operation reads values of its tensors on the host, or derives shapes from them.

    Args:
        indexing: operations whose second argument is a list of indices, of which only masks determine shapes.
    """
    if function in indexing:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return bool(_READS & set(function.tags))
