"""Data sets that are Python objects: tables, map-style data sets, tuples (train, test), and one data set per worker."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.data.columns import parts_of, warn_of_unused
from fedsim.data.drawn_tests import drawn_rows, split_test
from fedsim.data.encoding import DataTable, Names, class_names, require_equal_classes, train_and_test
from fedsim.data.tensors import TensorData, as_tensor_data
from fedsim.errors import DataError, show

ACCEPTED = (
    "a name, a path, a function, a data set, a data frame or a tuple (inputs, targets), a tuple (train, test) of them, "
    "or a list with one data set per worker, such as fedsim.TensorData(inputs, targets)"
)
WORKER = "worker"  # column of owners in a list of data sets
TRAIN, TEST = "the training data", "the test data"
Parts = tuple[Any, Any]  # training part, and test part or None


def source_of(target: Any) -> Callable[..., tuple[TensorData, TensorData]]:
    """Return a data set function for a Python object. Its parameters are those that the object needs.

    Args:
        target: one data set, a tuple (train, test), a dict of parts such as {"train": ..., "test": ...}, or a list of
            these with one for each worker. Each data set is a table (data frame, Hugging Face data set), a map-style
            data set of (input, target) samples, or a tuple (inputs, targets) of arrays.

    Raises DataError if the object cannot be used.
    """
    shares = isinstance(target, list)
    workers = [_parts(one) for one in target] if shares else [_parts(target)]
    tested = {test is not None for _, test in workers}
    tables = {is_table(part) for parts in workers for part in parts if part is not None}
    if len(tested) > 1 or len(tables) > 1:
        raise DataError(
            "all data sets must be tables or none, and all or none must have a test part; if these are inputs and "
            "targets, pass one table with both, such as inputs.assign(target=targets)"
        )
    (has_test,), (of_tables,) = tested, tables

    def read(**options: Any) -> tuple[TensorData, TensorData]:
        return (_from_tables if of_tables else _from_samples)(workers, shares, **options)

    names = ("target", "inputs", "ids", "standardize") * of_tables + ("test_fraction",) * (not has_test)
    known = inspect.signature(train_and_test, eval_str=True).parameters
    read.__signature__ = inspect.Signature([known[name] for name in names])  # type: ignore[attr-defined]
    return read


def is_table(data: Any) -> bool:
    """Whether an object is a data frame or a Hugging Face data set with a length."""
    named = hasattr(data, "column_names") or (hasattr(data, "columns") and hasattr(data, "to_numpy"))
    return named and hasattr(data, "__len__")


def _parts(data: Any) -> Parts:
    """Return the training part and the test part (or None) of an object. Raise DataError if it cannot be used."""
    if isinstance(data, Mapping):
        train, test = parts_of(list(data), TRAIN)
        if train is None:
            raise DataError(
                f"has the parts {', '.join(map(str, data))}; one of them must be called train; for one data set per "
                "worker, pass a list"
            )
        parts = data[train], None if test is None else data[test]
        warn_of_unused(list(data), (train, test), TRAIN)
    elif isinstance(data, tuple) and len(data) == 2 and not isinstance(data[0], (Tensor, np.ndarray)):
        parts = data
    else:
        parts = data, None
    if parts[0] is None:
        raise DataError("there is no training data; a data set is a tuple (train, test), or one of them")
    return parts


def _from_tables(
    workers: Sequence[Parts], shares: bool, ids: Names | None = None, **options: Any
) -> tuple[TensorData, TensorData]:
    """Return the samples of tables, of which there is one for each worker if `shares` is true."""
    train, test = (
        None if parts[0] is None else _table(parts, place, shares)
        for parts, place in zip(zip(*workers, strict=True), (TRAIN, TEST), strict=True)
    )
    assert train is not None
    ids = _index_of(workers[0][0]) if ids is None else [ids] if isinstance(ids, str) else ids
    ids, by = ([WORKER, *ids], WORKER) if shares else (ids, None)
    return train_and_test(train, test, ids=ids, workers=by, **options)


def _table(tables: Sequence[Any], place: str, shares: bool) -> DataTable:
    """Return data frames or Hugging Face data sets as one table, with a column WORKER if `shares` is true."""
    parts, index, classes = list[dict[Any, Any]](), list[str](), dict[str, list[str]]()
    for worker, table in enumerate(tables):
        here = f"{place} of worker {worker}" if shares else place
        if index := _index_of(table):
            table = table.reset_index()  # named levels become columns
        names = list(table.column_names if hasattr(table, "column_names") else table.columns)
        _check_names(names, here)
        if parts and set(names) != set(parts[0]):
            different = sorted(map(str, set(names) ^ set(parts[0])))[0]
            raise DataError(f"{here}: has other columns than worker 0, such as {show(different)}; use the same columns")
        if shares and WORKER in names:
            raise DataError(f"{here}: has a column {show(WORKER)}, but the list defines the workers; rename the column")
        parts.append({name: table[name][:] for name in names})
        ours, classes = DataTable({}, here, classes=class_names(table)), classes or class_names(table)
        require_equal_classes(ours, DataTable({}, f"{place} of worker 0", classes=classes), names)
    if not shares:
        return DataTable(parts[0], place, index, classes=classes)
    sizes = [len(next(iter(part.values()))) for part in parts]
    columns = {name: list(itertools.chain.from_iterable(part[name] for part in parts)) for name in parts[0]}
    ends = np.cumsum(sizes)

    def row(index: int) -> str:
        worker = int(np.searchsorted(ends, index, side="right"))
        return f"row {index - ends[worker] + sizes[worker]} of worker {worker}"

    return DataTable({**columns, WORKER: np.repeat(np.arange(len(sizes)), sizes)}, place, index, row, classes=classes)


def _index_of(table: Any) -> list[str]:
    """Return the names of the index of a data frame, without levels that have no name."""
    return [name for name in getattr(getattr(table, "index", None), "names", ()) if name is not None]


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


def _from_samples(workers: Sequence[Parts], shares: bool, test_fraction: float = 0.2) -> tuple[TensorData, TensorData]:
    """Return the samples of map-style data sets, of which there is one for each worker if `shares` is true."""
    train, test = (
        None if parts[0] is None else _joined(parts, place) if shares else _read(parts[0], place)
        for parts, place in zip(zip(*workers, strict=True), (TRAIN, TEST), strict=True)
    )
    assert train is not None
    if test is not None:
        return train, test
    if not shares:
        return split_test(train, test_fraction, TRAIN)
    *rows, how = drawn_rows(len(train), None, test_fraction, TRAIN, workers=train.ids[WORKER])
    first, second = (train.take(part) for part in rows)
    return replace(first, assumed=(*first.assumed, how)), second


def _read(data: Any, place: str) -> TensorData:
    try:
        tensors = as_tensor_data(data)
    except DataError as error:
        raise DataError(f"{place}: {error}") from None
    if tensors.inputs.is_floating_point() and not (finite := tensors.inputs.isfinite()).all():
        sample = int((~finite).nonzero()[0, 0])
        raise DataError(f"{place}: sample {sample} has NaN or infinity as input; replace it, or remove such samples")
    return tensors


def _joined(parts: Sequence[Any], place: str) -> TensorData:
    """Return one data set with the samples of each worker one after another, and the owners in the column WORKER."""
    data = [_read(part, f"{place} of worker {worker}") for worker, part in enumerate(parts)]
    kinds = [(one.inputs.dtype, one.inputs.shape[1:], one.scale, one.shift, one.dtype) for one in data]
    for worker, (one, kind) in enumerate(zip(data, kinds, strict=True)):
        if not len(one):
            raise DataError(f"{place} of worker {worker}: has no samples; each worker needs at least one")
        if kind != kinds[0] or one.targets.shape[1:] != data[0].targets.shape[1:] or one.rows is not None:
            raise DataError(
                f"{place} of worker {worker}: its inputs are {kind[0]} of shape {list(kind[1])}, but those of worker 0 "
                f"are {kinds[0][0]} of shape {list(kinds[0][1])}; all data sets must have the same types, shapes and "
                "normalisation, without `rows`"
            )
    inputs, targets = (torch.cat([getattr(one, name) for one in data]) for name in ("inputs", "targets"))
    owners = np.repeat(np.arange(len(data)), [len(one) for one in data])
    return replace(data[0], inputs=inputs, targets=targets, ids={WORKER: owners})
