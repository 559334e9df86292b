"""Start child processes that end when their parent ends, and that leave Ctrl-C to the parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker, util
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
from torch.multiprocessing import current_process, get_context, parent_process  # these share tensors

from fedsim.errors import ExperimentError, WorkerError, show_warnings_as_lines
from fedsim.processes.messages import Channel
from fedsim.system.limits import limit_hint

GRACE = 2.0  # seconds that a process has to end before it is killed
HELD_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # delayed while processes start or are closed
SAFE_PATH = "-P" if sys.version_info >= (3, 11) else "-I"  # option of Python: no working directory in sys.path
PR_SET_PDEATHSIG = 1  # prctl(2): set the signal that a process receives when its parent ends


class Child(NamedTuple):
    """A child process, and the parent's end of the pipe to the child."""

    process: BaseProcess
    pipe: Channel


def forks(start_method: str, threads: int | None) -> bool:
    """Whether processes are forked (otherwise they are spawned).

    Args:
        start_method: "spawn"; "fork"; or "auto", which forks where forking is safe now.
        threads: number of threads that PyTorch uses in each process.

    Raises ExperimentError if `start_method` is "fork" and forking is not safe.
    """
    alone = threading.active_count() == 1 and threading.current_thread() is threading.main_thread()
    hazards = {
        "this system is not Linux": sys.platform != "linux",
        "PyTorch uses a GPU": torch.accelerator.is_available(),
        "threads_per_process is not 1": threads != 1,
        "this program has other threads": not alone,
        "this process is daemonic": current_process().daemon,
    }
    hazard = next((reason for reason, holds in hazards.items() if holds), "")
    if start_method == "fork" and hazard:
        raise ExperimentError(
            f'start_method = "fork": forking is not safe here, because {hazard}; use start_method=auto'
        )
    return start_method != "spawn" and not hazard


def start_process(serve: Callable[..., object], *arguments: Any, name: str, daemon: bool, fork: bool = False) -> Child:
    """Start a child process. Call this function inside `signals_deferred`.

    Args:
        serve: main function of the process, called as `serve(pipe, *arguments)` with a Connection. It must call
            `init_child_process` and then answer the messages from a Channel until `receive` returns None.
        arguments: objects that can be pickled, or that multiprocessing can pass to a starting process.
        name: name of the process.
        daemon: as in multiprocessing: the process cannot have children, and Python ends it at exit.
        fork: whether to fork (see `forks`), which takes about 10 ms. Otherwise a new Python imports everything.

    Raises WorkerError if the system does not start another process. The message names the limit that was reached.
    """
    context = get_context("fork" if fork else "spawn")
    try:
        ours, theirs = context.Pipe()
        with theirs, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about idle NumPy threads too
            process = context.Process(target=serve, args=(theirs, *arguments), name=name, daemon=daemon)  # type: ignore[attr-defined]
            with _safe_path():
                process.start()
    except OSError as error:
        raise WorkerError(
            f"a process cannot be started: {error.strerror or error}{limit_hint(error)}; use fewer processes"
        ) from error
    return Child(process, Channel(ours))


def init_child_process() -> None:
    """Let this child process ignore Ctrl-C and end with its parent. Must be the first call in the child process."""
    show_warnings_as_lines()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked process inherits the handler of its parent
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
    _end_with_parent()


def describe_exit(exitcode: int | None) -> str:
    """Return text that follows the name of a process and says how it ended, such as "was killed by SIGKILL"."""
    if exitcode is None:
        return "closed its pipe"
    if exitcode >= 0:
        return f"ended with exit code {exitcode} before its work was done"
    name = signal.Signals(-exitcode).name if -exitcode in set(signal.Signals) else f"signal {-exitcode}"
    return f"was killed by {name} (exit code {exitcode})"


def describe_failed_start(exitcode: int | None, instead: str) -> str:
    """Describe why a process ended while it started, as text that follows the name of the process.

    The text recommends `instead`, a setting that needs no processes.

    The most likely reason for a positive exit code is a script without a main guard, because child processes import
    the script.
    """
    if not exitcode or exitcode < 0:
        return f"{describe_exit(exitcode)}, while it started"
    return (
        f"ended with exit code {exitcode} while it started; put the code of the script under "
        f'`if __name__ == "__main__":`, because processes import the script, or use {instead}'
    )


def require_importable_main(instead: str) -> None:
    """Check that this process may start child processes, and that they can import the main program.

    If a child process calls this function while it imports the main program, the child process exits (see
    `exit_if_imported_by_child`).

    Args:
        instead: setting that works without processes, which the error recommends.

    Raises WorkerError if the program does not come from a file, or if this process is daemonic.
    """
    exit_if_imported_by_child()
    if current_process().daemon:
        raise WorkerError(
            "this program runs in a daemonic process, such as a worker of multiprocessing.Pool, which must not start "
            f"processes; use concurrent.futures.ProcessPoolExecutor instead of the pool, or use {instead}"
        )
    path = getattr(sys.modules["__main__"], "__file__", None) or ""
    if path.startswith("<"):  # "<stdin>", which multiprocessing would look up as a file
        raise WorkerError(
            f"processes cannot import a program from {path}; write the program to a file, with its code under "
            f'`if __name__ == "__main__":`, or use {instead}'
        )


def exit_if_imported_by_child() -> None:
    """Exit silently if a child process is importing a script that has no main guard."""
    if getattr(current_process(), "_inheriting", False):  # multiprocessing.spawn tests the same attribute
        sys.exit(1)


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the block ends. Processes started inside the block have both signals blocked."""
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":  # cannot block signals
        yield
        return
    with _safe_path():
        resource_tracker.ensure_running()  # starting it later would unblock the signals
    received: list[int] = []  # signals received by other threads, which do not block them
    handlers = {number: signal.getsignal(number) for number in HELD_SIGNALS}
    for number in HELD_SIGNALS:
        signal.signal(number, lambda number, frame: received.append(number))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if received:
            signal.raise_signal(received[0])


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Return a context manager in which spawned processes get the `sys.path` of this process.

    Otherwise multiprocessing also adds the working directory to it.
    """
    options = util._args_from_interpreter_flags  # type: ignore[attr-defined]
    util._args_from_interpreter_flags = lambda: [*options(), SAFE_PATH]  # type: ignore[attr-defined]
    try:
        yield
    finally:
        util._args_from_interpreter_flags = options  # type: ignore[attr-defined]


def _end_with_parent() -> None:
    """End this process as soon as its parent ends."""
    parent = parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # the kernel ends this process, even if it is stopped
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(RuntimeError):  # no thread can be started; rely on the kernel
        threading.Thread(target=wait, daemon=True).start()
