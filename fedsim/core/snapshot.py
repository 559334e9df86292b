"""The state of a run between two rounds: all that later rounds depend on, except the experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedsim.core.learning_task import described
from fedsim.errors import RecordError
from fedsim.system.devices import has_room


@dataclass
class Snapshot:
    """Copies of tensors and other values; later rounds do not change them.

    Attributes:
        tensors: by dotted name, contiguous; each on the device of its original or on the CPU.
        facts: all other values, of JSON types.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def keep(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        """Add copies of tensors: on their own device, or on the CPU if that device has little free memory."""
        for name, tensor in tensors.items():
            device = tensor.device if has_room(tensor.device, tensor.nbytes) else "cpu"
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            self.tensors[prefix + name] = copy.copy_(tensor.detach())

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names have this prefix, by names without it."""
        return {name.removeprefix(prefix): kept for name, kept in self.tensors.items() if name.startswith(prefix)}

    def put_back(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        """Copy the stored values to tensors of the same names.

        Raises RecordError if a value is missing, or has another shape or dtype: the snapshot is of another run.
        """
        for name, tensor in tensors.items():
            kept = self.tensors.get(prefix + name)
            if kept is None:
                raise RecordError(f"lacks the tensor {prefix + name}")
            if kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                raise RecordError(f"{prefix + name} is {described(kept)}, and should be {described(tensor)}")
            tensor.copy_(kept)
