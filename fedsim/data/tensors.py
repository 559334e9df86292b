"""A data set as two tensors, from which whole batches are gathered and normalised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedsim.errors import DataError


@dataclass(frozen=True)
class TensorData(Dataset):
    """A map-style data set whose samples are one tensor, kept as compact as they came (images as uint8).

    Attributes:
        inputs: [n, ...]; images are [n, channels, height, width].
        targets: [n], int64 class labels.
        scale, shift: inputs are handed out as `input * scale + shift`; scalars or one value per channel.
        dtype: of the inputs that are handed out.
        ids: whose sample each one is (writer, user), [n], where that is known; for the partition `natural`.
    """

    inputs: Tensor
    targets: Tensor
    scale: float | tuple[float, ...] = 1.0
    shift: float | tuple[float, ...] = 0.0
    dtype: torch.dtype = torch.float32
    ids: np.ndarray | None = None

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise ValueError(f"{len(self.inputs)} inputs have {len(self.targets)} targets")
        if self.targets.dtype != torch.long or self.targets.ndim != 1:
            raise ValueError(f"targets must be int64 [n], not {self.targets.dtype} {list(self.targets.shape)}")

    @classmethod
    def of_images(cls, images: Tensor, targets: Tensor, mean: Sequence[float], std: Sequence[float]) -> TensorData:
        """uint8 images [n, channels, h, w] that are handed out as (image / 255 - mean) / std per channel."""
        scale = tuple(1 / (255 * s) for s in std)
        shift = tuple(-m / s for m, s in zip(mean, std, strict=True))
        if len(scale) == 1:
            return cls(images, targets, scale[0], shift[0])
        return cls(images, targets, scale, shift)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        inputs, targets = self.gather(torch.tensor([index]))
        return inputs[0], int(targets[0])

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """The samples of a whole batch at once: what a DataLoader's fetcher calls."""
        inputs, targets = self.gather(torch.as_tensor(indices))
        return list(zip(inputs, targets.tolist(), strict=True))

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """A batch: normalised inputs [batch, ...] and targets [batch], on the device of the data.

        Images on a CPU come in channels_last order: the same numbers, on which convolutions run up to twice as fast.
        """
        indices = indices.to(self.inputs.device)
        raw = self.inputs.index_select(0, indices)  # many times faster than self.inputs[indices] on a CPU
        targets = self.targets.index_select(0, indices)
        if raw.device.type != "cpu":
            return self._normalised_at_once(raw), targets
        inputs = torch.empty(raw.shape, dtype=self.dtype, memory_format=_order_of(raw)).copy_(raw)
        return self._normalise(inputs), targets

    def _normalise(self, inputs: Tensor) -> Tensor:
        if isinstance(self.scale, tuple):
            per_channel = (-1, *[1] * (inputs.ndim - 2))
            inputs.mul_(inputs.new_tensor(self.scale).view(per_channel))
            return inputs.add_(inputs.new_tensor(self.shift).view(per_channel))
        if self.scale != 1.0:
            inputs.mul_(self.scale)
        return inputs.add_(self.shift) if self.shift else inputs

    def _normalised_at_once(self, raw: Tensor) -> Tensor:
        """Samples that have been gathered, converted and normalised by one kernel."""
        if self.scale == 1.0 and not self.shift:
            return raw.to(self.dtype)
        scale, shift = self._scale_and_shift
        if raw.device.type != "cuda":  # not every other device computes with several types in one operation
            raw = raw.to(self.dtype)
        return torch.addcmul(shift, raw, scale, out=torch.empty_like(raw, dtype=self.dtype))

    @cached_property
    def _scale_and_shift(self) -> list[Tensor]:
        """Both on the device of the data, where they stay: copying them there would be a wait for each batch."""
        made = [
            torch.tensor(values, dtype=self.dtype, device=self.inputs.device) for values in (self.scale, self.shift)
        ]
        # Not of zero dimensions: then float32 inputs would be normalised in float32 whatever the dtype.
        return [values.view(-1, *[1] * (self.inputs.ndim - 2)) for values in made]

    def to(self, device: torch.device, dtype: torch.dtype) -> TensorData:
        """The same data on `device`, handing out floating inputs as `dtype` (token numbers stay what they are)."""
        dtype = dtype if self.dtype.is_floating_point else self.dtype
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device), dtype=dtype)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """What the data set keeps in memory."""
        return self.inputs, self.targets


def in_order(inputs: Tensor) -> Tensor:
    """Inputs [batch, ...] in the memory order in which `TensorData.gather` gives them; copied where they are not."""
    room = torch.empty_like(inputs, memory_format=_order_of(inputs))
    return inputs if inputs.stride() == room.stride() else room.copy_(inputs)


def _order_of(inputs: Tensor) -> torch.memory_format:
    images_on_cpu = inputs.ndim == 4 and inputs.device.type == "cpu"
    return torch.channels_last if images_on_cpu else torch.contiguous_format


def as_tensor_data(data: Any) -> TensorData:
    """Any map-style data set of (input, class) samples as tensors, read once, in order.

    Inputs may be tensors, arrays, numbers or (PIL) images; all must have one shape. uint8 inputs, as images are, are
    handed out divided by 255, as torchvision's ToTensor does; other integers (tokens) as they are. What the data set
    calls `ids` is kept.

    Raises DataError where a target is not one integer.
    """
    if isinstance(data, TensorData):
        return data
    samples = [data[index] for index in range(len(data))]
    inputs = torch.stack([_as_tensor(sample[0]) for sample in samples])
    targets = torch.tensor([class_of(sample[1], index) for index, sample in enumerate(samples)])
    ids = getattr(data, "ids", None)
    ids = None if ids is None else np.asarray(ids)
    if inputs.dtype == torch.uint8:
        return TensorData(inputs, targets, scale=1 / 255, ids=ids)
    return TensorData(inputs, targets, dtype=torch.float32 if inputs.is_floating_point() else inputs.dtype, ids=ids)


def class_of(target: Any, index: int) -> int:
    """The class of a sample; anything but one integer (or boolean) is refused."""
    value = target.detach().cpu().numpy() if isinstance(target, Tensor) else np.asarray(target)
    if value.dtype.kind in "iub" and value.size == 1:
        return int(value.item())
    described = f"a {type(target).__name__}"
    if value.dtype.kind in "iubfc":
        described = (
            f"{value.dtype} {value.item()}" if value.size == 1 else f"{value.dtype} of shape {list(value.shape)}"
        )
    raise DataError(
        f"the target of sample {index} is {described}; it must be one integer, the class: fedsim supports "
        "classification only"
    )


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "getbands"):  # a PIL image, told without importing PIL
        pixels = torch.from_numpy(np.array(value))
        return pixels.unsqueeze(0) if pixels.ndim == 2 else pixels.permute(2, 0, 1)
    return torch.as_tensor(value)
