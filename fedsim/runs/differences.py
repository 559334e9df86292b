"""Compare the settings of two experiments."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fedsim.config.source_catalog import plug_tables
from fedsim.core.input_limits import leaves_of
from fedsim.errors import show

NO_EFFECT = (  # keys that do not change results
    *("name", "engine", "processes", "timeout", "batched.width", "cuda_graphs"),
    *("distributed.backend", "distributed.timeout", "distributed.init", "distributed.inner"),
    *("checkpoint.every", "checkpoint.keep", "worker_retries", "worker_state_memory"),
    *("records.figures", "records.tensorboard", "records.loggers"),
)


def differences_of(
    there: Mapping[str, Any], here: Mapping[str, Any], ignored: Collection[str] = NO_EFFECT
) -> list[str]:
    """Return a line for each key with different values in two resolved experiments: `rounds: 5 there, 10 here`.

    The parameters of two different plugs are not compared.
    """
    one, other = dict(leaves_of(there)), dict(leaves_of(here))
    keys = [key for key in {**one, **other} if one.get(key) != other.get(key) and key not in ignored]
    of_plugs = {
        key
        for place, table in plug_tables().items()
        if f"{place}.{table.named_by}" in keys
        for key in keys
        if key.startswith(f"{place}.") and key.removeprefix(f"{place}.").partition(".")[0] not in table.keys
    }
    return [f"{key}: {_shown(one, key)} there, {_shown(other, key)} here" for key in keys if key not in of_plugs]


def _shown(leaves: Mapping[str, Any], key: str) -> str:
    return show(leaves[key]) if key in leaves else "not set"
