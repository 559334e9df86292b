"""Files of single workers: folders with one table for each worker, in one part or in parts for training and tests."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedsim.data.columns import PART_NAMES, parts_of, warn
from fedsim.data.sources import table_name
from fedsim.errors import DataError, cut, show


def files_of_parts(path: str, test_path: str | None) -> tuple[dict[str, str], dict[str, str]]:
    """Return the files of the training and test parts, each as {worker: file}. The worker "" stands for all workers."""
    if Path(path).is_dir():
        folders = [entry.name for entry in Path(path).iterdir() if entry.is_dir()]
        train, test = parts_of(folders, path)
        if train is not None:
            if test is not None and test_path is not None:
                raise DataError(
                    f"data.test_path = {show(test_path)}: {path} already has a test part; omit one of the two"
                )
            path, test_path = str(Path(path, train)), str(Path(path, test)) if test else test_path
    files, tests = ({} if place is None else _files_by_worker(place) for place in (path, test_path))
    if "" in files and tests and "" not in tests:
        raise DataError(f"data.test_path = {show(test_path)}: is a folder, but data.path is not; name a file")
    return files, tests


def natural_order(names: Iterable[str]) -> list[str]:
    """Return names in sorted order, with the numbers in them sorted by value.

    >>> natural_order(["h10", "h2", "H1"])
    ['H1', 'h2', 'h10']
    """

    def key(name: str) -> tuple[Any, ...]:
        parts = re.split(r"([0-9]+)", name.casefold())
        return [int(part) if place % 2 else part for place, part in enumerate(parts)], name

    return sorted(names, key=key)


def _files_by_worker(path: str) -> dict[str, str]:
    """Return {file name without ending: file} for the tables in the folder `path`, or {"": path} for a single file."""
    if not Path(path).is_dir():
        return {"": path}
    files = {entry.name: str(entry) for entry in Path(path).iterdir() if not entry.name.startswith(".")}
    tables = {table_name(name): file for name, file in files.items() if table_name(name)}
    if unused := sorted(name for name in files if not table_name(name)):
        warn(f"{path}: files that are not used: {cut(', '.join(unused))}")
    if len(tables) + len(unused) < len(files):
        raise DataError(f"{path}: has two tables with the same name; keep one for each worker")
    if parts := PART_NAMES.intersection(name.casefold() for name in tables):
        file = f"a file called {min(parts)}, which may be a part of the data instead of a worker"
        raise DataError(f"{path}: has {file}; set data.path and data.test_path to the files of the parts, or rename it")
    if not tables:
        raise DataError(f"{path}: has no files .csv or .parquet; check data.path")
    return tables
