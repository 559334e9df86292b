"""Convert updates (tensors, arrays, or nested dicts and lists of these) to a matrix [n, d] and back."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedsim.errors import ExperimentError

Entries = dict[str, Tensor]  # tensors of one update by key path, such as "['layer.weight']"


class MatrixForm:
    """Format of updates that were passed as one tensor or array [n, d]. Converts results to the same type.

    Args:
        is_array: whether results are NumPy arrays instead of tensors.
    """

    def __init__(self, is_array: bool) -> None:
        self._is_array = is_array

    def row(self, update: Any, place: str) -> Any:
        """Return one update as a flat vector [d]. Any object that contains no tensors is returned unchanged.

        `place` is the name of the update in error messages.
        """
        if isinstance(update, (list, tuple, Mapping)) and has_tensors(update):
            return as_rows([update], place)[0][0]
        return _tensor(update, place) if isinstance(update, np.ndarray) else update

    def rebuild(self, result: Tensor) -> Any:
        """Return a result [d] or [m, d] as a NumPy array if the updates were an array, otherwise as a tensor."""
        return result.cpu().numpy() if self._is_array else result


@dataclass(frozen=True)
class NestedForm:
    """Format of updates that were passed as dicts or lists of tensors. Converts results to the same structure.

    Attributes:
        first: first update. Results have the same structure.
        entries: tensors of the first update, by key path such as "['layer.weight']".
        name: name of the first update in error messages.
        shared: maps the key path of each tensor that shares memory with an earlier tensor (such as tied weights) to
            the key path of the earlier tensor.
    """

    first: Any
    entries: Entries
    name: str
    shared: dict[str, str] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        """Key paths of the tensors that are aggregated, in order: floating-point tensors, tied tensors only once."""
        return [
            place for place, tensor in self.entries.items() if tensor.is_floating_point() and place not in self.shared
        ]

    def row(self, update: Any, place: str) -> Any:
        """Return one update as a flat vector [d]. A vector, or an object without tensors, is returned unchanged.

        `place` is the name of the update in error messages.
        """
        if isinstance(update, (Tensor, np.ndarray)) and update.ndim == 1:
            return _tensor(update, place)
        return self.rows([_entries_like(self, update, place)])[0] if has_tensors(update) else update

    def rows(self, all_entries: Sequence[Entries]) -> Tensor:
        """Flatten the floating-point tensors of n updates, with one concatenation. Returns a tensor [n, d]."""
        columns = self.columns
        device = self.entries[columns[0]].device
        dtype = functools.reduce(torch.promote_types, (self.entries[place].dtype for place in columns))
        parts = [entries[place].reshape(-1).to(device, dtype) for entries in all_entries for place in columns]
        return torch.cat(parts).view(len(all_entries), -1)

    def rebuild(self, result: Tensor) -> Any:
        """Return a result [d] or [m, d] with the structure of the updates.

        Tensors that are not floating-point are copied from the first update.
        """
        if result.ndim == 2:
            return [self.rebuild(row) for row in result]
        columns = self.columns
        parts = dict(zip(columns, result.split([self.entries[name].numel() for name in columns]), strict=True))
        leaves: dict[str, Any] = {}
        originals, structure = pytree.tree_flatten(self.first)
        for (place, like), original in zip(self.entries.items(), originals, strict=True):
            if place in self.shared:
                leaves[place] = leaves[self.shared[place]]
                continue
            leaf = parts[place].view(like.shape).to(like) if place in parts else like
            leaf = leaf.clone(memory_format=torch.contiguous_format)
            leaves[place] = leaf if isinstance(original, Tensor) else leaf.cpu().numpy()
        rebuilt = pytree.tree_unflatten(list(leaves.values()), structure)
        if hasattr(self.first, "_metadata"):  # the versions of modules in a state_dict
            rebuilt._metadata = copy.copy(self.first._metadata)
        return rebuilt


Form = MatrixForm | NestedForm


def as_rows(updates: Any, place: str, like: Form | None = None) -> tuple[Any, Form]:
    """Convert updates to a matrix [n, d]. Returns the matrix, and an object that converts results back.

    Args:
        updates: a tensor or array [n, d], n lists of d numbers, or a list or iterator of n updates (tensors or arrays
            of any shape, or dicts or lists of these, such as a state_dict).
        place: name of the updates in error messages.
        like: format that the updates must have. None: any format.

    Raises ExperimentError if the updates have different keys or shapes. The message names the first difference.
    """
    updates = _listed(updates, place)
    if isinstance(updates, np.ndarray):
        return _tensor(updates, place), MatrixForm(is_array=True)
    names = [f"{place}[{index}]" for index in range(len(updates))] if isinstance(updates, (list, tuple)) else []
    if not names or not has_tensors(updates[0]):
        return updates, MatrixForm(is_array=False)
    form = like if isinstance(like, NestedForm) else _form_of(updates[0], names[0])
    all_entries = [_entries_like(form, update, name) for name, update in zip(names, updates, strict=True)]
    if form is not like and isinstance(updates[0], Mapping):  # gradients in a list may share memory by chance
        form = replace(form, shared=_shared(all_entries))
    return form.rows(all_entries), form


def _listed(updates: Any, place: str) -> Any:
    """Convert an iterator of updates to a list, and lists of numbers to a tensor. Return other objects unchanged."""
    updates = list(updates) if isinstance(updates, (Iterator, ValuesView)) else updates
    if not isinstance(updates, (list, tuple)):
        return updates
    updates = [list(update) if isinstance(update, Iterator) else update for update in updates]
    if updates and isinstance(updates[0], nn.Module):
        raise ExperimentError(f"{place}[0]: is a module; pass the state_dict() of each model")
    if updates and all(
        isinstance(update, (list, tuple)) and all(isinstance(number, Real) for number in update) for update in updates
    ):
        if len(set(map(len, updates))) > 1:
            raise ExperimentError(f"{place}: must all have the same number of entries, not {sorted(map(len, updates))}")
        return torch.tensor(updates, dtype=torch.get_default_dtype())
    return updates


def checked_matrix(updates: Any, place: str) -> Tensor:
    """Return updates [n, d] without their gradient history (detached).

    Raises ExperimentError unless `updates` is a floating-point tensor [n, d] with n >= 1.
    """
    if isinstance(updates, Tensor) and updates.ndim == 2 and updates.shape[0] and updates.is_floating_point():
        return updates.detach()
    if isinstance(updates, (list, tuple)) and updates:
        actual = f"a list of {type(updates[0]).__name__} objects"
    elif isinstance(updates, Mapping) and updates:
        actual = "a dict; pass a list of updates, such as one state_dict per worker"
    elif isinstance(updates, Tensor):
        actual = f"{updates.dtype} {tuple(updates.shape)}"
    else:
        actual = f"{'an empty' if updates in ([], (), {}) else 'a'} {type(updates).__name__}"
    raise ExperimentError(
        f"{place}: must be a floating-point tensor of shape [n, d] with one row per update (n >= 1), not {actual}"
    )


def has_tensors(value: Any) -> bool:
    """Whether a value is a tensor or array, or a dict or list that contains one."""
    return any(isinstance(leaf, (Tensor, np.ndarray)) for leaf in pytree.tree_leaves(value))


def _form_of(update: Any, place: str) -> NestedForm:
    entries = _entries(update, place)
    if not any(tensor.is_floating_point() and tensor.numel() for tensor in entries.values()):
        raise ExperimentError(f"{place}: contains no floating-point numbers")
    if refused := [where for where, tensor in entries.items() if tensor.is_complex()]:
        raise ExperimentError(f"{place}{refused[0]}: must be real-valued, not {entries[refused[0]].dtype}")
    return NestedForm(update, entries, place)


def _entries(update: Any, place: str) -> Entries:
    paths, _ = pytree.tree_flatten_with_path(update)
    leaves = ((pytree.keystr(path), leaf) for path, leaf in paths)
    return {where: _tensor(leaf, place + where) for where, leaf in leaves}


def _tensor(value: Any, place: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Real) and not isinstance(value, np.generic):
        raise ExperimentError(
            f"{place}: must be a tensor or an array, not the number {value!r}; pass numbers of samples as weights"
        )
    try:
        return torch.from_numpy(np.require(value, requirements=["C", "W"]))
    except (TypeError, ValueError):
        kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise ExperimentError(f"{place}: must be a tensor or an array of numbers, not {kind}") from None


def _entries_like(form: NestedForm, update: Any, place: str) -> Entries:
    """Return the tensors of an update as a dict by key path.

    Raises ExperimentError unless the key paths and shapes are those of `form`.
    """
    entries = _entries(update, place)
    if missing := [where for where in form.entries if where not in entries]:
        unexpected = [where for where in entries if where not in form.entries][:3]
        instead = f"; instead {place} has {', '.join(unexpected)}" if unexpected else ""
        raise ExperimentError(f"{place}: has no entry {missing[0]}, which {form.name} has{instead}")
    for where, tensor in entries.items():
        if where not in form.entries:
            remedy = "all updates must have the same entries"
            raise ExperimentError(f"{place}{where}: {form.name} has no such entry; {remedy}")
        expected = form.entries[where]
        if tensor.shape != expected.shape:
            wanted = f"{tuple(expected.shape)} as in {form.name}{where}"
            raise ExperimentError(f"{place}{where}: must have shape {wanted}, not {tuple(tensor.shape)}")
        if tensor.is_floating_point() != expected.is_floating_point():
            raise ExperimentError(
                f"{place}{where}: must be {expected.dtype} as in {form.name}{where}, not {tensor.dtype}"
            )
    return entries


def _shared(all_entries: list[Entries]) -> dict[str, str]:
    """Find tensors that share memory in all updates, such as tied weights.

    Returns a dict from the key path of each duplicate to the key path of the tensor that comes first.
    """
    seen: dict[Any, str] = {}
    pairs = {where: seen.setdefault(_memory(tensor), where) for where, tensor in all_entries[0].items()}
    return {
        where: earlier
        for where, earlier in pairs.items()
        if where != earlier and all(_memory(entries[where]) == _memory(entries[earlier]) for entries in all_entries)
    }


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
