"""Import of components by path, and what an experiment file may import: importing a module runs its code.

Import paths in Python code and on the command line come from the user and are always imported. Within the block
`untrusted_config(file)`, an import path that only the file contains is imported if

- the user allows it (`--allow-imports`, `allow_imports=True`), or
- the file lies in the working directory, and the path leads to a function or class that a module of the working
  directory itself defines: running such a file is like running a script there.

This is checked before anything is imported, and again before an imported object is called.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from fedsim.core.objects import ObjectName
from fedsim.errors import ExperimentError, show
from fedsim.system.packages import import_torchvision

REMEDY = "a file may import this only with --allow-imports (in Python allow_imports=True), since importing runs code"
IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


class ImportRefusedError(ExperimentError):
    """An experiment file contains an import path that it may not use."""


@dataclass(frozen=True)
class UntrustedSource:
    """The file that is being read, and the strings that the user gave beside it."""

    file: Path
    trusted: frozenset[str]


_source: ContextVar[UntrustedSource | None] = ContextVar("fedsim_untrusted_source", default=None)


@contextlib.contextmanager
def untrusted_config(file: Path | None, trusted: Iterable[Any] = (), *, allowed: bool = False) -> Iterator[None]:
    """Until the block ends, treat all values as values of a file, except the trusted ones.

    Args:
        file: the file that was read; None if the values come from the user.
        trusted: values that the user gave beside the file.
        allowed: whether the user allows all imports.
    """
    source = None if file is None or allowed else UntrustedSource(file, frozenset(_strings(trusted)))
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)


def is_untrusted(value: str) -> bool:
    """Whether a value comes from an untrusted file."""
    source = _source.get()
    return source is not None and value not in source.trusted


def import_object(path: str) -> Callable[..., Any]:
    """The function or class at "package.module:attribute"; modules in the working directory are found.

    Raises ImportRefusedError if the path comes from a file that may not import it.
    """
    if isinstance(path, ObjectName):
        return path.target
    module, _, attribute = path.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # console scripts, unlike `python script.py`, start without it
    untrusted = is_untrusted(path)
    if untrusted and not (IMPORT_PATH.fullmatch(path) and _file_is_here() and _is_local(module)):
        raise ImportRefusedError(REMEDY)
    if module.partition(".")[0] in ("torchvision", "torchmetrics"):  # the latter imports the former if it is there
        with contextlib.suppress(ImportError):
            import_torchvision()
    target: Any = importlib.import_module(module)
    for name in attribute.split("."):
        target = getattr(target, name)
        if untrusted:
            _require_local(target)
    if not callable(target):
        raise TypeError(f"{path} is of type {type(target).__name__}, not a function or class")
    return target


def _require_local(target: Any) -> None:
    """Raise ImportRefusedError unless a module in the working directory defines `target`.

    For example, `my_components:os.system` is refused.
    """
    home = target.__name__ if isinstance(target, ModuleType) else getattr(target, "__module__", None)
    if not isinstance(home, str) or not _is_local(home):
        raise ImportRefusedError(f"leads to an object that is defined in {show(home)}; {REMEDY}")


def _file_is_here() -> bool:
    """Whether the untrusted file lies in the working directory; a folder in it may belong to somebody else."""
    source = _source.get()
    return source is not None and source.file.resolve().parent == Path.cwd().resolve()


def _is_local(module: str) -> bool:
    """Whether a module is, or belongs to, a file or package of the working directory.

    Only its top-level package is searched for: to find a module in a package is to import that package.
    """
    top, here = module.partition(".")[0], Path.cwd().resolve()
    try:
        spec = find_spec(top)
    except (ImportError, ValueError, AttributeError):  # a module without a spec, such as __main__
        return False
    if spec is None or spec.origin is None:  # not found, or a folder without an __init__.py
        return False
    return Path(spec.origin).resolve() in (here / f"{top}.py", here / top / "__init__.py")


def _strings(values: Iterable[Any]) -> Iterator[str]:
    """All strings in values, also in nested lists and tables."""
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
