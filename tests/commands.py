"""Start programs from tests in the way that a user would."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(**more):
    """Return the environment of a program that uses this copy of fedsim."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def latest(words):
    """Return the words of a command without those `key=value` words whose key a later word sets too."""
    keys = (
        str(word).partition("=")[0] if re.match(r"[\w.]+=", str(word)) else place for place, word in enumerate(words)
    )
    return list(dict(zip(keys, words, strict=True)).values())


def run_python(*words, timeout=300, **options):
    """Run `python *words` to its end and return the completed process."""
    return subprocess.run(
        [sys.executable, *latest(words)], capture_output=True, text=True, timeout=timeout, env=environment(), **options
    )


def start(*words, cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more):
    """Start `python *words` in a new process group. The process is forked from a server that has imported fedsim."""
    from tests.forking import Program  # not on Windows

    return Program(latest(words), cwd=cwd, environment=environment(**more), stdout=stdout, stderr=stderr)


def start_python(*words, cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more):
    """Start `python *words` in a new interpreter, which spawns its processes."""
    return subprocess.Popen(
        [sys.executable, *latest(words)],
        cwd=cwd,
        env=environment(**more),
        stdout=stdout,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )


def free_port():
    """Return a port that no program uses now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def start_ranks(count, *words, cwd, words_by_rank=None):
    """Start `count` ranks, each as `python *words` with the environment variables of a launcher.

    Return the processes, ordered by rank.

    words_by_rank: further command-line words of single ranks, as {rank: words}.
    """
    shared = {"WORLD_SIZE": str(count), "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1"}
    return [
        start(*words, *(words_by_rank or {}).get(rank, ()), cwd=cwd, RANK=str(rank), **shared) for rank in range(count)
    ]


def start_tasks(count, *words, cwd):
    """Start `count` ranks, each as `python *words` with the environment variables of a step of SLURM on one host.

    Return the processes, ordered by rank.
    """
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": free_port(), "SLURM_NTASKS": str(count)}
    job |= {"SLURM_STEP_NUM_TASKS": str(count), "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "no-such-host"}
    return [
        start(*words, cwd=cwd, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), OMP_NUM_THREADS="1", **job)
        for rank in range(count)
    ]


def start_torchrun(count, *words, cwd, restarts=1):
    """Start `count` ranks with torchrun and return its process in a list."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count))
    return [start_python(*launcher, "--max-restarts", str(restarts), *words, cwd=cwd, OMP_NUM_THREADS="1")]


def ended(processes, timeout=60):
    """Wait for programs to end and return their exit codes, stdouts and stderrs."""
    texts = [process.communicate(timeout=timeout) for process in processes]
    for process in processes:
        assert_none_left(process.pid)
    return [process.returncode for process in processes], [out for out, _ in texts], [error for _, error in texts]


def read_until(process, beginning):
    """Read the output of a program up to the first line that starts with `beginning`.

    If there is no such line, close the program's files and raise AssertionError with its exit code and stderr.
    """
    for line in iter(process.stdout.readline, ""):
        if line.startswith(beginning):
            return
    _, error = process.communicate(timeout=60)
    raise AssertionError(f"exit code {process.returncode} before the program printed {beginning!r}; stderr:\n{error}")


def run_on_a_terminal(*words, cwd):
    """Run `python *words` with a terminal as stderr, and return its stdout and what the terminal received."""
    import fcntl  # these are not on Windows
    import pty
    import termios

    ours, theirs = pty.openpty()
    # tqdm prints nothing in a window of size 0
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = start(*words, cwd=cwd, stderr=theirs)
    os.close(theirs)
    shown = []
    with contextlib.suppress(OSError):  # the terminal is closed
        while chunk := os.read(ours, 65536):
            shown.append(chunk.decode())
    os.close(ours)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return out, "".join(shown)


def stat_of(pid):
    """Return the fields of /proc/PID/stat starting with the process state, or [] if the process has ended."""
    with contextlib.suppress(OSError):
        figures = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return figures if figures[0] != "Z" else []
    return []


def processes_of_group(group):
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if stat_of(pid)[2:3] == [str(group)]]


def assert_none_left(group):
    """Check that no process of a group is left, waiting up to 3 s for Python's resource tracker."""
    deadline = time.monotonic() + 3
    while processes_of_group(group) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes_of_group(group) == []
