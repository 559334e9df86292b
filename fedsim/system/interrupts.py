"""Ctrl-C while modules are imported."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator


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


def _exit(*_: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)
