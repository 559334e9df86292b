"""Limits that the system sets to a process: what to say where one is reached, and which can be raised in time."""

from __future__ import annotations

import contextlib
import errno
import os
import traceback
from collections.abc import Callable
from typing import NamedTuple

from fedsim.errors import WorkerError, one_line, show_bytes

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

FILES_OF_CHILD = 6  # that stay open here for each process that is started: its pipe, and what multiprocessing keeps
FILES_OF_START = 16  # and for a moment, while processes start and are handed the shared memory
FILES_WITHIN = 48  # that a process has open itself, libraries included, with room to spare
MEMORY_RAN_OUT = ("can't allocate memory", "not enough memory", "Cannot allocate memory")  # as PyTorch says it
USUAL_FILES = 24  # open before anything is started, where they cannot be counted


class Limit(NamedTuple):
    """What an error says of a limit: its name in `resource`, what it is, how its value is shown, how it is raised."""

    name: str
    what: str
    show: Callable[[int], str]
    how: str


LIMITS = {
    errno.EFBIG: Limit("RLIMIT_FSIZE", "a file may have {} here", show_bytes, "ulimit -f"),
    errno.EMFILE: Limit("RLIMIT_NOFILE", "this process may have {} files open", str, "ulimit -n"),
    errno.EAGAIN: Limit("RLIMIT_NPROC", "this user may have {} processes and threads", str, "ulimit -u"),
    errno.ENOMEM: Limit("RLIMIT_AS", "this process may have {} of address space", show_bytes, "ulimit -v"),
}


def remedy_of_limit(error: OSError) -> str:
    """What can be done where an error says that a limit is reached, as the rest of its line; "" where it says none."""
    limit = LIMITS.get(error.errno or 0)
    if limit is None or resource is None:
        return ""
    most = resource.getrlimit(getattr(resource, limit.name))[0]
    if most != resource.RLIM_INFINITY:
        return f"; {limit.what.format(limit.show(most))} ({limit.how} raises that)"
    return "; the container may have too few (pids.max)" if error.errno == errno.EAGAIN else ""


def told(error: Exception) -> str | None:
    """What the system would not do, and which of its limits that was, in one line; None where it is no such error."""
    if isinstance(error, OSError):
        place = "" if error.filename is None else f"{error.filename}: "
        return f"{place}{error.strerror or one_line(error)}{remedy_of_limit(error)}"
    if is_out_of_memory(error):
        text = " ".join(str(error).partition("\n")[0].split())
        return f"memory ran out{f' ({text})' if text else ''}{remedy_of_limit(OSError(errno.ENOMEM, ''))}"
    text = " ".join(str(error).split())
    if "device-side assert" in text:
        return one_line(error)
    if "can't start new thread" in text:
        return f"{text}{remedy_of_limit(OSError(errno.EAGAIN, ''))}"
    return None


def is_out_of_memory(error: Exception) -> bool:
    """Whether main memory could not be had."""
    return isinstance(error, MemoryError) or any(phrase in str(error) for phrase in MEMORY_RAN_OUT)


def lines_of(error: Exception) -> str:
    """An exception of the code of a run: one line, and its traceback below, or no traceback if memory ran out."""
    return told(error) or "" if is_out_of_memory(error) else f"{one_line(error)}\n{traceback.format_exc()}"


def require_files(processes: int, instead: str) -> None:
    """Before processes are started: see to it that this process may open the files that this takes.

    The limit (RLIMIT_NOFILE) is raised as far as the system lets every process raise it by itself.
    Raises WorkerError, with what to do `instead`, where that is not far enough.
    """
    if resource is None:
        return
    needed = max(FILES_WITHIN, _open_files() + processes * FILES_OF_CHILD + FILES_OF_START)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise WorkerError(
            f"processes = {processes}: to start them takes about {needed} open files, and this program may have {hard} "
            f"(RLIMIT_NOFILE); raise that (ulimit -n {needed}), use fewer processes, or {instead}"
        )
    with contextlib.suppress(OSError, ValueError):  # macOS has a further limit; then starting says what is wrong
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return USUAL_FILES
