"""Data sets that consist of input tensors and a target tensor, and the conversion of other data sets to them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import getitem
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedsim.core.learning_task import described
from fedsim.core.model_inputs import Inputs, leaves, named, on_each
from fedsim.core.objects import are_several, is_pair
from fedsim.data.partitions.ids import id_columns
from fedsim.data.pictures import raw_pixels_of
from fedsim.errors import DataError, FedsimWarning, plural
from fedsim.system.devices import with_index

TARGET_KEYS = "label", "labels", "target", "targets"
PAIRS = "data=((inputs, targets), (test_inputs, test_targets))"
MOST_CHANNELS = 4  # maximum number of elements of an axis that contains channels without a question
FROM_FRAME = 'frame.drop(columns="y").to_numpy("float32") and frame["y"].to_numpy()'


@dataclass
class ReadSettings:
    """Arguments of the current `load_dataset` call that exist for all data sets.

    Attributes:
        stratify, split_by, partitioned_by: how test samples are drawn.
        channels: whether images have the shape [n, channels, height, width] ("first") or [n, height, width, channels]
            ("last"). None: the shape decides.
        has_images: whether the data contains images of such a shape.
    """

    stratify: bool | None = None
    split_by: str | None = None
    partitioned_by: str | None = None
    channels: str | None = None
    has_images: bool = False


READING: ContextVar[ReadSettings | None] = ContextVar("fedsim_reading", default=None)


def reading() -> ReadSettings:
    """Return the arguments of the current `load_dataset` call, or unset arguments outside such a call."""
    return READING.get() or ReadSettings()


@dataclass(frozen=True)
class TensorData(Dataset):
    """Map-style data set that consists of input tensors and a target tensor. Reading normalises the inputs.

    Attributes:
        inputs: raw inputs in their original dtype (images as uint8), [n, ...] or [n, channels, height, width]. If a
            model has several inputs, a dict of tensors that `forward` takes by keyword, such as
            {"input_ids": ..., "attention_mask": ...}, or a tuple of tensors that it takes by position.
        targets: class labels, int64 [n], or numbers [n, ...], such as tokens (int64) or measured values (floating).
        scale, shift: a sample's input is `inputs[i] * scale + shift`. Scalars, or one value per channel.
        dtype: dtype of the normalised inputs. If there are several, `scale` and `shift` only apply to uint8 inputs,
            `dtype` applies to these and to floating-point inputs, and all others are unchanged.
        ids: owner of each sample, for the partition `natural`, such as {"writer": array or list [n]}. There may be
            several columns of owners. Empty: the owners are unknown.
        rows: position of each sample in `inputs` and `targets`, int64 [n], for samples that overlap, such as windows of
            a text. `inputs` and `targets` may then be views of one small tensor, and targets may be of any integer
            type. None: sample i has position i.
        assumed: what was assumed when the data was read, such as how test samples were drawn. A run prints it before
            the first round.
        drawn_by: if test samples were drawn from the same data set, the strata, such as "class", or "" without strata.
            None: the data set has a test part.
        worker_names: name of each worker, if each has its own data set with a name, such as a file.

    >>> data = fedsim.TensorData(torch.tensor([[0], [255]], dtype=torch.uint8), torch.tensor([0, 1]), scale=1 / 255)
    >>> data.gather(torch.tensor([1]))
    (tensor([[1.]]), tensor([1]))
    """

    inputs: Inputs
    targets: Tensor
    scale: float | tuple[float, ...] = 1.0
    shift: float | tuple[float, ...] = 0.0
    dtype: torch.dtype = torch.float32
    ids: Mapping[str, Any] = field(default_factory=dict)
    rows: Tensor | None = None
    assumed: tuple[str, ...] = ()
    drawn_by: str | None = None
    worker_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", id_columns(self.ids))
        if isinstance(self.inputs, (Mapping, list)):
            inputs = dict(self.inputs) if isinstance(self.inputs, Mapping) else tuple(self.inputs)
            object.__setattr__(self, "inputs", inputs)
        if not len(leaves(self.inputs)):
            raise ValueError(f"inputs = {self.inputs}: must contain at least one tensor")
        if wrong := [(t, name) for name, t in named(self.inputs).items() if len(t) != len(self.targets)]:
            raise ValueError(_unequal(*wrong[0], self.targets))
        known = self.targets.dtype == torch.long or self.targets.is_floating_point() or self.rows is not None
        if not known or not self.targets.ndim:
            raise ValueError(
                f"targets must be an int64 or floating-point tensor [n, ...], not {described(self.targets)}"
            )
        for name, owners in self.ids.items():
            if owners.shape != (len(self),):
                raise ValueError(
                    f"ids: {name} must contain one owner per sample, [{len(self)}], not {list(owners.shape)}"
                )

    @classmethod
    def of_images(cls, images: Tensor, targets: Tensor, mean: Sequence[float], std: Sequence[float]) -> TensorData:
        """Create a data set of uint8 images [n, channels, h, w], normalised to (image / 255 - mean) / std per channel.

        Args:
            images: uint8 images, [n, channels, h, w].
            targets: class labels, int64 [n].
            mean, std: mean and standard deviation of the images / 255, one value per channel.
        """
        scale = tuple(1 / (255 * s) for s in std)
        shift = tuple(-m / s for m, s in zip(mean, std, strict=True))
        if len(scale) == 1:
            return cls(images, targets, scale[0], shift[0])
        return cls(images, targets, scale, shift)

    def __len__(self) -> int:
        return len(self.targets if self.rows is None else self.rows)

    @property
    def has_integers(self) -> bool:
        """Whether each target is one integer."""
        return self.targets.ndim == 1 and not self.targets.is_floating_point()

    @cached_property
    def has_labels(self) -> bool:
        """Whether each target is one class label: an integer, and none is negative."""
        return self.has_integers and not bool((self.targets < 0).any())

    @property
    def classes(self) -> int:
        """The highest class label or token plus one, or 0 for floating-point targets."""
        return 0 if self.targets.is_floating_point() else int(compact(self.targets).max()) + 1

    @property
    def sample_targets(self) -> Tensor:
        """The targets of all samples, [n, ...]. If `rows` is set, they are copied and converted to int64."""
        return self.targets if self.rows is None else self.targets.index_select(0, self.rows).long()

    def __getitem__(self, index: int) -> tuple[Inputs, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Inputs, Any]]:
        """Return a list of (input, target) samples at `indices`. Class labels are ints. A DataLoader calls this."""
        inputs, targets = self.gather(torch.as_tensor(indices))
        if not isinstance(inputs, Tensor):
            inputs = [on_each(getitem, inputs, index) for index in range(len(targets))]
        return list(zip(inputs, targets.tolist() if self.has_integers else targets, strict=True))

    def gather(self, indices: Tensor) -> tuple[Any, Tensor]:
        """Return the normalised inputs [batch, ...] and the targets [batch, ...] at `indices`, on the data's device.

        On a CPU, images are returned in channels_last memory format, which makes convolutions up to twice as fast.
        """
        indices = indices.to(self.targets.device)
        if self.rows is not None:
            indices = self.rows.index_select(0, indices)
        targets = self.targets.index_select(0, indices)
        return on_each(self._gathered, self.inputs, indices), targets if targets.is_floating_point() else targets.long()

    def _gathered(self, tensor: Tensor, indices: Tensor) -> Tensor:
        """Return the inputs at `indices` in a raw tensor, normalised. On a GPU, normalising takes one kernel."""
        raw = tensor.index_select(0, indices)  # many times faster than tensor[indices] on a CPU
        scaled = self._is_scaled(raw)
        plain = (self.scale == 1.0 and not self.shift) or not scaled
        dtype = self.dtype if scaled or raw.is_floating_point() else raw.dtype
        scale, shift = self._scale_and_shift_of(tensor)
        if raw.device.type == "cpu":
            inputs = torch.empty(raw.shape, dtype=dtype, device="cpu", memory_format=_order_of(raw)).copy_(raw)
            return inputs if plain else inputs.mul_(scale).add_(shift)
        if plain:
            return raw.to(dtype)
        if raw.device.type != "cuda":  # some devices do not support mixed dtypes in one operation
            raw = raw.to(dtype)
        return torch.addcmul(shift, raw, scale, out=torch.empty_like(raw, dtype=dtype))

    @cached_property
    def _scale_and_shift(self) -> list[Tensor]:
        """`scale` and `shift` as tensors on the data's device, cached so that they are copied there only once."""
        return [
            torch.tensor(values, dtype=self.dtype, device=self.targets.device) for values in (self.scale, self.shift)
        ]

    def _scale_and_shift_of(self, tensor: Tensor) -> list[Tensor]:
        """Return `scale` and `shift` with the channels in the second dimension of an input."""
        # At least one dimension, since zero-dimensional tensors do not take part in type promotion.
        return [values.view(-1, *[1] * (tensor.ndim - 2)) for values in self._scale_and_shift]

    def _is_scaled(self, tensor: Tensor) -> bool:
        """Whether `scale` and `shift` apply to an input: the only one, or one with integers from 0 to 255."""
        return isinstance(self.inputs, Tensor) or tensor.dtype == torch.uint8

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without cached tensors, for which another process would need shared memory."""
        return {name: value for name, value in vars(self).items() if name != "_scale_and_shift"}

    @property
    def normalisation(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the pixels. For uint8 images, (sample * deviation + mean) is in [0, 1]."""
        tensors = leaves(self.inputs)
        scale, shift = self._scale_and_shift_of(max(tensors, key=lambda tensor: tensor.ndim))  # the images
        deviation = 1 / (scale * (255 if any(tensor.dtype == torch.uint8 for tensor in tensors) else 1))
        return -shift * deviation, deviation

    def to(self, device: torch.device, dtype: torch.dtype) -> TensorData:
        """Return the data set on `device`, with floating-point values in `dtype`. Integers are unchanged."""
        targets = _moved(self.targets, device).to(dtype if self.targets.is_floating_point() else self.targets.dtype)
        dtype = dtype if self.dtype.is_floating_point else self.dtype
        rows = None if self.rows is None else self.rows.to(device)
        inputs = on_each(_moved, self.inputs, device)
        return replace(self, inputs=inputs, targets=targets, dtype=dtype, rows=rows)

    def take(self, positions: np.ndarray) -> TensorData:
        """Return a new TensorData of the samples at `positions`. If `rows` is set, only `rows` is copied."""
        index = torch.from_numpy(positions).to(self.targets.device)
        ids = {name: column[positions] for name, column in self.ids.items()}
        if self.rows is not None:
            return replace(self, rows=self.rows.index_select(0, index), ids=ids)
        inputs, targets = (on_each(Tensor.index_select, part, 0, index) for part in (self.inputs, self.targets))
        return replace(self, inputs=inputs, targets=targets, ids=ids)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The raw tensors by name: inputs, targets, and `rows` unless it is None."""
        rows = {} if self.rows is None else {"rows": self.rows}
        return {**named(self.inputs), "targets": self.targets, **rows}


def _unequal(inputs: Any, name: str, targets: Any) -> str:
    """Return the error for inputs, called `inputs` or `inputs.NAME`, whose number differs from that of the targets."""
    rows = "rows of " * (name != "inputs")
    return f"there are {len(inputs)} {rows}{name}, but {len(targets)} targets; each input needs one target"


def compact(values: Tensor) -> Tensor:
    """Return the underlying 1-D tensor [m] of overlapping samples, such as windows of a text, else `values` itself."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))
    return values if elements >= values.numel() else values.as_strided((elements,), (1,))


