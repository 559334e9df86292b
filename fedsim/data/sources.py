"""The registered data sets. Experiments can also name any other data set as "package.module:function".

A data set is a function `(root, *, parameters) -> (train, test)`. `root` is the folder for downloaded files. A data set
without downloads omits it. `train` and `test` are map-style data sets of (input, target) samples: TensorData, or
anything that `as_tensor_data` accepts.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedsim.core.learning_task import LearningTask, output_count
from fedsim.core.registry import Registration, Registry
from fedsim.data.columns import is_table, samples_of_tables
from fedsim.data.tensors import TensorData, as_tensor_data, compact
from fedsim.errors import DataError, FedsimError, one_line, plural, show

FEWEST_PIXELS = 16  # sides of the smallest images for which the model `net` is chosen
MOST_UNLIKELY_CLASSES = 100


@dataclass(frozen=True)
class SampleShape:
    """What the training samples of a data set prescribe to a task and a model.

    Attributes:
        inputs: shape of one input.
        classes: the highest training label or target token plus one; 0 for floating-point targets.
        targets: shape of one target.
        tokens: the highest token of the inputs plus one; 0 if inputs are floating-point numbers.
        gaps: whether the labels are so high and so few that they are probably not consecutive classes.
    """

    inputs: tuple[int, ...]
    classes: int
    targets: tuple[int, ...] = ()
    tokens: int = 0
    gaps: bool = False

    @classmethod
    def of(cls, train: TensorData) -> SampleShape:
        """Return the shape of training samples."""
        tokens = 0 if train.dtype.is_floating_point else int(compact(train.inputs).cpu().numpy().max()) + 1
        classes = max(train.classes, not train.targets.is_floating_point())
        gaps = train.has_integers and classes > max(MOST_UNLIKELY_CLASSES, 2 * len(train.targets.unique()))
        return cls(tuple(train.inputs.shape[1:]), classes, tuple(train.targets.shape[1:]), tokens, gaps)

    def __str__(self) -> str:
        if self.tokens:
            return plural(self.inputs[0], "token") if len(self.inputs) == 1 else f"integers {list(self.inputs)}"
        if len(self.inputs) == 3:
            channels, height, width = self.inputs
            return f"an image of {height}x{width} pixels with {plural(channels, 'channel')}"
        return plural(self.inputs[0], "number") if len(self.inputs) == 1 else f"numbers {list(self.inputs)}"

    @property
    def task(self) -> str:
        """Name of the learning task for the targets."""
        if not self.classes:
            return "regression"
        return "next_token" if self.tokens and self.targets == self.inputs else "classification"

    @property
    def model(self) -> str:
        """Name of the default model: a network for tokens, for square images that are not too small, or for numbers."""
        if self.tokens:
            return "char_lstm"
        return "net" if self._is_square and self.inputs[1] >= FEWEST_PIXELS else "mlp"

    @property
    def _is_square(self) -> bool:
        return len(self.inputs) == 3 and self.inputs[1] == self.inputs[2]

    def dimensions(self, task: LearningTask) -> dict[str, int]:
        """Return the parameters that a model takes from the data, by name (see `fedsim.models.base.DIMENSIONS`)."""
        classes = max(self.classes, self.tokens) if self.tokens and self.targets else self.classes
        outputs = output_count(task, classes, math.prod(self.targets))
        values = {"classes": outputs, "outputs": outputs}
        if self.tokens:
            return {**values, "vocabulary": self.tokens, "context": self.inputs[-1], "last_only": not self.targets}
        values["inputs"] = math.prod(self.inputs)
        if len(self.inputs) == 3:
            values["channels"] = self.inputs[0]
        return {**values, "size": self.inputs[1]} if self._is_square else values


class DatasetRegistry(Registry):
    """Registry of data sets. The data set may also be one table, such as a data frame, from which tests are drawn."""

    def _registration(self, name: str, target: Any) -> Registration:
        return super()._registration(name, (lambda: (target, None)) if is_table(target) else target)


dataset = DatasetRegistry(
    "data set",
    inputs=("root",),
    # lacks_files: a function (root, **parameters) that says whether files would be downloaded.
    # declared: a function of the parameters that returns the SampleShape, so that it is known before a download.
    traits=("lacks_files", "declared"),
    accepts="a function, a class, a data frame, or a tuple (train, test) of data sets or (inputs, targets)",
)

MNIST5K_FILE = Path(__file__).with_name("mnist5k.npz")  # mnist5k.txt describes the origin of the images
MNIST5K_TRAIN = 4000  # number of training images, at the start of the file; the rest are test images
MNIST_STATISTICS = (0.1307,), (0.3081,)  # mean and standard deviation of the pixels


def default_root() -> Path:
    """Return the default folder for data sets: $FEDSIM_DATA if set, else fedsim/data in the user's cache folder.

    For a user without a home folder, as in some containers, the cache folder is .cache in the working folder.
    """
    if os.environ.get("FEDSIM_DATA"):
        return Path(os.environ["FEDSIM_DATA"]).expanduser()
    try:
        home = Path.home()
    except RuntimeError:
        home = Path()
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "fedsim" / "data"


def load_dataset(name: str, root: str | Path | None = None, **params: Any) -> tuple[TensorData, TensorData]:
    """Load the training samples and the test samples of a data set.

    Args:
        name: a registered name (`fedsim list datasets`), "package.module:function", or a function.
        root: folder for downloaded files. None: $FEDSIM_DATA if set, else the user's cache folder.
        params: parameters of the data set.

    Returns two TensorData (train, test), each with inputs [n, ...] and targets [n] (class labels) or [n, ...].

    Raises DataError if files can be neither found nor downloaded, if the training or test set is empty, if their inputs
    differ in type or shape, or if targets are NaN or infinite.

    In a run: `fedsim.data.sources.load_dataset_once` calls `load_dataset`.

    >>> train, test = fedsim.load_dataset("mnist5k")
    >>> inputs, targets = train.gather(torch.arange(3))
    >>> inputs.shape, targets
    (torch.Size([3, 1, 28, 28]), tensor([0, 1, 2]))
    """
    registration = dataset.get(name, "data.name")
    params = registration.check(params, "data", beside=["name", "root"])
    try:
        folder = Path(root).expanduser() if root else default_root()
        train, test = registration.target(**registration.select_inputs(root=folder), **params)
        if is_table(train):
            train, test = samples_of_tables(train, test)
        else:
            train, test = (_read(part, name) for part in (train, test))
    except FedsimError:
        raise
    except Exception as error:
        raise DataError(f"data.name = {show(name)}: {one_line(error)}") from error
    for part, data in (("training", train), ("test", test)):
        if not len(data):
            raise DataError(f"data.name = {show(name)}: the {part} set is empty; it needs at least one sample")
        if data.targets.is_floating_point() and not data.targets.isfinite().all():
            raise DataError(f"data.name = {show(name)}: the {part} set has targets that are NaN or infinite")
    first, second = (f"{data.inputs.dtype} of shape {list(data.inputs.shape[1:])}" for data in (train, test))
    images = [data.inputs.dtype == torch.uint8 for data in (train, test)]  # only these are divided by 255
    if train.inputs.shape[1:] != test.inputs.shape[1:] or images[0] != images[1]:
        raise DataError(
            f"data.name = {show(name)}: each training input is {first}, but each test input is {second}; both must "
            "have the same type and shape"
        )
    return train, test


_kept: ContextVar[dict[str, tuple[TensorData, TensorData]] | None] = ContextVar("fedsim_kept_data", default=None)
_shapes: ContextVar[dict[str, SampleShape] | None] = ContextVar("fedsim_kept_shapes", default=None)


@contextlib.contextmanager
def data_loaded_once() -> Iterator[None]:
    """Context manager: a data set that was loaded to count the workers is reused by the run, not loaded twice."""
    token, shapes = (
        _kept.set({} if _kept.get() is None else _kept.get()),
        _shapes.set({} if _shapes.get() is None else _shapes.get()),
    )
    try:
        yield
    finally:
        _kept.reset(token)
        _shapes.reset(shapes)


def load_dataset_once(
    name: str, root: str | None, params: Mapping[str, Any], *, take: bool = False
) -> tuple[TensorData, TensorData]:
    """Return a data set like `load_dataset`, but within `data_loaded_once` do not load the same data set twice.

    There, the last data set stays in memory for the next call. take=True releases it.
    """
    kept, key = _kept.get(), repr((name, root, sorted(params.items())))
    data = (kept or {}).get(key) or load_dataset(name, root, **params)
    if kept is not None:
        kept.clear()
        if not take:
            kept[key] = data
    return data


def known_shape(name: str, root: str | None, params: Mapping[str, Any]) -> SampleShape | None:
    """Return the shape of a data set's samples if it is declared, or known within `data_loaded_once`, else None."""
    if declared := getattr(dataset.get(name).target, "declared", None) if name in dataset.names() else None:
        return declared(**params)
    return (_shapes.get() or {}).get(repr((name, root, sorted(params.items()))))


