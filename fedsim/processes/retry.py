"""Repetition of work after a process has died, up to a maximum number of retries."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import TypeVar

from fedsim.errors import FedsimWarning, ProcessLostError, WorkerError

Note = Callable[..., object]  # called with an event's kind, its round, and further details; see `RunFolder.event`
T = TypeVar("T")

STARTED = "its processes have been started"  # what has been tried before the first round


def retried(
    attempt: Callable[[], T], retries: int, attempted: str, note: Note | None = None, *, round: int = 0, then: str = ""
) -> T:
    """Call `attempt`, and repeat the call if a process dies. Return the result of the first successful call.

    Args:
        attempt: function to call. If a process has died, the function must first restore the initial state.
        retries: maximum number of repetitions.
        attempted: text before "N times" in the error message, such as "round 3 has been tried".
        note: function that records each dead process; None to record nothing.
        round: current round; 0 before the first round.
        then: end of the warning, such as ", and round 3 is repeated".

    Raises WorkerError if the last repetition fails too.
    """
    for number in itertools.count(1):
        try:
            return attempt()
        except ProcessLostError as loss:
            if error := last_error(loss, number, retries, attempted):
                raise error from (None if error is loss else loss)
            announce(loss, number, retries, note, round=round, then=then)
    raise AssertionError("unreachable: the loop above ends by return or raise")


def last_error(loss: ProcessLostError, attempt: int, retries: int, attempted: str) -> WorkerError | None:
    """Return the error to raise if the last allowed attempt has failed; None if another attempt follows.

    Args:
        loss: error that ended the attempt.
        attempt: number of the attempt, from 1.
        retries: maximum number of repetitions after the first attempt.
        attempted: text before "N times" in the error message, such as "round 3 has been tried".
    """
    if attempt <= retries:
        return None
    return loss if attempt == 1 else WorkerError(f"{loss}; {attempted} {attempt} times (max_restarts = {retries})")


def announce(
    loss: ProcessLostError,
    attempt: int,
    retries: int,
    note: Note | None = None,
    *,
    round: int = 0,
    run: str = "",
    then: str = "",
) -> None:
    """Warn that a process has died and is replaced, and record the event.

    Args:
        loss: error that reports the dead process.
        attempt: number of the failed attempt, from 1.
        retries: maximum number of repetitions.
        note: function that records the event; None to record nothing.
        round: current round; 0 before the first round.
        run: beginning of the warning, which names the run if there are several runs.
        then: end of the warning, such as ", and round 3 is repeated".
    """
    often = f"restart {attempt}, max_restarts = {retries}"
    warnings.warn(f"{run}{loss}; a new process takes over{then} ({often})", FedsimWarning, stacklevel=5)
    if note:
        note("worker replaced", round=round, process=loss.process, worker=loss.worker, why=loss.why, attempt=attempt)