def _moved(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor, moved to a device. Overlapping samples (views of the same memory) stay views."""
    if values.device == with_index(device) and values._base is None:
        return values  # the same object, because `share` moves tensors in place
    moved = compact(values).to(device)
    strides = moved.stride() if moved.shape == values.shape else values.stride()
    # PyTorch's views keep their base, so a data set in shared memory would also stay in the memory where it was read.
    return moved.new_empty(0).set_(moved.untyped_storage(), moved.storage_offset(), values.size(), strides)


def in_order(inputs: Tensor) -> Tensor:
    """Return inputs [batch, ...] in the memory format that `TensorData.gather` uses, without a copy if possible."""
    copy = torch.empty_like(inputs, memory_format=_order_of(inputs))
    return inputs if inputs.stride() == copy.stride() else copy.copy_(inputs)


def _order_of(inputs: Tensor) -> torch.memory_format:
    images_on_cpu = inputs.ndim == 4 and inputs.device.type == "cpu"
    return torch.channels_last if images_on_cpu else torch.contiguous_format


def as_tensor_data(data: Any) -> TensorData:
    """Convert a map-style data set of (input, target) samples to TensorData, in the same order.

    `data` may also be a pair (inputs, targets) of tensors or arrays. A sample may be a dict with inputs and one target,
    whose key is label, labels, target or targets. If there are several inputs, they are a dict or a tuple.

    Inputs may be tensors, arrays, numbers or PIL images of equal shape. PIL images are rotated as their EXIF data say,
    and palettes are converted to colours. PIL images with integers of more than 8 bits are errors. uint8 inputs, such
    as images, are divided by 255, as torchvision's ToTensor does, and those without channels become [1, height, width].
    Images with channels last become [channels, height, width], with a warning. Longer unsigned integers become int64,
    other integers (tokens) are unchanged, and Booleans become floating-point unless there are several inputs. Targets
    may be numbers, tensors or arrays of equal shape: integers become int64, and floating-point targets are unchanged.
    The data set's attribute `ids` is kept.

    Raises DataError if `data` is a data frame, or has no length or index (such as a DataLoader). Raises DataError also
    if a sample is not an (input, target) pair, if inputs or targets are not numeric or differ in shape, or if the first
    and the last axis of images may both contain channels.

    >>> fedsim.data.as_tensor_data([(torch.zeros(3), 1), (torch.ones(3), 0)]).targets
    tensor([1, 0])
    """
    if isinstance(data, TensorData):  # has channels first
        return data
    kind = type(data).__name__
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        remedy = "data=(list(train), list(test))" if hasattr(data, "__iter__") else PAIRS
        remedy = "data=(train.dataset, test.dataset)" if hasattr(data, "dataset") else remedy
        raise DataError(
            f"the {kind} object is not a map-style data set; a data set must have a length (__len__) and return "
            f"samples by index (__getitem__); pass {remedy}"
        )
    if hasattr(data, "to_numpy"):
        raise DataError(
            f"the {kind} object contains columns, not samples; pass {PAIRS}, with arrays such as {FROM_FRAME}"
        )
    pictures = False
    is_two = isinstance(data, (tuple, list)) and len(data) == 2
    if is_pair(data) or (is_two and not isinstance(data[0], (tuple, list, Mapping))):
        inputs, targets = _columns(*data)
    else:
        if not len(data):
            raise DataError("has no samples")
        if isinstance(data[0], (tuple, list)) and len(data[0]) > 2:
            line = (
                f"samples have {len(data[0])} parts, of which only the first two are used, as input and target; a "
                "sample with two inputs is ((a, b), target)"
            )
            warnings.warn(line, FedsimWarning, stacklevel=2)
        samples = [as_pair(data[index], index) for index in range(len(data))]
        pictures = hasattr(samples[0][0], "getbands")  # images of PIL
        inputs = _stacked([sample[0] for sample in samples])
        targets = torch.from_numpy(as_targets([sample[1] for sample in samples]))
    ids, notes = id_columns(getattr(data, "ids", None)), list[str]()
    prepared = iter([_prepared(tensor, name, pictures, notes) for name, tensor in named(inputs).items()])
    inputs = on_each(lambda _: next(prepared), inputs)
    scale = 1 / 255 if notes else 1.0
    if not isinstance(inputs, Tensor):
        return TensorData(inputs, targets, scale, ids=ids, assumed=(*dict.fromkeys(notes),))
    if inputs.dtype == torch.bool:
        inputs = inputs.float()
    if inputs.is_floating_point() or notes:
        return TensorData(inputs, targets, scale, ids=ids, assumed=(*notes,))
    note = "integer inputs are treated as tokens (convert measured numbers to floating point)"
    return TensorData(inputs, targets, dtype=inputs.dtype, ids=ids, assumed=(note,))


def _prepared(inputs: Tensor, name: str, pictures: bool, notes: list[str]) -> Tensor:
    """Return inputs with the axes and of a type that TensorData can have. A note on uint8 inputs is added to `notes`.

    Args:
        inputs: tensor [n, ...].
        name: name for error messages, such as `inputs` or `inputs.image`.
        pictures: whether the inputs were images of PIL, so that the first axis contains the channels.
        notes: what is assumed about the inputs, modified in place.
    """
    if inputs.layout != torch.strided or inputs.is_complex() or inputs.is_quantized:
        kind = f"layout {inputs.layout} and type {inputs.dtype}"
        raise DataError(f"the {name} must be a dense tensor of real numbers, but have {kind}")
    if not pictures and (inputs.dtype == torch.uint8 or inputs.is_floating_point()):
        inputs = _channels_first(inputs, name)
    if inputs.dtype == torch.uint8:
        shape, inputs = list(inputs.shape[1:]), inputs[:, None] if inputs.ndim == 3 else inputs
        changed = f", shape {shape} becomes {[1, *shape]}" * (len(shape) == 2)
        notes.append(f"uint8 inputs are divided by 255{changed}")
    if inputs.dtype in (torch.uint16, torch.uint32, torch.uint64):  # few operations of PyTorch support them
        inputs = torch.from_numpy(_int64(inputs.numpy(), name))
    return inputs


def _channels_first(inputs: Tensor, name: str) -> Tensor:
    """Return images [n, h, w, channels] as [n, channels, h, w]. Inputs of other shapes are unchanged.

    Without a setting `data.channels`, the last axis contains the channels if it has at most 4 elements and is shorter
    than the others, and the first axis has more than 4. Raises DataError if both axes may contain channels.
    """
    shape, settings = list(inputs.shape[1:]), reading()
    if len(shape) != 3 or not all(shape) or shape == [1, 1, 1]:
        return inputs
    first, height, last = shape
    is_last = settings.channels == "last"
    if settings.channels is None:
        is_last = last <= MOST_CHANNELS < first and last < height
        if not is_last and (last <= MOST_CHANNELS or last < min(first, height)):
            raise DataError(
                f"{name} of shape {shape} may be images with {plural(first, 'channel')} first or with "
                f'{plural(last, "channel")} last; set data.channels to "first" or "last"'
            )
        if is_last and not settings.has_images:
            line = f"{name} of shape {shape} are taken for images with channels last, and become {[last, *shape[:2]]}"
            warnings.warn(f'{line}; data.channels = "last" confirms this', FedsimWarning, stacklevel=3)
    settings.has_images = True
    return inputs.permute(0, 3, 1, 2).contiguous() if is_last else inputs


def as_pair(sample: Any, index: int) -> tuple[Any, Any]:
    """Return a sample's input and target.

    Raises DataError if the sample is not an (input, target) pair. The message suggests a conversion.
    """
    if isinstance(sample, Mapping):
        inputs, targets = ([key for key in sample if (key in TARGET_KEYS) == wanted] for wanted in (False, True))
        if inputs and len(targets) == 1:
            of_sample = sample[inputs[0]] if len(inputs) == 1 else {name: sample[name] for name in inputs}
            return of_sample, sample[targets[0]]
        problem, (first, *_), (last, *_) = f"has the keys {', '.join(sample)}", inputs or ["x"], targets or ["y"]
        conversion = f'[(sample["{first}"], sample["{last}"]) for sample in data]'
    elif isinstance(sample, (tuple, list)) and len(sample) > 1:
        return sample[0], sample[1]
    else:
        problem, conversion = f"is a {type(sample).__name__}", "list(zip(inputs, targets))"
    raise DataError(f"sample {index} {problem}; each sample must be a pair (input, target), as in {conversion}")


def _columns(inputs: Any, targets: Any, name: str = "inputs") -> tuple[Inputs, Tensor]:
    """Return `inputs` (called `name` in errors) and `targets`, which are tensors or arrays, as tensors."""
    if are_several(inputs):
        columns: dict[Any, Any] = {
            key: _columns(array, targets, f"inputs.{key}") for key, array in by_name(inputs).items()
        }
        (_, numbers), *_ = columns.values()
        several = {name: tensor for name, (tensor, _) in columns.items()}
        return several if isinstance(inputs, Mapping) else tuple(several.values()), numbers
    for place, value in ((name, inputs), ("targets", targets)):
        if not isinstance(value, (Tensor, np.ndarray)) or not value.ndim:
            kind = type(value).__name__
            remedy = "; convert the object with .to_numpy()" if hasattr(value, "to_numpy") else ""
            raise DataError(f"{place}: must be a tensor or an array with at least one dimension, not a {kind}{remedy}")
    if len(inputs) != len(targets):
        raise DataError(_unequal(inputs, name, targets))
    array = targets.detach().cpu().numpy() if isinstance(targets, Tensor) else _plain(targets)
    array = _as_int64(array) if array.dtype.kind in "iubf" else as_targets(list(array))
    return _as_tensor(inputs, f"an array of {name}"), torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _stacked(values: list[Any], kind: str = "input") -> Inputs:
    """Return the inputs of all samples as one tensor, or as several if each input is a dict or a tuple of arrays."""
    if several := by_name(values[0]):
        if kind != "input":
            raise DataError(f"the {kind} of sample 0 contains several inputs; it must be one number, tensor or array")
        for index, value in enumerate(values):
            if by_name(value).keys() != several.keys():
                names = ", ".join(map(str, several))
                raise DataError(f"sample {index} has other inputs than sample 0, which has {names}")
        columns: dict[Any, Any] = {
            name: _stacked([value[name] for value in values], f"input {name}") for name in several
        }
        return columns if isinstance(values[0], Mapping) else tuple(columns.values())
    inputs = [_as_tensor(value, f"the {kind} of sample {index}") for index, value in enumerate(values)]
    for index, sample_input in enumerate(inputs):
        if sample_input.shape != inputs[0].shape:
            raise DataError(
                f"the {kind} of sample {index} has shape {list(sample_input.shape)}, but the {kind} of sample 0 has "
                f"shape {list(inputs[0].shape)}; all inputs must have the same shape: pad them with "
                f"torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True) and pass {PAIRS}, or, if you have a "
                "collate_fn that pads, pass data=(collate_fn(list(train)), collate_fn(list(test)))"
            )
    return torch.stack(inputs)


def by_name(value: Any) -> dict[Any, Any]:
    """Return the inputs of a dict by name, and those of a tuple of arrays or PIL images by position. Otherwise {}."""
    if isinstance(value, Mapping):
        return dict(value)
    parts = value if isinstance(value, tuple) else ()
    is_several = any(getattr(part, "ndim", 0) or hasattr(part, "getbands") for part in parts)
    return dict(enumerate(parts)) if is_several else {}


def as_targets(targets: Sequence[Any]) -> np.ndarray:
    """Stack the targets of all samples in one array [n, ...]: int64 for integers and booleans, else floating-point.

    Raises DataError if a target is not numeric or differs in size from the first one.
    """
    values = [item.detach().cpu().numpy() if isinstance(item, Tensor) else np.asarray(item) for item in targets]
    for index, (target, value) in enumerate(zip(targets, values, strict=True)):
        place = f"the target of sample {index}"
        if value.dtype.kind not in "iubf":
            numbered = "; number the classes: numpy.unique(targets, return_inverse=True)[1]" * (
                value.dtype.kind in "UT"
            )
            raise DataError(
                f"{place} is a {type(target).__name__}; targets must be numbers or arrays of numbers{numbered}"
            )
        if value.size != values[0].size:
            raise DataError(
                f"{place} has shape {list(value.shape)}, but the target of sample 0 has shape "
                f"{list(values[0].shape)}; all targets must have the same shape (pad token sequences with -100, which "
                "the task next_token ignores)"
            )
    return _as_int64(np.stack(values) if values else np.zeros(0, dtype=np.int64))


def _as_int64(array: np.ndarray) -> np.ndarray:
    """Convert integer and boolean targets to int64, and flatten class labels from [n, 1] to [n]."""
    if array.shape[1:] == (1,) and array.dtype.kind in "iub":  # class labels as arrays of one number
        array = array[:, 0]
    return _int64(array, "targets") if array.dtype.kind in "iub" else array


def _int64(array: np.ndarray, kind: str) -> np.ndarray:
    """Return integers as int64. Raise DataError, with `kind` ("targets"), for integers that int64 cannot hold."""
    if array.dtype.kind == "u" and array.max(initial=0) > np.iinfo(np.int64).max:
        raise DataError(f"the {kind} go up to {array.max()}, which int64 cannot hold; renumber them from 0")
    return array.astype(np.int64)


def _plain(array: np.ndarray) -> np.ndarray:
    """Return an array of a type that PyTorch supports if possible: numbers in the byte order of this machine.

    Raises DataError for masked values.
    """
    if np.ma.is_masked(array):
        raise DataError("the inputs or targets have masked values; fill them in, or remove such samples")
    if array.dtype.kind == "O" and all(isinstance(value, (int, float, np.number)) for value in array.flat):
        array = np.array(array.tolist())
    if array.dtype.itemsize > 8 and array.dtype.kind == "f":
        array = array.astype(np.float64)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _as_tensor(value: Any, place: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if hasattr(value, "getbands"):  # a PIL image, recognised without importing PIL
        try:
            pixels = torch.from_numpy(raw_pixels_of(value))
        except ValueError as error:
            raise DataError(f"{place}: {error}") from None
        return pixels.unsqueeze(0) if pixels.ndim == 2 else pixels.permute(2, 0, 1)
    try:
        is_array = isinstance(value, np.ndarray)
        return torch.as_tensor(np.require(_plain(value), requirements=["C", "W"]) if is_array else value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = f"{value.dtype} array" if isinstance(value, np.ndarray) else type(value).__name__
        raise DataError(
            f"{place} is a {kind}; it must be a number, a tensor, a numeric array or a PIL image"
        ) from error
