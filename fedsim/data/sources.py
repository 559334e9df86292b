"""The registered data sets. Experiments can also name any other data set as "package.module:function".

A data set is a function `(root, *, parameters) -> (train, test)`. `root` is the folder for downloaded files. A data set
without downloads omits it. `train` and `test` are map-style data sets of (input, target) samples: TensorData, or
anything that `as_tensor_data` accepts.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsim.core.import_policy import IMPORT_PATH
from fedsim.core.model_inputs import named
from fedsim.core.objects import ObjectName, name_of, plain
from fedsim.core.registry import Registration, Registry
from fedsim.data.brought import ACCEPTED, source_of
from fedsim.data.columns import TRAIN_PARTS
from fedsim.data.partitions.ids import NUMBER
from fedsim.data.shapes import SampleShape
from fedsim.data.tensors import READING, ReadSettings, TensorData
from fedsim.errors import DataError, ExperimentError, FedsimError, one_line, show
from fedsim.system.files import is_file, user_path
from fedsim.system.global_settings import plain_arithmetic


class DatasetRegistry(Registry):
    """Registry of data sets. A data set may also be an object other than a function (see `fedsim.data.brought`)."""

    def _registration(self, name: str, target: Any) -> Registration:
        return super()._registration(name, target if callable(target) else source_of(target))


dataset = DatasetRegistry(
    "data set",
    inputs=("root",),
    # lacks_files: a function (root, **parameters) that says whether files would be downloaded.
    # declared: a function of the parameters that returns the SampleShape, so that it is known before a download.
    traits=("lacks_files", "declared"),
    accepts=ACCEPTED,
)


def data_table(value: Any) -> dict[str, Any]:
    """Return the setting `data`, which has several short forms, as a table with the name and the parameters.

    A path of a file in a known format becomes the name of the format and the parameter `path`. A dict or a list of data
    sets becomes one object.

    Raises ExperimentError for other values.

    >>> data_table("points.csv")
    {'name': 'csv', 'path': 'points.csv'}
    """
    table = dict(value) if isinstance(value, Mapping) else {"name": value}
    parts = {key: part for key, part in table.items() if isinstance(part, ObjectName) and not callable(part.target)}
    if parts and "name" not in table:
        table = {"name": parts, **{key: item for key, item in table.items() if key not in parts}}
    name = str(table["name"]) if isinstance(table.get("name"), Path) else table.get("name")
    if isinstance(name, (dict, list)) and name:
        pairs = list(name.items()) if isinstance(name, dict) else list(enumerate(name))
        if all(isinstance(part, ObjectName) for _, part in pairs):
            targets = {key: part.target for key, part in pairs}
            return {**table, "name": name_of(targets if isinstance(name, dict) else list(targets.values()))}
    if isinstance(name, str) and not isinstance(name, ObjectName) and (known := _format_of(name)):
        if "path" in table:
            raise ExperimentError(f"data.path = {show(table['path'])}: {show(name)} is a path too; omit one of the two")
        if known == "text" and is_file(user_path(name)) and _is_table(user_path(name)):
            raise ExperimentError(
                f"data.name = {show(name)}: looks like a table; write data=csv data.path={name} for its columns, or "
                f"data=text data.path={name} to train on its characters"
            )
        return {**table, "name": known, "path": name}
    are_samples = isinstance(table.get("train"), list) or any(map(_has_array, table.values()))
    if not isinstance(name, (str, NoneType)) or (name is None and are_samples):
        raise ExperimentError(
            f'data: must be {ACCEPTED}; to set parameters, pass a dict, such as data={{"name": frame, "ids": "client"}}'
        )
    return table


def _has_array(value: Any) -> bool:
    """Whether a value is an array of several axes as nested lists, or a dict that contains an array."""
    parts = value.values() if isinstance(value, Mapping) else ()
    return (isinstance(value, list) and bool(value) and isinstance(value[0], list)) or any(map(_has_array, parts))


def one_per_worker(value: Any) -> bool:
    """Whether the setting `data` has one data set for each worker."""
    with contextlib.suppress(ExperimentError, DataError):  # reported together with the errors of the other tables
        table = data_table(value)
        name, path = table.get("name"), table.get("path")
        if isinstance(name, ObjectName):
            return getattr(dataset.get(name).target, "one_per_worker", False)
        return name in ("csv", "parquet") and isinstance(path, str) and os.path.isdir(user_path(path))
    return False


def has_tables(path: Path) -> bool:
    """Whether `path` is a folder with tables, directly or in its training part."""
    try:
        folders = [path, *(path / name for name in os.listdir(path) if name.casefold() in TRAIN_PARTS)]
        return any(table_name(name) for folder in folders if folder.is_dir() for name in os.listdir(folder))
    except OSError:  # no folder, or one that cannot be read
        return False


def table_name(file: str) -> str:
    """Return the name of a file without its ending if it is a table, otherwise "". Hidden files are no tables."""
    endings = [ending for ending, name in FORMATS.items() if name in ("csv", "parquet")]
    ending = max((ending for ending in endings if file.lower().endswith(ending)), key=len, default=None)
    return "" if ending is None or file.startswith(".") else file[: -len(ending)]


def _format_of(path: str) -> str | None:
    """Return the name of the data set that reads a file, or None if `path` is not the path of a data file or folder.

    Raises ExperimentError for other existing files, and for folders, which may have several formats.
    """
    if IMPORT_PATH.fullmatch(path) or path in dataset.names():
        return None
    for suffix, name in {**FORMATS, **dict.fromkeys(PICKLES, "npz")}.items():  # which refuses pickles with a remedy
        if path.lower().endswith(suffix):
            return name
    file = user_path(path)
    if has_tables(file):
        return "csv"
    if path in (".", "..") or path.endswith(("/", "\\")) or os.path.isdir(file):
        folder = f"data.path={path}"
        raise ExperimentError(
            f"data.name = {show(path)}: is a folder; write data=image_folder {folder}, or leaf, text or huggingface "
            "instead of image_folder"
        )
    if re.search(r"[/\\]", path) and not re.search(r":|\.py$", path) and not os.path.exists(file):
        raise ExperimentError(f"data.name = {show(path)}: no such file or folder; check the path")
    if is_file(file) and file.suffix != ".py":
        raise ExperimentError(
            f"data.name = {show(path)}: no data set reads this type of file; allowed: {', '.join(FORMATS)}, folders of "
            "images, or your own function"
        )
    return None


def _is_table(path: Path) -> bool:
    """Whether the first lines of a text file have equally many values, at least two, of which most are numbers."""
    with contextlib.suppress(OSError), open(path, "rb") as file:  # an error is reported when the file is loaded
        lines = [line for line in file.read(4096).decode(errors="replace").splitlines()[:20] if line.strip()]
        for delimiter in (r"[,;\t|]", r"\s+"):
            rows = [re.split(delimiter, line.strip()) for line in lines][: max(3, len(lines) - 1)]
            cells = [cell.strip() for row in rows[1:] for cell in row]
            numbers = sum(NUMBER.fullmatch(cell) is not None for cell in cells)
            if len(rows) > 2 and {len(row) for row in rows} == {max(len(rows[0]), 2)} and 2 * numbers > len(cells):
                return True
    return False


FORMATS = {  # name of the data set that reads files with an ending
    **dict.fromkeys((".csv", ".tsv", ".csv.gz", ".tsv.gz"), "csv"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **{".npz": "npz", ".safetensors": "safetensors", ".txt": "text"},
}
PICKLES = ".pt", ".pth", ".pkl", ".pickle", ".npy"
MNIST5K_FILE = Path(__file__).with_name("mnist5k.npz")  # mnist5k.txt describes the origin of the images
MNIST5K_TRAIN = 4000  # number of training images, at the start of the file; the rest are test images
MNIST_STATISTICS = (0.1307,), (0.3081,)  # mean and standard deviation of the pixels


def default_root() -> Path:
    """Return the default folder for data sets: $FEDSIM_DATA if set, else fedsim/data in the user's cache folder.

    For a user without a home folder, as in some containers, the cache folder is .cache in the working folder.
    """
    if os.environ.get("FEDSIM_DATA"):
        return user_path(os.environ["FEDSIM_DATA"])
    try:
        home = Path.home()
    except RuntimeError:
        home = Path()
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "fedsim" / "data"


@plain_arithmetic
def load_dataset(
    name: Any,
    root: str | Path | None = None,
    *,
    stratify: bool | None = None,
    channels: Literal["first", "last"] | None = None,
    split_by: str | None = None,
    partitioned_by: str | None = None,
    **params: Any,
) -> tuple[TensorData, TensorData]:
    """Load the training samples and the test samples of a data set.

    Args:
        name: a registered name (`fedsim list datasets`), the path of a file, "package.module:function", a function, or
            the data itself: a data set, data frame or tuple (inputs, targets), a tuple (train, test) of them, or a list
            with one data set per worker.
        root: folder for downloaded files. None: $FEDSIM_DATA if set, else the user's cache folder.
        stratify: whether test samples that are drawn from the data have the same fraction of each class. None: true if
            the data is one data set with class labels.
        channels: whether the channels of images are their first or last axis. None: the shape decides, or an error is
            raised if it is ambiguous.
        split_by: column of owners whose samples are kept together when test samples are drawn. "samples": samples of
            one owner may be separated. None: the column with the most owners, if they are more than in
            `partitioned_by`.
        partitioned_by: column of owners by which the samples are divided among workers. "": the first column of owners.
            None: there is no such column.
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
    params = data_table({**plain({"name": name}), **params})
    name = params.pop("name")
    registration = dataset.get(name, "data.name")
    params = registration.check(params, "data", beside=["name", "root"])
    token = READING.set(settings := ReadSettings(stratify, split_by, partitioned_by, channels))
    try:
        folder = user_path(root) if root else default_root()
        loaded = registration.target(**registration.select_inputs(root=folder), **params)
        loaded = tuple(loaded) if isinstance(loaded, list) else loaded  # a function may return [train, test]
        if not (isinstance(loaded, tuple) and all(isinstance(part, TensorData) for part in loaded)):
            try:
                loaded = source_of(loaded)()
            except DataError as error:
                raise DataError(f"data.name = {show(name)}: {error}") from None
        train, test = loaded
    except FedsimError:
        raise
    except Exception as error:
        raise DataError(f"data.name = {show(name)}: {one_line(error)}") from error
    finally:
        READING.reset(token)
    if channels and not settings.has_images:
        raise DataError(
            f"data.channels = {show(channels)}: is not used, because the data set has no arrays of images [n, height, "
            "width, channels] or [n, channels, height, width]; omit it"
        )
    for part, data in (("training", train), ("test", test)):
        if not len(data):
            raise DataError(f"data.name = {show(name)}: the {part} set is empty; it needs at least one sample")
        for kind, tensor in data.tensors.items():
            if 0 in (shape := tensor.shape)[1:]:
                raise DataError(
                    f"data.name = {show(name)}: the {kind} of the {part} set have the shape {list(shape)}, so samples "
                    "have no values; every dimension must have at least one element"
                )
        if data.targets.is_floating_point() and not data.targets.float().isfinite().all():
            raise DataError(
                f"data.name = {show(name)}: the {part} set has targets that are NaN or infinite; remove such samples"
            )
    _require_equal_inputs(named(train.inputs), named(test.inputs), name)
    return train, test


