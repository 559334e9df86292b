"""Conversion of named columns to samples, for tables in files, data frames and Hugging Face data sets."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.core.randomness import numpy_generator
from fedsim.core.suggestions import nearest
from fedsim.data.partitions.allocation import group
from fedsim.data.pictures import pixels_of
from fedsim.data.tensors import TensorData, as_tensor_data
from fedsim.errors import DataError, FedsimWarning, cut, one_line, show

TARGETS = "label", "labels", "target", "targets", "y"  # names of the target column that need not be set
NAMELESS = re.compile(r"(Unnamed: \d+(\.\d+)?)?")  # names that pandas gives to a column without a name
RESET_INDEX = "index", "level_0"  # names that pandas gives to an index that becomes a column
PANDAS_INDEX = re.compile(r"__index_level_\d+__")  # columns in which pandas stores an index without a name
TRAIN_PARTS = ("train", "training")
TEST_PARTS = ("test", "testing"), ("validation", "valid", "val")  # in order of preference
MISSING = "na", "n/a", "nan", "null", "none", "?"
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
    index: Collection[str] = (),
) -> tuple[TensorData, TensorData]:
    """Return the training and test samples of data sets that are stored as columns, such as CSV files.

    Args:
        train, test: columns by name, arrays or lists [n, ...] of numbers. Columns of targets and owners may also
            contain text. Text targets become class labels in sorted order.
        places: names of `train` and `test` in error messages, such as a file name.
        target: name of the column of targets. None: the only column called label, labels, target, targets or y.
        inputs: names of the columns of inputs, which are concatenated. None: all other columns, without those that only
            number the rows.
        ids: names of the columns that contain the owner of each sample, such as a user. None: there are none.
        test_fraction: fraction of `train` that is drawn as test samples if `test` is None.
        index: names of the columns that were the index of a data frame, and are no inputs.

    Raises DataError, with the place and the column, for missing columns, text in inputs, NaN and infinity, columns
    without a name, and columns that cannot be joined to one input, such as images and numbers.
    """
    parts = [(columns, place) for columns, place in zip((train, test), places, strict=True) if columns is not None]
    target, ids = target or _only_target(train, places[0]), ids or ()
    if inputs is None:
        inputs = _input_columns({name: train[name] for name in train if name not in (target, *ids)}, index, places[0])
    for columns, place in parts:
        for name in (target, *inputs, *ids):
            if name not in columns:
                raise DataError(f"{place}: has no column {show(name)}; {nearest(str(name), map(str, columns))}")
        if not len(columns[target]):
            raise DataError(f"{place}: has no samples")
    targets = [_values(columns[target], f"{place}: column {show(target)}") for columns, place in parts]
    are_names = any(values.dtype.kind == "U" for values in targets)
    if are_names:
        targets = _numbered(targets, [f"{place}: column {show(target)}" for _, place in parts])
    samples = []
    for (columns, place), values in zip(parts, targets, strict=True):
        arrays = {name: _numbers(columns[name], f"{place}: column {show(name)}") for name in inputs}
        require_finite(values, f"{place}: column {show(target)}")
        owners = {name: _values(columns[name], f"{place}: column {show(name)}") for name in ids}
        samples.append(samples_of(_joined(arrays, place), values, owners, place))
    if test is not None:
        return samples[0], samples[1]
    return split_test(samples[0], test_fraction, places[0], are_classes=are_names)


def _numbered(columns: Sequence[np.ndarray], places: Sequence[str]) -> list[np.ndarray]:
    """Replace names of classes by numbers, in the sorted order of the names in the training samples.

    Args:
        columns: names of the classes of all samples: one column for the training samples, perhaps followed by one for
            the test samples.
        places: name of each column in error messages.
    """
    names = [values.astype(str) for values in columns]
    classes = np.unique(names[0])
    warn_of_unlikely_classes(classes.tolist(), places[0])
    for values, place in zip(names, places, strict=True):
        if len(unknown := np.setdiff1d(values, classes)):
            raise DataError(f"{place}: the class {show(str(unknown[0]))} has no training samples")
    return [np.searchsorted(classes, values) for values in names]


def is_table(data: Any) -> bool:
    """Whether an object is a data frame or a Hugging Face data set."""
    return hasattr(data, "column_names") or (hasattr(data, "columns") and hasattr(data, "to_numpy"))


def samples_of_tables(train: Any, test: Any) -> tuple[TensorData, TensorData]:
    """Return the samples of two data frames or Hugging Face data sets. If `test` is None, test samples are drawn.

    The named index levels of a data frame are used as columns of owners. Raises DataError like `train_and_test`, and if
    a column name has several levels or occurs twice.
    """
    places = "the training data", "the test data"
    for table, place in zip((train, test), places, strict=True):
        if table is not None:
            _check_names(_names(table), place)
    owners = [name for name in getattr(getattr(train, "index", None), "names", ()) if name is not None]
    tables = [table.reset_index() if owners else table for table in (train, test) if table is not None]
    first, *others = ({name: table[name][:] for name in _names(table)} for table in tables)
    return train_and_test(first, others[0] if others else None, places, ids=owners)


def _names(table: Any) -> list[Any]:
    return list(table.column_names if hasattr(table, "column_names") else table.columns)


def _check_names(names: Sequence[Any], place: str) -> None:
    """Raise DataError if a name of a column has several levels or occurs twice."""
    for name in names:
        if isinstance(name, tuple):
            raise DataError(
                f"{place}: has a column name of several levels, {show(name)}; name each column by one text, for "
                'example with frame.columns = ["_".join(map(str, name)) for name in frame.columns]'
            )
        if names.count(name) > 1:
            raise DataError(f"{place}: has two columns {show(name)}; rename or remove one of the two")


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

    If integer targets do not count as class labels, a warning says how many values are left without training samples.

    Raises DataError if the targets are certainly class labels, and there are too few samples to leave one training
    sample to each class.
    """
    order, held_out = numpy_generator(0, "test_split").permutation(len(data)), round(fraction * len(data))
    chosen, targets = np.zeros(len(data), dtype=bool), data.targets.numpy()
    if data.has_labels and (are_classes or len(data.targets.unique()) <= held_out):
        _, class_of, sizes = np.unique(targets, return_inverse=True, return_counts=True)
        if held_out > len(data) - len(sizes):
            separate, most = "give a separate test part", len(data) - len(sizes)
            smaller = f"draw at most {most} with a smaller data.test_fraction, or {separate}"
            raise DataError(
                f"{place}: {held_out} of {len(data)} samples would be drawn for tests, which leaves classes without "
                f"training samples ({len(sizes)} classes); {smaller if most else separate}"
            )
        members = group(order, class_of[order], len(sizes))  # each class in the drawn order
        counts = _stratified(sizes, held_out)
        chosen[np.concatenate([samples[:count] for samples, count in zip(members, counts, strict=True)])] = True
    else:
        chosen[order[:held_out]] = True
        if data.has_labels and (untrained := np.setdiff1d(targets[chosen], targets[~chosen])).size:
            warn(
                f"{place}: the targets are integers of more different values than the {held_out} test samples drawn, "
                f"so the draw is not stratified, and {untrained.size} values, such as {untrained[0]}, have no training "
                "samples; if the targets are classes, give a separate test part, and if not, write them as "
                "floating-point numbers",
            )
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


