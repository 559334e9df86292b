"""Ctrl-C and SIGTERM: end a program at once, or raise an exception.

A signal handler runs at any point of a program. Its exception may interrupt an import, the handling of another
exception, or Python's exit, and then becomes a traceback. Therefore signals raise an exception only while a command
runs (`signals_as_exceptions`), and only once. At other times Ctrl-C ends the program at once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

CLEANUP_SECONDS = 5.0  # after a signal; a second signal that comes later ends the program at once
RESEND_SECONDS = 0.05  # until a signal is sent again if its exception could not be raised

_first: float | None = None  # time of the first signal


class Terminated(BaseException):
    """SIGTERM as an exception, so that files and processes are closed."""


def install_exit_on_interrupt() -> None:
    """Let Ctrl-C end the program at once outside of `signals_as_exceptions`. Keeps a handler that the user has set."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Within the block, the first Ctrl-C raises KeyboardInterrupt and the first SIGTERM raises Terminated.

    Later signals are ignored, since a second exception would interrupt the cleanup; after CLEANUP_SECONDS they end the
    program at once. Ctrl-C stays ignored if it was, as in background jobs of a shell. Does nothing outside of the main
    thread.
    """
    global _first
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _first = None
    taken = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _exit):
        taken.append(signal.SIGINT)
    hook = sys.unraisablehook
    sys.unraisablehook = functools.partial(_raise_again, hook)
    before = {number: signal.signal(number, _raise_once) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook


def _raise_once(number: int, frame: object) -> None:
    global _first
    if _first is None:
        _first = time.monotonic()
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated
    if time.monotonic() - _first > CLEANUP_SECONDS:
        _exit(number)


def _raise_again(hook: Callable[[Any], object], unraisable: Any) -> None:
    """Send the signal of an exception in a destructor again, after the destructor; pass other exceptions to `hook`."""
    global _first
    if not issubclass(unraisable.exc_type, (KeyboardInterrupt, Terminated)):
        hook(unraisable)
        return
    _first = None
    number = signal.SIGINT if issubclass(unraisable.exc_type, KeyboardInterrupt) else signal.SIGTERM
    threading.Timer(RESEND_SECONDS, os.kill, (os.getpid(), number)).start()


def _exit(number: int, frame: object = None) -> None:
    """End the program at once; print "interrupted" unless the command has printed it."""
    if _first is None:
        os.write(2, b"interrupted\n")
    os._exit(128 + number)