def _require_equal_inputs(train: Mapping[str, Tensor], test: Mapping[str, Tensor], name: str) -> None:
    """Raise DataError unless the inputs of both parts have the same names and shapes, and the same ones are uint8."""
    if train.keys() != test.keys():
        first, second = (", ".join(part) for part in (train, test))
        where = f"data.name = {show(name)}"
        raise DataError(f"{where}: the training samples have {first}, but the test samples have {second}")
    for key in train:
        first, second = (f"{part[key].dtype} of shape {list(part[key].shape[1:])}" for part in (train, test))
        images = [part[key].dtype == torch.uint8 for part in (train, test)]  # only these are divided by 255
        if train[key].shape[1:] != test[key].shape[1:] or images[0] != images[1]:
            kind = key.replace("inputs", "input", 1)
            raise DataError(
                f"data.name = {show(name)}: each training {kind} is {first}, but each test {kind} is {second}; both "
                "must have the same type and shape"
            )


class _Loaded(NamedTuple):
    """What was loaded within `data_loaded_once`: the last data set, and the shapes of all data sets, by `_key`."""

    data: dict[str, tuple[TensorData, TensorData]]
    shapes: dict[str, SampleShape]


_loaded: ContextVar[_Loaded | None] = ContextVar("fedsim_loaded_data", default=None)


