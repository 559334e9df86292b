"""The numbers of a run: its progress on the scales of a curve, its metrics, and its rounds as rows of a data frame."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fedsim.records.record import RoundRecord, mean_staleness, metrics_in, score_in
from fedsim.system.packages import import_extra

if TYPE_CHECKING:
    from pandas import DataFrame

SCALES = {  # of the x axis of a curve, with the texts beside it
    "round": "round",
    "virtual_seconds": "virtual seconds",
    "updates": "updates of the global model",
    "arrivals": "arrivals at the server",
    "seconds": "seconds",
    "bytes": "bytes sent",
    "samples": "training samples",
}
SUMS: dict[str, Callable[[RoundRecord], float | None]] = {  # scales that add up a number of the rounds
    "seconds": lambda record: record.total_seconds,
    "bytes": lambda record: record.total_bytes,
    "samples": lambda record: sum(record.samples) if record.samples else None,
}

# Numbers of the last record that are metrics of the run.
LAST_ROUND = ("test_loss", "train_loss", "attack_success", "validation_accuracy", "validation_loss")
ALWAYS = ("test_accuracy", "test_loss", "train_loss")  # columns that every frame has


class Progress(NamedTuple):
    """Totals of a run since its start. A total is None if the records do not contain it.

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
    """Return the progress after each round.

    Asynchronous records hold it. A synchronous round is one update, and one arrival per worker of the cohort. If
    gradients are averaged, each step is an update, and one arrival per worker that takes the step.

    Args:
        history: the records.
        experiment: its resolved tables, nested.
    """
    progress: list[Progress] = []
    updates: int | None = 0
    arrivals: int | None = 0
    for record in history:
        if record.asynchronous is not None:
            updates, arrivals = record.asynchronous.updates, record.asynchronous.arrivals
        else:
            sent = _sent_by_each(record, experiment)
            updates = None if sent is None or updates is None else updates + max(sent, default=0)
            arrivals = None if sent is None or arrivals is None else arrivals + sum(sent)
        progress.append(Progress(record.round, record.virtual_seconds, updates, arrivals))
    return progress


def places_on(scale: str, progress: Sequence[Progress], history: Sequence[RoundRecord]) -> list[float | None]:
    """Return the place of each round on a scale of `SCALES`; None if the records do not hold it.

    >>> history = [RoundRecord(round=1, bytes_up=10), RoundRecord(round=2, bytes_up=30)]
    >>> places_on("bytes", progress_of(history, {}), history)
    [10, 40]
    """
    if scale not in SUMS:
        return [getattr(each, scale) for each in progress]
    total = lambda before, of_round: None if before is None or of_round is None else before + of_round  # noqa: E731
    return list(itertools.accumulate(map(SUMS[scale], history), total))


def _sent_by_each(record: RoundRecord, experiment: Mapping[str, Any]) -> Sequence[int] | None:
    """Number of rows that each worker of the cohort sends in a synchronous round; None if unknown."""
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


def run_metrics(
    history: Sequence[RoundRecord], progress: Sequence[Progress], target: float | None = None
) -> dict[str, float | None]:
    """Return the numbers of a finished run by name, such as `test_accuracy` and `seconds`, if its records hold them.

    Args:
        history: the records of its rounds.
        progress: the progress after each round, see `progress_of`.
        target: a test accuracy. With it, `..._to_target` are the rounds, virtual seconds, updates and arrivals until
            the first test with at least this accuracy; None if there is none. Of a task without accuracy, a test loss.
    """
    last, at, score = history[-1], progress[-1], score_in(history)
    numbers = {score.key: score.read(last), score.key.replace("test_", "best_"): best_score(history)}
    losses = {name: math.nan for name in ("test_loss", "train_loss") if last[name] is None}  # NaN, null in a file
    numbers |= {name: losses.get(name, last[name]) for name in LAST_ROUND if name != score.key}
    numbers |= {"seconds": sum(record.total_seconds or 0.0 for record in history), **component_metrics(last)}
    if at.virtual_seconds is not None:
        numbers |= {**at._asdict(), "staleness": mean_staleness(history)}
        del numbers["round"]
    numbers = {name: value for name, value in numbers.items() if value is not None}
    if target is not None:
        pairs = [(at, score.read(record)) for record, at in zip(history, progress, strict=True)]
        there = next((at for at, value in pairs if value is not None and score.reaches(value, target)), None)
        for place, name in enumerate(["rounds", *Progress._fields[1:]]):
            numbers[f"{name}_to_target"] = there[place] if there else None
    return numbers


def best_score(history: Sequence[RoundRecord]) -> float | None:
    """Return the best `score_in` of all rounds, the highest accuracy or the lowest loss; None if no round has one."""
    score = score_in(history)
    values = [value for record in history if (value := score.read(record)) is not None]
    return max(values, key=lambda value: score.sign * value, default=None)


def component_metrics(record: RoundRecord) -> dict[str, float | None]:
    """Return the numbers that components added to a round, as `metrics.NAME`."""
    return {f"metrics.{name}": value for name, value in record.metrics.items()}


def byzantine_weight(history: Iterable[RoundRecord], byzantine: Collection[int]) -> float | None:
    """Return the share of Byzantine workers in the sum of absolute weights, as the mean over rounds with weights."""
    shares = []
    for record in history:
        sizes = {worker: abs(weight or 0.0) for worker, weight in record.weights}
        if total := sum(sizes.values()):
            shares.append(sum(size for worker, size in sizes.items() if worker in byzantine) / total)
    return mean_or_none(shares)


def mean_or_none(values: Iterable[float | None], digits: int = 8) -> float | None:
    """Return the mean, to so many digits, of the values that are not None; None if all are."""
    known = [value for value in values if value is not None]
    return float(f"{statistics.fmean(known):.{digits}g}") if known else None


def round_rows(history: Sequence[RoundRecord]) -> list[dict[str, float]]:
    """For each round its number, and the numbers of its record by the dotted keys of `metrics.jsonl`.

    All rounds have the same keys. NaN stands for a number that the round does not have, or that is not finite.

    >>> round_rows([RoundRecord(round=1, test_accuracy=0.5, test_loss=0.7, train_loss=0.8, metrics={"f1": 0.25})])
    [{'round': 1, 'test_accuracy': 0.5, 'test_loss': 0.7, 'train_loss': 0.8, 'metrics.f1': 0.25}]
    """
    metrics = metrics_in(history)
    rows = []
    for record in history:
        row: dict[str, float] = {"round": record.round, **dict.fromkeys(ALWAYS, math.nan)}
        for metric in metrics:
            value = metric.read(record)
            row[metric.key] = math.nan if value is None else value
        rows.append(row)
    return rows


def to_frame(rows: Sequence[Mapping[str, Any]], purpose: str) -> DataFrame:
    """Rows as a data frame. Raises MissingPackageError, which names the `purpose`, if pandas is not installed."""
    return import_extra("pandas", extra="pandas", purpose=purpose).DataFrame(rows)
