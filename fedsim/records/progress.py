"""The progress of a run after each of its rounds, on scales that runs of all modes share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fedsim.records.record import RoundRecord

SCALES = {  # of the x axis of a curve, with the texts beside it
    "round": "round",
    "virtual_seconds": "virtual seconds",
    "updates": "updates of the global model",
    "arrivals": "arrivals at the server",
    "seconds": "seconds",
    "bytes": "bytes sent",
}
SUMS: dict[str, Callable[[RoundRecord], float | None]] = {  # scales that add up a number of the rounds
    "seconds": lambda record: record.total_seconds,
    "bytes": lambda record: record.total_bytes,
}


class Progress(NamedTuple):
    """The totals of a run since its start; None if its records do not hold them.

    Attributes:
        round: number of the round.
        virtual_seconds: on the virtual clock.
        updates: of the global row.
        arrivals: results of workers that were used: trained models, or gradients of one step.
    """

    round: int
    virtual_seconds: float | None
    updates: int | None
    arrivals: int | None


def progress_of(history: Iterable[RoundRecord], experiment: Mapping[str, Any]) -> list[Progress]:
    """The progress after each round.

    Asynchronous records hold it. A synchronous round is one update, and one arrival per worker of the cohort. If
    gradients are averaged, each step is an update, and one arrival per worker that takes the step.

    Args:
        history: the records.
        experiment: its resolved tables, nested.
    """
    found: list[Progress] = []
    updates: int | None = 0
    arrivals: int | None = 0
    for record in history:
        if record.asynchronous is not None:
            updates, arrivals = record.asynchronous.updates, record.asynchronous.arrivals
        else:
            sent = _sent_by_each(record, experiment)
            updates = None if sent is None or updates is None else updates + max(sent, default=0)
            arrivals = None if sent is None or arrivals is None else arrivals + sum(sent)
        found.append(Progress(record.round, record.virtual_seconds, updates, arrivals))
    return found


def places_on(scale: str, progress: Sequence[Progress], history: Sequence[RoundRecord]) -> list[float | None]:
    """The place of each round on a scale of `SCALES`; None if the records do not hold it.

    >>> history = [RoundRecord(round=1, bytes_up=10), RoundRecord(round=2, bytes_up=30)]
    >>> places_on("bytes", progress_of(history, {}), history)
    [10, 40]
    """
    if scale not in SUMS:
        return [getattr(each, scale) for each in progress]
    total = lambda before, of_round: None if before is None or of_round is None else before + of_round  # noqa: E731
    return list(itertools.accumulate(map(SUMS[scale], history), total))


def _sent_by_each(record: RoundRecord, experiment: Mapping[str, Any]) -> Sequence[int] | None:
    """How many rows each worker of the cohort sends in a synchronous round; None if that is unknown."""
    cohort, sync, first = record.cohort, experiment.get("sync"), experiment.get("gradient_rounds")
    if not (sync == "gradients" or (sync == "post_local" and isinstance(first, int) and record.round <= first)):
        return [1] * len(cohort)
    local = experiment.get("local")
    steps, epochs, batch = (
        local.get(key) if isinstance(local, Mapping) else None for key in ("steps", "epochs", "batch_size")
    )
    if isinstance(steps, int):
        return [steps] * len(cohort)
    if not cohort:
        return []
    if not (record.samples and isinstance(epochs, int) and isinstance(batch, int) and epochs > 0 and batch > 0):
        return None
    return [epochs * -(-count // (epochs * batch)) for count in record.samples]  # an epoch ends with a smaller batch
