"""Convert updates (tensors, arrays, or nested dicts and lists of these) to a matrix [n, d] and back."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
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
        stacked: whether the updates are one dict of stacked tensors [n, ...] instead of a list.
    """

    first: Any
    entries: Entries
    name: str
    shared: dict[str, str] = field(default_factory=dict)
    stacked: bool = False

    @property
    def columns(self) -> list[str]:
        """Key paths of the tensors that are aggregated, in order: floating-point tensors, with tied ones only once."""
        return [
            place for place, tensor in self.entries.items() if tensor.is_floating_point() and place not in self.shared
        ]

    def row(self, update: Any, place: str) -> Any:
        """Return one update as a flat vector [d]. A vector, or an object without tensors, is returned unchanged.

        `place` is the name of the update in error messages.
        """
        if isinstance(update, (Tensor, np.ndarray)) and update.ndim == 1:
            return _tensor(update, place)
        return self.flat(_entries_like(self, update, place)) if has_tensors(update) else update

    def flat(self, entries: Entries, lead: tuple[int, ...] = ()) -> Tensor:
        """Flatten and concatenate the floating-point tensors, of shapes [*lead, ...]. Returns a tensor [*lead, d]."""
        return torch.cat(self._parts(entries, lead), dim=-1)

    def rows(self, all_entries: Sequence[Entries]) -> Tensor:
        """Flatten the floating-point tensors of n updates, with one concatenation. Returns a tensor [n, d]."""
        parts = [part for entries in all_entries for part in self._parts(entries)]
        return torch.cat(parts).view(len(all_entries), -1)

    def _parts(self, entries: Entries, lead: tuple[int, ...] = ()) -> list[Tensor]:
        like = [self.entries[place] for place in self.columns]
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in like))
        return [entries[place].reshape(*lead, -1).to(like[0].device, dtype) for place in self.columns]

    def rebuild(self, result: Tensor) -> Any:
        """Return a result [d] or [m, d] with the structure of the updates.

        Tensors that are not floating-point are copied from the first update.
        """
        if result.ndim == 2 and not self.stacked:
            return [self.rebuild(row) for row in result]
        lead, columns = result.shape[:-1], self.columns
        parts = dict(zip(columns, result.split([self.entries[name].numel() for name in columns], dim=-1), strict=True))
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
    """Convert updates to a matrix [n, d]. Returns the matrix, and an object that converts results back.

    Args:
        updates: a tensor or array [n, d], or n lists of d numbers; a list or iterator of n updates (tensors or arrays
            of any shape, or dicts or lists of these, such as a state_dict); a dict of n dicts with the same keys, such
            as the state_dict of each client; or a dict of stacked tensors [n, ...].
        place: name of the updates in error messages.
        like: format that the updates must have. None: any format.

    Raises ExperimentError if the updates have different keys or shapes (the message names the first difference), or if
    a dict may be read as updates of clients and as stacked tensors.
    """
    updates = listed(updates, place)
    if isinstance(updates, np.ndarray):
        return _tensor(updates, place), MatrixForm(is_array=True)
    names = [f"{place}[{index}]" for index in range(len(updates))] if isinstance(updates, (list, tuple)) else []
    if isinstance(updates, Mapping) and has_tensors(updates):
        if not _are_clients(updates, place):
            return _stacked_rows(updates, place, like)
        names, updates = [f"{place}[{client!r}]" for client in updates], list(updates.values())
    if not names or not has_tensors(updates[0]):
        return updates, MatrixForm(is_array=False)
    form = like if isinstance(like, NestedForm) else _form_of(updates[0], names[0])
    all_entries = [_entries_like(form, update, name) for name, update in zip(names, updates, strict=True)]
    if form is not like and isinstance(updates[0], Mapping):  # gradients in a list may share memory by chance
        form = replace(form, shared=_shared(all_entries))
    return form.rows(all_entries), form


