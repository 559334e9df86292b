"""Owners of samples: one or several columns of ids, such as the writer or the session of each sample."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from fedsim.errors import DataError, ExperimentError, show
from fedsim.hints.meanings import nearest

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
Ids = Mapping[str, Sequence[Any] | np.ndarray] | Sequence[Any] | np.ndarray | None


def id_columns(ids: Ids) -> dict[str, np.ndarray]:
    """Return the owners of samples as a dict from column name to array [n]. A column without a name is called "id".

    >>> id_columns(["ann", "bob"])
    {'id': array(['ann', 'bob'], dtype='<U3')}
    """
    if ids is None:
        return {}
    columns = ids if isinstance(ids, Mapping) else {"id": ids}
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    for name, column in columns.items():
        is_text = arrays[name].dtype.kind == "U" and not isinstance(column, np.ndarray)
        if is_text and not all(isinstance(owner, str) for owner in column):
            arrays[name] = np.array(column, dtype=object)  # otherwise NaN beside text would be the text nan
    return arrays


def joined(columns: Sequence[np.ndarray], place: str) -> np.ndarray:
    """Return the owners of several parts, arrays [n], as one array: of one type of numbers, otherwise as text.

    Raises DataError if floating-point numbers would be compared with other owners, since 1.0 may be meant as 1.
    """
    kinds = {column.dtype.kind for column in columns}
    if "f" in kinds and len(kinds) > 1:
        raise DataError(
            f"{place}: the owners are floating-point numbers in one part and not in another, so 1.0 would not be 1; "
            "use one type, such as integers or text, in all parts"
        )
    return np.concatenate(columns if len(kinds) == 1 else [column.astype(str) for column in columns])


def owners_of(ids: Mapping[str, np.ndarray], by: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the sorted owners in the column `by` (None: the first column), and the index of each sample's owner, [n].

    Owners whose texts differ, such as 1 and 01, are different. If all are numbers, they are sorted by value.

    Raises ExperimentError if there is no such column, or if a sample has no owner.
    """
    if by is not None and by not in ids:
        raise ExperimentError(f"partition.by = {show(by)}: no such column of ids; {nearest(by, ids)}")
    name = next(iter(ids)) if by is None else by
    column = ids[name]
    if column.dtype.kind not in "OU":
        owners, owner_of = np.unique(column, return_inverse=True)
        if column.dtype.kind in "fM" and np.isnan(column).any():
            raise _owner_error(name, int(np.flatnonzero(np.isnan(column))[0]))
        return owners, owner_of
    values = column.tolist()  # a dict of Python objects is many times faster than sorting them all
    kind = str if isinstance(values[0], str) else int
    wrong = next((index for index, value in enumerate(values) if not isinstance(value, kind) or value == ""), None)
    if wrong is not None:
        raise _owner_error(name, wrong)
    names = _sorted(set(values))
    numbers = dict(zip(names, range(len(names)), strict=True))
    return np.array(names), np.fromiter((numbers[value] for value in values), np.int64, len(values))


def _sorted(owners: Collection[Any]) -> list[Any]:
    """Return integers or text in ascending order. Text of numbers is sorted by value: 2, 03, 10."""
    if all(isinstance(owner, str) and NUMBER.fullmatch(owner) for owner in owners):
        return sorted(owners, key=lambda owner: (Decimal(owner), owner))
    return sorted(owners)


def _owner_error(name: str, index: int) -> ExperimentError:
    return ExperimentError(
        f"data.ids = {show(name)}: sample {index} has no owner, or an owner of another type; all owners must be "
        "text, or all must be integers"
    )
