"""Detect shared memory that tests leave behind, ignoring that of other programs."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
# segments of PyTorch and multiprocessing, most with the pid of their creator
NAME = re.compile(r"(?:torch_|pym-)(?P<maker>\d+)|psm_")
SHARED = ("/memfd:fedsim", "/dev/shm/", "/torch_")  # names of shared memory among the memory maps of a process
PATIENCE = 5.0  # seconds
MARK = f"FEDSIM_TESTS={os.getpid()}"  # in the environment of all descendants, including orphans

os.environ.update([MARK.split("=")])


def segments() -> set[str]:
    """Return the names of all shared-memory segments."""
    return {path.name for path in SHARED_MEMORY.glob("*") if NAME.match(path.name)}


def left_behind(before: set[str]) -> set[str]:
    """Return the new segments, except those that another living program created or uses.

    A segment that no living process uses counts as left behind after PATIENCE seconds, in which parallel tests may
    remove their segments.
    """
    deadline = time.monotonic() + PATIENCE
    while (left := _left_behind(before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _left_behind(before: set[str]) -> set[str]:
    new = segments() - before
    others = _other_programs() if new else []
    foreign = {name for name in new if any(_made(pid, name) or _uses(pid, name) for pid in others)}
    return {name for name in new - foreign if (SHARED_MEMORY / name).exists()}


def _other_programs() -> list[int]:
    """Return the IDs of living processes that are not descendants of this process."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and _is_foreign(pid)]


def _is_foreign(pid: int) -> bool:
    try:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":  # dead but not yet reaped
            return False
        return MARK.encode() not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except PermissionError:  # a process of another user
        return True
    except OSError:  # the process has ended
        return False


def _made(pid: int, name: str) -> bool:
    return NAME.match(name)["maker"] == str(pid)


def _uses(pid: int, name: str) -> bool:
    path = str(SHARED_MEMORY / name)
    try:
        return path in Path(f"/proc/{pid}/maps").read_text() or any(
            os.readlink(link) == path for link in Path(f"/proc/{pid}/fd").iterdir()
        )
    except OSError:  # the process has ended or belongs to another user
        return False
