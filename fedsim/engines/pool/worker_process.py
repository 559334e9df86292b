"""A child process whose heartbeats and death the parent monitors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedsim.engines.pool.barrier import HOLDING, LOCK, SHARED_ROW, HeartbeatTable, HeartbeatTimeout
from fedsim.system.child_process import GRACE, ChildProcess, describe_exit, describe_failed_start

START_TIMEOUT = 120.0  # seconds for a process to import PyTorch and send its first message
CONSEQUENCES = {
    LOCK: " while it held a lock: what that protects may be half written",
    SHARED_ROW: " in the middle of a write to the shared model, which may be half written",
}


class WorkerProcess(ChildProcess):
    """A child process with a line in a heartbeat table. Start it inside `signals_deferred`.

    Args:
        serve: the main function, as in `ChildProcess`.
        arguments: of `serve`, after the pipe.
        table, index: the heartbeats of the process.
        instead: a setting that starts no process, for errors.
        name, daemon: as in `ChildProcess`.

    Attributes:
        started: whether the process has sent its first message; the owner sets it.
        timeout: seconds without a heartbeat after which the process counts as hanging.
    """

    def __init__(
        self,
        serve: Callable[..., object],
        *arguments: Any,
        table: HeartbeatTable,
        index: int = 0,
        instead: str,
        name: str,
        daemon: bool,
    ) -> None:
        super().__init__(serve, *arguments, name=name, daemon=daemon)
        self._table, self._index, self._instead = table, index, instead
        self.started = False
        self.expect_heartbeats(START_TIMEOUT)

    def expect_heartbeats(self, timeout: float) -> None:
        """Measure the silence of the process from now on."""
        self.timeout, self._silence = timeout, HeartbeatTimeout(self._table, self._index, timeout)

    @property
    def look_interval(self) -> float:
        """Call `is_silent` at least once in so many seconds."""
        return self._silence.interval

    def is_silent(self) -> bool:
        """Whether it has sent no heartbeat for the timeout."""
        return self._silence.too_long()

    @property
    def failed_at_start(self) -> bool:
        """Whether it ended by itself while it started, as a main program that cannot be imported makes any process."""
        return not self.started and (self.exitcode or 0) > 0

    def describe_death(self) -> str:
        """Why the process ended, as the predicate of a sentence. Waits for the end for a moment."""
        self.wait(GRACE)
        if not self.started:
            return describe_failed_start(self.exitcode, self._instead)
        return describe_exit(self.exitcode) + CONSEQUENCES.get(self._table.read(self._index, HOLDING), "")

    def describe_silence(self) -> str:
        """That the process is silent, as the predicate of a sentence."""
        if not self.started:
            return f"has not started within {self.timeout:g} s"
        return f"has given no sign of life for {self.timeout:g} s"
