"""Safe file access: write files completely or not at all, and read only regular files of limited size."""

from __future__ import annotations

import codecs
import contextlib
import csv
import errno
import io
import json
import math
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fedsim.errors import ExperimentError, RecordError, show, show_bytes
from fedsim.system.limits import limit_hint

ELSEWHERE = "or choose another folder with --out"

if sys.platform == "win32":
    fcntl: Any = None
else:
    import fcntl

PART = ".{}.part"  # temporary name of a file while it is written


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file completely or not at all. Raise RecordError if it cannot be written."""
    if not path.name:  # for example "", the current folder
        raise RecordError(f"{path}: is a folder; give the path of a file")
    temporary = path.with_name(PART.format(path.name))
    try:
        temporary.unlink(missing_ok=True)  # left by a killed process, or a link to another place
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        _remove(temporary)  # before the error message reports the free space
        raise unwritable_error(path, error, len(content)) from error
    finally:
        _remove(temporary)


def decoded(content: bytes) -> str:
    """Return text in UTF-8 without a byte-order mark. Raise ValueError, with the line, if it is not UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise ValueError("the text is UTF-16, not UTF-8; save the file as UTF-8") from None
        line, letter = error.object.count(b"\n", 0, error.start) + 1, show(chr(error.object[error.start]))
        raise ValueError(
            f"line {line} is not UTF-8 ({letter} in Latin-1); save the file as UTF-8, for example with iconv -f LATIN1 "
            "-t UTF-8"
        ) from None


def remove_parts(folder: Path, patterns: Iterable[str]) -> None:
    """Remove unfinished files that a killed process has left in a folder.

    `patterns` are paths of the finished files relative to the folder, such as `checkpoints/round-*.json`. Raises
    OSError if an unfinished file cannot be removed.
    """
    for pattern in patterns:
        path = Path(pattern)
        for part in folder.glob(str(path.with_name(PART.format(path.name)))):
            if not is_outside(part.parent, folder):
                part.unlink()


def append_atomically(file: io.FileIO, path: Path, content: bytes) -> None:
    """Append all of `content` to an unbuffered file, or nothing. Raise RecordError, with `path`, on failure."""
    end = file.tell()
    rest = memoryview(content)
    try:
        while rest:
            rest = rest[file.write(rest) :]  # writes only a part if little space is left
    except OSError as error:
        with contextlib.suppress(OSError):  # keeps the earlier content, which ends with a complete line
            file.truncate(end)
            file.seek(end)
        raise unwritable_error(path, error, len(content)) from error


def require_unchanged(file: io.FileIO, path: Path, when: str) -> None:
    """Raise RecordError if another program removed, replaced or changed the file that is open for appending.

    `when` completes the error message, such as "after round 3".
    """
    with contextlib.suppress(OSError):
        status = os.stat(path)
        if os.path.samestat(status, os.fstat(file.fileno())) and status.st_size == file.tell():
            return
    raise RecordError(
        f"{path}: was removed or changed by another program {when}; the run stops, because rounds would be missing "
        "from the file"
    )


def unwritable_error(path: Path, error: OSError, needed: int | None = None) -> RecordError:
    """Return the error for a file that cannot be written. It says what to change. `needed`: size in bytes."""
    return RecordError(f"{path}: cannot be written: {error.strerror or error}{remedy(path, error, needed)}")


@contextlib.contextmanager
def os_errors_as_record_errors(path: Path, problem: str = "cannot be written") -> Iterator[None]:
    """Context manager that turns an OSError into a RecordError: `path`, `problem`, the reason and what to change."""
    try:
        yield
    except OSError as error:
        raise RecordError(f"{path}: {problem}: {error.strerror or error}{remedy(path, error)}") from error


def remedy(path: Path, error: OSError, needed: int | None = None) -> str:
    """Return what to change after a write error, as the end of an error line, or "" if nothing is known.

    `needed` is the size of the file in bytes, or None if unknown.
    """
    if error.errno == errno.ENOSPC:
        asked = "" if needed is None else f", but {show_bytes(needed)} are needed"
        return f": {show_bytes(free_space(path))} are free{asked}; free some space, {ELSEWHERE}"
    if error.errno == errno.EDQUOT:
        return f"; free some space within your disk quota, {ELSEWHERE}"
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return "; a file with this name exists; choose another folder with --out"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"; make the folder writable, {ELSEWHERE}"
    return limit_hint(error)


