"""Import components by path, and decide what an experiment file may import: importing a module runs its code.

Import paths in Python code and on the command line come from the user and are always imported. Inside the block
`untrusted_config(file)`, an import path in the file that the user has not also passed is imported only if

- the user allows it (`--allow-imports`, `allow_imports=True`), or
- the file lies directly in the working directory, and the path leads to a function or class that a module in the
  working directory defines. Running such a file is like running a script there.

These conditions are checked before the import, and again before an imported object is called.
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

REMEDY = "a file may import this only with --allow-imports (in Python: allow_imports=True), because importing runs code"
IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


class ImportRefusedError(ExperimentError):
    """Raised if an experiment file contains an import path that is not allowed."""


@dataclass(frozen=True)
class UntrustedSource:
    """An experiment file that may come from somebody else.

    Attributes:
        file: path of the experiment file.
        trusted: import paths that the user passed in addition to the file. They may name any module.
    """

    file: Path
    trusted: frozenset[str]


_source: ContextVar[UntrustedSource | None] = ContextVar("fedsim_untrusted_source", default=None)


@contextlib.contextmanager
def untrusted_config(file: Path | None, trusted: Iterable[Any] = (), *, allowed: bool = False) -> Iterator[None]:
    """Allow an experiment file to import only modules in the working directory, inside the `with` block.

    Args:
        file: experiment file, which may come from somebody else. None: there is no file, and nothing is restricted.
        trusted: settings that the user passed in addition to the file. Their import paths may name any module.
        allowed: whether the user allows all imports.
    """
    source = None if file is None or allowed else UntrustedSource(file, frozenset(_strings(trusted)))
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)


def is_untrusted(value: str) -> bool:
    """Whether the setting `value` comes from an experiment file, and not from the user."""
    source = _source.get()
    return source is not None and value not in source.trusted


def import_object(path: str) -> Callable[..., Any]:
    """Import the function or class at "package.module:attribute". Modules in the working directory are found too.

    Raises ImportRefusedError if the path comes from a file that is not allowed to import it.
    """
    if isinstance(path, ObjectName):
        return path.target
    module, _, attribute = path.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # missing in console scripts, unlike in `python script.py`
    untrusted = is_untrusted(path)
    if untrusted and not (IMPORT_PATH.fullmatch(path) and _file_is_here() and _is_local(module)):
        raise ImportRefusedError(REMEDY)
    if module.partition(".")[0] in ("torchvision", "torchmetrics"):  # torchmetrics may load torchvision
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
    """Raise ImportRefusedError unless `target` is defined by a module in the working directory."""
    home = target.__name__ if isinstance(target, ModuleType) else getattr(target, "__module__", None)
    if not isinstance(home, str) or not _is_local(home):
        raise ImportRefusedError(f"the import path leads to an object defined in {show(home)}; {REMEDY}")


def _file_is_here() -> bool:
    """Whether the untrusted experiment file lies directly in the working directory, and not in a subfolder."""
    source = _source.get()
    return source is not None and source.file.resolve().parent == Path.cwd().resolve()


def _is_local(module: str) -> bool:
    """Whether a module, or the package that contains it, lies in the working directory."""
    top, here = module.partition(".")[0], Path.cwd().resolve()
    try:
        spec = find_spec(top)
    except (ImportError, ValueError, AttributeError):  # a module without a spec, such as __main__
        return False
    if spec is None or spec.origin is None:  # not found, or a folder without an __init__.py
        return False
    return Path(spec.origin).resolve() in (here / f"{top}.py", here / top / "__init__.py")


def _strings(values: Iterable[Any]) -> Iterator[str]:
    """Yield all strings in `values`, including those in nested lists and tables."""
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
