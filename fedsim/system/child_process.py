"""Child processes: each ends with its parent, and only the parent handles Ctrl-C."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import current_process, get_context, parent_process, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch

from fedsim.errors import WorkerError, show_warnings_as_lines
from fedsim.system.limits import limit_hint
from fedsim.system.messages import Channel

GRACE = 2.0  # seconds that a process gets to end before it is killed
HELD_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # while processes start or are closed
PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent ends


class Child(NamedTuple):
    """A child process, and the parent's end of a pipe to it."""

    process: BaseProcess
    pipe: Channel


def can_fork() -> bool:
    """Whether a process that is forked now, and computes with one thread, works as one that is spawned.

    A thread that holds a lock would leave it locked for ever in the child, and a GPU cannot be used after a fork.
    OpenMP's own threads, which the child does not have, are of no use to a child with one thread.
    """
    alone = threading.active_count() == 1 and threading.current_thread() is threading.main_thread()
    may_have_children = not current_process().daemon
    return sys.platform == "linux" and alone and may_have_children and not torch.accelerator.is_available()


def start_process(serve: Callable[..., object], *arguments: Any, name: str, daemon: bool, fork: bool = False) -> Child:
    """Start a process, inside `signals_deferred`.

    Args:
        serve: the main function, `serve(pipe, *arguments)`, with a Connection. It calls `init_child_process` and then
            answers the messages of a Channel until it is dismissed.
        arguments: objects that can be pickled, or that multiprocessing passes to a process as it starts.
        name: name of the process.
        daemon: as in multiprocessing: the process has no children, and Python ends it at exit.
        fork: whether to fork this process, see `can_fork`, which takes some 10 ms; spawn imports everything anew.

    Raises WorkerError, which names the limit of the system, if that does not start another process.
    """
    context = get_context("fork" if fork else "spawn")
    try:
        ours, theirs = context.Pipe()
        with theirs, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 also counts the idle threads of NumPy
            process = context.Process(  # type: ignore[attr-defined]
                target=serve, args=(theirs, *arguments), name=name, daemon=daemon
            )
            process.start()
    except OSError as error:
        raise WorkerError(
            f"a process cannot be started: {error.strerror or error}{limit_hint(error)}; use fewer processes"
        ) from error
    return Child(process, Channel(ours))


def init_child_process() -> None:
    """Call first in a process that was started inside `signals_deferred`: ignore Ctrl-C, and end with the parent."""
    show_warnings_as_lines()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked process has the handler of its parent
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
    _end_with_parent()


def describe_exit(exitcode: int | None) -> str:
    """The end of a process that was expected to run on, as the predicate of a sentence."""
    if exitcode is None:
        return "closed its pipe"
    if exitcode >= 0:
        return f"ended with exit code {exitcode} before its work was done"
    name = signal.Signals(-exitcode).name if -exitcode in set(signal.Signals) else f"signal {-exitcode}"
    return f"was killed by {name} (exit code {exitcode})"


def describe_failed_start(exitcode: int | None, instead: str) -> str:
    """The end of a process that had not begun to work; `instead` names a setting that starts no process.

    A positive exit code most likely comes from a script without a main guard, which its own processes import.
    """
    if not exitcode or exitcode < 0:
        return f"{describe_exit(exitcode)}, while it started"
    return (
        f'ended with exit code {exitcode} while it started; a script needs `if __name__ == "__main__":` around what '
        f"it does, because processes import it, or else {instead}"
    )


def require_importable_main(instead: str) -> None:
    """Check that processes can import the main program, which they do as they start.

    Raises WorkerError, which recommends `instead`, if the program is not a file. See `exit_if_imported_by_child`.
    """
    exit_if_imported_by_child()
    path = getattr(sys.modules["__main__"], "__file__", None) or ""
    if path.startswith("<"):  # "<stdin>", which multiprocessing would look up as a file
        raise WorkerError(
            f"processes cannot import a program that comes from {path}: it needs to be a file, with "
            f'`if __name__ == "__main__":` around what it does, or else {instead}'
        )


def exit_if_imported_by_child() -> None:
    """Exit silently if multiprocessing is starting this process.

    The process is then importing a main program that has no main guard. The parent reports that.
    """
    if getattr(current_process(), "_inheriting", False):  # the test of multiprocessing.spawn itself
        sys.exit(1)


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Deliver Ctrl-C and SIGTERM at the end of the block; processes that start inside have both blocked."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # multiprocessing would start it inside, and unblock the signals
    received: list[int] = []  # by other threads, which block no signals
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


def _end_with_parent() -> None:
    """End this process as soon as its parent ends."""
    parent = parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    with contextlib.suppress(OSError, AttributeError):  # Linux: the kernel does it, even if this process is stopped
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(RuntimeError):  # no thread can be started: rely on the kernel
        threading.Thread(target=wait, daemon=True).start()
