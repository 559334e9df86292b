"""Convert updates, which are tensors, arrays, or nested lists and dicts of them, to a matrix [n, d] and back."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedsim.errors import ExperimentError

Entries = dict[str, Tensor]  # the tensors of an update by their places in it: "['layer.weight']"


class MatrixForm:
    """The form of updates that are the rows of a tensor, or of an array.

    Args:
        is_array: whether the result is an array.
    """

    def __init__(self, is_array: bool) -> None:
        self._is_array = is_array

    def row(self, update: Any, place: str) -> Any:
        """Return an update of this form as a row [d], and any other object unchanged."""
        if isinstance(update, (list, tuple, Mapping)) and has_tensors(update):
            return as_rows([update], place)[0][0]
        return _tensor(update, place) if isinstance(update, np.ndarray) else update

    def rebuild(self, result: Tensor) -> Any:
        """Return a row [d], or rows [m, d], in this form."""
        return result.cpu().numpy() if self._is_array else result


@dataclass(frozen=True)
class NestedForm:
    """The form of updates that are dicts or lists of tensors or arrays, or tensors of any shape.

    Attributes:
        first: the first update.
        entries: of the first update.
        name: of the first update in errors.
        shared: of dicts, entries that share the memory of an earlier entry in all updates, as tied weights do; the
            earlier one. They count once, and share memory in the result.
        stacked: whether the updates are one dict of stacked tensors [n, ...], and not a list.
    """

    first: Any
    entries: Entries
    name: str
    shared: dict[str, str] = field(default_factory=dict)
    stacked: bool = False

    @property
    def columns(self) -> list[str]:
        """The floating entries, of which a row consists."""
        return [place for place, tensor in self.entries.items() if _counts(tensor) and place not in self.shared]

    def row(self, update: Any, place: str) -> Any:
        """Return one update, or a row [d], as a row [d]."""
        if isinstance(update, (Tensor, np.ndarray)) and update.ndim == 1:
            return _tensor(update, place)
        return self.flat(_entries_like(self, update, place)) if has_tensors(update) else update

    def flat(self, entries: Entries, lead: tuple[int, ...] = ()) -> Tensor:
        """Return the floating entries, of shapes [*lead, ...], side by side: [*lead, d]."""
        like = [self.entries[place] for place in self.columns]
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in like))
        parts = [entries[place].reshape(*lead, -1).to(like[0].device, dtype) for place in self.columns]
        return torch.cat(parts, dim=-1)

    def rebuild(self, result: Tensor) -> Any:
        """Return a row [d], or rows [m, d], in this form; other entries are those of the first update."""
        if result.ndim == 2 and not self.stacked:
            return [self.rebuild(row) for row in result]
        lead, columns = result.shape[:-1], self.columns
        parts = dict(zip(columns, result.split([self.entries[each].numel() for each in columns], dim=-1), strict=True))
        leaves: dict[str, Any] = {}
        originals, structure = pytree.tree_flatten(self.first)
        for (place, like), original in zip(self.entries.items(), originals, strict=True):
            if place in self.shared:
                leaves[place] = leaves[self.shared[place]]
                continue
            shape = (*lead, *like.shape)
            leaf = parts[place].reshape(shape).to(like) if place in parts else like.expand(shape)
            leaf = leaf.clone(memory_format=torch.contiguous_format)
            leaves[place] = leaf if isinstance(original, Tensor) else leaf.cpu().numpy()
        rebuilt = pytree.tree_unflatten(list(leaves.values()), structure)
        if hasattr(self.first, "_metadata"):  # the versions of modules in a state_dict
            rebuilt._metadata = copy.copy(self.first._metadata)
        return rebuilt


Form = MatrixForm | NestedForm


def as_rows(updates: Any, place: str, like: Form | None = None) -> tuple[Any, Form]:
    """Return the floating entries of updates as a matrix [n, d], and their form.

    Args:
        updates: a tensor or array [n, d]; a list of updates: tensors or arrays of any shape, or dicts (as a state_dict)
            or lists of them; or a dict of stacked tensors [n, ...]. All updates have the same entries, in any order.
        place: the name of the updates in errors.
        like: the form of other updates, whose entries these must have.

    Entries that are not floating, such as a counter, are those of the first update. A tensor is returned unchanged.

    Raises ExperimentError with the place of the entry that differs.
    """
    if isinstance(updates, np.ndarray):
        return _tensor(updates, place), MatrixForm(is_array=True)
    if isinstance(updates, Mapping) and has_tensors(updates):
        return _stacked_rows(updates, place, like)
    if not isinstance(updates, (list, tuple)) or not updates or not has_tensors(updates[0]):
        return updates, MatrixForm(is_array=False)
    form = like if isinstance(like, NestedForm) else _form_of(updates[0], f"{place}[0]")
    all_entries = [_entries_like(form, update, f"{place}[{index}]") for index, update in enumerate(updates)]
    if form is not like and isinstance(updates[0], Mapping):  # gradients in a list may share memory by chance
        form = replace(form, shared=_shared(all_entries))
    return torch.stack([form.flat(entries) for entries in all_entries]), form


def _stacked_rows(updates: Any, place: str, like: Form | None) -> tuple[Tensor, NestedForm]:
    stacked = _entries(updates, place)
    named, first = next(iter(stacked.items()))
    for where, tensor in stacked.items():
        if not first.shape or not len(first) or tensor.shape[:1] != first.shape[:1]:
            wanted = f"[n, ...], a stack of n >= 1 updates, with n as in {place}{named}"
            raise ExperimentError(f"{place}{where}: must be {wanted}, not of shape {tuple(tensor.shape)}")
    form = like
    if not isinstance(form, NestedForm):
        form = _form_of(pytree.tree_map(lambda leaf: leaf[0], updates), place)
        form = replace(form, shared=_shared([stacked]), stacked=True)
    return form.flat(_entries_like(form, updates, place, skip=1), first.shape[:1]), form


def checked_matrix(updates: Any, place: str) -> Tensor:
    """Return the result of `as_rows` without its gradient.

    Raises ExperimentError unless it is a floating tensor [n, d].
    """
    if isinstance(updates, Tensor) and updates.ndim == 2 and len(updates) and updates.is_floating_point():
        return updates.detach()
    actual = f"{updates.dtype} {tuple(updates.shape)}" if isinstance(updates, Tensor) else f"a {type(updates).__name__}"
    raise ExperimentError(f"{place}: must be a floating tensor [n, d] with n >= 1, not {actual}")


def has_tensors(value: Any) -> bool:
    """Whether a value is a tensor, an array, or nested dicts and lists that begin with one."""
    leaves = pytree.tree_leaves(value)
    return bool(leaves) and isinstance(leaves[0], (Tensor, np.ndarray))


def _counts(tensor: Tensor) -> bool:
    return tensor.is_floating_point()


def _form_of(update: Any, place: str) -> NestedForm:
    entries = _entries(update, place)
    if not any(map(_counts, entries.values())):
        raise ExperimentError(f"{place}: has no floating numbers")
    if refused := [where for where, tensor in entries.items() if tensor.is_complex()]:
        raise ExperimentError(f"{place}{refused[0]}: must be real, not {entries[refused[0]].dtype}")
    return NestedForm(update, entries, place)


def _entries(update: Any, place: str) -> Entries:
    paths, _ = pytree.tree_flatten_with_path(update)
    leaves = ((pytree.keystr(path), leaf) for path, leaf in paths)
    return {where: _tensor(leaf, place + where) for where, leaf in leaves}


def _tensor(value: Any, place: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    try:
        return torch.from_numpy(np.require(value, requirements=["C", "W"]))
    except (TypeError, ValueError):
        kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise ExperimentError(f"{place}: must be a tensor or an array of numbers, not {kind}") from None


def _entries_like(form: NestedForm, update: Any, place: str, skip: int = 0) -> Entries:
    """Return the entries of an update, of which the first `skip` dimensions number updates.

    Raises ExperimentError unless they are those of the form, with the same shapes.
    """
    entries = _entries(update, place)
    if missing := [where for where in form.entries if where not in entries]:
        others = [where for where in entries if where not in form.entries][:3]
        instead = f"; it has {', '.join(others)}" if others else ""
        raise ExperimentError(f"{place}: has no entry {missing[0]}, which {form.name} has{instead}")
    for where, tensor in entries.items():
        if where not in form.entries:
            raise ExperimentError(f"{place}{where}: {form.name} has no such entry")
        expected = form.entries[where]
        if tensor.shape[skip:] != expected.shape:
            wanted = f"{tuple(expected.shape)} as in {form.name}{where}"
            raise ExperimentError(f"{place}{where}: must have shape {wanted}, not {tuple(tensor.shape[skip:])}")
        if _counts(tensor) != _counts(expected):
            raise ExperimentError(f"{place}{where}: must be {expected.dtype} as in {form.name}, not {tensor.dtype}")
    return entries


def _shared(all_entries: list[Entries]) -> dict[str, str]:
    """Return the entries that share the memory of an earlier entry in all updates, and that one."""
    seen: dict[Any, str] = {}
    pairs = {where: seen.setdefault(_memory(tensor), where) for where, tensor in all_entries[0].items()}
    return {
        where: earlier
        for where, earlier in pairs.items()
        if where != earlier and all(_memory(entries[where]) == _memory(entries[earlier]) for entries in all_entries)
    }


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
