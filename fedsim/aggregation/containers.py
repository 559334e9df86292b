"""Updates as rows: tensors, arrays, and nested lists and dicts of them, to one matrix [n, d] and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.errors import ExperimentError


def as_rows(updates: Any, place: str) -> tuple[Any, Callable[[Tensor], Any]]:
    """A matrix of the floating entries of updates [n, d], and a function from rows [m, d] or a row [d] to that form.

    Args:
        updates: a tensor or array [n, d], or a list of updates: tensors or arrays of any shape, or dicts (as a
            state_dict) or lists of them. All have the same entries.
        place: what an error calls them.

    Entries that are not floating, as a counter, are those of the first update. A tensor comes back as it is.

    Raises ExperimentError with the place of the entry that differs.
    """
    if isinstance(updates, np.ndarray):
        return _tensor(updates, place), lambda rows: rows.cpu().numpy()
    if not isinstance(updates, (list, tuple)) or not updates or not _is_update(updates[0]):
        return updates, lambda rows: rows
    pairs = [list(_leaves(update, f"{place}[{index}]")) for index, update in enumerate(updates)]
    for each, update in zip(pairs, updates, strict=True):
        _require_alike(pairs[0], each, len(updates), updates[0], update)
    floating = [position for position, (_, leaf) in enumerate(pairs[0]) if leaf.is_floating_point()]
    if not floating:
        raise ExperimentError(f"{place}[0]: has no floating numbers")
    dtype = pairs[0][floating[0]][1].dtype
    for position in floating:
        dtype = torch.promote_types(dtype, pairs[0][position][1].dtype)
    device = pairs[0][floating[0]][1].device
    rows = torch.stack([torch.cat([each[i][1].reshape(-1).to(device, dtype) for i in floating]) for each in pairs])

    def rebuild(result: Tensor) -> Any:
        if result.ndim == 2:
            return [rebuild(row) for row in result]
        sizes = [pairs[0][position][1].numel() for position in floating]
        parts = dict(zip(floating, result.split(sizes), strict=True))
        leaves = (
            parts[i].reshape(leaf.shape).to(leaf.device, leaf.dtype, copy=True) if i in parts else leaf.clone()
            for i, (_, leaf) in enumerate(pairs[0])
        )
        return _rebuilt(updates[0], leaves)

    return rows, rebuild


def as_row(update: Any, place: str) -> Any:
    """One update as a row [d], by the same rules; anything else is returned as it is."""
    if isinstance(update, np.ndarray):
        return _tensor(update, place)
    if isinstance(update, Tensor) or not _is_update(update):
        return update
    return as_rows([update], place)[0][0]


def _is_update(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value)
    if isinstance(value, (list, tuple)):
        return bool(value) and _is_update(value[0])
    return isinstance(value, (Tensor, np.ndarray))


def _leaves(update: Any, place: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an update, each with its place: `updates[1]["weight"]`."""
    if isinstance(update, Mapping):
        for key, value in update.items():
            yield from _leaves(value, f'{place}["{key}"]')
    elif isinstance(update, (list, tuple)):
        for index, value in enumerate(update):
            yield from _leaves(value, f"{place}[{index}]")
    else:
        yield place, _tensor(update, place)


def _tensor(value: Any, place: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    try:
        return torch.from_numpy(np.require(value, requirements=["C", "W"]))
    except (TypeError, ValueError):
        kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise ExperimentError(f"{place}: must be a tensor or an array of numbers, not {kind}") from None


def _require_alike(
    first: Sequence[tuple[str, Tensor]], other: Sequence[tuple[str, Tensor]], n: int, one: Any, two: Any
) -> None:
    """Raise ExperimentError unless two updates have the same entries with the same shapes."""
    for (place, leaf), (other_place, other_leaf) in zip(first, other, strict=False):
        if _within(place) != _within(other_place):
            raise ExperimentError(f"{other_place}: stands where the first update has {place}")
        if leaf.shape != other_leaf.shape:
            shapes = f"{tuple(leaf.shape)} as in {place}, not {tuple(other_leaf.shape)}"
            raise ExperimentError(f"{other_place}: must have shape {shapes}")
    if len(first) != len(other):
        place = other[0][0].partition("]")[0] + "]" if other else f"one of {n} updates"
        raise ExperimentError(f"{place}: has {len(other)} entries, the first has {len(first)}")


def _within(place: str) -> str:
    return place.partition("]")[2]


def _rebuilt(like: Any, leaves: Iterator[Tensor]) -> Any:
    """An update with the nesting and the types of another, of these tensors."""
    if isinstance(like, Mapping):
        return {key: _rebuilt(value, leaves) for key, value in like.items()}
    if isinstance(like, (list, tuple)):
        values = [_rebuilt(value, leaves) for value in like]
        return tuple(values) if isinstance(like, tuple) else values
    leaf = next(leaves)
    return leaf if isinstance(like, Tensor) else leaf.cpu().numpy()
