"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedsim.errors import RecordError

if os.name == "posix":
    import fcntl
else:
    fcntl = None


PART = ".{}.part"  # what a file is called while it is being written


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all. Raises RecordError where it cannot be written."""
    temporary = path.with_name(PART.format(path.name))
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise RecordError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)  # there is one still only where it went wrong


def read_whole(path: Path, most: int) -> bytes:
    """The content of a regular file of at most so many bytes. Raises RecordError where it is something else."""
    try:
        if not path.is_file():
            raise RecordError(f"{path}: no such file")
        if (size := path.stat().st_size) > most:
            raise RecordError(f"{path}: has {size:,} bytes, of which there is memory for {most:,}")
        return path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from error


@contextlib.contextmanager
def locked(folder: Path, by_whom: str) -> Iterator[None]:
    """Keep others out of a folder; the system lets go of the lock when this process ends, however it does.

    Raises RecordError where somebody is at work there: `another comparison`, say.
    """
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecordError(f"{folder}: {by_whom} is at work there") from None
        yield
    finally:
        os.close(handle)


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON proper: numbers that are not finite, which JSON has no word for, become null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