def listed(updates: Any, place: str) -> Any:
    """Return iterators of updates as lists, and lists of numbers as a tensor. Other objects are returned unchanged.

    `place` is the name of the updates in error messages. Raises ExperimentError for modules.

    >>> listed([[1, 2], [3, 4]], "updates")
    tensor([[1., 2.],
            [3., 4.]])
    """
    updates = list(updates) if isinstance(updates, (Iterator, ValuesView)) else updates
    if not isinstance(updates, (list, tuple)):
        return updates
    updates = [list(update) if isinstance(update, Iterator) else update for update in updates]
    if updates and isinstance(updates[0], nn.Module):
        raise ExperimentError(f"{place}[0]: is a module; pass the state_dict() of each model")
    if updates and all(isinstance(update, (list, tuple)) and all(map(_is_number, update)) for update in updates):
        if len(set(map(len, updates))) > 1:
            raise ExperimentError(f"{place}: must all have the same number of entries")
        return torch.tensor(updates, dtype=torch.get_default_dtype())
    return updates


def without_weights(updates: Any, place: str) -> tuple[Any, list[float] | None]:
    """Split pairs (update, weight) or (weight, update), as in Flower, into updates and weights.

    Args:
        updates: list of n pairs, or dict of n pairs by client. Weights are numbers, such as numbers of samples. Any
            other object is returned unchanged, with None instead of weights.
        place: name of the updates in error messages.

    Raises ExperimentError if a list may also be read in another way.

    >>> without_weights([(torch.tensor([1.0]), 10), (torch.tensor([3.0]), 30)], "updates")
    ([tensor([1.]), tensor([3.])], [10, 30])
    """
    updates = listed(updates, place)
    refuse_unclear_pairs(updates, place)
    pairs = _pairs(updates) or ()
    for at in (0, 1):
        if pairs and all(_is_number(pair[at]) and has_tensors(pair[1 - at]) for pair in pairs):
            weights = [pair[at] for pair in pairs]
            if at == 0 and isinstance(updates, (list, tuple)) and _are_counted(weights):
                raise ExperimentError(
                    f"{place}: the numbers {weights[0]} to {weights[-1]} in the pairs (number, update) may be weights "
                    "or client IDs; pass weights=[...], or the updates alone"
                )
            return [pair[1 - at] for pair in pairs], weights
    return updates, None


def refuse_unclear_pairs(updates: Any, place: str) -> None:
    """Raise ExperimentError for a list of pairs of which each contains a single number as a tensor or array.

    The number may be a weight or a parameter. `place` is the name of the updates in error messages.
    """
    pairs = None if isinstance(updates, Mapping) else _pairs(updates)
    for at in (0, 1):
        if pairs and all(_is_single(pair[at], beside=pair[1 - at]) for pair in pairs):
            raise ExperimentError(
                f"{place}[0][{at}]: a tensor or array of one number may be a weight or an entry of the update; pass "
                "n.item() for a weight, or updates as dicts"
            )


def _are_counted(numbers: Sequence[Any]) -> bool:
    """Whether there are several numbers, which are the integers 0, 1, 2, ... or 1, 2, 3, ... in this order."""
    integers = len(numbers) > 1 and all(isinstance(number, Integral) for number in numbers)
    return integers and numbers[0] in (0, 1) and list(numbers) == list(range(numbers[0], numbers[0] + len(numbers)))


def _pairs(updates: Any) -> Sequence[Any] | None:
    """Return the values of a list or dict if all are pairs, otherwise None."""
    pairs = list(updates.values()) if isinstance(updates, Mapping) else updates
    if not isinstance(pairs, (list, tuple)) or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in pairs):
        return None
    return pairs


def _is_number(value: Any) -> bool:
    return isinstance(value, (Real, np.number)) and not isinstance(value, bool)


def _is_single(value: Any, beside: Any) -> bool:
    """Whether a value is a tensor or array of one number beside others, without dimensions or beside a dict or list."""
    return (
        _is_leaf(value)
        and has_tensors(beside)
        and (value.ndim == 0 or (math.prod(value.shape) == 1 and not _is_leaf(beside)))
    )


