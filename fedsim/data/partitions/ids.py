"""Owners of samples: one or several columns of ids, such as the writer or the session of each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedsim.core.suggestions import nearest
from fedsim.errors import ExperimentError, show

Ids = Mapping[str, Sequence[Any] | np.ndarray] | Sequence[Any] | np.ndarray | None


def id_columns(ids: Ids) -> dict[str, np.ndarray]:
    """Return the owners of samples as a dict from column name to array [n]. A column without a name is called "id".

    >>> id_columns(["ann", "bob"])
    {'id': array(['ann', 'bob'], dtype='<U3')}
    """
    if ids is None:
        return {}
    columns = ids if isinstance(ids, Mapping) else {"id": ids}
    return {name: np.asarray(column) for name, column in columns.items()}


def owners_of(ids: Mapping[str, np.ndarray], by: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the sorted owners in the column `by` (None: the first column), and the index of each sample's owner, [n].

    Raises ExperimentError if there is no such column, or if a sample has no owner.
    """
    if by is not None and by not in ids:
        raise ExperimentError(f"partition.by = {show(by)}: no such column of ids; {nearest(by, ids)}")
    name = next(iter(ids)) if by is None else by
    column = ids[name]
    if column.dtype.kind != "O":
        owners, owner_of = np.unique(column, return_inverse=True)
        if column.dtype.kind in "fM" and np.isnan(column).any():
            raise _owner_error(name, int(np.flatnonzero(np.isnan(column))[0]))
        return owners, owner_of
    values = column.tolist()  # a dict of Python objects is many times faster than sorting them all
    kind = str if isinstance(values[0], str) else int
    wrong = next((index for index, value in enumerate(values) if not isinstance(value, kind)), None)
    if wrong is not None:
        raise _owner_error(name, wrong)
    names = sorted(set(values))
    numbers = dict(zip(names, range(len(names)), strict=True))
    return np.array(names), np.fromiter((numbers[value] for value in values), np.int64, len(values))


def _owner_error(name: str, index: int) -> ExperimentError:
    return ExperimentError(
        f"partition.by = {show(name)}: sample {index} has no owner, or an owner of another type; all owners must be "
        "text, or all must be integers"
    )
