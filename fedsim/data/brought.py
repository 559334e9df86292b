"""Data sets that are Python objects: tables, map-style data sets, tuples (train, test), and one data set per worker."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsim.core.learning_task import described
from fedsim.core.model_inputs import concatenated, named
from fedsim.core.objects import ARRAYS, are_several, is_pair, is_samples
from fedsim.data.columns import PART_NAMES, DataColumn, parts_of, warn_of_unscaled, warn_of_unused
from fedsim.data.drawn_tests import split_test
from fedsim.data.encoding import NOBODY, WORKER, table_of, target_numbers, train_and_test
from fedsim.data.tensors import TensorData, as_tensor_data
from fedsim.errors import DataError, called, plural, show

ACCEPTED = (
    "a name, a path, a function, a data set, a data frame or a tuple (inputs, targets), a tuple (train, test) of them, "
    "or one of these for each worker: a list such as [(inputs_1, targets_1), (inputs_2, targets_2)], or a dict such as "
    '{"A": (train, test), "B": (train, test)}'
)
TRAIN, TEST = "the training data", "the test data"
Parts = tuple[Any, ...]  # the training part, or the training part and the test part, of which one may be None


class Part(NamedTuple):
    """The training part or the test part of a data set.

    Attributes:
        data: the samples.
        place: name of the part in error messages.
        worker: number of the worker, if there is one data set for each worker. NOBODY: a test part for all workers.
    """

    data: Any
    place: str
    worker: int


def source_of(target: Any) -> Callable[..., tuple[TensorData, TensorData]]:
    """Return a function that reads a Python object as a data set, with the parameters that this type of object needs.

    The function's attribute `one_per_worker` says whether there is one data set for each worker.

    Args:
        target: one data set, a tuple (train, test), a dict of parts such as {"train": ..., "test": ...}, or one of
            these for each worker: a list, or a dict by name. A training part may also be a list or a dict with one data
            set for each worker. Each data set is a table (data frame, Hugging Face data set), a map-style data set of
            (input, target) samples, or a tuple (inputs, targets) of arrays.

    Raises DataError if the object cannot be used.
    """
    clients, for_all = _clients(target), None
    if clients is None:
        parts = _parts(target, of_worker=False)
        if (clients := _clients(parts[0])) is not None and len(parts) == 2:
            own = _clients(parts[1])
            clients, for_all = (clients, parts[1]) if own is None else (_with_own_tests(clients, own), None)
    shares = clients is not None
    workers = [(name, _parts(one, of_worker=True)) for name, one in clients] if clients else [("", parts)]
    workers.sort(key=lambda worker: worker[1][0] is None)  # workers without training samples are last
    names = tuple(name for name, _ in workers)
    train, test = (
        [
            Part(parts[part], f"{place} of worker {called(worker, names)}" if shares else place, worker)
            for worker, (_, parts) in enumerate(workers)
            if part < len(parts) and parts[part] is not None
        ]
        for part, place in enumerate((TRAIN, TEST))
    )
    lacks_test = bool(test) and any(len(parts) == 1 for _, parts in workers)
    test += [] if for_all is None else [Part(for_all, TEST, NOBODY)]
    tables = {is_table(part.data) for part in [*train, *test]}
    if not train:
        raise DataError("there is no training data; at least one worker must have training samples")
    if lacks_test or len(tables) > 1:
        raise DataError(
            "some data sets are tables, or have a test part, while others do not; use one form for all (a test part "
            "may be None), and join inputs and targets in one table, such as inputs.assign(target=targets)"
        )
    (of_tables,), has_test = tables, bool(test)
    are_pairs = shares and not any(names) and is_pair(train[0].data)
    pairs = ("each tuple (inputs, targets) in the list is the data of one worker",) * are_pairs

    def read(**options: Any) -> tuple[TensorData, TensorData]:
        first, second = (_from_tables if of_tables else _from_samples)(train, test, shares, **options)
        return replace(first, assumed=(*pairs, *first.assumed), worker_names=names if any(names) else ()), second

    of_split = ("split",) * of_tables + ("test_fraction",)
    options = ("target", "inputs", "ids", "standardize") * of_tables + of_split * (not has_test)
    known = inspect.signature(train_and_test, eval_str=True).parameters
    read.__signature__ = inspect.Signature([known[name] for name in options])  # type: ignore[attr-defined]
    read.one_per_worker = shares  # type: ignore[attr-defined]
    return read


def _clients(data: Any) -> list[tuple[str, Any]] | None:
    """Return pairs (name, data) if there is one data set for each worker, otherwise None. A list has no names."""
    if isinstance(data, list) and data and not is_samples(data):
        return [("", one) for one in data]
    if not isinstance(data, Mapping) or PART_NAMES.intersection(str(key).casefold() for key in data):
        return None
    names = list(map(str, data))
    if repeated := [name for name in names if names.count(name) > 1]:
        raise DataError(f"two workers are called {show(repeated[0])}; give each worker another name")
    return list(zip(names, data.values(), strict=True))


def _with_own_tests(train: list[tuple[str, Any]], test: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return pairs (name, (training part, test part)) from the training parts and the test parts of all workers."""
    if not train[0][0] and not test[0][0] and len(train) == len(test):
        return [("", (first, second)) for (_, first), (_, second) in zip(train, test, strict=True)]
    if not (train[0][0] and test[0][0]):
        raise DataError(
            f"there are {plural(len(train), 'training part')} and {plural(len(test), 'test part')} of workers; pass "
            "two lists of equal length, two dicts, or one test set for all workers"
        )
    first, second = dict(train), dict(test)
    return [(name, (first.get(name), second.get(name))) for name in {**first, **second}]


