"""Arrays in `.npz` and tensors in `.safetensors` files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.core.numbers import ProperFraction
from fedsim.data.columns import DataColumn, data_path, require_finite, samples_of, unreadable, warn, warn_of_unscaled
from fedsim.data.drawn_tests import split_test
from fedsim.data.encoding import target_numbers
from fedsim.data.sources import PICKLES, dataset
from fedsim.data.tensors import TensorData, by_name
from fedsim.errors import DataError, ExperimentError, show
from fedsim.system.devices import require_memory

NAMES = {  # accepted names of each array
    "inputs": ("inputs", "x_train", "x", "X", "images", "train_images", "data"),
    "targets": ("targets", "y_train", "y", "labels", "train_labels"),
    "test_inputs": ("test_inputs", "x_test", "test_images"),
    "test_targets": ("test_targets", "y_test", "test_labels"),
    "validation_inputs": ("val_inputs", "x_val", "val_images"),
    "validation_targets": ("val_targets", "y_val", "val_labels"),
}


@dataset("npz")
@dataset("safetensors")
def arrays(*, path: str, test_fraction: ProperFraction = 0.2) -> tuple[TensorData, TensorData]:
    """Arrays in a `.npz` file, or tensors in a `.safetensors` file.

    The arrays are `inputs` [n, ...], `targets` [n, ...] and, if the file has test samples, `test_inputs` and
    `test_targets` (or `x_train`, `y_train`, `x_test`, `y_test` as in Keras, and other usual names). Several inputs are
    called `inputs.NAME`, such as `inputs.image`, or `inputs.0`, `inputs.1`, ... by position. Without test samples,
    validation samples such as `val_images` and `val_labels` (MedMNIST) are used for tests. Every other array
    has shape [n] and contains the owner of each sample, for the partition `natural`. uint8 inputs are divided by 255,
    and those of shape [n, height, width] get one channel. Images [n, height, width, channels] become [n, channels,
    height, width] if only the last axis can contain channels (see `data.channels`). Targets that are text become class
    labels in sorted order.

    Args:
        path: the file. `.pt` files are refused, because reading a pickle runs code.
        test_fraction: fraction of the samples that is drawn at random for tests if the file has no test samples. The
            draw is the same for every seed.

    Raises DataError, with the file and the array, for files that cannot be read, missing arrays, arrays of different
    lengths, NaN and infinity.

    >>> import tempfile
    >>> file = tempfile.mkdtemp() + "/points.npz"
    >>> np.savez(file, inputs=np.zeros((10, 3), "float32"), targets=np.arange(10) % 2, user=np.arange(10) // 2)
    >>> train, test = fedsim.load_dataset("npz", path=file)
    >>> train.inputs.shape, len(test), list(train.ids)
    (torch.Size([8, 3]), 2, ['user'])
    """
    stored = _with_several_inputs(_read(path), path)
    parts = {role: [name for name in names if name in stored] for role, names in NAMES.items()}
    for role, names in parts.items():
        if len(names) > 1:
            raise DataError(f"{path}: has several arrays of {role}: {', '.join(names)}; keep only one")
    validation = [parts.pop(f"validation_{kind}") for kind in ("inputs", "targets")]
    if not (parts["test_inputs"] or parts["test_targets"]):
        parts["test_inputs"], parts["test_targets"] = validation
    elif unused := [name for names in validation for name in names]:
        warn(f"{path}: {' and '.join(unused)} are not used, because the file has test samples")
        stored = {name: array for name, array in stored.items() if name not in unused}
    tested = parts["test_inputs"] or parts["test_targets"]
    for role in ("inputs", "targets", *(("test_inputs", "test_targets") if tested else ())):
        if not parts[role]:
            raise DataError(
                f"{path}: has no array {role}, only {', '.join(stored) or 'none'}; allowed: {', '.join(NAMES[role])}"
            )
    values = {role: stored.pop(name) for role, names in parts.items() for name in names}
    for role in ("inputs", "test_inputs"):
        for name, array in (by_name(values[role]) or {"": values[role]}).items() if role in values else ():
            require_finite(array, f"{path}: {role}.{name}".rstrip("."))
    columns = {role: DataColumn(array, f"{path}: {role}") for role, array in values.items() if "targets" in role}
    targets, are_names = target_numbers([columns.pop("targets")], list(columns.values()))
    n = len(values["targets"])
    for name, array in stored.items():
        if array.shape != (n,):
            raise DataError(
                f"{path}: {show(name)} has shape {list(array.shape)}; must be one of "
                f"{', '.join(known for names in NAMES.values() for known in names)}, or contain one owner per sample, "
                f"[{n}]"
            )
    owners = {name: DataColumn(array, f"{path}: {show(name)}").owners() for name, array in stored.items()}
    train = samples_of(values["inputs"], targets[:n], owners, path)
    warn_of_unscaled(train, path, "inputs", "targets")
    if "test_inputs" not in values:
        return split_test(train, test_fraction, path, are_classes=are_names)
    return train, samples_of(values["test_inputs"], targets[n:], {}, path)


def _with_several_inputs(stored: Mapping[str, np.ndarray], path: str) -> dict[str, Any]:
    """Return the arrays of a file, where arrays such as inputs.NAME become one dict, or a tuple if NAME is a number."""
    known = [f"{name}." for role, names in NAMES.items() if role.endswith("inputs") for name in names]
    several = dict[str, dict[str, np.ndarray]]()
    for name in [name for name in stored if name.startswith((*known,))]:
        several.setdefault(name.partition(".")[0], {})[name.partition(".")[2]] = stored[name]
    arrays: dict[str, Any] = {name: array for name, array in stored.items() if not name.startswith((*known,))}
    for role, parts in several.items():
        if role in arrays:
            raise DataError(f"{path}: has an array {role} and an array {role}.{next(iter(parts))}; keep only one")
        by_position = all(name.isdecimal() for name in parts)
        if by_position and sorted(map(int, parts)) != list(range(len(parts))):
            raise DataError(f"{path}: the arrays {role}.NUMBER have the numbers {', '.join(parts)}; count from 0")
        arrays[role] = tuple(parts[name] for name in sorted(parts, key=int)) if by_position else parts
    return arrays


def _read(path: str) -> dict[str, np.ndarray]:
    """Return the arrays in a `.npz` or `.safetensors` file as a dict. Raise DataError if the file cannot be read."""
    path, suffix = data_path(path), Path(path).suffix.lower()
    if suffix in PICKLES:
        raise DataError(
            f"{path}: {suffix} files are not read, because reading a pickle can run code; write numpy.savez(FILE, "
            'inputs=..., targets=...) or safetensors.torch.save_file({"inputs": ...}, FILE)'
        )
    try:
        if suffix == ".safetensors":
            from safetensors.numpy import load_file

            return load_file(path)
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            require_memory(sum(part.file_size for part in file.zip.infolist()), f"reading {path}", "a smaller file")
            arrays = {name: file[name] for name in file.files}
    except ExperimentError:
        raise
    except Exception as error:  # errors of zip files, of NumPy and of safetensors
        if "allow_pickle" in str(error):
            raise DataError(
                f"{path}: an array contains Python objects, whose reading could run code; write text as "
                "array.astype(str), and numbers as array.astype(float)"
            ) from None
        raise unreadable(path, error) from None
    if others := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
        raise DataError(f"{path}: {show(others[0])} is not an array of NumPy; write the file with numpy.savez")
    return arrays
