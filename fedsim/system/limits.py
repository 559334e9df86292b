"""Resource limits of the system: name them in error messages, and raise the limit of open files."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fedsim.errors import WorkerError, one_line, show_bytes

if sys.platform == "win32":
    resource: Any = None
else:
    import resource

ErrorType = TypeVar("ErrorType", bound=BaseException)

FILES_OF_CHILD = 6  # open files of this process per child: the pipe, and files of multiprocessing
FILES_OF_START = 16  # additional open files while processes start and receive shared memory
FILES_WITHIN = 48  # generous estimate of open files of one process, including libraries
MEMORY_RAN_OUT = ("can't allocate memory", "not enough memory", "Cannot allocate memory")  # phrases in PyTorch messages
INSTALLED = {"site-packages", "dist-packages"}
FOLDERS = Path(__file__).parents[1], sysconfig.get_path("stdlib")
# prefixes of file names that belong to fedsim or Python, not to the user
LIBRARIES = (*(os.path.join(folder, "") for folder in FOLDERS), "<frozen")
USUAL_FILES = 24  # assumed number of open files if they cannot be counted


class Limit(NamedTuple):
    """A resource limit of the operating system, and how error messages describe it.

    Attributes:
        name: name of the limit in the module `resource`.
        phrase: format string that describes the limit.
        show: function that formats the value.
        command: shell command that raises the limit.
    """

    name: str
    phrase: str
    show: Callable[[int], str]
    command: str


LIMITS = {
    errno.EFBIG: Limit("RLIMIT_FSIZE", "files may have at most {}", show_bytes, "ulimit -f"),
    errno.EMFILE: Limit("RLIMIT_NOFILE", "this process may open at most {} files", str, "ulimit -n"),
    errno.EAGAIN: Limit("RLIMIT_NPROC", "this user may have at most {} processes and threads", str, "ulimit -u"),
    errno.ENOMEM: Limit("RLIMIT_AS", "this process may use at most {} of address space", show_bytes, "ulimit -v"),
}


def limit_hint(error: OSError) -> str:
    """Return the end of an error line: the resource limit that was reached and how to raise it. "" if unknown."""
    limit = LIMITS.get(error.errno or 0)
    if limit is None or resource is None:
        return ""
    most = resource.getrlimit(getattr(resource, limit.name))[0]
    if most != resource.RLIM_INFINITY:
        return f"; {limit.phrase.format(limit.show(most))} ({limit.command} raises this limit)"
    return "; the container may allow too few processes (pids.max)" if error.errno == errno.EAGAIN else ""


def describe_os_error(error: Exception) -> str | None:
    """Describe a system error (file, memory, thread or device) and its limit in one line. None for other errors."""
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
    """Format an exception as one line and its traceback, shortened to the frames in the user's own files if any."""
    if is_out_of_memory(error):
        return describe_os_error(error) or ""
    shown = traceback.TracebackException.from_exception(error)
    if frames := frames_of_user(error):
        shown.stack = traceback.StackSummary.from_list(frames)
    return f"{one_line(error)}\n{''.join(shown.format())}"


def frames_of_user(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the traceback frames that are not in fedsim, Python or an installed package."""
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(LIBRARIES) and not INSTALLED & set(Path(frame.filename).parts)
    ]


def without_inner_frames(error: ErrorType) -> ErrorType:
    """Remove the tracebacks of an error and of its causes that show only code of fedsim or of libraries.

    Such a traceback does not help the user. It would also keep the tensors of a failed run in memory as long as the
    error exists, in a notebook until the next error. A traceback through the user's own files is kept.

    Returns the error.
    """
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        following = following.__cause__ or following.__context__
    for link in chain:
        if not frames_of_user(link):
            link.__traceback__ = None
    return error


def require_files(processes: int, instead: str) -> None:
    """Make sure that this process may open enough files to start `processes` child processes.

    Raises WorkerError, which recommends the setting `instead`, if the system does not allow it.
    """
    needed, (now, most) = files_for(processes), limits_of_files()
    if most < needed:
        raise WorkerError(
            f"processes = {processes}: starting them takes about {needed} open files, but the limit is {most} "
            f"(RLIMIT_NOFILE); raise the limit (ulimit -n {needed}), use fewer processes, or {instead}"
        )
    if now < needed:
        with contextlib.suppress(OSError, ValueError):  # macOS has an additional limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def files_for(processes: int) -> int:
    """Estimate how many open files this process needs to start `processes` child processes."""
    return max(FILES_WITHIN, _open_files() + processes * FILES_OF_CHILD + FILES_OF_START)


def limits_of_files() -> tuple[float, float]:
    """Return the current limit of open files, and the limit up to which fedsim can raise it."""
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
