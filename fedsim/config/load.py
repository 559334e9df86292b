"""Load a checked Experiment from a file, tables or an Experiment, and apply changes."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedsim.config.engines import engine_class, traits_of
from fedsim.config.experiment import Experiment, ExperimentKeys, Unpack, refuse_untrusted_root
from fedsim.config.files import COMPARISON, find_experiment, read_toml, read_yaml
from fedsim.config.overrides import changes_in, override, parse_word, removed_warnings, repeated
from fedsim.config.schema import Distributed
from fedsim.core.import_policy import RUN_FILES, is_untrusted, untrusted_config
from fedsim.core.input_limits import leaves_of
from fedsim.core.objects import plain
from fedsim.data.sources import data_loaded_once, sample_shape
from fedsim.errors import DataError, ExperimentError, SettingWarning, cut, show
from fedsim.system.files import is_file
from fedsim.system.limits import without_inner_frames

PATHS = (  # keys of paths
    *("data.path", "data.test_path", "data.images", "model.weights", "partition.path"),
    *("sampling.trace", "policy.topology.path", "clock.noise.path", "clock.replay_log"),
)
NAMES_OR_PATHS = "data", "data.name", "policy.topology", "policy.topology.name"  # values with a dot may be paths


def load_experiment(
    source: Experiment | Mapping[str, Any] | str | Path | None = None,
    overrides: Iterable[str] = (),
    *,
    allow_imports: bool = False,
    **changes: Unpack[ExperimentKeys],
) -> Experiment:
    """Load an experiment, apply changes, and check the result.

    If the experiment in `source` has a default name, as saved experiments may have, the changed experiment gets a new
    default name.

    Args:
        source: an Experiment, tables (keys may be dotted: {"local.lr": 0.1}), the path of a TOML or YAML file, the name
            of a built-in experiment (`fedsim list experiments`), or None for the default experiment.
        overrides: texts such as "local.lr=0.1". Values are read as TOML, or as strings if they are not TOML.
        allow_imports: whether a file may import any Python code. See `fedsim.core.import_policy`. Import paths in
            `overrides`, tables and Experiments are always imported.
        changes: keys of the experiment (see `fedsim.components("keys")`), set after the overrides. A table changes only
            the keys that it contains.

    Warns (SettingWarning) about settings in `source` that do not apply to a newly selected component, and about keys
    that two overrides set.
    Raises ExperimentError with one line per problem.

    >>> load_experiment("mnist_sync_sgd", ["local.lr=0.5"], rounds=3).rounds
    3
    """
    words = [parse_word(word) for word in overrides]
    for key in repeated(words):
        warnings.warn(f"{key}: is set twice; the last value counts", SettingWarning, stacklevel=2)
    words += changes_in(plain(changes))
    if isinstance(source, Experiment) and not words:
        return source
    description = describe(source)
    if words:
        with untrusted_config(file_of(source), allowed=allow_imports):
            drop_default_name(description)
    removed = override(description, words)
    try:
        if isinstance(description.get(COMPARISON), dict):
            raise ExperimentError("the table [comparison] describes several experiments; use fedsim compare")
        with untrusted_config(file_of(source), (value for _, value in words), allowed=allow_imports):
            experiment = experiment_of(description)
            lines = removed_warnings([(removed, experiment.resolved())]) if removed else []
    except ExperimentError as error:
        if not isinstance(source, (str, Path)):
            raise without_inner_frames(error) from error.__cause__
        raise ExperimentError(*error.lines, source=source) from None
    if lines and engine_class(experiment.engine).is_main():
        for line in lines:
            warnings.warn(line, SettingWarning, stacklevel=2)
    return experiment


def with_data(experiment: Experiment) -> Experiment:
    """Return the experiment with the settings derived from its data, which is downloaded if files are missing.

    Raises DataError if the data cannot be loaded. On ranks, the run reports this error to all ranks later.
    """
    if not experiment.awaits_data:
        return experiment
    with data_loaded_once():
        try:
            sample_shape(*experiment.data.source(experiment.partition))
        except DataError:
            if not traits_of(experiment.engine).ranks:
                raise
            return experiment
        return experiment_of(describe(experiment))


def file_of(source: object) -> Path | None:
    """Return the experiment file that `source` names, or None if the settings come from the user's own code."""
    return find_experiment(source) if isinstance(source, (str, Path)) else None


