"""Convert updates, which are tensors, arrays, or nested lists and dicts of them, to a matrix [n, d] and back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedsim.errors import ExperimentError

Entry = tuple[str, Tensor]  # `updates[1]['weight']` and its value


def as_rows(updates: Any, place: str) -> tuple[Any, Callable[[Tensor], Any]]:
    """The floating entries of updates as a matrix [n, d], and a function from rows [m, d] or a row [d] to their form.

    Args:
        updates: a tensor or array [n, d], or a list of updates: tensors or arrays of any shape, or dicts (as a
            state_dict) or lists of them. All have the same entries.
        place: the name of the updates in errors.

    Entries that are not floating, such as a counter, are those of the first update. A tensor is returned unchanged.

    Raises ExperimentError with the place of the entry that differs.
    """
    if isinstance(updates, np.ndarray):
        return _tensor(updates, place), lambda rows: rows.cpu().numpy()
    if not isinstance(updates, (list, tuple)) or not updates or not _is_update(updates[0]):
        return updates, lambda rows: rows
    entries = [_entries(update, f"{place}[{index}]") for index, update in enumerate(updates)]
    for index, other in enumerate(entries):
        _require_same_entries(entries[0], other, f"{place}[{index}]")
    first = [tensor for _, tensor in entries[0]]
    floating = [i for i, tensor in enumerate(first) if tensor.is_floating_point()]
    if not floating:
        raise ExperimentError(f"{place}[0]: has no floating numbers")
    device = first[floating[0]].device
    dtype = functools.reduce(torch.promote_types, (first[i].dtype for i in floating))
    rows = torch.stack([torch.cat([each[i][1].reshape(-1).to(device, dtype) for i in floating]) for each in entries])
    originals, structure = pytree.tree_flatten(updates[0])

    def rebuild(result: Tensor) -> Any:
        if result.ndim == 2:
            return [rebuild(row) for row in result]
        parts = dict(zip(floating, result.split([first[i].numel() for i in floating]), strict=True))
        leaves = []
        for i, (original, like) in enumerate(zip(originals, first, strict=True)):
            leaf = parts[i].reshape(like.shape).to(like.device, like.dtype) if i in parts else like
            leaf = leaf.clone()
            leaves.append(leaf if isinstance(original, Tensor) else leaf.cpu().numpy())
        return pytree.tree_unflatten(leaves, structure)

    return rows, rebuild


def checked_matrix(updates: Any, place: str) -> Tensor:
    """The result of `as_rows` without its gradient. Raises ExperimentError unless it is a floating tensor [n, d]."""
    if isinstance(updates, Tensor) and updates.ndim == 2 and len(updates) and updates.is_floating_point():
        return updates.detach()
    found = f"{updates.dtype} {tuple(updates.shape)}" if isinstance(updates, Tensor) else f"a {type(updates).__name__}"
    raise ExperimentError(f"{place}: must be a floating tensor [n, d] with n >= 1, not {found}")


def as_row(update: Any, place: str) -> Any:
    """One update as a row [d]; any other object is returned unchanged."""
    if isinstance(update, np.ndarray):
        return _tensor(update, place)
    if isinstance(update, Tensor) or not _is_update(update):
        return update
    return as_rows([update], place)[0][0]


def _is_update(value: Any) -> bool:
    leaves = pytree.tree_leaves(value)
    return bool(leaves) and isinstance(leaves[0], (Tensor, np.ndarray))


def _entries(update: Any, place: str) -> list[Entry]:
    paths, _ = pytree.tree_flatten_with_path(update)
    leaves = ((place + pytree.keystr(path), leaf) for path, leaf in paths)
    return [(where, _tensor(leaf, where)) for where, leaf in leaves]


def _tensor(value: Any, place: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    try:
        return torch.from_numpy(np.require(value, requirements=["C", "W"]))
    except (TypeError, ValueError):
        kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise ExperimentError(f"{place}: must be a tensor or an array of numbers, not {kind}") from None


def _require_same_entries(first: list[Entry], other: list[Entry], place: str) -> None:
    """Raise ExperimentError unless two updates have the same entries with the same shapes."""
    for (first_place, first_tensor), (other_place, tensor) in zip(first, other, strict=False):
        if first_place.partition("]")[2] != other_place.partition("]")[2]:
            raise ExperimentError(f"{other_place}: the first update has {first_place} in this place")
        if first_tensor.shape != tensor.shape:
            shapes = f"{tuple(first_tensor.shape)} as in {first_place}, not {tuple(tensor.shape)}"
            raise ExperimentError(f"{other_place}: must have shape {shapes}")
    if len(first) != len(other):
        raise ExperimentError(f"{place}: has {len(other)} entries, the first has {len(first)}")
