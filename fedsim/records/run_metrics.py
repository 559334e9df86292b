"""The numbers of a run that comparisons and reports average over seeds."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np

from fedsim.core.confidence import Estimate, estimate
from fedsim.records.progress import Progress, reached
from fedsim.records.record import Metric, RoundRecord, mean_staleness

LAST_ROUND = ("test_loss", "train_loss", "attack_success")  # numbers of a record that are metrics of the run


def run_metrics(
    history: Sequence[RoundRecord], progress: Sequence[Progress], target: float | None = None
) -> dict[str, float | None]:
    """Return the numbers of a finished run by name, such as `test_accuracy` and `seconds`, if its records hold them.

    Args:
        history: the records of its rounds.
        progress: the progress after each round, see `progress_of`.
        target: a test accuracy. With it, `..._to_target` are the rounds, virtual seconds, updates and arrivals until
            the first test with at least this accuracy; None if there is none.
    """
    last, at = history[-1], progress[-1]
    found: dict[str, float | None] = {"test_accuracy": last.test_accuracy, "best_accuracy": best_accuracy(history)}
    found |= {name: last[name] for name in LAST_ROUND}
    found |= {"seconds": sum(record.total_seconds or 0.0 for record in history), **plug_metrics(last)}
    if at.virtual_seconds is not None:
        found |= {**at._asdict(), "staleness": mean_staleness(history)}
        del found["round"]
    found = {name: value for name, value in found.items() if value is not None}
    if target is not None:
        there = reached([record.test_accuracy for record in history], progress, target)
        names = ["rounds", *Progress._fields[1:]]
        found |= dict.fromkeys([f"{name}_to_target" for name in names])
        found |= {f"{name}_to_target": value for name, value in zip(names, there or (), strict=False)}
    return found


def best_accuracy(history: Sequence[RoundRecord]) -> float | None:
    """Return the highest test accuracy of all rounds; None if no round has one."""
    return max((record.test_accuracy for record in history if record.test_accuracy is not None), default=None)


def plug_metrics(record: RoundRecord) -> dict[str, float | None]:
    """Return the numbers that plugs added to a round, as `metrics.NAME`."""
    return {f"metrics.{name}": value for name, value in record.metrics.items()}


def mean_metrics(runs: Sequence[Mapping[str, float | None]]) -> dict[str, Estimate | None]:
    """Return the mean of each metric over the runs that have it; None if no run has a value."""
    names = dict.fromkeys(name for metrics in runs for name in metrics)
    return {name: estimate([value for metrics in runs if (value := metrics.get(name)) is not None]) for name in names}


def paired_difference(ours: Mapping[Hashable, float], theirs: Mapping[Hashable, float]) -> Estimate | None:
    """Return the mean over seeds of (our value - their value), over the seeds that both have.

    Runs of one seed share their start, cohorts and batches, so the difference varies less than either value.
    """
    return estimate([ours[seed] - theirs[seed] for seed in ours if seed in theirs])


def curve(
    metric: Metric, scale: str, history: Iterable[RoundRecord], progress: Iterable[Progress]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the places on a scale, a field of `Progress`, and the metric there, for all rounds that have both."""
    pairs = zip(progress, history, strict=True)
    points = [(getattr(at, scale), metric.read(record)) for at, record in pairs]
    x, y = np.array([point for point in points if None not in point], dtype=float).reshape(-1, 2).T
    return x, y