def warn(message: str) -> None:
    """Issue a FedsimWarning about data."""
    warnings.warn(message, FedsimWarning, stacklevel=3)


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
            f"`target` to one of the columns {', '.join(map(str, columns))}, or rename a column"
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
        return without_spaces(array.astype(str), place)
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


def _joined(columns: Mapping[str, np.ndarray], place: str) -> np.ndarray:
    """Join input columns to one array, float32 [n, features]. A single array [n, ...] is returned unchanged.

    Raises DataError if there is no column, or if an image or another array of two or more dimensions would be joined.
    """
    if not columns:
        raise DataError(f"{place}: has no input columns, only the target and owners; add at least one input column")
    arrays = list(columns.values())
    if len(arrays) == 1 and arrays[0].ndim > 1:
        return arrays[0]  # pictures and tokens keep their integers
    for name, array in columns.items():
        if array.ndim > 2:
            raise DataError(
                f"{place}: column {show(name)} has values of shape {list(array.shape[1:])}, such as images, which "
                "cannot be joined with other columns to one input; set `inputs` to one of the columns "
                f"{cut(', '.join(map(str, columns)))}, or remove the others"
            )
    return np.concatenate([array.reshape(len(array), -1).astype(np.float32) for array in arrays], axis=1)


def _input_columns(columns: Columns, index: Collection[str], place: str) -> list[str]:
    """Return the names of the columns of inputs: all that do not number the rows, which are named in a warning.

    A column called index numbers the rows if it contains 0, 1, 2, ... in any order, and a column without a name only
    in this order. Another warning names columns called id or index that are inputs and may number the samples.

    Raises DataError if another column has no name.
    """
    inputs = []
    for name, values in columns.items():
        folded = name.casefold() if isinstance(name, str) else ""
        is_index = name in index or PANDAS_INDEX.fullmatch(folded) is not None
        if is_nameless(name):
            is_index |= np.array_equal(np.asarray(values), np.arange(len(values)))
        elif folded in RESET_INDEX and _are_different_integers(values):
            is_index |= (np.min(values), np.max(values)) == (0, len(values) - 1)
        if is_index:
            warn(
                f"{place}: column {show(name)} is the index of a data frame, and is not an input; to use it, set "
                "`inputs` or `ids`",
            )
            continue
        if is_nameless(name):
            raise DataError(
                f"{place}: column {show(name)} has no name, and is not an index 0, 1, 2, ...; give it a name, remove "
                "it, or set `inputs` to the columns of inputs"
            )
        if folded in ("id", *RESET_INDEX) and _are_different_integers(values):
            warn(
                f"{place}: column {show(name)}, which contains a different integer in each row, is used as an input; "
                "if it only numbers the rows, remove it, or set `inputs` to the columns of inputs",
            )
        inputs.append(name)
    return inputs


