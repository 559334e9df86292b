"""Resource limits of the system: error messages that name them, and the limit of open files, which is raised."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fedsim.errors import WorkerError, one_line, show_bytes

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

FILES_OF_CHILD = 6  # open files of this process for each child: its pipe, and what multiprocessing keeps
FILES_OF_START = 16  # further open files while processes start and receive the shared memory
FILES_WITHIN = 48  # open files of a process itself, libraries included, generously
MEMORY_RAN_OUT = ("can't allocate memory", "not enough memory", "Cannot allocate memory")  # in messages of PyTorch
INSTALLED = {"site-packages", "dist-packages"}
FOLDERS = Path(__file__).parents[1], sysconfig.get_path("stdlib")
LIBRARIES = (*(os.path.join(folder, "") for folder in FOLDERS), "<frozen")  # where paths of other files begin
USUAL_FILES = 24  # open files before a process is started, if they cannot be counted


class Limit(NamedTuple):
    """A limit: its name in `resource`, a phrase with its value, how to format the value, the command that raises it."""

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


def limit_hint(error: OSError) -> str:
    """A hint for the end of an error line: the limit that was reached and how to raise it; "" if there is none."""
    limit = LIMITS.get(error.errno or 0)
    if limit is None or resource is None:
        return ""
    most = resource.getrlimit(getattr(resource, limit.name))[0]
    if most != resource.RLIM_INFINITY:
        return f"; {limit.what.format(limit.show(most))} ({limit.how} raises that)"
    return "; the container may have too few (pids.max)" if error.errno == errno.EAGAIN else ""


def describe_os_error(error: Exception) -> str | None:
    """An error of the system (files, memory, threads, device) and its limit in one line; None for other errors."""
    if isinstance(error, OSError):
        place = "" if error.filename is None else f"{error.filename}: "
        return f"{place}{error.strerror or one_line(error)}{limit_hint(error)}"
    if is_out_of_memory(error):
        text = " ".join(str(error).partition("\n")[0].split())
        return f"memory ran out{f' ({text})' if text else ''}{limit_hint(OSError(errno.ENOMEM, ''))}"
    text = " ".join(str(error).split())
    if "device-side assert" in text:
        return one_line(error)
    if "can't start new thread" in text:
        return f"{text}{limit_hint(OSError(errno.EAGAIN, ''))}"
    return None


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation in main memory failed."""
    return isinstance(error, MemoryError) or any(phrase in str(error) for phrase in MEMORY_RAN_OUT)


def format_failure(error: Exception) -> str:
    """An exception as one line with its traceback below; no traceback if memory ran out.

    The traceback shows the lines of the user's files alone, if there are any.
    """
    if is_out_of_memory(error):
        return describe_os_error(error) or ""
    shown = traceback.TracebackException.from_exception(error)
    if frames := frames_of_user(error):
        shown.stack = traceback.StackSummary.from_list(frames)
    return f"{one_line(error)}\n{''.join(shown.format())}"


def frames_of_user(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of a traceback that are neither in fedsim nor in Python or an installed package."""
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(LIBRARIES) and not INSTALLED & set(Path(frame.filename).parts)
    ]


def require_files(processes: int, instead: str) -> None:
    """Make sure that this process may open the files that so many child processes take.

    Raises the soft limit RLIMIT_NOFILE up to the hard limit.
    Raises WorkerError, which recommends `instead`, if the hard limit is too low.
    """
    needed, (now, most) = files_for(processes), limits_of_files()
    if most < needed:
        raise WorkerError(
            f"processes = {processes}: to start them takes about {needed} open files, and this program may have {most} "
            f"(RLIMIT_NOFILE); raise that (ulimit -n {needed}), use fewer processes, or {instead}"
        )
    if now < needed:
        with contextlib.suppress(OSError, ValueError):  # macOS has another limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def files_for(processes: int) -> int:
    """About how many open files this process needs to start so many child processes."""
    return max(FILES_WITHIN, _open_files() + processes * FILES_OF_CHILD + FILES_OF_START)


def limits_of_files() -> tuple[float, float]:
    """How many files this process may have open: the limit now, and the limit up to which fedsim raises it."""
    if resource is None:
        return math.inf, math.inf
    both = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in both)
    return soft, hard


def _open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return USUAL_FILES
