"""Snapshots of a run's state between two rounds, with everything that later rounds need except the experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fedsim.core.learning_task import described
from fedsim.errors import RecordError
from fedsim.system.devices import has_room

# Types of values in checkpoints
Number = Annotated[int, Field(ge=0, lt=2**53)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Counts = list[tuple[Number, Number]]  # (worker, count)


class CheckpointModel(BaseModel):
    """Base class for data that is stored in checkpoints. Wrong types and unknown keys raise an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


@dataclass
class Snapshot:
    """Copy of a run's state, which does not change when the run continues.

    Attributes:
        tensors: copies of tensors by name, each on the original's device or on the CPU.
        metadata: all other values, as JSON types.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def keep(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        """Store copies of tensors under the names `prefix` + name, on the CPU if the device has little free memory."""
        for name, tensor in tensors.items():
            device = tensor.device if has_room(tensor.device, tensor.nbytes) else "cpu"
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            self.tensors[prefix + name] = copy.copy_(tensor.detach())

    def under(self, prefix: str) -> dict[str, Tensor]:
        """Return the stored tensors whose names start with `prefix`, by their names without the prefix."""
        return {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}

    def put_back(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        """Copy the stored values with the names `prefix` + name back into these tensors, in place.

        Raises RecordError if a value is missing or its shape or dtype differs, as in a snapshot of another run.
        """
        for name, tensor in tensors.items():
            stored = self.tensors.get(prefix + name)
            if stored is None:
                raise RecordError(f"the stored state has no tensor {prefix + name}")
            if stored.shape != tensor.shape or stored.dtype != tensor.dtype:
                raise RecordError(
                    f"the stored tensor {prefix + name} is {described(stored)}, but this run's is {described(tensor)}"
                )
            tensor.copy_(stored)
