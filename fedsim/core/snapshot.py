"""A run between two rounds: all that the rounds to come depend on, beyond the experiment itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedsim.errors import RecordError
from fedsim.system.devices import has_room


@dataclass
class Snapshot:
    """Copies, which no later round changes.

    Attributes:
        tensors: by dotted name, contiguous; each on the device of its original or on the CPU.
        facts: what else there is, in the types that JSON has.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def keep(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        """Add copies of tensors: on their own device, or on the CPU where that device has little memory left."""
        for name, tensor in tensors.items():
            device = tensor.device if has_room(tensor.device, tensor.nbytes) else "cpu"
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            self.tensors[prefix + name] = copy.copy_(tensor.detach())

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin so, by the rest of their names."""
        return {name.removeprefix(prefix): kept for name, kept in self.tensors.items() if name.startswith(prefix)}

    def put_back(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        """Give tensors the values that were kept under their names.

        Raises RecordError where it holds none, or some of another shape or dtype: it is of another run then.
        """
        for name, tensor in tensors.items():
            kept = self.tensors.get(prefix + name)
            if kept is None:
                raise RecordError(f"lacks the tensor {prefix + name}")
            if kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                raise RecordError(f"{prefix + name} is {_said(kept)}, and should be {_said(tensor)}")
            tensor.copy_(kept)


def _said(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
