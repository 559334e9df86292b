"""Files that are written whole or not at all, and what to do where they cannot be written."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from fedsim.errors import RecordError, show_bytes
from fedsim.limits import remedy_of_limit

ELSEWHERE = "or name another place with --out"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all. Raises RecordError where it cannot be written."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        _remove(temporary)  # before the free space is looked at
        raise cannot_write(path, error, len(content)) from error
    finally:
        _remove(temporary)  # there is one still only where it went wrong


def append_whole(file: io.FileIO, path: Path, content: bytes) -> None:
    """Append to an unbuffered file, all of it or nothing. Raises RecordError, naming `path`, where that fails."""
    end = file.tell()
    rest = memoryview(content)
    try:
        while rest:
            rest = rest[file.write(rest) :]  # where little room is left, it writes a part
    except OSError as error:
        with contextlib.suppress(OSError):  # what was there before stays, and ends with a whole line
            file.truncate(end)
            file.seek(end)
        raise cannot_write(path, error, len(content)) from error


def cannot_write(path: Path, error: OSError, needed: int | None = None) -> RecordError:
    """What to raise where a file cannot be written: place, reason and remedy; `needed` is its size in bytes."""
    return RecordError(f"{path}: cannot be written: {error.strerror or error}{remedy(path, error, needed)}")


def remedy(path: Path, error: OSError, needed: int | None = None) -> str:
    """What can be done about an error of writing there, as the rest of its line; "" where nobody knows."""
    if error.errno == errno.ENOSPC:
        asked = "" if needed is None else f" where {show_bytes(needed)} are needed"
        return f": {show_bytes(free_space(path))} are free there{asked}; make room, {ELSEWHERE}"
    if error.errno == errno.EDQUOT:
        return f"; make room within your quota there, {ELSEWHERE}"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"; make the place writable, {ELSEWHERE}"
    return remedy_of_limit(error)


def require_space(folder: Path, needed: float, purpose: str) -> None:
    """Raise RecordError unless there is room for so many bytes in the file system of a folder; `purpose` is what for.

    That is told before the work, not after it.
    """
    free = free_space(folder)
    if needed > free:
        raise RecordError(
            f"{folder}: {show_bytes(free)} are free there, and {purpose} needs {show_bytes(needed)}; "
            f"make room, {ELSEWHERE}"
        )


def free_space(path: Path) -> float:
    """Bytes that are free for this user where a file or folder is or would be; infinite if nobody knows."""
    with contextlib.suppress(OSError, StopIteration):
        there = next(each for each in (path, *path.absolute().parents) if each.exists())
        usage = shutil.disk_usage(there)
        return usage.free if usage.total else math.inf  # some network file systems know neither
    return math.inf


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON proper: numbers that are not finite, which JSON has no word for, become null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