def _are_clients(updates: Mapping[Any, Any], place: str) -> bool:
    """Whether a dict contains one update per client, instead of stacked tensors [n, ...].

    Raises ExperimentError if this is ambiguous.
    """
    values = list(updates.values())
    if all(isinstance(value, Mapping) for value in values):
        shapes = [{key: _is_leaf(leaf) and tuple(leaf.shape) for key, leaf in value.items()} for value in values]
        if len(values) > 1 and False not in shapes[0].values() and all(shape == shapes[0] for shape in shapes):
            return True
        kind = "one dict" if len(values) == 1 else "dicts with different keys or shapes"
    elif all(isinstance(value, (list, tuple)) for value in values):
        kind = "lists of tensors"
    elif not all(isinstance(key, str) for key in updates):
        kind = "tensors whose keys are not text"
    elif len(values) > 1 and all(_is_leaf(value) and np.ndim(value) == 1 for value in values):
        kind = "vectors"
    else:
        return False
    raise ExperimentError(
        f"{place}: a dict of {kind} may contain one update per client or stacked tensors [n, ...]; for clients, "
        "pass a list such as list(updates.values()); for stacked tensors, pass one dict of tensors with two or more "
        "dimensions by name"
    )


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray))


def _stacked_rows(updates: Any, place: str, like: Form | None) -> tuple[Tensor, NestedForm]:
    stacked = _entries(updates, place)
    named, first = next(iter(stacked.items()))
    for where, tensor in stacked.items():
        if not first.shape or not len(first) or tensor.shape[:1] != first.shape[:1]:
            wanted = f"[n, ...] with the same n >= 1 as {place}{named}"
            raise ExperimentError(f"{place}{where}: must have shape {wanted}, not {tuple(tensor.shape)}")
    form = like
    if not isinstance(form, NestedForm):
        form = _form_of(pytree.tree_map(lambda leaf: leaf[0], updates), place)
        form = replace(form, shared=_shared([stacked]), stacked=True)
    return form.flat(_entries_like(form, updates, place, skip=1), first.shape[:1]), form


def checked_matrix(updates: Any, place: str) -> Tensor:
    """Return updates [n, d] without their gradient history (detached).

    Raises ExperimentError unless `updates` is a floating-point tensor [n, d] with n >= 1.
    """
    if isinstance(updates, Tensor) and updates.ndim == 2 and updates.shape[0] and updates.is_floating_point():
        return updates.detach()
    if isinstance(updates, (list, tuple)) and updates:
        actual = f"a list of {type(updates[0]).__name__} objects"
    elif isinstance(updates, Tensor):
        actual = f"{updates.dtype} {tuple(updates.shape)}"
    else:
        actual = f"{'an empty' if updates in ([], (), {}) else 'a'} {type(updates).__name__}"
    raise ExperimentError(
        f"{place}: must be a floating-point tensor of shape [n, d] with one row per update (n >= 1), not {actual}"
    )


def has_tensors(value: Any) -> bool:
    """Whether a value is a tensor or array, or a dict or list whose first element is a tensor or array."""
    leaves = pytree.tree_leaves(value)
    return bool(leaves) and isinstance(leaves[0], (Tensor, np.ndarray))


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
            f"{place}: must be a tensor or an array, not the number {value!r}; pass numbers of samples as weights, or "
            "in pairs [(update, n), ...] of fedsim.aggregate"
        )
    try:
        return torch.from_numpy(np.require(value, requirements=["C", "W"]))
    except (TypeError, ValueError):
        kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise ExperimentError(f"{place}: must be a tensor or an array of numbers, not {kind}") from None


def _entries_like(form: NestedForm, update: Any, place: str, skip: int = 0) -> Entries:
    """Return the tensors of an update as a dict by key path.

    Raises ExperimentError unless the key paths and shapes are those of `form`. The first `skip` dimensions of each
    tensor are not compared.
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
        if tensor.shape[skip:] != expected.shape:
            wanted = f"{tuple(expected.shape)} as in {form.name}{where}"
            raise ExperimentError(f"{place}{where}: must have shape {wanted}, not {tuple(tensor.shape[skip:])}")
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