def require_space(folder: Path, needed: float, purpose: str) -> None:
    """Raise RecordError unless `needed` bytes are free in the file system of a folder. The message names `purpose`."""
    free = free_space(folder)
    if needed > free:
        raise RecordError(
            f"{folder}: only {show_bytes(free)} are free, but {purpose} needs {show_bytes(needed)}; free some space, "
            f"{ELSEWHERE}"
        )


def free_space(path: Path) -> float:
    """Return the bytes free for this user in the file system of `path` (infinite if unknown).

    The path itself need not exist."""
    with contextlib.suppress(OSError, StopIteration):
        existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        usage = shutil.disk_usage(existing)
        return usage.free if usage.total else math.inf  # some network file systems report zeros
    return math.inf


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path, by_whom: str) -> Iterator[None]:
    """Lock a folder inside the block. The system releases the lock if this process ends.

    Args:
        folder: the folder.
        by_whom: program that may hold the lock, for the error message, such as "another comparison".

    Raises RecordError if the folder is already locked.
    """
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        if not _take_lock(handle):
            raise RecordError(
                f"{folder}: {by_whom} is using this folder; wait until it has ended, or use another folder"
            )
        yield
    finally:
        _release(handle)


@contextlib.contextmanager
def one_at_a_time(path: Path, seconds: float) -> Iterator[None]:
    """Let only one process at a time execute the block, by locking the file `path`.

    A process that has waited for `seconds` enters the block anyway, as do processes on systems without locks.
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
    """Try to lock an open file. Return whether this process now holds the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _release(handle: int) -> None:
    """Release the lock of a file and close it. Closing alone is not enough if a process has been forked meanwhile."""
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def user_path(path: str | os.PathLike[str]) -> Path:
    """Return a path that a user wrote, with `~` at its start replaced by the home folder.

    Raises ExperimentError if `path` is not a path, for example the result of a run instead of its folder.
    """
    try:
        return Path(os.path.expanduser(path))
    except TypeError:
        raise ExperimentError(f"{show(path)}: must be a path, such as the folder of a run") from None


def read_bounded(path: Path, most: float, inside: Path | None = None) -> bytes:
    """Return the content of a regular file.

    Pipes and devices are refused, because reading them may never end.

    Args:
        path: the file.
        most: maximum size in bytes; infinite for no limit.
        inside: folder that must contain the file after links are resolved. None: any folder.

    Raises OSError with a `strerror` that names the problem.
    """
    try:
        require_regular(path, most, inside)
        with open(path, "rb", opener=_open_without_waiting) as file:
            content = file.read(-1 if most == math.inf else int(most) + 1)
    except ValueError:  # NUL character in the name
        raise OSError(errno.EINVAL, "no file can have this name") from None
    if len(content) > most:  # the file has grown, or reports 0 bytes like files in /proc
        raise _too_large(most)
    return content


def require_regular(path: Path, most: float, inside: Path | None = None) -> None:
    """Raise OSError if this is not a regular file, is larger than `most` bytes, or lies outside the folder `inside`."""
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
    """Raise OSError if a path, which may not exist, leads out of a folder through links or `..`."""
    if is_outside(path, folder):
        raise OSError(errno.EINVAL, f"the path leads out of {folder}")


def is_outside(path: Path, folder: Path) -> bool:
    """Whether a path leads out of a folder."""
    try:
        return not path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # circular links or an impossible name
        return True


def is_file(path: Path) -> bool:
    """Whether `path` is an existing regular file. False for a name that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))


def _too_large(most: float) -> OSError:
    return OSError(errno.EFBIG, f"it is larger than {most:,.0f} bytes")


def to_csv(rows: Iterable[Iterable[Any]]) -> str:
    """Format rows as CSV. None gives an empty cell.

    Text that a spreadsheet might run as a formula is prefixed with an apostrophe. Text that starts with an apostrophe
    gets a second one, so removing one apostrophe from the start of a cell always restores the text.

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
    """Format a value as standard JSON, with null for numbers that are not finite."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
