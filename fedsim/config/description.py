"""The settings that a file holds, as nested tables that are not yet checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedsim.config.catalog import find_experiment
from fedsim.config.overrides import changes_in, override
from fedsim.config.toml import read_toml
from fedsim.config.yaml_file import YAML_SUFFIXES, read_yaml
from fedsim.core.input_limits import leaves_of
from fedsim.errors import ExperimentError

GRID = "grid"  # the table of the axes of a comparison


def describe_file(source: str | Path) -> dict[str, Any]:
    """The settings in an experiment file, or in the experiment of that name, as nested tables, without defaults.

    Raises ExperimentError if the file cannot be read.
    """
    path = find_experiment(source)
    if path.suffix.lower() not in YAML_SUFFIXES:
        return read_toml(path)
    tables = read_yaml(path)
    grid = take_grid(tables)
    return {**nested(tables), **grid}


def nested(tables: dict[str, Any]) -> dict[str, Any]:
    """Tables with dotted keys as nested tables; others as they are."""
    if any("." in str(key) for key in tables):
        changes, tables = changes_in(tables), {}
        override(tables, changes)
    return tables


def take_grid(tables: dict[str, Any]) -> dict[str, Any]:
    """Remove the axes of a comparison from tables; returns {"grid": {dotted key: values}}, or {} if there are none.

    They stay flat, since both `attack` and `attack.fraction` may be axes.
    """
    keys = [key for key in tables if str(key).partition(".")[0] == GRID]
    if not keys or (keys == [GRID] and not isinstance(tables[GRID], Mapping)):
        return {}
    axes: dict[str, Any] = {}
    for key, values in leaves_of({key: tables.pop(key) for key in keys}):
        axis = key.partition(".")[2]
        if axis in axes:
            raise ExperimentError(f"{key}: is given twice")
        axes[axis] = values
    return {GRID: axes}