def is_nameless(name: Any) -> bool:
    """Whether a column has no name, or the name that pandas gives to a column without a name."""
    if isinstance(name, str):
        return NAMELESS.fullmatch(name) is not None
    return name is None or (isinstance(name, float) and np.isnan(name))  # pandas may store None as NaN


def _are_different_integers(values: Any) -> bool:
    array = np.asarray(values)
    return array.ndim == 1 and array.dtype.kind in "iu" and len(np.unique(array)) == len(array) > 0


def warn_of_unlikely_classes(classes: Sequence[str], place: str) -> None:
    """Warn of class names that differ only in case or outer spaces, or probably stand for a missing value."""
    by_folded: dict[str, str] = {}
    for name in classes:
        twin = by_folded.setdefault(name.strip().casefold(), name)
        if twin != name:
            problem = f"{show(twin)} and {show(name)} are different classes; if they are one, write them alike"
        elif name.casefold() in MISSING:
            problem = f"{show(name)} is a class; if it is a missing value, remove its samples"
        else:
            continue
        warn(f"{place}: {problem}")


def without_spaces(values: np.ndarray, place: str) -> np.ndarray:
    """Return an array of text [n] without spaces around its values. If there are any, one warning names them.

    Other arrays are returned unchanged. Raises DataError if nothing is left of a value.
    """
    if values.dtype.kind != "U":
        return values
    stripped = np.char.strip(values)
    if len(empty := np.flatnonzero(stripped == "")):
        raise DataError(f"{place}: has no value in row {empty[0]}; remove such rows or fill in the values")
    if len(changed := np.flatnonzero(stripped != values)):
        warn(
            f"{place}: spaces around {len(changed)} of {len(values)} values are removed, such as in "
            f"{show(str(values[changed[0]]))}",
        )
    return stripped


def parts_of(names: Collection[str], place: str) -> tuple[str | None, str | None]:
    """Return the names of the training part and the test part among names of folders or splits.

    Upper and lower case are the same. The training part is called train or training, and the test part test, testing,
    validation, valid or val. If there are parts for tests and for validation, a warning says that only the first is
    used. None: there is no such part.

    Raises DataError if two names are those of one part, such as train and Training.

    >>> parts_of(["Train", "cats", "VAL"], "photos")
    ('Train', 'VAL')
    """
    parts: list[str | None] = []
    for accepted in (TRAIN_PARTS, *TEST_PARTS):
        matching = [name for name in names if name.casefold() in accepted]
        if len(matching) > 1:
            raise DataError(f"{place}: {' and '.join(sorted(matching))} are names of the same part; keep only one")
        parts.append(matching[0] if matching else None)
    train, test, validation = parts
    if test is not None and validation is not None:
        warn(f"{place}: {validation} is not used, because {test} is the test part")
    return train, validation if test is None else test


def part_like(names: Collection[str]) -> tuple[str | None, str | None]:
    """Return the first name that may be meant as the training part, and the first that may be meant as a test part.

    Such a name begins or ends with the name of a part and has more than letters, as in training_set or images-val.

    >>> part_like(["cats", "train_images", "Test 2"])
    ('train_images', 'Test 2')
    """
    words = {name: re.split(r"[\W\d_]+", name.casefold()) for name in names}
    ends = {name: {parts[0], parts[-1]} for name, parts in words.items() if len(parts) > 1}
    train, test = (
        next((name for name in ends if ends[name].intersection(accepted)), None)
        for accepted in (TRAIN_PARTS, [name for part in TEST_PARTS for name in part])
    )
    return train, test
