"""In what two experiments differ, as far as that matters to what comes of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fedsim.errors import show
from fedsim.tables import leaves_of

# Keys that say how a run is done, not what comes of it.
HOW = (
    *("name", "engine", "processes", "timeout", "batched.width", "cuda_graphs", "data.verify"),
    *("distributed.backend", "distributed.timeout", "distributed.init", "distributed.inner"),
    *("checkpoint.every", "checkpoint.keep", "on_worker_failure", "worker_retries", "records.figures"),
)


def differences_of(there: Mapping[str, Any], here: Mapping[str, Any], but: Collection[str] = HOW) -> list[str]:
    """A line for each key in which two resolved experiments differ, `but` for these: `rounds: 5 there, 10 here`."""
    one, other = dict(leaves_of(there)), dict(leaves_of(here))
    keys = [key for key in {**one, **other} if one.get(key) != other.get(key) and key not in but]
    return [f"{key}: {_said(one, key)} there, {_said(other, key)} here" for key in keys]


def _said(leaves: Mapping[str, Any], key: str) -> str:
    return show(leaves[key]) if key in leaves else "not set"
