"""Names for Python objects in experiments: functions, classes, modules, pairs of data sets.

An experiment stores a name for each object, because TOML, JSON and comparisons need text. The name is the object's
import path if it has one, otherwise a note such as `<MyNet>`. In memory, the name is an `ObjectName`, a string with the
object as an attribute.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import enum
import functools
import inspect
import itertools
import pickle
import re
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CellType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.errors import ExperimentError, one_line, show
from fedsim.hints.components import NOTE

Value = TypeVar("Value")

ARRAYS = Tensor, np.ndarray
AT_START = ("__init__", "__post_init__", "__new__", "__setstate__")  # methods that run before the first call
DATA = "data", "data.name", "name"  # keys whose value may consist of data sets
LONGEST_NOTE = 60  # maximum number of characters
NUMBER = re.compile(r" \d+(?=>$)")


class ObjectName(str):
    """Text that stands for a Python object (such as a model class) in the settings.

    Attributes:
        target: the object, or a function that returns it.
    """

    target: Any

    def __new__(cls, text: str, target: Any) -> ObjectName:
        name = super().__new__(cls, text)
        name.target = target
        return name

    def __reduce__(self) -> tuple[Any, tuple[str, bytes]]:
        import cloudpickle

        # copies tensors too, because the user may change them
        return _unpickled, (str(self), cloudpickle.dumps(self.target))

    def __deepcopy__(self, memo: object) -> ObjectName:
        return self


def _unpickled(text: str, target: bytes) -> ObjectName:
    return ObjectName(text, pickle.loads(target))


def name_of(target: Any) -> ObjectName:
    """Return a text that stands for a Python object in the settings: its import path, or else a text such as `<MyNet>`.

    Different objects have different names, such as `<MyNet>` and `<MyNet 2>`.
    """
    if path := _import_path(target):
        return ObjectName(path, target)
    marks: list[Any] = []
    leaves = list(_leaves(target, marks))
    key = (*marks, *map(id, leaves))
    note = _notes.get(key)
    if note is None:
        text = _word_for(target)[:LONGEST_NOTE]
        number = next(_numbers[text])
        note = f"<{text}>" if number == 1 else f"<{text} {number}>"
        with contextlib.suppress(TypeError):  # no weak references (a list, for example): a new name for each call
            for leaf in leaves:
                weakref.finalize(leaf, _notes.pop, key, None).atexit = False
            _notes[key] = note
    if isinstance(target, nn.Module):
        return ObjectName(note, lambda: copy.deepcopy(target))  # keeps the parameters of the instance
    return ObjectName(note, target)


_notes: dict[tuple[Any, ...], str] = {}  # by the structure and the ids of living objects
_numbers: defaultdict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))


def plain(value: Any) -> Any:
    """Convert a value to types that a file can store: dicts, lists, Python numbers, and names of objects.

    NumPy arrays and tensors become lists of numbers. Functions, classes and other objects become names (see `name_of`).

    >>> plain({"seed": np.int64(3), "weights": torch.ones(2)})
    {'seed': 3, 'weights': [1.0, 1.0]}
    """
    if type(value) in (str, int, float, bool):  # fast path for the most frequent case
        return value
    if isinstance(value, (np.generic, np.ndarray, Tensor)):
        return value.tolist()
    if isinstance(value, Mapping):
        if type(value) is not dict and _holds_data(value):  # such as a DatasetDict
            return name_of(dict(value))
        return {key: _plain_data(item) if key in DATA else plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and len(value) == 2 and not is_pair(value) and _holds_data(value):
        return name_of(value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [plain(item) for item in value]
    if isinstance(value, torch.device):
        return str(value)
    return name_of(value) if _is_object(value) else value


def _plain_data(value: Any) -> Any:
    """Convert a value, which may be or contain data sets, to types that a file can store (see `plain`)."""
    if isinstance(value, Mapping) and "name" in value:
        return plain(value)
    if _holds_data(value) and not is_samples(value):
        return name_of(value)
    if isinstance(value, Mapping):
        named = {key: _holds_data(item) and not is_samples(item) for key, item in value.items()}
        return {key: name_of(item) if named[key] else plain(item) for key, item in value.items()}
    return plain(value)


def names_in(value: Any) -> Iterator[ObjectName]:
    """Yield the names of all Python objects in nested tables and lists."""
    if isinstance(value, ObjectName):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from names_in(item)


def holds_objects(value: Any) -> bool:
    """Whether a value is or contains a Python object that a file cannot store."""
    if isinstance(value, (Mapping, list, tuple)):
        return any(map(holds_objects, value.values() if isinstance(value, Mapping) else value))
    return _is_object(value)


def may_change(target: Any) -> bool:
    """Whether a Python object may keep a state between calls, in its attributes or in variables of its functions.

    >>> class Average:
    ...     def __init__(self):
    ...         self.last = None
    ...     def __call__(self, updates):
    ...         self.last = updates.mean(0)
    ...         return self.last
    >>> may_change(Average()), may_change(torch.optim.SGD), may_change(lambda updates: updates.mean(0))
    (True, False, False)
    """
    return _may_change(target, depth=3)


def _may_change(target: Any, depth: int) -> bool:
    """Whether an object may keep a state, judged by at most `depth` levels of nested objects."""
    inner: Iterable[Any] = ()
    if inspect.ismethod(target):
        target = target.__self__
    if isinstance(target, functools.partial):
        inner = target.func, *target.args, *target.keywords.values()
    elif inspect.isfunction(target):
        if _assigns(target):
            return True
        cells = [cell.cell_contents for cell in target.__closure__ or () if cell != CellType()]  # without empty cells
        inner = [value for value in cells if not isinstance(value, (Tensor, np.ndarray))]  # probably constants
    elif isinstance(target, (list, dict, set, bytearray, Tensor, np.ndarray, torch.Generator, np.random.Generator)):
        return True
    elif not isinstance(target, (type, nn.Module, tuple, enum.Enum)) and not inspect.ismodule(target):
        methods = [item for kind in type(target).__mro__ for item in vars(kind).values() if inspect.isfunction(item)]
        if any(_assigns(item) for item in methods if item.__name__ not in AT_START):
            return True
        inner = getattr(target, "__dict__", {}).values()
    return depth > 0 and any(_may_change(value, depth - 1) for value in inner)


def _assigns(function: Any) -> bool:
    """Whether a function assigns to attributes, or to variables outside the function."""
    outside = {*function.__code__.co_freevars}
    return any(
        step.opname in ("STORE_ATTR", "STORE_GLOBAL") or (step.opname == "STORE_DEREF" and step.argval in outside)
        for step in dis.get_instructions(function)
    )


def with_objects(value: Any, names: Iterable[ObjectName]) -> Any:
    """Put Python objects back into settings that were read from a file, which contains only their names.

    `names`: the objects. Each text in `value` that equals a name, such as `<MyNet>`, is replaced by its object.
    """
    named = {str(name): name for name in names}
    unnumbered = [NUMBER.sub("", name) for name in named]
    named |= {note: name for note, name in zip(unnumbered, named.values(), strict=True) if unnumbered.count(note) == 1}

    def replaced(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: replaced(item) for key, item in value.items()}
        if isinstance(value, list):
            return [replaced(item) for item in value]
        if isinstance(value, str) and NOTE.fullmatch(value):
            return named.get(value, named.get(NUMBER.sub("", value), value))
        return value

    return replaced(value)


def own_copy(value: Value) -> Value:
    """Return a deep copy of `value`, such as an experiment. Raise ExperimentError if an object cannot be copied."""
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise ExperimentError(
            f"an object in the experiment cannot be copied ({one_line(error)}), but each run needs a copy of its own; "
            "pass a function that calls the object instead"
        ) from error


def why_unsendable(names: Iterable[ObjectName]) -> str | None:
    """Return an error message about the first object that cannot be sent to another process, or None if all can be."""
    for name in names:
        try:
            pickle.dumps(name)
        except Exception as error:
            return f"{show(name)} cannot be sent to other processes ({one_line(error)})"
    return None


def _is_object(value: Any) -> bool:
    """Whether a value may be a component: a function, a class, or an object that is not of a built-in type."""
    if callable(value):
        return True
    is_builtin = type(value).__module__ in ("builtins", "datetime", "decimal") or isinstance(value, (str, int, float))
    is_model = hasattr(type(value), "model_fields")  # of pydantic, which is not imported here
    return not (is_builtin or is_model or isinstance(value, (enum.Enum, Path, Mapping, np.generic, np.ndarray, Tensor)))


def _holds_data(value: Any) -> bool:
    """Whether a value is a data set, or a tuple, list or dict of data sets (see `fedsim.data.brought`)."""
    if not isinstance(value, (tuple, list, Mapping)):
        return _is_object(value) and not callable(value)
    if isinstance(value, Mapping):  # lists of tables may be settings, such as augmentations
        return all(map(_holds_data, value.values())) and not any(map(is_samples, value.values())) and bool(value)
    parts = [part for part in value if part is not None]
    return is_pair(value) or is_samples(value) or (bool(parts) and all(map(_holds_data, parts)))


def is_samples(value: Any) -> bool:
    """Whether a value is one data set: a list of samples such as (input, target), or a list [inputs, targets]."""
    if not isinstance(value, list) or not value:
        return False
    if isinstance(value[0], tuple) and is_pair(value[0]):
        return not _are_data_sets(value)
    return is_pair(value) or (isinstance(value[0], (tuple, dict)) and not _holds_data(value[0]))


def _are_data_sets(pairs: list[Any]) -> bool:
    """Whether pairs of arrays are data sets (inputs [n, ...], targets [n, ...]), and not samples (input, target)."""
    shapes = [tuple(tuple(_first(part).shape) for part in pair) if is_pair(pair) else ((), ()) for pair in pairs]
    if not all(len(first) > 1 and second and first[0] == second[0] for first, second in shapes):
        return False
    return len(shapes[0][1]) == 1 or len(set(shapes)) > 1


def is_pair(value: Any) -> bool:
    """Whether a value is a tuple (inputs, targets) of arrays. The inputs may be a dict or a tuple of several arrays."""
    return (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and isinstance(value[1], ARRAYS)
        and (isinstance(value[0], ARRAYS) or are_several(value[0]))
    )


def are_several(value: Any) -> bool:
    """Whether a value is a dict or a tuple of several input arrays."""
    arrays = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, tuple) else ()
    return len(arrays) > 0 and all(isinstance(array, ARRAYS) for array in arrays)


def _first(inputs: Any) -> Any:
    """Return the input array, or the first one of several inputs."""
    return next(iter(inputs.values() if isinstance(inputs, Mapping) else inputs)) if are_several(inputs) else inputs


def _leaves(value: Any, marks: list[Any]) -> Iterator[Any]:
    """Yield the objects in nested tuples, lists and dicts, and append a description of the structure to `marks`."""
    marks.append(None if value is None else type(value))
    if not isinstance(value, (tuple, list, dict)) or is_samples(value):
        yield from () if value is None else (value,)
        return
    marks += value if isinstance(value, dict) else [len(value)]
    for part in value.values() if isinstance(value, dict) else value:
        yield from _leaves(part, marks)


def _import_path(target: Any) -> str | None:
    """Return `module:name` if every process can import `target` at this path, otherwise None."""
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module in ("__main__", "__mp_main__"):
        return None
    resolved = sys.modules.get(module)
    for part in name.split("."):
        resolved = getattr(resolved, part, None)
    return f"{module}:{name}" if resolved is target else None


def _word_for(target: Any) -> str:
    if is_pair(target) or is_samples(target):
        return "samples"
    if isinstance(target, (tuple, list, dict)) and target:
        words = [_word_for(part) for part in (target.values() if isinstance(target, dict) else target)]
        many = isinstance(target, list) or len(words) > 2 or ", " in words[0]
        return f"{len(words)} {words[0]}" if many else ", ".join(words)
    target = target.func if isinstance(target, functools.partial) else target
    word = getattr(target, "__name__", None) or type(target).__name__
    return re.sub(r"\W+", "_", str(word)).strip("_") or "object"