def sample_shape(name: str, root: str | None, params: Mapping[str, Any]) -> SampleShape:
    """Return the shape of a data set's samples. The data set is loaded if the shape is not known."""
    shape = known_shape(name, root, params) or SampleShape.of(load_dataset_once(name, root, params)[0])
    if (shapes := _shapes.get()) is not None:
        shapes[repr((name, root, sorted(params.items())))] = shape
    return shape


def _read(data: Any, name: str) -> TensorData:
    """Return a training or test set as TensorData. Raise DataError, with the data set's name, if it cannot be used."""
    try:
        return as_tensor_data(data)
    except DataError as error:
        raise DataError(f"data.name = {show(name)}: {error}") from None


@dataset("mnist5k", declared=lambda: SampleShape((1, 28, 28), 10))
def mnist5k() -> tuple[TensorData, TensorData]:
    """5,000 MNIST images that are included in fedsim: 4,000 to train and 1,000 to test, equally many per class.

    All images are from MNIST's training set. Digits alternate (0, 1, ..., 9, 0, 1, ...), so the workers of a contiguous
    partition have nearly equal label counts. Images are uint8 [n, 1, 28, 28], normalised with MNIST's mean and standard
    deviation.

    >>> train, test = fedsim.load_dataset("mnist5k")
    >>> train.inputs.shape, len(test)
    (torch.Size([4000, 1, 28, 28]), 1000)
    """
    with np.load(MNIST5K_FILE) as file:
        images, labels = torch.from_numpy(file["images"]).unsqueeze(1), torch.from_numpy(file["labels"]).long()
    parts = slice(MNIST5K_TRAIN), slice(MNIST5K_TRAIN, None)
    train, test = (TensorData.of_images(images[part], labels[part], *MNIST_STATISTICS) for part in parts)
    return train, test
