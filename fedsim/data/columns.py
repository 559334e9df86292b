"""Conversion of named columns to samples, for tables in files, data frames and Hugging Face data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedsim.core.randomness import numpy_generator
from fedsim.core.suggestions import nearest
from fedsim.data.partitions.allocation import group
from fedsim.data.tensors import TensorData, as_tensor_data
from fedsim.errors import DataError, one_line, show

TARGETS = "label", "labels", "target", "targets", "y"  # names of the target column that need not be set
Fraction = Annotated[float, Field(gt=0, lt=1)]
Columns = Mapping[str, Any]


def train_and_test(
    train: Columns,
    test: Columns | None,
    places: tuple[str, str],
    *,
    target: str | None = None,
    inputs: Sequence[str] | None = None,
    ids: Sequence[str] | None = None,
    test_fraction: float = 0.2,
) -> tuple[TensorData, TensorData]:
    """Return the training and test samples of data sets that are stored as columns, such as CSV files.

    Args:
        train, test: columns by name, arrays or lists [n, ...] of numbers. Columns of targets and owners may also
            contain text. Text targets become class labels in sorted order.
        places: names of `train` and `test` in error messages, such as a file name.
        target: name of the column of targets. None: the only column called label, labels, target, targets or y.
        inputs: names of the columns of inputs, which are concatenated. None: all other columns.
        ids: names of the columns that contain the owner of each sample, such as a user. None: there are none.
        test_fraction: fraction of `train` that is drawn as test samples if `test` is None.

    Raises DataError, with the place and the column, for missing columns, text in inputs, NaN and infinity.
    """
    parts = [(columns, place) for columns, place in zip((train, test), places, strict=True) if columns is not None]
    target, ids = target or _only_target(train, places[0]), ids or ()
    inputs = [name for name in train if name not in (target, *ids)] if inputs is None else inputs
    for columns, place in parts:
        for name in (target, *inputs, *ids):
            if name not in columns:
                raise DataError(f"{place}: has no column {show(name)}; {nearest(name, columns)}")
        if not len(columns[target]):
            raise DataError(f"{place}: has no samples")
    targets = [_values(columns[target], f"{place}: column {show(target)}") for columns, place in parts]
    if named := any(values.dtype.kind == "U" for values in targets):
        targets = [values.astype(str) for values in targets]
        classes = np.unique(targets[0])
        for values, (_, place) in zip(targets, parts, strict=True):
            if len(unknown := np.setdiff1d(values, classes)):
                raise DataError(
                    f"{place}: column {show(target)}: the class {show(str(unknown[0]))} has no training samples"
                )
        targets = [np.searchsorted(classes, values) for values in targets]
    samples = []
    for (columns, place), values in zip(parts, targets, strict=True):
        arrays = [_numbers(columns[name], f"{place}: column {show(name)}") for name in inputs]
        require_finite(values, f"{place}: column {show(target)}")
        owners = {name: _values(columns[name], f"{place}: column {show(name)}") for name in ids}
        samples.append(samples_of(_joined(arrays, place), values, owners, place))
    if test is not None:
        return samples[0], samples[1]
    return split_test(samples[0], test_fraction, places[0], are_classes=named)


def is_table(data: Any) -> bool:
    """Whether an object is a data frame or a Hugging Face data set."""
    return hasattr(data, "column_names") or (hasattr(data, "columns") and hasattr(data, "to_numpy"))


def samples_of_tables(train: Any, test: Any) -> tuple[TensorData, TensorData]:
    """Return the samples of two data frames or Hugging Face data sets. If `test` is None, test samples are drawn.

    The named index levels of a data frame are used as columns of owners. Raises DataError like `train_and_test`.
    """
    owners = [name for name in getattr(getattr(train, "index", None), "names", ()) if name is not None]
    tables = [table.reset_index() if owners else table for table in (train, test) if table is not None]
    first, *others = ({name: table[name][:] for name in _names(table)} for table in tables)
    places = "the training data", "the test data"
    return train_and_test(first, others[0] if others else None, places, ids=owners)


def _names(table: Any) -> list[str]:
    return list(table.column_names if hasattr(table, "column_names") else table.columns)


def samples_of(inputs: np.ndarray, targets: np.ndarray, ids: Mapping[str, np.ndarray], place: str) -> TensorData:
    """Return a data set of n samples.

    Args:
        inputs, targets: arrays [n, ...].
        ids: who owns each sample (such as a user): a dict from column name to an array [n].
        place: name of the data set in error messages.

    Raises DataError if the arrays cannot be used as a data set, for example if their lengths differ.
    """

    try:
        return replace(as_tensor_data((inputs, targets)), ids=ids)
    except DataError as error:
        raise DataError(f"{place}: {error}") from None


def split_test(
    data: TensorData, fraction: float, place: str, *, are_classes: bool = False
) -> tuple[TensorData, TensorData]:
    """Split a data set at random into training samples and a `fraction` of test samples, the same for every seed.

    For class labels, the draw is stratified: each class has the same fraction of test samples up to rounding, and at
    least one training sample.

    Args:
        data: data set of n samples.
        fraction: fraction of test samples. Their number is round(fraction n).
        place: name of the data set in error messages.
        are_classes: whether integer targets are certainly class labels. Otherwise, they count as class labels unless
            there are more different values than test samples.

    Raises DataError if the targets are certainly class labels, and there are too few samples to leave one training
    sample to each class.
    """
    order, held_out = numpy_generator(0, "test_split").permutation(len(data)), round(fraction * len(data))
    chosen = np.zeros(len(data), dtype=bool)
    if data.has_labels and (are_classes or len(data.targets.unique()) <= held_out):
        _, class_of, sizes = np.unique(data.targets.numpy(), return_inverse=True, return_counts=True)
        if held_out > len(data) - len(sizes):
            raise DataError(
                f"{place}: {held_out} of {len(data)} samples would be drawn for tests, which leaves classes without "
                f"training samples ({len(sizes)} classes); use a smaller data.test_fraction"
            )
        members = group(order, class_of[order], len(sizes))  # each class in the drawn order
        counts = _stratified(sizes, held_out)
        chosen[np.concatenate([samples[:count] for samples, count in zip(members, counts, strict=True)])] = True
    else:
        chosen[order[:held_out]] = True
    return data.take(np.flatnonzero(~chosen)), data.take(np.flatnonzero(chosen))


def _stratified(sizes: np.ndarray, total: int) -> np.ndarray:
    """Divide `total` test samples among classes in proportion to `sizes` [C], and return their numbers [C].

    Rounds by largest remainders, of which ties go to the first class. Each class keeps at least one training sample.
    """
    shares = total * sizes
    counts, remainders = np.divmod(shares, sizes.sum())
    while (left := total - counts.sum()) > 0:
        may_grow = np.flatnonzero(counts < sizes - 1)
        counts[may_grow[np.argsort(-remainders[may_grow], kind="stable")][:left]] += 1
    return counts


def data_path(path: str) -> str:
    """Return the path of a data file with `~` replaced by the home folder."""
    return str(Path(path).expanduser())


def unreadable(path: str, error: Exception) -> DataError:
    """Return the error for a data file that does not exist or cannot be read."""
    exists = Path(path).exists()
    return DataError(f"{path}: cannot be read: {one_line(error) if exists else 'no such file; check data.path'}")


def require_finite(values: np.ndarray, place: str) -> None:
    """Raise DataError, with the place and the row, if an array [n, ...] contains NaN or infinity as float32."""
    if values.dtype.kind != "f":
        return
    with np.errstate(over="ignore"):
        finite = np.isfinite(values.astype(np.float32, copy=False))
    if not finite.all():
        row = int(np.argwhere(~finite)[0][0])
        raise DataError(
            f"{place}: row {row} contains NaN, infinity, a missing value or a number beyond float32; remove "
            "such rows or replace the values"
        )


def _only_target(columns: Columns, place: str) -> str:
    names = [name for name in columns if name in TARGETS]
    if len(names) != 1:
        raise DataError(
            f"{place}: must have exactly one column with one of the names {', '.join(TARGETS)}; otherwise, set "
            f"`target` to one of the columns {', '.join(columns)}, or rename a column"
        )
    return names[0]


def _values(values: Any, place: str) -> np.ndarray:
    """Return a column of targets or owners as an array of text [n] or of numbers [n, ...].

    Raises DataError, which begins with `place`, for a missing value, and for values of different types.
    """
    array = np.asarray(values)
    if array.dtype.kind not in "OU":
        return array
    for row, value in enumerate(array):
        if value is None or (isinstance(value, float) and np.isnan(value)) or (isinstance(value, str) and not value):
            raise DataError(f"{place}: has no value in row {row}; remove such rows or fill in the values")
    if all(isinstance(value, str) for value in array):
        return array.astype(str)
    try:
        numbers = np.array(array.tolist())
        return numbers if numbers.dtype.kind in "iubf" else numbers.astype(float)
    except (TypeError, ValueError):
        raise DataError(f"{place}: must contain only text, or only numbers of one shape") from None


def _numbers(values: Any, place: str) -> np.ndarray:
    """Return a column as an array of numbers [n, ...]. PIL images become uint8 [n, channels, height, width].

    Raises DataError, which begins with `place`, if the values are not numbers of equal shape, or are not finite.
    """
    if hasattr(next(iter(values), None), "getbands"):  # PIL pictures
        mode = "L" if all(picture.mode in ("1", "L") for picture in values) else "RGB"
        try:
            values = [pixels_of(picture, mode).transpose(2, 0, 1) for picture in values]
        except ValueError as error:
            raise DataError(f"{place}: {error}") from None
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        raise DataError(f"{place}: its values have different shapes; all values must have the same shape") from None
    if array.dtype.kind == "O" and len(array) and isinstance(array[0], (list, np.ndarray)):
        shapes = {np.shape(value) for value in array}
        if len(shapes) > 1:
            raise DataError(
                f"{place}: its values have different shapes, such as {' and '.join(map(str, sorted(shapes)[:2]))}; "
                "all values must have the same shape"
            )
        array = np.stack([np.asarray(value) for value in array])
    if array.dtype.kind not in "iubf":
        raise DataError(
            f"{place}: contains {array.dtype} values instead of numbers; set `inputs` to the columns that contain "
            "numbers, or remove the column"
        )
    require_finite(array, place)
    return array.astype(np.float32) if array.dtype.kind == "f" else array


def pixels_of(picture: Any, mode: str, size: int | None = None) -> np.ndarray:
    """Return a PIL image as uint8 [height, width, channels], converted to `mode` and resized to `size` x `size`.

    Raises ValueError for more than 8 bits per channel, which PIL would not scale but cut off.
    """
    if picture.mode.startswith(("I", "F")):
        raise ValueError(f"the image has the mode {picture.mode} of PIL; convert it to 8 bits per channel")
    picture = picture.convert(mode)
    return np.atleast_3d(picture if size is None else picture.resize((size, size)))


def _joined(arrays: list[np.ndarray], place: str) -> np.ndarray:
    """Join input columns to one array, float32 [n, features]. A single array [n, ...] is returned unchanged."""
    if not arrays:
        raise DataError(f"{place}: has no input columns, only the target and owners; add at least one input column")
    if len(arrays) == 1 and arrays[0].ndim > 1:
        return arrays[0]  # pictures and tokens keep their integers
    return np.concatenate([array.reshape(len(array), -1).astype(np.float32) for array in arrays], axis=1)