def _key(name: str, root: str | None, params: Mapping[str, Any]) -> str:
    return repr((name, root, sorted(params.items())))


@contextlib.contextmanager
def data_loaded_once() -> Iterator[None]:
    """Context manager within which a data set that was loaded to count the workers is not loaded again for the run."""
    token = _loaded.set(_loaded.get() or _Loaded({}, {}))
    try:
        yield
    finally:
        _loaded.reset(token)


def forget_loaded_data() -> None:
    """Free this process's copy of the data set that `load_dataset_once` has kept."""
    if loaded := _loaded.get():
        loaded.data.clear()


def load_dataset_once(
    name: str, root: str | None, params: Mapping[str, Any], *, take: bool = False
) -> tuple[TensorData, TensorData]:
    """Return a data set like `load_dataset`, but within `data_loaded_once` do not load the same data set twice.

    Within `data_loaded_once`, the last data set stays in memory for the next call, unless `take` is true.
    """
    loaded, key = _loaded.get() or _Loaded({}, {}), _key(name, root, params)
    data = loaded.data.get(key) or load_dataset(name, root, **params)
    loaded.data.clear()
    if not take:
        loaded.data[key] = data
    return data


def known_shape(name: str, root: str | None, params: Mapping[str, Any]) -> SampleShape | None:
    """Return the shape of a data set's samples if it is registered or `data_loaded_once` knows it, else None."""
    if declared := getattr(dataset.get(name).target, "declared", None) if name in dataset.names() else None:
        return declared(**{key: value for key, value in params.items() if key not in vars(ReadSettings())})
    return loaded.shapes.get(_key(name, root, params)) if (loaded := _loaded.get()) else None


def sample_shape(name: str, root: str | None, params: Mapping[str, Any]) -> SampleShape:
    """Return the shape of a data set's samples. The data set is loaded if the shape is not known."""
    shape = known_shape(name, root, params) or SampleShape.of(load_dataset_once(name, root, params)[0])
    if loaded := _loaded.get():
        loaded.shapes[_key(name, root, params)] = shape
    return shape


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
