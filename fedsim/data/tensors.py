"""A data set in two tensors, from which whole batches are gathered and normalised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedsim.core.learning_task import described
from fedsim.data.partitions.ids import id_columns
from fedsim.errors import DataError

TARGET_KEYS = "label", "labels", "target", "targets"
PAIRS = "data=((inputs, targets), (test_inputs, test_targets))"
FROM_FRAME = 'frame.drop(columns="y").to_numpy("float32") and frame["y"].to_numpy()'


@dataclass(frozen=True)
class TensorData(Dataset):
    """A map-style data set in two tensors, in their original dtype (images as uint8).

    Attributes:
        inputs: [n, ...]; images are [n, channels, height, width].
        targets: class labels int64 [n]; or numbers [n, ...], such as tokens (int64) or measured values (floating).
        scale, shift: samples are `input * scale + shift`; scalars or one value per channel.
        dtype: of the samples.
        ids: owners of the samples, such as {"writer": array [n]}, for the partition `natural`; several columns are
            possible; empty: unknown.

    >>> data = fedsim.TensorData(torch.tensor([[0], [255]], dtype=torch.uint8), torch.tensor([0, 1]), scale=1 / 255)
    >>> data.gather(torch.tensor([1]))
    (tensor([[1.]]), tensor([1]))
    """

    inputs: Tensor
    targets: Tensor
    scale: float | tuple[float, ...] = 1.0
    shift: float | tuple[float, ...] = 0.0
    dtype: torch.dtype = torch.float32
    ids: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise ValueError(f"{len(self.inputs)} inputs have {len(self.targets)} targets")
        if not (self.targets.dtype == torch.long or self.targets.is_floating_point()) or not self.targets.ndim:
            raise ValueError(f"targets must be int64 or floating, [n, ...], not {described(self.targets)}")

    @classmethod
    def of_images(cls, images: Tensor, targets: Tensor, mean: Sequence[float], std: Sequence[float]) -> TensorData:
        """uint8 images [n, channels, h, w], normalised as (image / 255 - mean) / std per channel."""
        scale = tuple(1 / (255 * s) for s in std)
        shift = tuple(-m / s for m, s in zip(mean, std, strict=True))
        if len(scale) == 1:
            return cls(images, targets, scale[0], shift[0])
        return cls(images, targets, scale, shift)

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def has_labels(self) -> bool:
        """Whether each target is one class label."""
        return self.targets.ndim == 1 and not self.targets.is_floating_point()

    @property
    def classes(self) -> int:
        """One more than the highest class or token; 0 for floating targets."""
        return 0 if self.targets.is_floating_point() else int(self.targets.max()) + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Any]]:
        """A list of the samples at these positions; class labels are ints. A DataLoader calls this for each batch."""
        inputs, targets = self.gather(torch.as_tensor(indices))
        return list(zip(inputs, targets.tolist() if self.has_labels else targets, strict=True))

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return a batch: normalised inputs [batch, ...] and targets [batch, ...], on the device of the data.

        Images on a CPU have channels_last memory order, on which convolutions run up to twice as fast.
        """
        indices = indices.to(self.inputs.device)
        raw = self.inputs.index_select(0, indices)  # many times faster than self.inputs[indices] on a CPU
        targets = self.targets.index_select(0, indices)
        return self._normalised(raw), targets

    def _normalised(self, raw: Tensor) -> Tensor:
        """Convert and normalise gathered samples, on a GPU in one kernel."""
        plain = self.scale == 1.0 and not self.shift
        scale, shift = self._scale_and_shift
        if raw.device.type == "cpu":
            inputs = torch.empty(raw.shape, dtype=self.dtype, memory_format=_order_of(raw)).copy_(raw)
            return inputs if plain else inputs.mul_(scale).add_(shift)
        if plain:
            return raw.to(self.dtype)
        if raw.device.type != "cuda":  # not every other device computes with several types in one operation
            raw = raw.to(self.dtype)
        return torch.addcmul(shift, raw, scale, out=torch.empty_like(raw, dtype=self.dtype))

    @cached_property
    def _scale_and_shift(self) -> list[Tensor]:
        """Scale and shift on the device of the data, so that no batch waits for a copy."""
        made = [
            torch.tensor(values, dtype=self.dtype, device=self.inputs.device) for values in (self.scale, self.shift)
        ]
        # With zero dimensions, float32 inputs would be normalised in float32 for every dtype.
        return [values.view(-1, *[1] * (self.inputs.ndim - 2)) for values in made]

    @property
    def normalisation(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of pixels: samples * deviation + mean is in [0, 1] for uint8 images."""
        scale, shift = self._scale_and_shift
        deviation = 1 / (scale * (255 if self.inputs.dtype == torch.uint8 else 1))
        return -shift * deviation, deviation

    def to(self, device: torch.device, dtype: torch.dtype) -> TensorData:
        """Return the same data on `device`, with floating samples and targets of `dtype`; integers keep their dtype."""
        targets = self.targets.to(device, dtype if self.targets.is_floating_point() else None)
        dtype = dtype if self.dtype.is_floating_point else self.dtype
        inputs = self.inputs.to(device)
        if inputs._base is not None:  # a view keeps the memory of its base, also when it moves to shared memory
            place = inputs.untyped_storage(), inputs.storage_offset(), inputs.size(), inputs.stride()
            inputs = torch.empty(0, dtype=inputs.dtype, device=device).set_(*place)
        return replace(self, inputs=inputs, targets=targets, dtype=dtype)

    def take(self, positions: np.ndarray) -> TensorData:
        """Return a new data set of the samples at these positions."""
        index = torch.from_numpy(positions).to(self.inputs.device)
        ids = {name: column[positions] for name, column in self.ids.items()}
        inputs, targets = (tensor.index_select(0, index) for tensor in self.tensors)
        return replace(self, inputs=inputs, targets=targets, ids=ids)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """The tensors that the data set holds."""
        return self.inputs, self.targets


def in_order(inputs: Tensor) -> Tensor:
    """Inputs [batch, ...] in the memory order of `TensorData.gather`, copied if needed."""
    room = torch.empty_like(inputs, memory_format=_order_of(inputs))
    return inputs if inputs.stride() == room.stride() else room.copy_(inputs)


def _order_of(inputs: Tensor) -> torch.memory_format:
    images_on_cpu = inputs.ndim == 4 and inputs.device.type == "cpu"
    return torch.channels_last if images_on_cpu else torch.contiguous_format


def as_tensor_data(data: Any) -> TensorData:
    """Read any map-style data set of (input, target) samples into tensors, in order.

    A pair (inputs, targets) of tensors or arrays is a data set as well. A sample may be a dict of an input and a
    target, if the key of the target is label, labels, target or targets.

    Inputs may be tensors, arrays, numbers or PIL images; all must have one shape. uint8 inputs, such as images, are
    divided by 255, as torchvision's ToTensor does; other integers (tokens) stay the same. Targets are numbers, tensors
    or arrays of one shape: integers stay integers, others floating. The attribute `ids` of the data set is kept.

    Raises DataError for data without length or index, such as a DataLoader, for a data frame, for a sample that is no
    such pair, and for an input or a target that is not made of numbers, or has another shape than the first.

    >>> fedsim.data.as_tensor_data([(torch.zeros(3), 1), (torch.ones(3), 0)]).targets
    tensor([1, 0])
    """
    if isinstance(data, TensorData):
        return data
    kind = type(data).__name__
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise DataError(f"a {kind} is not a map-style data set, which has a length and gives samples by their index")
    if hasattr(data, "to_numpy"):
        raise DataError(f"a {kind} has columns, not samples; give {PAIRS}, with arrays such as {FROM_FRAME}")
    if isinstance(data, (tuple, list)) and len(data) == 2 and not isinstance(data[0], (tuple, list, Mapping)):
        inputs, targets = _columns(*data)
    else:
        samples = [as_pair(data[index], index) for index in range(len(data))]
        inputs = _stacked([_as_tensor(sample[0], f"the input of sample {n}") for n, sample in enumerate(samples)])
        targets = torch.from_numpy(as_targets([sample[1] for sample in samples]))
    ids = id_columns(getattr(data, "ids", None))
    if inputs.dtype == torch.uint8:
        return TensorData(inputs, targets, scale=1 / 255, ids=ids)
    return TensorData(inputs, targets, dtype=torch.float32 if inputs.is_floating_point() else inputs.dtype, ids=ids)


def as_pair(sample: Any, index: int) -> tuple[Any, Any]:
    """Return the input and the target of a sample. Raises DataError, with the conversion, if it is no such pair."""
    if isinstance(sample, Mapping):
        inputs, targets = ([key for key in sample if (key in TARGET_KEYS) == wanted] for wanted in (False, True))
        if len(inputs) == len(targets) == 1:
            return sample[inputs[0]], sample[targets[0]]
        problem, (first, *_), (last, *_) = f"has the keys {', '.join(sample)}", inputs or ["x"], targets or ["y"]
        convert = f'[(sample["{first}"], sample["{last}"]) for sample in data]'
    elif isinstance(sample, (tuple, list)) and len(sample) > 1:
        return sample[0], sample[1]
    else:
        problem, convert = f"is a {type(sample).__name__}", "list(zip(inputs, targets))"
    raise DataError(f"sample {index} {problem}; a sample must be (input, target), as in {convert}")


def _columns(inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
    """Return the tensors of a pair (inputs, targets) of tensors or arrays."""
    for place, value in (("inputs", inputs), ("targets", targets)):
        if not isinstance(value, (Tensor, np.ndarray)) or not value.ndim:
            kind = type(value).__name__
            convert = "; convert it by .to_numpy()" if hasattr(value, "to_numpy") else ""
            raise DataError(
                f"the {place} are a {kind}; must be a tensor or an array of one or more dimensions{convert}"
            )
    if len(inputs) != len(targets):
        raise DataError(f"{len(inputs)} inputs have {len(targets)} targets")
    array = targets.detach().cpu().numpy() if isinstance(targets, Tensor) else targets
    array = _as_int64(array) if array.dtype.kind in "iubf" else as_targets(list(array))
    return _as_tensor(inputs, "an array of inputs"), torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _stacked(inputs: list[Tensor]) -> Tensor:
    for index, sample_input in enumerate(inputs):
        if sample_input.shape != inputs[0].shape:
            raise DataError(
                f"the input of sample {index} has the shape {list(sample_input.shape)}, and that of sample 0 "
                f"{list(inputs[0].shape)}; all must have one shape: pad them by "
                f"torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True) and give {PAIRS}; "
                "with a collate_fn that pads: data=(collate_fn(list(train)), collate_fn(list(test)))"
            )
    return torch.stack(inputs)


def as_targets(targets: Sequence[Any]) -> np.ndarray:
    """Return the targets of all samples in one array [n, ...]: int64 for integers and booleans, else floating.

    Raises DataError as `as_tensor_data`.
    """
    values = [each.detach().cpu().numpy() if isinstance(each, Tensor) else np.asarray(each) for each in targets]
    for index, (target, value) in enumerate(zip(targets, values, strict=True)):
        place = f"the target of sample {index} is"
        if value.dtype.kind not in "iubf":
            raise DataError(f"{place} a {type(target).__name__}; targets must be numbers, or arrays of numbers")
        if value.size != values[0].size:
            raise DataError(
                f"{place} of shape {list(value.shape)}, and that of sample 0 of {list(values[0].shape)}; all must have "
                "one shape: pad tokens with -100, which the task next_token ignores"
            )
    return _as_int64(np.stack(values) if values else np.zeros(0, dtype=np.int64))


def _as_int64(array: np.ndarray) -> np.ndarray:
    """Targets with integers converted to int64, and class labels [n, 1] flattened to [n]."""
    if array.shape[1:] == (1,) and array.dtype.kind in "iub":  # classes as arrays of one number
        array = array[:, 0]
    return array.astype(np.int64) if array.dtype.kind in "iub" else array


def _as_tensor(value: Any, place: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "getbands"):  # a PIL image, recognised without importing PIL
        pixels = torch.from_numpy(np.array(value))
        return pixels.unsqueeze(0) if pixels.ndim == 2 else pixels.permute(2, 0, 1)
    try:
        return torch.as_tensor(np.require(value, requirements=["C", "W"]) if isinstance(value, np.ndarray) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = f"{value.dtype} array" if isinstance(value, np.ndarray) else type(value).__name__
        raise DataError(f"{place} is a {kind}; must be numbers, a tensor, an array or a picture") from error
