"""Ctrl-C and SIGTERM: when they end a program at once, and when they are exceptions.

A signal handler runs wherever the program is. So an exception from it may be raised while a module is imported, while
another exception is handled, or in Python's own exit, where it becomes a traceback. A program therefore has exceptions
only while a command runs (`signals_as_exceptions`), and only one; else Ctrl-C ends it at once (`exit_on_interrupt`).
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

PATIENCE = 5.0  # seconds for a program to clean up after a signal; from then on another signal ends it at once
AGAIN = 0.05  # seconds after which a signal comes again whose exception could not be raised

_first: float | None = None  # when the signal came that ended the command


class Terminated(BaseException):
    """SIGTERM, as an exception: what has been opened is closed on the way out."""


def install_exit_on_interrupt() -> None:
    """From now on Ctrl-C ends the program at once, but for `signals_as_exceptions`. A handler that was set stays."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Until the block ends, Ctrl-C raises KeyboardInterrupt, and SIGTERM raises Terminated; the first of them only.

    What was opened is closed while that exception passes. Further signals are ignored meanwhile, since a second
    exception would break that off; after PATIENCE seconds they end the program at once. Ctrl-C that is ignored, as in
    background jobs of a shell, stays so. Does nothing outside of the main thread.
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
    if time.monotonic() - _first > PATIENCE:
        _exit(number)


def _raise_again(hook: Callable[[Any], object], unraisable: Any) -> None:
    """Handle an exception in a destructor: send its signal again after the destructor; pass others to `hook`."""
    global _first
    if not issubclass(unraisable.exc_type, (KeyboardInterrupt, Terminated)):
        hook(unraisable)
        return
    _first = None
    number = signal.SIGINT if issubclass(unraisable.exc_type, KeyboardInterrupt) else signal.SIGTERM
    threading.Timer(AGAIN, os.kill, (os.getpid(), number)).start()


@contextlib.contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Until the block ends, Ctrl-C ends the program at once, with one word and exit code 130.

    For imports: nothing has begun yet, and a module that is being imported might catch a KeyboardInterrupt, or make
    another exception of it. A handler that the caller has set stays, as does one outside of the main thread.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _exit(number: int, frame: object = None) -> None:
    """End the program at once, with a word unless the command that was ended has said it."""
    if _first is None:
        os.write(2, b"interrupted\n")
    os._exit(128 + number)