def is_table(data: Any) -> bool:
    """Whether an object is a data frame or a Hugging Face data set with a length."""
    named = hasattr(data, "column_names") or (hasattr(data, "columns") and hasattr(data, "to_numpy"))
    return named and hasattr(data, "__len__")


def holds_columns(data: Any) -> bool:
    """Whether an object consists of arrays, tensors and data frames, which are read without a loop over samples."""
    if isinstance(data, Mapping) or (isinstance(data, (tuple, list)) and not is_samples(data)):
        parts = [part for part in (data.values() if isinstance(data, Mapping) else data) if part is not None]
        return bool(parts) and all(map(holds_columns, parts))
    return isinstance(data, (TensorData, *ARRAYS)) or is_pair(data) or hasattr(data, "to_numpy")


def _parts(data: Any, *, of_worker: bool) -> Parts:
    """Return the training part and the test part (if given) of an object. Raise DataError if it cannot be used.

    `of_worker`: whether the object belongs to one worker, which may have only a test part.
    """
    if isinstance(data, Mapping):
        train, test = parts_of(list(data), TRAIN)
        if train is None and (test is None or not of_worker):
            raise DataError(
                f"has the parts {', '.join(map(str, data))}; one of them must be called train; for one data set per "
                "worker, use the names of workers only"
            )
        parts = tuple(None if name is None else data[name] for name in (train, test))
        parts = parts if test is not None else parts[:1]
        warn_of_unused(list(data), (train, test), TRAIN)
    elif isinstance(data, tuple) and len(data) == 2 and not isinstance(data[0], ARRAYS) and not is_pair(data):
        parts = data
        lists = [part for part in data if isinstance(part, list) and is_pair(part) and not are_several(part[0])]
        shapes = [[array.shape[1:] for array in part] for part in lists]
        if len(shapes) == 2 and shapes[0][0] == shapes[0][1] != shapes[1][0]:
            raise DataError(
                "there is a list of inputs and a list of targets; for one data set per worker, pass "
                "data=list(zip(inputs, targets))"
            )
    else:
        parts = (data,)
    if of_worker and len(parts) == 2 and not getattr(parts[1], "__len__", lambda: 1)():
        parts = parts[0], None  # a test part without samples
    if parts[0] is None and (parts[-1] is None or not of_worker):
        raise DataError("there is no training data; pass a tuple (train, test), or only the training data")
    return parts


