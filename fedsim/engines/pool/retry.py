"""Repeat work after the loss of a process, at most a given number of times, and report each loss."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import TypeVar

from fedsim.errors import FedsimWarning, ProcessLostError, WorkerError, plural

Note = Callable[..., object]  # called with the kind of an event, its round, and further facts; see `RunFolder.event`
T = TypeVar("T")


def retried(
    attempt: Callable[[int], T], retries: int, report: Callable[[ProcessLostError, int], object], attempted: str
) -> T:
    """Return the result of `attempt(number)`, counted from 1, which is called again when it loses a process.

    Args:
        attempt: what to do; from number 2 on it first restores the state before.
        retries: how often it is called again at most.
        report: called with each loss after which it is called again, and the number of the attempt.
        attempted: the beginning of "... N times" in the error: `round 3 has been tried`.

    Raises WorkerError if it loses a process once more than that.
    """
    for number in itertools.count(1):
        try:
            return attempt(number)
        except ProcessLostError as loss:
            if error := last_error(loss, number, retries, attempted):
                raise error from (None if error is loss else loss)
            report(loss, number)
    raise AssertionError("there is always one more attempt")


def last_error(loss: ProcessLostError, attempt: int, retries: int, attempted: str) -> WorkerError | None:
    """Return the error for a loss that ended the last attempt; None if another attempt follows.

    Arguments as in `retried`.
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
        round: the current round: 0 before the first, the last one after it.
        run: the beginning of the sentence, if there are several runs.
        then: what happens besides, as the middle of the sentence.
    """
    often = f"{attempt} of at most {plural(retries, 'time')}"
    warnings.warn(f"{run}{loss}; a new one takes its place{then} ({often})", FedsimWarning, stacklevel=5)
    if note:
        note("worker replaced", round=round, process=loss.process, worker=loss.worker, why=loss.why, attempt=attempt)
