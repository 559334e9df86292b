"""Import components by path, and decide what an experiment file may import: importing a module runs its code.

Import paths in Python code and on the command line come from the user and are always imported. Inside the block
`untrusted_config(file)`, an import path in the file that the user has not also passed is imported only if

- the user allows it (`--allow-imports`, `allow_imports=True`), or
- the file lies directly in the working directory, which is not a run folder, and the path leads to a function or class
  that a module in the working directory defines. Running such a file is like running a script there.

These conditions are checked before the import, and again before an imported object is called. fedsim never adds the
working directory to `sys.path`, where every package would look for its optional modules. Instead, a module finder
searches this folder only for modules that `import_object` imports, and for modules that these modules import.
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
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from fedsim.core.objects import ObjectName
from fedsim.errors import ExperimentError, show
from fedsim.system.packages import import_torchvision

REMEDY = "a file may import this only with --allow-imports (in Python: allow_imports=True), because importing runs code"
RUN_FILES = ("metrics.jsonl", "comparison.json")  # written to the folder of each run or comparison
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


class LocalModules:
    """Module finder for working directories. It is the last finder in `sys.meta_path`.

    Attributes:
        folders: working directory of each top-level module that was found there.
    """

    def __init__(self) -> None:
        self.folders: dict[str, str] = {}

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a top-level module that `admit` named, or that such a module imports, else None."""
        if path is not None:  # in a package, which knows its folders
            return None
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals.get("__name__", "").startswith("importlib"):
            frame = frame.f_back
        importer = str(frame.f_globals.get("__name__")).partition(".")[0]
        folder = self.folders.get(name) or self.folders.get(importer)
        spec = PathFinder.find_spec(name, [folder]) if folder else None
        if folder and spec:
            self.folders[name] = folder
        return spec

    def admit(self, folders: dict[str, str]) -> None:
        """Let this finder find the top-level modules in `folders`, which maps a module's name to its folder."""
        if folders and self not in sys.meta_path:
            sys.meta_path.append(self)
        self.folders.update(folders)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[dict[str, str]]]:
        return _admit_here, (dict(self.folders),)  # unpickled in another process, whose finder finds the same modules


local_modules = LocalModules()


def _admit_here(folders: dict[str, str]) -> LocalModules:
    local_modules.admit(folders)
    return local_modules


_source: ContextVar[UntrustedSource | None] = ContextVar("fedsim_untrusted_source", default=None)
_is_stored: ContextVar[bool] = ContextVar("fedsim_reads_stored_run", default=False)


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


@contextlib.contextmanager
def reading_stored_run() -> Iterator[None]:
    """Forbid experiment files, which lie in a run or comparison folder, to import anything inside the `with` block."""
    token = _is_stored.set(True)
    try:
        yield
    finally:
        _is_stored.reset(token)


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
    untrusted = is_untrusted(path)
    if untrusted and not (IMPORT_PATH.fullmatch(path) and _file_is_here() and _is_local(module)):
        raise ImportRefusedError(REMEDY)
    top = module.partition(".")[0]
    if _spec_of(top) is None:  # not found by Python, which searches the working directory in `python script.py` only
        local_modules.admit({top: os.getcwd()})
    if top in ("torchvision", "torchmetrics"):  # torchmetrics may load torchvision
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
    """Whether the untrusted experiment file lies directly in the working directory, which is not a run folder."""
    source, here = _source.get(), Path.cwd().resolve()
    if source is None or _is_stored.get() or source.file.resolve().parent != here:
        return False
    return not any((here / name).exists() for name in RUN_FILES)


def _is_local(module: str) -> bool:
    """Whether a module, or the package that contains it, lies in the working directory. Nothing is imported."""
    top, here = module.partition(".")[0], Path.cwd().resolve()
    spec = _spec_of(top) or PathFinder.find_spec(top, [str(here)])
    if spec is None or spec.origin is None:  # not found, or a folder without an __init__.py
        return False
    return Path(spec.origin).resolve() in (here / f"{top}.py", here / top / "__init__.py")


def _spec_of(top: str) -> ModuleSpec | None:
    """Return the spec of a top-level module without importing it, or an empty spec if Python finds none."""
    try:
        return find_spec(top)
    except (ImportError, ValueError, AttributeError):  # such as __main__
        return ModuleSpec(top, None)


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
