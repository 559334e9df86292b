"""The numbers of a run that comparisons and reports average over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence

from fedsim.records.progress import Progress
from fedsim.records.record import RoundRecord, mean_staleness, score_in

# Numbers of a record that are metrics of the run.
LAST_ROUND = ("test_loss", "train_loss", "attack_success", "validation_accuracy", "validation_loss")


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
    found = {score.key: score.read(last), score.key.replace("test_", "best_"): best_score(history)}
    found |= {name: last[name] for name in LAST_ROUND if name != score.key}
    found |= {"seconds": sum(record.total_seconds or 0.0 for record in history), **plug_metrics(last)}
    if at.virtual_seconds is not None:
        found |= {**at._asdict(), "staleness": mean_staleness(history)}
        del found["round"]
    found = {name: value for name, value in found.items() if value is not None}
    if target is not None:
        pairs = [(at, score.read(record)) for record, at in zip(history, progress, strict=True)]
        there = next((at for at, value in pairs if value is not None and score.reaches(value, target)), None)
        for place, name in enumerate(["rounds", *Progress._fields[1:]]):
            found[f"{name}_to_target"] = there[place] if there else None
    return found


def best_score(history: Sequence[RoundRecord]) -> float | None:
    """Return the best `score_in` of all rounds, the highest accuracy or the lowest loss; None if no round has one."""
    score = score_in(history)
    values = [value for record in history if (value := score.read(record)) is not None]
    return max(values, key=lambda value: score.sign * value, default=None)


def plug_metrics(record: RoundRecord) -> dict[str, float | None]:
    """Return the numbers that plugs added to a round, as `metrics.NAME`."""
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