def _from_tables(
    train: Sequence[Part], test: Sequence[Part], shares: bool, **options: Any
) -> tuple[TensorData, TensorData]:
    """Return the training and test samples of tables. `shares`: whether there is one table for each worker."""
    first, second = ([table_of(*part) for part in parts] for parts in (train, test))
    return train_and_test(first, second, of_workers=TRAIN * shares, **options)


def _from_samples(
    train: Sequence[Part], test: Sequence[Part], shares: bool, test_fraction: float = 0.2
) -> tuple[TensorData, TensorData]:
    """Return the training and test samples of map-style data sets.

    `shares`: whether there is one data set for each worker. `test_fraction`: fraction of the samples that is drawn for
    tests if there is no test part.
    """
    train, test, are_names = _with_classes(train, test)
    first = _joined(train, shares)
    warn_of_unscaled(first, TRAIN, "inputs", "targets")
    if test:
        return first, _joined(test, shares)
    owners = first.ids[WORKER] if shares else None
    return split_test(first, test_fraction, TRAIN, are_classes=are_names, workers=owners)


def _with_classes(train: Sequence[Part], test: Sequence[Part]) -> tuple[Sequence[Part], Sequence[Part], bool]:
    """Convert arrays of text targets to class labels. Return both parts, and whether any targets were text."""
    parts = [*train, *test]
    pairs = [part.data for part in parts if is_pair(part.data)]
    if not any(isinstance(targets, np.ndarray) and targets.dtype.kind in "OUT" for _, targets in pairs):
        return train, test, False
    if len(pairs) < len(parts):
        raise DataError("targets are text in some data sets only; pass each data set as a tuple (inputs, targets)")
    columns = [DataColumn(np.asarray(part.data[1]), f"{part.place}: targets") for part in parts]
    numbers, are_names = target_numbers(columns[: len(train)], columns[len(train) :])
    ends = np.cumsum([len(column.values) for column in columns])
    labels = np.split(numbers, ends[:-1])
    parts = [part._replace(data=(part.data[0], own)) for part, own in zip(parts, labels, strict=True)]
    return parts[: len(train)], parts[len(train) :], are_names


def _read(data: Any, place: str) -> TensorData:
    try:
        tensors = as_tensor_data(data)
    except DataError as error:
        raise DataError(f"{place}: {error}") from None
    for name, tensor in named(tensors.inputs).items():
        if tensor.is_floating_point() and not (finite := tensor.float().isfinite()).all():
            sample = int((~finite).nonzero()[0, 0])
            where = "as input" if name == "inputs" else f"in {name}"
            raise DataError(f"{place}: sample {sample} has NaN or infinity {where}; replace it, or remove such samples")
    return tensors


def _joined(parts: Sequence[Part], shares: bool) -> TensorData:
    """Return one data set with the samples of all parts.

    If `shares` is true, each part belongs to a worker, whose ID is in the column WORKER. Otherwise there is one part.
    """
    data = {part.place: _read(part.data, part.place) for part in parts}
    first = next(iter(data.values()))
    if not shares:
        return first
    for place, one in data.items():
        if _kind(one) != _kind(first) or one.rows is not None:
            raise DataError(
                f"{place}: its inputs, {_described(one)}, differ from those of {parts[0].place}, "
                f"{_described(first)}; all data sets must have the same type, shape and normalisation, and no "
                "`rows`"
            )
    inputs = concatenated([one.inputs for one in data.values()])
    targets = torch.cat([one.targets for one in data.values()])
    owners = np.repeat([part.worker for part in parts], [len(one) for one in data.values()])
    return replace(first, inputs=inputs, targets=targets, ids={WORKER: owners} if (owners != NOBODY).any() else {})


def _kind(data: TensorData) -> tuple[Any, ...]:
    inputs = {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in named(data.inputs).items()}
    return inputs, data.targets.shape[1:], data.scale, data.shift, data.dtype


def _described(data: TensorData) -> str:
    several = not isinstance(data.inputs, Tensor)
    return ", ".join(f"{name} {described(t)}" if several else described(t) for name, t in named(data.inputs).items())
