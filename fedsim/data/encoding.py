"""Conversion of tables to training and test samples, for tables in files, data frames and Hugging Face data sets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedsim.core.numbers import ProperFraction
from fedsim.core.suggestions import nearest
from fedsim.data.columns import (
    Columns,
    DataColumn,
    input_columns,
    mostly_digits,
    mostly_numbers,
    only_target,
    samples_of,
    warn,
    warn_of_unlikely_classes,
)
from fedsim.data.drawn_tests import drawn_rows
from fedsim.data.tensors import TensorData
from fedsim.errors import DataError, cut, plural, show

Names = str | list[str]  # one column, or several
MOST_TEXTS = 100  # maximum number of different texts in a column that becomes one-hot inputs
MOST_LISTED = 8  # maximum number of columns that are listed
UNSCALED = 10  # root mean square of a column from which a warning recommends to standardize


@dataclass(frozen=True)
class DataTable:
    """Named columns of a table.

    Attributes:
        columns: columns by name, arrays or lists [n, ...].
        place: name of the table in error messages, such as a file name.
        index: names of columns that were the index of a data frame, and are no inputs.
        row: function from the index of a row to its name in error messages, such as "line 9".
        assumed: what was assumed when the table was read.
        classes: names of the classes 0, 1, ... of columns that contain numbers of classes.
    """

    columns: Columns
    place: str
    index: Collection[str] = ()
    row: Callable[[int], str] = "row {}".format
    assumed: tuple[str, ...] = ()
    classes: Mapping[str, list[str]] = field(default_factory=dict)

    def column(self, name: str) -> DataColumn:
        """Return a column. Raise DataError if the table does not have it."""
        if name not in self.columns:
            raise DataError(f"{self.place}: has no column {show(name)}; {nearest(str(name), map(str, self.columns))}")
        return DataColumn(self.columns[name], f"{self.place}: column {show(name)}", self.row)


@dataclass(frozen=True)
class _Samples:
    """Samples whose inputs are still columns of numbers or text."""

    inputs: dict[str, np.ndarray]
    targets: np.ndarray
    owners: dict[str, np.ndarray]

    def take(self, rows: np.ndarray) -> _Samples:
        inputs, owners = ({name: values[rows] for name, values in part.items()} for part in (self.inputs, self.owners))
        return _Samples(inputs, self.targets[rows], owners)


def train_and_test(
    train: DataTable,
    test: DataTable | None,
    *,
    target: str | None = None,
    inputs: Names | None = None,
    ids: Names | None = None,
    standardize: bool = False,
    test_fraction: ProperFraction = 0.2,
    workers: str | None = None,
) -> tuple[TensorData, TensorData]:
    """Return the training and test samples of data sets that are stored as columns, such as CSV files.

    Columns of numbers are inputs as they are. A column of text with at most 100 different texts becomes one input per
    text of the training samples, in sorted order: 1 for the text of a sample, else 0. A test sample whose text no
    training sample has gets only zeros. Text targets become class labels in sorted order.

    Args:
        train, test: the tables. If `test` is None, test samples are drawn at random from `train`.
        target: column of targets. None: the only column called label, labels, target, targets or y.
        inputs: columns of inputs, which are concatenated. None: all other columns, without those that only number the
            rows.
        ids: columns that contain the owner of each sample, such as a user. None: there are none. `test` may lack them.
        standardize: whether to subtract the mean of each column of numbers and to divide by its standard deviation,
            both of the training samples. A column that is constant in them is only shifted, to 0.
        test_fraction: fraction of `train` that is drawn as test samples if `test` is None.
        workers: column of owners by which the draw is stratified, so that each of them keeps samples. None: the draw is
            stratified by class.

    Raises DataError, with the place, the column, the row and the value, for missing columns and values, text between
    numbers, NaN and infinity, more than 100 different texts, and columns that cannot be joined to one input.
    """
    tables = [train] if test is None else [train, test]
    ids = [ids] if isinstance(ids, str) else ids or []
    target = target or only_target(train.columns, train.place)
    if inputs is None:
        candidates = {name: values for name, values in train.columns.items() if name not in (target, *ids)}
        inputs = input_columns(candidates, train.index, train.place)
    inputs = [inputs] if isinstance(inputs, str) else inputs
    if target in inputs:
        raise DataError(f"data.inputs = {show(inputs)}: contains the target {show(target)}; remove it")
    for table in tables:
        if not len(table.column(target).values):
            raise DataError(f"{table.place}: has no samples")
    for table in tables:
        require_equal_classes(table, train, [target, *inputs])
    targets, are_names = target_numbers([table.column(target) for table in tables])
    columns = {name: _inputs([table.column(name) for table in tables]) for name in inputs}
    parts = [
        _Samples(
            {name: values[number] for name, values in columns.items()},
            targets[number],
            {name: table.column(name).owners() for name in ids if table is train or name in table.columns},
        )
        for number, table in enumerate(tables)
    ]
    places, drawn = [table.place for table in tables], []
    if test is None:
        values, owners = targets[0], None if workers is None else parts[0].owners[workers]
        are_labels = values.ndim == 1 and values.dtype.kind in "iub" and not (values < 0).any()
        *rows, how = drawn_rows(
            len(values),
            values if are_labels else None,
            test_fraction,
            train.place,
            are_classes=are_names,
            workers=owners,
            ids=parts[0].owners,
        )
        parts, places, drawn = [parts[0].take(part) for part in rows], [train.place] * 2, [how]
    arrays, encoded = _joined([part.inputs for part in parts], places, standardize=standardize)
    first, second = (
        samples_of(array, part.targets, part.owners, place)
        for array, part, place in zip(arrays, parts, places, strict=True)
    )
    whole = first.targets.is_floating_point() and not bool((first.targets % 1).any())
    numbers = " (whole numbers, but stored as floating-point numbers: no classes)" * whole
    roles = f"target {cut(str(target))}{numbers}, inputs {encoded}"
    return replace(first, assumed=(roles, *train.assumed, *first.assumed, *drawn)), second


def class_names(data: Any) -> dict[str, list[str]]:
    """Return the class names of the columns of a Hugging Face data set whose feature is a ClassLabel."""
    features = (data.features if hasattr(data, "column_names") else None) or {}
    return {name: feature.names for name, feature in features.items() if hasattr(feature, "names")}


def require_equal_classes(table: DataTable, train: DataTable, columns: Collection[str]) -> None:
    """Raise DataError if the numbers in a column stand for different classes in `table` and in `train`."""
    for name in columns:
        names, expected = (part.classes.get(name) for part in (table, train))
        if names and expected and names != expected:
            raise DataError(
                f"{table.place}: column {show(name)}: its classes are {cut(', '.join(names))}, but those of "
                f"{train.place} are {cut(', '.join(expected))}; use the same names in the same order, for example with "
                "datasets' align_labels_with_mapping"
            )


def target_numbers(columns: Sequence[DataColumn]) -> tuple[list[np.ndarray], bool]:
    """Return the targets of all tables as numbers [n, ...], and whether they are class labels that were text.

    Text is numbered in the sorted order of the classes of the training samples. Text of numbers that are not integers
    is converted to numbers.
    """
    arrays = [column.array() for column in columns]
    if not any(array.dtype.kind == "U" for array in arrays):
        return [column.numbers_or_text() for column in columns], False
    names = arrays[0].astype(str)
    if mostly_numbers(names):
        numbers = [column.numbers(array.astype(str)) for array, column in zip(arrays, columns, strict=True)]
        if any((values % 1).any() for values in numbers):
            return numbers, False
    classes = np.unique(names)
    warn_of_unlikely_classes(classes.tolist(), columns[0].place)
    for array, column in zip(arrays, columns, strict=True):
        if len(unknown := np.flatnonzero(~np.isin(array.astype(str), classes))):
            name = show(str(array[unknown[0]]))
            raise DataError(f"{column.place}: the class {name} has no training samples")
    return [np.searchsorted(classes, array.astype(str)) for array in arrays], True


def _inputs(columns: Sequence[DataColumn]) -> list[np.ndarray]:
    """Return a column of all tables: all numbers [n, ...], or all text [n]."""
    train, others = columns[0].numbers_or_text(), columns[1:]
    if train.dtype.kind == "U":
        return [train, *(column.numbers_or_text(convert=False).astype(str) for column in others)]
    pairs = [(column, column.numbers_or_text()) for column in others]
    return [train, *(column.numbers(array) if array.dtype.kind == "U" else array for column, array in pairs)]


def _joined(
    parts: Sequence[Mapping[str, np.ndarray]], places: Sequence[str], *, standardize: bool
) -> tuple[list[np.ndarray], str]:
    """Join the input columns of the training part and the test part to one array each, float32 [n, features].

    A single array [n, ...] is returned unchanged. Also returns a description of the columns.

    Raises DataError if there is no column, or if an image or another array of two or more dimensions would be joined.
    """
    names = list(parts[0])
    if not names:
        raise DataError(f"{places[0]}: has no input columns, only the target and owners; add at least one input column")
    arrays = [part[names[0]] for part in parts]
    if len(names) == 1 and arrays[0].ndim > 1:
        if standardize:
            raise DataError(
                f"data.standardize: is only used for columns of numbers, but {show(names[0])} has values of shape "
                f"{list(arrays[0].shape[1:])}; remove it"
            )
        arrays = [array.astype(np.float32) if array.dtype.kind == "f" else array for array in arrays]
        return arrays, cut(str(names[0]))  # pictures and tokens keep their integers
    blocks: list[list[np.ndarray]] = []
    texts, unscaled = dict[str, str](), dict[str, float]()
    for name in names:
        values = [part[name] for part in parts]
        place = f"{places[0]}: column {show(name)}"
        if values[0].ndim > 2:
            raise DataError(
                f"{place} has values of shape {list(values[0].shape[1:])}, such as images, which "
                "cannot be joined with other columns to one input; set `inputs` to one of the columns "
                f"{cut(', '.join(map(str, names)))}, or remove the others"
            )
        if values[0].dtype.kind == "U":
            values, texts[name] = _one_hot(values, place)
        elif standardize:
            values = standardized(*values)
        elif (size := float(np.sqrt(np.square(values[0], dtype=float).mean()))) > UNSCALED:
            unscaled[name] = size
        blocks.append([array.reshape(len(array), -1).astype(np.float32) for array in values])
    if unscaled:
        _warn_of_unscaled(parts[0], unscaled, places[0])
    described = [f"{cut(str(name))}{texts.get(name, '')}" for name in names]
    if len(names) > MOST_LISTED:
        described = [f"{len(names)} columns", *(f"{cut(str(name))}{text}" for name, text in texts.items())]
    scaled = ", standardized" * standardize
    return [np.concatenate(columns, axis=1) for columns in zip(*blocks, strict=True)], ", ".join(described) + scaled


def _one_hot(values: Sequence[np.ndarray], place: str) -> tuple[list[np.ndarray], str]:
    """Return text of both parts as one-hot arrays [n, texts of the training part], and a description."""
    known = np.unique(values[0])
    if len(known) > MOST_TEXTS:
        raise DataError(
            f"{place} has {len(known):,} different texts, such as {show(str(known[0]))}; at most {MOST_TEXTS} become "
            "inputs; leave the column out with `inputs`, or name it in `ids` if it contains the owners of the samples"
        )
    if mostly_digits(known):
        warn(
            f"{place} is text, such as {show(str(known[0]))}, and becomes one-hot inputs; if these are numbers, write "
            "them like 1234.5"
        )
    new = int((~np.isin(values[1], known)).sum())
    unseen = f", all 0 in {new} test samples with other texts" * (new > 0)
    return [array[:, None] == known for array in values], f" (one-hot, {len(known)} texts{unseen})"


def standardized(train: np.ndarray, test: np.ndarray) -> list[np.ndarray]:
    """Return both arrays [n, ...], minus the mean and divided by the standard deviation of each column of `train`.

    A column that is constant in `train` is not divided.

    >>> standardized(np.array([[1.0, 5.0], [3.0, 5.0]]), np.array([[2.0, 6.0]]))
    [array([[-1.,  0.],
           [ 1.,  0.]]), array([[0., 1.]])]
    """
    mean, deviation = train.mean(0, dtype=float), train.std(0, dtype=float)
    deviation = np.where(train.max(0) == train.min(0), 1.0, deviation)
    return [(values - mean) / deviation for values in (train, test)]


def _warn_of_unscaled(columns: Columns, sizes: Mapping[str, float], place: str) -> None:
    """Warn of columns with large numbers. `sizes` is the root mean square of each of them."""
    name = max(sizes, key=sizes.__getitem__)
    others = f" (and {plural(len(sizes) - 1, 'other column')})" if len(sizes) > 1 else ""
    warn(
        f"{place}: column {show(name)} has values from {columns[name].min():,.6g} to {columns[name].max():,.6g}{others}"
        ", for which SGD often diverges; data.standardize=true scales every column of numbers"
    )
