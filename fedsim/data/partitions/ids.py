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


def column_of(ids: Mapping[str, np.ndarray], by: str | None) -> np.ndarray:
    """Return the column of owners called `by`, [n], or the first column if `by` is None.

    Raises ExperimentError if there is no such column.
    """
    if by is None:
        return next(iter(ids.values()))
    if by not in ids:
        raise ExperimentError(f"partition.by = {show(by)}: no such column of ids; {nearest(by, ids)}")
    return ids[by]
