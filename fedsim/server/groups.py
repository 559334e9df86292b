"""Groups of workers, each with a server of its own, between the workers and the top level."""

from __future__ import annotations

import numpy as np

from fedsim.core.import_policy import import_object
from fedsim.errors import ExperimentError, one_line, show


def divide_workers(groups: int | list[int] | str, workers: int) -> np.ndarray:
    """Return the group of each worker, int64 [workers].

    Args:
        groups: number of groups of consecutive workers, whose sizes differ by at most one; or a list with the group of
            each worker; or the import path of a function that returns such a list for a number of workers.
        workers: number of workers.

    Raises ExperimentError if the groups do not fit the workers.

    >>> divide_workers(2, workers=5).tolist()
    [0, 0, 0, 1, 1]
    """
    place = f"groups = {show(groups)}"
    if isinstance(groups, int):
        if groups > workers:
            raise ExperimentError(f"{place}: must be at most {workers}, the number of workers; use more workers")
        return np.arange(workers) * groups // workers
    try:
        listed, again = (
            np.asarray(import_object(groups)(workers) if isinstance(groups, str) else groups) for _ in range(2)
        )
    except Exception as error:
        need = "must be a number, a list, or the path package.module:name of a function of the number of workers"
        why = f"; it cannot be called: {one_line(error)}" if ":" in str(groups) else ""
        raise ExperimentError(f"{place}: {need}{why}") from error
    if not np.array_equal(listed, again):
        raise ExperimentError(f"{place}: returned two different lists; use a fixed seed for random draws")
    is_valid = listed.shape == (workers,) and listed.dtype.kind in "iu"
    if not is_valid or not np.array_equal(np.unique(listed), np.arange(listed.max() + 1)):
        need = f"must contain the group of each of {workers} workers, numbered 0, 1, ... without gaps"
        raise ExperimentError(f"{place}: {need}; change groups or workers")
    return listed.astype(np.int64)
