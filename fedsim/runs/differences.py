"""The differences between two experiments that change their results."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fedsim.core.input_limits import leaves_of
from fedsim.errors import show

# Keys that do not change results.
HOW = (
    *("name", "engine", "processes", "timeout", "batched.width", "cuda_graphs"),
    *("distributed.backend", "distributed.timeout", "distributed.init", "distributed.inner"),
    *("checkpoint.every", "checkpoint.keep", "on_worker_failure", "worker_retries", "records.figures"),
)


def differences_of(there: Mapping[str, Any], here: Mapping[str, Any], but: Collection[str] = HOW) -> list[str]:
    """A line for each key in which two resolved experiments differ, except `but`: `rounds: 5 there, 10 here`."""
    one, other = dict(leaves_of(there)), dict(leaves_of(here))
    keys = [key for key in {**one, **other} if one.get(key) != other.get(key) and key not in but]
    return [f"{key}: {_shown(one, key)} there, {_shown(other, key)} here" for key in keys]


def _shown(leaves: Mapping[str, Any], key: str) -> str:
    return show(leaves[key]) if key in leaves else "not set"
