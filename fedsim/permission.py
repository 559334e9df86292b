"""What a file may import: importing a module runs it, and experiment files can come from strangers.

What Python code, or a word of the command line, names is the user's own word, and imported as it is named. While the
words of a FILE are read, inside `words_of`, an import path among them is followed only where

- the user allows it (`--allow-imports`, `allow_imports=True`), or has said that very path himself, or
- the file lies in the working directory, and the path leads to a function or class which a module of the working
  directory itself defines: running such a file is what running a script there would be.

Checked before anything is imported, and again before what has been imported is called.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from fedsim.errors import ExperimentError, show

HOW = "a file may import this only with --allow-imports (in Python allow_imports=True), since importing runs code"
IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


class ImportRefusedError(ExperimentError):
    """A file names an import path that it may not."""


@dataclass(frozen=True)
class Stranger:
    """Who speaks: a file, and the words beside it that are the user's own."""

    file: Path
    granted: frozenset[str]


_speaker: ContextVar[Stranger | None] = ContextVar("fedsim_stranger", default=None)


@contextlib.contextmanager
def words_of(file: Path | None, own: Iterable[Any] = (), *, allowed: bool = False) -> Iterator[None]:
    """Until the block ends, what is named counts as named by that file, except what stands in `own` too.

    Args:
        file: where the description has been read; None: it comes from the user himself.
        own: values that he has given beside it.
        allowed: whether he allows all imports.
    """
    speaker = None if file is None or allowed else Stranger(file, frozenset(_strings(own)))
    token = _speaker.set(speaker)
    try:
        yield
    finally:
        _speaker.reset(token)


def is_strangers(value: str) -> bool:
    """Whether a file says this, and not the user, at the moment."""
    speaker = _speaker.get()
    return speaker is not None and value not in speaker.granted


def require_importable(path: str) -> None:
    """Before an import: raise ImportRefusedError where a file names what it may not."""
    speaker = _speaker.get()
    if speaker is None or path in speaker.granted:
        return
    if not (IMPORT_PATH.fullmatch(path) and _lies_here(speaker.file) and _is_own_module(path.partition(":")[0])):
        raise ImportRefusedError(HOW)


def require_own(path: str, found: Any) -> None:
    """After it, of each thing on the way from the module to what is named: whether a module of one's own defines it.

    Otherwise `my_plugs:os.system` would lead anywhere.
    """
    speaker = _speaker.get()
    if speaker is None or path in speaker.granted:
        return
    home = found.__name__ if isinstance(found, ModuleType) else getattr(found, "__module__", None)
    if not isinstance(home, str) or not _is_own_module(home):
        raise ImportRefusedError(f"leads to what is defined in {show(home)}; {HOW}")


def _lies_here(file: Path) -> bool:
    """Whether a file lies in the working directory, not in a folder in it: that may be another's, as a run folder."""
    return file.resolve().parent == Path.cwd().resolve()


def _is_own_module(module: str) -> bool:
    """Whether a module would be found in, or belongs to, a file or package of the working directory.

    Only the first part of its name is looked for: to find a module in a package is to import that package.
    """
    top, here = module.partition(".")[0], Path.cwd().resolve()
    try:
        spec = find_spec(top)
    except (ImportError, ValueError, AttributeError):  # of a module that has none, as __main__
        return False
    if spec is None or spec.origin is None:  # None: there is none, or it is a folder without an __init__.py
        return False
    return Path(spec.origin).resolve() in (here / f"{top}.py", here / top / "__init__.py")


def _strings(values: Iterable[Any]) -> Iterator[str]:
    """All strings among values, those in lists and tables too."""
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