def describe(source: Experiment | Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """Return the settings in `source` as nested tables, without defaults."""
    if isinstance(source, (str, Path)):
        return describe_file(source)
    if isinstance(source, Experiment):
        return source.model_dump(exclude_none=True, exclude_unset=True)
    if source is not None and not isinstance(source, Mapping):
        raise ExperimentError(f"{show(source)}: must be an Experiment, a table (dict) or the path of a file")
    return nested(plain(dict(source or {})))


def describe_file(source: str | Path) -> dict[str, Any]:
    """Return the settings in an experiment file or built-in experiment as nested tables, without defaults.

    Raises ExperimentError if the file cannot be read.
    """
    path = find_experiment(source)
    tables = nested(read_yaml(path)) if path.suffix.lower() in (".yaml", ".yml") else read_toml(path)
    if not any(is_file(path.with_name(name)) for name in RUN_FILES):  # the paths in a run folder are complete
        _complete_paths(tables, "", path)
    return tables


def _complete_paths(tables: dict[str, Any], prefix: str, file: Path) -> None:
    """Complete, in place, the relative paths in `tables` that lead to files in the folder of the experiment `file`.

    `prefix` is the dotted key of `tables` followed by a dot, or "". Raises ExperimentError for a path that also leads
    to another file in the working directory.
    """
    for name, value in tables.items():
        key = f"{prefix}{name}".removeprefix(f"{COMPARISON}.")
        if isinstance(value, dict):
            _complete_paths(value, f"{key}.", file)
        elif key in (*PATHS, *NAMES_OR_PATHS):
            completed = [_complete_path(key, path, file) for path in (value if isinstance(value, list) else [value])]
            tables[name] = completed if isinstance(value, list) else completed[0]


def _complete_path(key: str, path: Any, file: Path) -> Any:
    is_path = isinstance(path, str) and (key in PATHS or "." in path)
    if not is_path or path != os.path.expanduser(path) or not os.path.exists(beside := str(file.parent / path)):
        return path
    if not os.path.exists(path):
        return beside
    if not os.path.samefile(path, beside):
        raise ExperimentError(
            f"{key} = {show(path)}: exists in the working directory and also beside {cut(str(file))}; write an "
            "absolute path, or remove one of the two"
        )
    return path


def nested(tables: dict[str, Any]) -> dict[str, Any]:
    """Return tables that may have dotted keys, such as "local.lr", as nested tables.

    The axes of a comparison stay flat, {"comparison": {dotted key: values}}, because both `attack` and
    `attack.fraction` may be axes. Raises ExperimentError if a key occurs twice.
    """
    in_comparison = {key: value for key, value in tables.items() if str(key).partition(".")[0] == COMPARISON}
    if isinstance(in_comparison.get(COMPARISON, {}), Mapping) and in_comparison:
        axes: dict[str, Any] = {}
        for key, values in leaves_of(in_comparison):
            axis = key.partition(".")[2]
            if axis in axes:
                raise ExperimentError(f"{key}: is set twice; remove one of the two")
            axes[axis] = values
        return {**nested({key: value for key, value in tables.items() if key not in in_comparison}), COMPARISON: axes}
    if any("." in str(key) for key in tables):
        changes, tables = changes_in(tables), {}
        override(tables, changes)
    return tables


def drop_default_name(description: dict[str, Any]) -> None:
    """Remove the key `name` if it has the default name, so that a changed experiment gets a new default name."""
    if "name" in description and COMPARISON not in description:
        unnamed = {key: value for key, value in description.items() if key != "name"}
        with contextlib.suppress(ExperimentError):  # later changes may correct the problem
            if experiment_of(unnamed).name == description["name"]:
                del description["name"]


def experiment_of(description: Mapping[str, Any]) -> Experiment:
    """Create the experiment with the settings in nested tables. Raise ExperimentError with one line per problem."""
    experiment = Experiment(**{str(key): value for key, value in description.items()})
    _refuse_untrusted_places(experiment)
    return experiment


def _refuse_untrusted_places(experiment: Experiment) -> None:
    """Raise ExperimentError if an untrusted experiment file sets a network address or a download folder."""
    init, data = experiment.distributed.init_method, experiment.data
    if init != Distributed().init_method and is_untrusted(init):
        raise ExperimentError(
            f"distributed.init_method = {show(init)}: must not be set in an experiment file, because the address "
            "could be that of any computer; set the key on the command line"
        )
    refuse_untrusted_root(data)
