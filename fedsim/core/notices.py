"""Notices about steps that take long."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

SLOW_SECONDS = 2.0


class SlowStepNotice:
    """Reports each step of a setup that takes longer than SLOW_SECONDS.

    Args:
        report: called with one line, from another thread.
    """

    def __init__(self, report: Callable[[str], object]) -> None:
        self._report = report
        self._timer: threading.Timer | None = None

    def begin(self, step: str) -> None:
        """End the step before, if any, and begin this one: `loading the data set mnist`."""
        self.end()
        self._timer = threading.Timer(SLOW_SECONDS, self._report, [f"{step} ..."])
        self._timer.daemon = True
        with contextlib.suppress(RuntimeError):  # the system allows no more threads
            self._timer.start()

    def end(self) -> None:
        """End the current step."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@contextlib.contextmanager
def notice_if_slow(step: str) -> Iterator[None]:
    """Print the step on stderr if the block takes longer than SLOW_SECONDS, and if stderr is a terminal."""
    notice = SlowStepNotice(lambda line: print(line, file=sys.stderr, flush=True))
    if sys.stderr.isatty():
        notice.begin(step)
    try:
        yield
    finally:
        notice.end()
