"""Conversion of tables to training and test samples, for tables in files, data frames and Hugging Face data sets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedsim.core.numbers import ProperFraction
from fedsim.data.columns import (
    DIVERGES,
    PART_NAMES,
    UNSCALED,
    Columns,
    DataColumn,
    collected,
    input_columns,
    mostly_numbers,
    only_target,
    parts_of,
    require_different_names,
    samples_of,
    warn,
    warn_of_unscaled,
    warn_of_unused,
)
from fedsim.data.drawn_tests import SAMPLES, drawn_rows
from fedsim.data.partitions.ids import joined
from fedsim.data.tensors import TensorData, reading
from fedsim.errors import DataError, cut, plural, show
from fedsim.hints.meanings import nearest

Names = str | list[str]  # one column, or several
InputNames = Names | dict[str, Names]  # columns that are joined to one input, or those of several inputs by name
Rows = slice | np.ndarray  # positions of samples
MOST_TEXTS = 100  # maximum number of different texts in a column that becomes one-hot inputs
WORKER = "worker"  # column of owners if each worker has its own data set
NOBODY = -1  # owner of test samples that belong to no worker


@dataclass(frozen=True)
class DataTable:
    """Named columns of a table.

    Attributes:
        columns: columns by name, arrays or lists [n, ...].
        place: name of the table in error messages, such as a file name.
        index: names of columns that were the index of a data frame, which contain the owners of samples by default.
        row: function from the index of a row to its name in error messages, such as "line 9".
        assumed: what was assumed when the table was read.
        classes: names of the classes 0, 1, ... of columns that contain numbers of classes.
        worker: if each table belongs to one worker, the number of this worker, or NOBODY for a table of all workers.
        signs: what to change if numbers contain signs such as commas (see `DataColumn`).
    """

    columns: Columns
    place: str
    index: Collection[str] = ()
    row: Callable[[int], str] = "row {}".format
    assumed: tuple[str, ...] = ()
    classes: Mapping[str, list[str]] = field(default_factory=dict)
    worker: int = 0
    signs: str = DataColumn._field_defaults["signs"]

    def column(self, name: str) -> DataColumn:
        """Return a column. Raise DataError if the table does not have it."""
        if name not in self.columns:
            raise DataError(f"{self.place}: has no column {show(name)}; {nearest(str(name), map(str, self.columns))}")
        return DataColumn(self.columns[name], f"{self.place}: column {show(name)}", self.row, self.signs)


def train_and_test(
    train: Sequence[DataTable],
    test: Sequence[DataTable],
    *,
    target: str | None = None,
    inputs: InputNames | None = None,
    ids: Names | None = None,
    standardize: bool = False,
    split: str | None = None,
    test_fraction: ProperFraction = 0.2,
    of_workers: str = "",
) -> tuple[TensorData, TensorData]:
    """Return the training and test samples of data sets that are stored as columns, such as CSV files.

    Columns of numbers become inputs unchanged. A column of text is one-hot encoded: it becomes one input for each
    different text in the training samples (at most 100), in sorted order. A text that occurs only in test samples is
    encoded as zeros. Text targets become class labels in sorted order.

    Args:
        train, test: the tables of both parts. Without a test part, the column `split` says which rows of `train` are
            test samples, or these are drawn at random.
        target: column of targets. None: the only column called label, labels, target, targets or y.
        inputs: columns of inputs, which are concatenated, or a dict with the columns of several inputs, by name. None:
            all other columns, except those that only number the rows.
        ids: columns that contain the owner of each sample, such as a user. None: the table's index. The test tables may
            lack these columns.
        standardize: whether to subtract the training samples' mean from each column of numbers, and to divide by their
            standard deviation. A column that is constant in the training samples is only shifted, to 0.
        split: column with the part of each sample, such as train and test. None: the column called split, if all of
            its values are names of parts.
        test_fraction: fraction of `train` that is drawn as test samples if `test` is empty.
        of_workers: name of `train` in error messages if each table belongs to one worker, so that the column `worker`
            contains the owners, and the draw is stratified by worker. Otherwise it is stratified by class.

    Raises DataError, with the place, the column, the row and the value, for missing columns and values, text between
    numbers, NaN and infinity, more than 100 different texts, and columns that cannot be joined to one input.
    """
    tables, place = [*train, *test], of_workers or train[0].place
    if split is not None and test:
        raise DataError(f"data.split = {show(split)}: the data has a test part already; omit data.split or this part")
    for table in train:
        if different := sorted(map(str, set(table.columns) ^ set(train[0].columns))):
            raise DataError(
                f"{table.place}: has other columns than {train[0].place}, such as {show(different[0])}; all "
                "tables must have the same columns"
            )
        if of_workers and WORKER in table.columns:
            raise DataError(f"{table.place}: has a column {show(WORKER)}, but each table is a worker; rename it")
    if split is None and not test:
        named = [name for name in train[0].columns if str(name).casefold() == "split" and name not in names_in(inputs)]
        texts = [{str(value).casefold() for table in train for value in table.columns[name]} for name in named]
        split = next((name for name, values in zip(named, texts, strict=True) if values <= PART_NAMES), None)
        values = set().union(*texts)
        others = sorted(values - PART_NAMES)
        if inputs is None and target not in named and 0 < len(others) < len(values & PART_NAMES):
            line = f"becomes an input, as it has the values {cut(', '.join(others))}; correct them, or set data.split"
            warn(f"{place}: column {show(named[0])} {line} to name the column of the parts, or data.inputs")
    owned_by = [*([ids] if isinstance(ids, str) else train[0].index if ids is None else ids)]
    if (split_by := reading().split_by) not in (None, SAMPLES, *owned_by):
        owned_by.append(str(split_by))
    target = target or only_target(train[0].columns, place)
    if inputs is None:
        taken = [target, *owned_by, *train[0].index, split]
        candidates = {name: values for name, values in train[0].columns.items() if name not in taken}
        inputs = input_columns(candidates, place)
        arrays = [name for name in inputs if np.ndim(next(iter(candidates[name]), 0))]
        if arrays and len(inputs) > 1:
            raise DataError(
                f"{place}: the columns {cut(', '.join(map(str, inputs)))} are not joined to one input, because "
                f"{show(str(arrays[0]))} has several numbers per sample; set data.inputs to one of these columns, to a "
                "list of columns to join, or to a dict of several inputs by name"
            )
    columns = names_in(inputs)
    if isinstance(inputs, dict) and not (inputs and all(key and names for key, names in inputs.items())):
        raise DataError(f"data.inputs = {show(inputs)}: must contain names of inputs, each with at least one column")
    if target in columns:
        raise DataError(f"data.inputs = {show(inputs)}: contains the target {show(target)}; remove it")
    sizes = [len(table.column(target).values) for table in tables]
    if 0 in sizes:
        raise DataError(f"{tables[sizes.index(0)].place}: has no samples")
    for table in tables:
        require_equal_classes(table, train[0], [target, *columns, *owned_by])
    errors = list[str]()
    with collected(errors):
        targets, are_names = target_numbers(*([table.column(target) for table in part] for part in (train, test)))
    with_owners = {name: [*train, *(table for table in test if name in table.columns)] for name in owned_by}
    owners = dict[str, np.ndarray]()
    for name, having in with_owners.items():
        with collected(errors):
            owners[name] = joined([table.column(name).owners() for table in having], f"{place}: column {show(name)}")
    if of_workers:
        owned = tables if any(table.worker != NOBODY for table in test) else train
        owners[WORKER] = np.repeat([table.worker for table in owned], sizes[: len(owned)])
    n, drawn, drawn_by = sum(sizes[: len(train)]), list[str](), None
    parts: list[Rows] = [slice(n), slice(n, None)] if test else []
    if split is not None and not errors and (parts := _split_of(train, split, place)):
        drawn = [f"column {cut(split)} divides the samples"]
    if errors:
        parts = [slice(None), slice(0)]
    elif not parts:
        by = owners.get(WORKER)
        *parts, drawn_by, how = drawn_rows(targets, test_fraction, place, are_classes=are_names, workers=by, ids=owners)
        drawn = [how]
    joint = {  # the key "" stands for the only input
        key: _joined(tables, names_in(names), parts, place, errors, standardize=standardize)
        for key, names in (inputs if isinstance(inputs, dict) else {"": columns}).items()
    }
    encoded = ", ".join(f"{key} = {text}" if key else text for key, (_, text) in joint.items())
    first, second = (
        samples_of(
            joint[""][0][rows] if "" in joint else {key: array[rows] for key, (array, _) in joint.items()},
            targets[rows],
            {name: of[rows] for name, of in owners.items() if rows is parts[0] or len(of) == len(targets)},
            place,
        )
        for rows in parts
    )
    warn_of_unscaled(first, f"{place}: column {show(target)}", "targets")
    whole = first.targets.is_floating_point() and not bool((first.targets % 1).any())
    kind = " (whole numbers, but stored as floating-point numbers: classes only with task=classification)" * whole
    roles = f"target {cut(str(target))}{kind}, inputs {encoded}"
    assumed = roles, *train[0].assumed, *first.assumed, *drawn
    return replace(first, assumed=assumed, drawn_by=drawn_by), second


def names_in(columns: InputNames | None) -> list[str]:
    """Return the names of all columns in a setting such as `inputs`."""
    if isinstance(columns, dict):
        return [name for names in columns.values() for name in names_in(names)]
    return [columns] if isinstance(columns, str) else list(columns or ())


def _split_of(tables: Sequence[DataTable], split: str, place: str) -> list[Rows]:
    """Return the rows of the training part and of the test part according to the column `split`, or [] without parts.

    Raises DataError if there are other parts, but no training part or no test part.
    """
    values = np.concatenate([table.column(split).array().astype(str) for table in tables])
    names, where = np.unique(values).tolist(), f"{place}: column {show(split)}"
    used = parts_of(names, where)
    if None in used and names != [used[0]]:
        raise DataError(f"{where}: has the values {cut(', '.join(names))}; it must have train and test (or validation)")
    warn_of_unused(names, used, where)
    return [] if None in used else [np.flatnonzero(values == name) for name in used]


def table_of(data: Any, place: str, worker: int = 0) -> DataTable:
    """Return a data frame or a Hugging Face data set as a table. Named levels of an index become columns."""
    index = [name for name in getattr(getattr(data, "index", None), "names", ()) if name is not None]
    data = data.reset_index() if index else data
    names = list(data.column_names if hasattr(data, "column_names") else data.columns)
    require_different_names(names, place)
    columns = {name: data[name][:] for name in names}
    return DataTable(columns, place, index, classes=class_names(data), worker=worker)


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


def target_numbers(train: Sequence[DataColumn], test: Sequence[DataColumn]) -> tuple[np.ndarray, bool]:
    """Return targets as one array of numbers [n, ...], and whether they are class labels that were text.

    Text is numbered in the sorted order of the classes of the training samples. Text of numbers that are not integers
    is converted to numbers.
    """
    columns = [*train, *test]
    arrays = [column.array() for column in columns]
    if not any(array.dtype.kind == "U" for array in arrays):
        return np.concatenate([column.numbers_or_text() for column in columns]), False
    texts = [array.astype(str) for array in arrays]
    names, known = np.concatenate(texts), np.concatenate(texts[: len(train)])
    if mostly_numbers(known):
        numbers = np.concatenate([column.numbers(text) for column, text in zip(columns, texts, strict=True)])
        if (numbers % 1).any():
            return numbers, False
    classes = np.unique(known)
    train[0].require_text(classes)
    for column, text in zip(columns, texts, strict=True):
        if len(unknown := text[~np.isin(text, classes)]):
            raise DataError(
                f"{column.place}: the class {show(str(unknown[0]))} has no training samples; add some, or remove its "
                "test samples"
            )
    return np.searchsorted(classes, names), True


def _values(columns: Sequence[DataColumn], train: Rows) -> np.ndarray:
    """Return a column of all tables as an array: text [n] if the rows `train` have text, otherwise numbers [n, ...]."""
    arrays = [column.numbers_or_text(convert=False) for column in columns]
    values = np.concatenate(arrays)  # numbers beside text become text
    if values.dtype.kind != "U" or not mostly_numbers(values[train]):
        return values
    pairs = zip(columns, arrays, strict=True)
    return np.concatenate([column.numbers(array) if array.dtype.kind == "U" else array for column, array in pairs])


def _joined(
    tables: Sequence[DataTable],
    names: Sequence[str],
    parts: Sequence[Rows],
    place: str,
    errors: list[str],
    *,
    standardize: bool,
) -> tuple[np.ndarray, str]:
    """Join columns of inputs to one array, float32 [n, features], and return it with a description.

    A single column of arrays [n, ...] is returned unchanged. `parts` are the rows of the training and test samples.
    `standardize`: whether to scale columns of numbers by mean and standard deviation of the training samples.

    Raises DataError with the earlier `errors` and the errors of all columns, such as values that are not numbers, and
    arrays of two or more dimensions that would be joined.
    """
    blocks, described, unscaled = list[np.ndarray](), list[str](), list[tuple[float, str]]()
    has_numbers = False
    if not names:
        raise DataError(f"{place}: has no input columns, only the target and owners; add at least one input column")
    for name in names:
        with collected(errors):
            values, text = _values([table.column(name) for table in tables], parts[0]), ""
            column = f"{place}: column {show(name)}"
            if values.ndim > 2 and len(names) > 1:
                raise DataError(
                    f"{column} has values of shape {list(values.shape[1:])}, such as images, which cannot be joined "
                    f"with other columns to one input; set data.inputs to one of the columns "
                    f"{cut(', '.join(map(str, names)))}"
                )
            if values.dtype.kind == "U":
                tables[0].column(name).require_text(np.unique(values[parts[0]]))
                values, text = _one_hot(values, parts, column)
            elif standardize:
                values, has_numbers = standardized(values, parts[0]), True
            elif (
                values.ndim == 1
                and (size := float(np.sqrt(np.square(values[parts[0]], dtype=float).mean()))) > UNSCALED
            ):
                unscaled.append((size, f"{column} has values from {values.min():,.6g} to {values.max():,.6g}"))
            if len(names) > 1 or values.ndim == 1:
                values = values.reshape(len(values), -1).astype(np.float32, copy=False)
            elif values.dtype.kind == "f":  # pictures and tokens keep their integers
                values = values.astype(np.float32, copy=False)
            blocks.append(values)
            described.append(f"{name}{text}")
    if errors:
        raise DataError("; also ".join([errors[0], *(error.removeprefix(f"{place}: ") for error in errors[1:])]))
    if unscaled:
        others = f" (and {plural(len(unscaled) - 1, 'other column')})" if len(unscaled) > 1 else ""
        remedy = f"{DIVERGES}; data.standardize=true scales every column of numbers"
        warn(f"{max(unscaled)[1]}{others}, {remedy}")
    array = blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis=1)
    return array, cut(", ".join(described)) + ", numbers standardized" * has_numbers


def _one_hot(values: np.ndarray, parts: Sequence[Rows], place: str) -> tuple[np.ndarray, str]:
    """Return text [n] as a one-hot array [n, texts of the training samples], and a description.

    `parts` are the rows of the training and test samples.
    """
    known = np.unique(values[parts[0]])
    if len(known) > MOST_TEXTS:
        raise DataError(
            f"{place} has {len(known):,} different texts, such as {show(str(known[0]))}; at most {MOST_TEXTS} become "
            "inputs; leave the column out by setting data.inputs, or name it in data.ids if it contains the owners of "
            "samples"
        )
    new = int((~np.isin(values[parts[1]], known)).sum())
    unseen = f", all 0 in {new} test samples with other texts" * (new > 0)
    return (values[:, None] == known).astype(np.float32), f" (one-hot, {len(known)} texts{unseen})"


def standardized(values: np.ndarray, train: Rows) -> np.ndarray:
    """Return numbers [n, ...], minus the mean of the rows `train`, divided by their standard deviation if it is not 0.

    >>> standardized(np.array([[1.0, 5.0], [3.0, 5.0], [2.0, 6.0]]), slice(2))
    array([[-1.,  0.],
           [ 1.,  0.],
           [ 0.,  1.]])
    """
    known = values[train].astype(float)
    return (values - known.mean(0)) / np.where(np.ptp(known, 0) == 0, 1.0, known.std(0))
