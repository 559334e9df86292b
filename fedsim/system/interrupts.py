"""Handle Ctrl-C and SIGTERM: end the program at once, or raise an exception.

A signal handler can run at any point of a program. An exception raised by the handler may interrupt an import, the
handling of another exception, or Python's exit, and then appears as a traceback. Signals therefore raise an exception
only while a command runs (`signals_as_exceptions`), and only once. At other times Ctrl-C ends the program at once.
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

CLEANUP_SECONDS = 5.0  # a second signal ends the program at once if it comes this long after the first
RESEND_SECONDS = 0.05  # delay before a signal is sent again if its exception could not be raised

_first: float | None = None  # time of the first signal


class Terminated(BaseException):
    """Exception that SIGTERM raises, so that files and processes are closed before the program ends."""


def install_exit_on_interrupt() -> None:
    """Let Ctrl-C end the program at once.

    Inside the context manager `signals_as_exceptions`, Ctrl-C raises an exception instead. A handler that the user has
    set is kept.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Turn the first Ctrl-C inside the block into KeyboardInterrupt, and the first SIGTERM into Terminated.

    Later signals are ignored, because a second exception would interrupt the cleanup. After CLEANUP_SECONDS they end
    the program at once. If Ctrl-C was ignored before, as in background jobs of a shell, it stays ignored. Does nothing
    outside the main thread.
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
    except Exception as error:
        if interruption := _interruption_behind(error):
            raise interruption from None
        raise
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


def _interruption_behind(error: BaseException | None) -> BaseException | None:
    """Return the KeyboardInterrupt or Terminated that a library wrapped in `error`, as pydantic does; None if none.

    Of an exception in a nested serializer, pydantic keeps only the name, in its own message.
    """
    while error is not None and not isinstance(error, (KeyboardInterrupt, Terminated)):
        for kind in (KeyboardInterrupt, Terminated):
            if _first is not None and f": {kind.__name__}" in str(error):
                return kind()
        error = error.__cause__ or error.__context__
    return error


def _raise_again(hook: Callable[[Any], object], unraisable: Any) -> None:
    """Handle an exception in a destructor, where Python cannot propagate it.

    KeyboardInterrupt and Terminated: send the signal again a little later. Other exceptions: call `hook`."""
    global _first
    if not issubclass(unraisable.exc_type, (KeyboardInterrupt, Terminated)):
        hook(unraisable)
        return
    _first = None
    number = signal.SIGINT if issubclass(unraisable.exc_type, KeyboardInterrupt) else signal.SIGTERM
    threading.Timer(RESEND_SECONDS, os.kill, (os.getpid(), number)).start()


def _exit(number: int, frame: object = None) -> None:
    """End the program at once. Print "interrupted" if this is the first signal."""
    if _first is None:
        os.write(2, b"interrupted\n")
    os._exit(128 + number)
