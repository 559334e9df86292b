"""Writing files whole or not at all, and reading only regular files of bounded size inside their folder."""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import math
import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fedsim.errors import RecordError, show_bytes
from fedsim.system.limits import limit_hint

ELSEWHERE = "or name another place with --out"

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


PART = ".{}.part"  # the name of a file while it is written


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file whole or not at all. Raises RecordError if it cannot be written."""
    if not path.name:  # as of "", which stands for the current folder
        raise RecordError(f"{path}: is a folder; name a file")
    temporary = path.with_name(PART.format(path.name))
    try:
        temporary.unlink(missing_ok=True)  # left by a killed process, or a link that leads elsewhere
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        _remove(temporary)  # before the error reports the free space
        raise write_error(path, error, len(content)) from error
    finally:
        _remove(temporary)


def remove_parts(folder: Path, patterns: Iterable[str]) -> None:
    """Remove the unfinished files that a killed process has left in a folder, of the names that match one of these.

    `patterns` are paths in the folder, such as `checkpoints/round-*.json`. Raises OSError if one cannot be removed.
    """
    for pattern in patterns:
        path = Path(pattern)
        for part in folder.glob(str(path.with_name(PART.format(path.name)))):
            if not is_outside(part.parent, folder):
                part.unlink()


def append_atomically(file: io.FileIO, path: Path, content: bytes) -> None:
    """Append to an unbuffered file, all of `content` or nothing. Raises RecordError, naming `path`, if that fails."""
    end = file.tell()
    rest = memoryview(content)
    try:
        while rest:
            rest = rest[file.write(rest) :]  # with little space left, it writes a part
    except OSError as error:
        with contextlib.suppress(OSError):  # what was there before stays, and ends with a whole line
            file.truncate(end)
            file.seek(end)
        raise write_error(path, error, len(content)) from error


def require_unchanged(file: io.FileIO, path: Path, when: str) -> None:
    """Check that `path` still names the file that is open for appending, and that only this program appended to it.

    Raises RecordError, with `when` in its line, if another program removed, replaced or changed the file.
    """
    with contextlib.suppress(OSError):
        status = os.stat(path)
        if os.path.samestat(status, os.fstat(file.fileno())) and status.st_size == file.tell():
            return
    raise RecordError(
        f"{path}: was removed or changed by another program {when}; the run stops, since rounds would be missing there"
    )


def write_error(path: Path, error: OSError, needed: int | None = None) -> RecordError:
    """The error for a file that cannot be written: path, reason and remedy; `needed` is its size in bytes."""
    return RecordError(f"{path}: cannot be written: {error.strerror or error}{remedy(path, error, needed)}")


def remedy(path: Path, error: OSError, needed: int | None = None) -> str:
    """A remedy for an error of writing, as the end of its line; "" if none is known."""
    if error.errno == errno.ENOSPC:
        asked = "" if needed is None else f" where {show_bytes(needed)} are needed"
        return f": {show_bytes(free_space(path))} are free there{asked}; make room, {ELSEWHERE}"
    if error.errno == errno.EDQUOT:
        return f"; make room within your quota there, {ELSEWHERE}"
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return "; a file is in the way: name another place with --out"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"; make the place writable, {ELSEWHERE}"
    return limit_hint(error)


def require_space(folder: Path, needed: float, purpose: str) -> None:
    """Raise RecordError, which names the `purpose`, unless so many bytes are free in the file system of a folder."""
    free = free_space(folder)
    if needed > free:
        raise RecordError(
            f"{folder}: {show_bytes(free)} are free there, and {purpose} needs {show_bytes(needed)}; "
            f"make room, {ELSEWHERE}"
        )


def free_space(path: Path) -> float:
    """Bytes that are free for this user in the file system of a path, which need not exist; infinite if unknown."""
    with contextlib.suppress(OSError, StopIteration):
        there = next(each for each in (path, *path.absolute().parents) if each.exists())
        usage = shutil.disk_usage(there)
        return usage.free if usage.total else math.inf  # some network file systems report zeros
    return math.inf


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path, by_whom: str) -> Iterator[None]:
    """Lock a folder in the block; the system releases the lock when this process ends.

    Args:
        by_whom: the holder of the lock, for the error: `another comparison`.

    Raises RecordError if it is locked.
    """
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        if not _take_lock(handle):
            raise RecordError(f"{folder}: {by_whom} is at work there")
        yield
    finally:
        _release(handle)


@contextlib.contextmanager
def one_at_a_time(path: Path, seconds: float) -> Iterator[None]:
    """Let the processes that enter such a block for this path do so one after another.

    A process waits at most so many seconds and then enters all the same, as it does where locks do not work.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDONLY)
            stack.callback(_release, handle)
            deadline = time.monotonic() + seconds
            while fcntl is not None and not _take_lock(handle) and time.monotonic() < deadline:
                time.sleep(0.05)
        yield


def _take_lock(handle: int) -> bool:
    """Whether this process got the lock of an open file, which no other process holds."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _release(handle: int) -> None:
    """Close a file, and release its lock, which processes forked meanwhile would keep."""
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def read_bounded(path: Path, most: int, inside: Path | None = None) -> bytes:
    """The content of a regular file.

    Nothing else is opened, since reading a pipe or a device may never end.

    Args:
        most: its maximum size in bytes.
        inside: a folder that must contain the file after links are resolved; None: any.

    Raises OSError with a `strerror` that names the problem.
    """
    try:
        require_regular(path, most, inside)
        with open(path, "rb", opener=_open_without_waiting) as file:
            content = file.read(most + 1)
    except ValueError:  # a NUL in its name
        raise OSError(errno.EINVAL, "no file has such a name") from None
    if len(content) > most:  # it has grown, or reports 0 bytes as files in /proc do
        raise _too_large(most)
    return content


def require_regular(path: Path, most: int, inside: Path | None = None) -> None:
    """Raise OSError unless `read_bounded` would read the file."""
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    if status.st_size > most:
        raise _too_large(most)
    if inside is not None:
        require_inside(path, inside)


def require_inside(path: Path, folder: Path) -> None:
    """Raise OSError if a path, which need not exist, leads out of a folder by links or `..`."""
    if is_outside(path, folder):
        raise OSError(errno.EINVAL, f"it leads out of {folder}")


def is_outside(path: Path, folder: Path) -> bool:
    """Whether a path leads out of a folder."""
    try:
        return not path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # a circle of links, a name that cannot be one
        return True


def is_file(path: Path) -> bool:
    """Whether there is such a regular file; False for a name that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))


def _too_large(most: int) -> OSError:
    return OSError(errno.EFBIG, f"it is larger than {most:,} bytes")


def to_csv(rows: Iterable[Iterable[Any]]) -> str:
    """Rows as CSV; None is an empty cell.

    A text that a spreadsheet might run as a formula has an apostrophe before it. So has a text that begins with one,
    so that to remove one apostrophe at the beginning of a cell gives back the text.

    >>> to_csv([["=1+1", "-0.5", "krum", None]])
    "'=1+1,-0.5,krum,\\n"
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(_as_plain_text, row) for row in rows)
    return text.getvalue()


def _as_plain_text(cell: Any) -> Any:
    if not isinstance(cell, str) or not cell.startswith(("=", "+", "-", "@", "\t", "\r", "'")):
        return cell
    with contextlib.suppress(ValueError):
        float(cell)
        return cell
    return f"'{cell}"


def to_json(value: Any, indent: int | None = None) -> str:
    """Standard JSON, with null in place of numbers that are not finite."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
