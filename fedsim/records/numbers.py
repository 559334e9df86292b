"""Numbers of a run: progress over time, summary metrics, and the rounds as rows of a DataFrame."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fedsim.records.history import with_nan_losses
from fedsim.records.record import RoundRecord, mean_staleness, metrics_in, score_in
from fedsim.system.packages import import_extra

if TYPE_CHECKING:
    from pandas import DataFrame

SCALES = {  # quantities for the x axis of a curve, with their axis titles
    "round": "round",
    "virtual_seconds": "virtual seconds",
    "updates": "updates of the global model",
    "arrivals": "arrivals at the server",
    "seconds": "seconds",
    "bytes": "bytes sent",
    "top_bytes": "bytes to and from the top level",
    "samples": "training samples",
    "epsilon": "epsilon",
}
SUMS: dict[str, Callable[[RoundRecord], float | None]] = {  # scales that are cumulative sums over the rounds
    "seconds": lambda record: record.total_seconds,
    "bytes": lambda record: record.total_bytes,
    "top_bytes": lambda record: record.top_bytes,
    "samples": lambda record: sum(record.samples) if record.samples else None,
}

# Numbers of the last round that are also metrics of the whole run.
LAST_ROUND = (
    *("test_loss", "train_loss", "attack_success", "validation_accuracy", "validation_loss"),
    *("worker_accuracy", "worker_loss"),
)
ALWAYS = ("test_accuracy", "test_loss", "train_loss")  # columns of every DataFrame


class Progress(NamedTuple):
    """Totals from the start of a run to the end of a round. A total is None if it is unknown.

    Attributes:
        round: number of the round.
        virtual_seconds: time on the virtual clock.
        updates: number of updates of the global model.
        arrivals: number of results (trained models or gradients) from workers that the server has used.
    """

    round: int
    virtual_seconds: float | None
    updates: int | None
    arrivals: int | None


def progress_of(history: Iterable[RoundRecord], experiment: Mapping[str, Any]) -> list[Progress]:
    """Return the totals, such as updates and virtual seconds, after each round.

    Args:
        history: the records of the run.
        experiment: the experiment, with all defaults, as nested dicts.
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
    """Return the x value of each round in a chart, or None where it is unknown. `scale` names the x axis.

    >>> history = [RoundRecord(round=1, bytes_up=10), RoundRecord(round=2, bytes_up=30)]
    >>> places_on("bytes", progress_of(history, {}), history)
    [10, 40]
    """
    if scale == "epsilon":
        return [record.metrics.get(scale) for record in history]
    if scale not in SUMS:
        return [getattr(totals, scale) for totals in progress]
    total = lambda before, of_round: None if before is None or of_round is None else before + of_round  # noqa: E731
    return list(itertools.accumulate(map(SUMS[scale], history), total))


def _sent_by_each(record: RoundRecord, experiment: Mapping[str, Any]) -> Sequence[int] | None:
    """Return how many results each worker of the cohort sends in a synchronous round, or None if unknown."""
    cohort, sync, first = record.cohort, experiment.get("sync"), experiment.get("switch_after_round")
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
    """Return the results of a finished run by name, such as `test_accuracy` and `seconds`.

    Args:
        history: the records of the run.
        progress: the totals after each round (see `progress_of`).
        target: test accuracy (or test loss) to reach. If set, the results include `rounds_to_target` and similar
            totals when the run first reached the target, or None if the run did not reach it.
    """
    last, at, score = with_nan_losses(history[-1]), progress[-1], score_in(history)
    numbers = {score.key: score.read(last), score.key.replace("test_", "best_"): best_score(history)}
    numbers |= {name: last[name] for name in LAST_ROUND if name != score.key}
    sent = places_on("bytes", progress, history)
    numbers |= {"seconds": sum(record.total_seconds or 0.0 for record in history), "bytes": sent[-1]}
    numbers["top_bytes"] = places_on("top_bytes", progress, history)[-1]
    numbers |= component_metrics(last)
    if at.virtual_seconds is not None:
        numbers |= {**at._asdict(), "staleness": mean_staleness(history)}
        del numbers["round"]
    numbers = {name: value for name, value in numbers.items() if value is not None}
    if updates := sum(record.race.updates or 0 for record in history if record.race):
        numbers["lost_fraction"] = sum(record.race.updates_lost or 0.0 for record in history if record.race) / updates
    if target is not None:
        totals = [(*at, nbytes) for at, nbytes in zip(progress, sent, strict=True)]
        pairs = [(at, score.read(record)) for record, at in zip(history, totals, strict=True)]
        there = next((at for at, value in pairs if value is not None and score.reaches(value, target)), None)
        for position, name in enumerate(["rounds", *Progress._fields[1:], "bytes"]):
            numbers[f"{name}_to_target"] = there[position] if there else None
    return numbers


def best_score(history: Sequence[RoundRecord]) -> float | None:
    """Return the best test result of all rounds: the highest accuracy, or the lowest loss for a task without accuracy.

    Returns None if no round has a test result.
    """
    score = score_in(history)
    values = [value for record in history if (value := score.read(record)) is not None]
    return max(values, key=lambda value: score.sign * value, default=None)


def component_metrics(record: RoundRecord) -> dict[str, float | None]:
    """Return the numbers in a record that components added, by keys such as "metrics.drift"."""
    return {f"metrics.{name}": value for name, value in record.metrics.items()}


def byzantine_weight(history: Iterable[RoundRecord], byzantine: Collection[int]) -> float | None:
    """Return the share of the Byzantine workers in the aggregation weights, averaged over the rounds.

    Returns None if no round has weights.
    """
    shares = []
    for record in history:
        sizes = {worker: abs(weight or 0.0) for worker, weight in record.weights_by_worker}
        if total := sum(sizes.values()):
            shares.append(sum(size for worker, size in sizes.items() if worker in byzantine) / total)
    return mean_or_none(shares)


def mean_or_none(values: Iterable[float | None], digits: int = 8) -> float | None:
    """Return the mean of all values except None, rounded to `digits` significant digits. None if all are None."""
    known = [value for value in values if value is not None]
    return float(f"{statistics.fmean(known):.{digits}g}") if known else None


def round_rows(history: Sequence[RoundRecord]) -> list[dict[str, float]]:
    """Return one dict of numbers per round, whose keys are the dotted keys of `metrics.jsonl`.

    All dicts have the same keys. Missing numbers are NaN.

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
    """Return a list of dicts as a pandas DataFrame.

    Raises MissingPackageError if pandas is not installed. The message says for which `purpose` it is needed.
    """
    return import_extra("pandas", extra="pandas", purpose=purpose).DataFrame(rows)
