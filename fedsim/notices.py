"""What is being done, said when it takes long."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

SLOW_SECONDS = 2.0


class SlowStepNotice:
    """Tells which step of a setup is under way, as soon as that step has taken SLOW_SECONDS.

    Args:
        tell: called with one line, from a thread of its own.
    """

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._timer: threading.Timer | None = None

    def begin(self, step: str) -> None:
        """The step before, if any, is done, and this one begins: `loading the data set mnist`."""
        self.end()
        self._timer = threading.Timer(SLOW_SECONDS, self._tell, [f"{step} ..."])
        self._timer.daemon = True
        with contextlib.suppress(RuntimeError):  # the system allows no more threads
            self._timer.start()

    def end(self) -> None:
        """The last step is done."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@contextlib.contextmanager
def notice_if_slow(step: str) -> Iterator[None]:
    """Print what the block does, on stderr, as soon as it has taken SLOW_SECONDS; only if stderr is a terminal.

    So stderr holds errors and warnings alone where a program reads it.
    """
    notice = SlowStepNotice(lambda line: print(line, file=sys.stderr, flush=True))
    if sys.stderr.isatty():
        notice.begin(step)
    try:
        yield
    finally:
        notice.end()
