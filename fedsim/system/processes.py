"""What every process that fedsim starts needs: it goes with its parent, and Ctrl-C is its parent's business."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import current_process, get_context, parent_process, resource_tracker
from typing import Any

from fedsim.errors import WorkerError, show_warnings_as_lines
from fedsim.system.limits import remedy_of_limit
from fedsim.system.messages import Channel

GRACE = 2.0  # seconds for a process to go by itself before it is killed
HELD_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # while processes start or are closed
PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent ends


class Child:
    """A spawn process and the parent's end of a pipe to it. Start it inside `interrupts_held`.

    Args:
        serve: what it does, `serve(pipe, *arguments)`, with a Connection: `begin_as_child`, and then answer the
            messages of a Channel until it is dismissed.
        arguments: picklable, or what multiprocessing hands to processes as they start.
        name: of the process.
        daemon: whether it may have no processes of its own, and is ended where the parent forgets to.

    Raises WorkerError where the system starts no further process.
    """

    def __init__(self, serve: Callable[..., object], *arguments: Any, name: str, daemon: bool) -> None:
        context = get_context("spawn")
        with _refusals_as_errors():
            ours, theirs = context.Pipe()
            self.pipe = Channel(ours)
            with theirs:
                self._process = context.Process(target=serve, args=(theirs, *arguments), name=name, daemon=daemon)
                self._process.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def sentinel(self) -> int:
        """What `multiprocessing.connection.wait` takes to wait for its end."""
        return self._process.sentinel

    @property
    def exitcode(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float) -> None:
        """Wait for its end, but no longer than that."""
        self._process.join(seconds)

    def dismiss(self) -> None:
        """Ask it to go once it has ended what it does; one that is gone already is not asked."""
        with contextlib.suppress(OSError):
            self.pipe.dismiss()

    def close(self, deadline: float) -> None:
        """Wait until it is gone; kill it where it has not gone by then, a time of `time.monotonic`."""
        self._process.join(max(0.0, deadline - time.monotonic()))
        self._process.kill()
        self._process.join()
        self._process.close()
        self.pipe.close()


@contextlib.contextmanager
def _refusals_as_errors() -> Iterator[None]:
    """Where the system lets no process, thread or file come of it: a WorkerError, with its limits."""
    try:
        yield
    except OSError as error:
        raise WorkerError(
            f"a process cannot be started: {error.strerror or error}{remedy_of_limit(error)}; use fewer processes"
        ) from error


def begin_as_child() -> None:
    """First thing in a process that was started inside `interrupts_held`: ignore Ctrl-C, and go with the parent."""
    show_warnings_as_lines()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
    _go_with_parent()


def how_it_ended(exitcode: int | None) -> str:
    """How a process ended that should not have, as part of a sentence."""
    if exitcode is None:
        return "closed its pipe"
    if exitcode < 0:
        return f"was killed by {_signal_name(-exitcode)} (exit code {exitcode})"
    return f"ended with exit code {exitcode} before its work was done"


def how_its_start_ended(exitcode: int | None, instead: str) -> str:
    """The same of a process that had not begun yet; `instead` is what starts no process.

    An exit code of Python's own is most likely that of a script which is imported by the processes that it starts.
    """
    if not exitcode or exitcode < 0:
        return f"{how_it_ended(exitcode)}, while it started"
    return (
        f'ended with exit code {exitcode} while it started; a script needs `if __name__ == "__main__":` around what '
        f"it does, because processes import it, or else {instead}"
    )


def require_importable_main(instead: str) -> None:
    """Before processes are started, which import the program that they belong to: whether they can.

    Raises WorkerError, with what to do `instead`, for a program that is not a file; see also `leave_if_being_started`.
    """
    leave_if_being_started()
    path = getattr(sys.modules["__main__"], "__file__", None) or ""
    if path.startswith("<"):  # "<stdin>", for which multiprocessing would look on the disk
        raise WorkerError(
            f"processes cannot import a program that comes from {path}: it needs to be a file, with "
            f'`if __name__ == "__main__":` around what it does, or else {instead}'
        )


def leave_if_being_started() -> None:
    """End this process, without a word, if multiprocessing is just starting it.

    It is importing the main program then, which has no main guard and so has come here again. Its parent says that.
    """
    if getattr(current_process(), "_inheriting", False):  # as multiprocessing.spawn finds out itself
        sys.exit(1)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back until the end of the block; processes started inside have them blocked."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # multiprocessing would start it inside, and unblock the signals
    came: list[int] = []
    hold = lambda number, frame: came.append(number)  # noqa: E731  # for threads that block nothing
    handlers = {number: signal.getsignal(number) for number in HELD_SIGNALS}
    for number in HELD_SIGNALS:
        signal.signal(number, hold)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if came:
            signal.raise_signal(came[0])


def _go_with_parent() -> None:
    """Make this process end when its parent does, whatever it is doing."""
    parent = parent_process()
    if parent is None:
        return
    with contextlib.suppress(OSError, AttributeError):  # Linux: by the kernel, even if this process is stopped
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(RuntimeError):  # no thread can be started; the kernel does it
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()  # elsewhere, or if it is gone already


def _end_after(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
