"""Repetition of work after the loss of a process, up to a maximum number of retries."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import TypeVar

from fedsim.errors import FedsimWarning, ProcessLostError, WorkerError, plural

Note = Callable[..., object]  # called with an event's kind, its round, and further facts; see `RunFolder.event`
T = TypeVar("T")


def retried(
    attempt: Callable[[int], T], retries: int, report: Callable[[ProcessLostError, int], object], attempted: str
) -> T:
    """Return the result of `attempt(number)`, and repeat the call if it loses a process.

    Args:
        attempt: function of the number of the attempt, from 1. From number 2 on, it must first restore the initial
            state.
        retries: maximum number of repetitions.
        report: function that is called before each repetition, with the loss and the number of the failed attempt.
        attempted: text before "N times" in the error message, such as `round 3 has been tried`.

    Raises WorkerError if the last repetition loses a process too.
    """
    for number in itertools.count(1):
        try:
            return attempt(number)
        except ProcessLostError as loss:
            if error := last_error(loss, number, retries, attempted):
                raise error from (None if error is loss else loss)
            report(loss, number)
    raise AssertionError("unreachable: the loop above ends by return or raise")


def last_error(loss: ProcessLostError, attempt: int, retries: int, attempted: str) -> WorkerError | None:
    """Return the error to raise if `attempt` was the last one; None if another attempt follows.

    Args:
        loss: loss that ended the attempt.
        attempt: number of the attempt, from 1.
        retries, attempted: as in `retried`.
    """
    if attempt <= retries:
        return None
    return loss if attempt == 1 else WorkerError(f"{loss}; {attempted} {attempt} times (process_retries = {retries})")


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
    """Warn that a process was lost and is replaced, and record the event.

    Args:
        loss: loss of the process.
        attempt: number of the failed attempt, from 1.
        retries: maximum number of repetitions.
        note: function that records the event; None to record nothing.
        round: current round; 0 before the first round.
        run: prefix of the warning that names the run, if there are several runs.
        then: further consequence in the warning, such as ", and the round is repeated".
    """
    often = f"{attempt} of at most {plural(retries, 'time')}"
    warnings.warn(f"{run}{loss}; a new one takes its place{then} ({often})", FedsimWarning, stacklevel=5)
    if note:
        note("worker replaced", round=round, process=loss.process, worker=loss.worker, why=loss.why, attempt=attempt)
