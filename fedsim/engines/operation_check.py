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


def depends_on_values(function: Any, args: tuple, indexing: Collection[Any]) -> bool:
    """Whether an operation reads values of its tensors on the host, or derives shapes from them.

    Args:
        indexing: operations whose second argument is a list of indices, of which only masks determine shapes.
    """
    if function in indexing:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return bool(_READS & set(function.tags))
