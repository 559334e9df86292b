"""How far a run is after each of its rounds, on the scales along which runs can be compared, whatever their mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedsim.intervals import Estimate, estimate


class Progress(NamedTuple):
    """What a run has come to since its start; None where its records do not say.

    Attributes:
        round: its number.
        virtual_seconds: of the clock.
        updates: of the global row.
        trips: pieces of work that workers have brought, and that counted: trained models, or gradients of one step.
    """

    round: int
    virtual_seconds: float | None
    updates: int | None
    trips: int | None


def progress_of(history: Iterable[Mapping[str, Any]], experiment: Mapping[str, Any]) -> list[Progress]:
    """Progress after each of the records of a run.

    Asynchronous records say it themselves. A synchronous round is one update, and a trip of each of its cohort; where
    gradients are averaged, every step is an update, and a trip of everyone who takes it.

    Args:
        history: the records.
        experiment: what was run, as nested tables with all keys.
    """
    found: list[Progress] = []
    updates: int | None = 0
    trips: int | None = 0
    for record in history:
        asynchronous = record.get("asynchronous")
        if asynchronous is not None:
            updates, trips = asynchronous.get("updates"), asynchronous.get("trips")
        else:
            steps = _synchronisations(record, experiment)
            updates = None if steps is None or updates is None else updates + max(steps, default=0)
            trips = None if steps is None or trips is None else trips + sum(steps)
        found.append(Progress(record["round"], record.get("virtual_seconds"), updates, trips))
    return found


def _synchronisations(record: Mapping[str, Any], experiment: Mapping[str, Any]) -> Sequence[int] | None:
    """How often each of the cohort has sent something in a synchronous round."""
    cohort = record.get("cohort", ())
    sync, first = experiment.get("sync"), experiment.get("gradient_rounds")
    in_step = sync == "gradients" or (sync == "post_local" and isinstance(first, int) and record["round"] <= first)
    if not in_step:
        return [1] * len(cohort)
    local = experiment.get("local")
    schedule = ("steps", "epochs", "batch_size")
    steps, epochs, batch = (local.get(key) if isinstance(local, Mapping) else None for key in schedule)
    if isinstance(steps, int):
        return [steps] * len(cohort)
    samples = record.get("samples")
    if not (samples and isinstance(epochs, int) and isinstance(batch, int) and epochs > 0 and batch > 0):
        return None
    return [epochs * -(-count // (epochs * batch)) for count in samples]  # every epoch ends with a batch of the rest


@dataclass(frozen=True)
class ToTarget:
    """What it took several runs to reach a test accuracy: until the first test with that accuracy at least.

    Attributes:
        reached: how many of the runs did.
        rounds, virtual_seconds, updates, trips: means over those, since the start of a run; None where nobody did, or
            there is no such scale. Where some did not, these are means of the faster ones.
    """

    reached: int
    rounds: Estimate | None
    virtual_seconds: Estimate | None
    updates: Estimate | None
    trips: Estimate | None

    @classmethod
    def of(cls, runs: Iterable[Progress | None]) -> ToTarget:
        """Of runs that were so far when they reached it; None stands for one that did not."""
        found = [progress for progress in runs if progress is not None]
        scales = zip(*found, strict=True) if found else [()] * len(Progress._fields)
        return cls(len(found), *(estimate([value for value in scale if value is not None]) for scale in scales))


def reached(accuracies: Iterable[float | None], progress: Iterable[Progress], target: float) -> Progress | None:
    """How far a run was at its first test with at least this accuracy; None if there is none."""
    pairs = zip(accuracies, progress, strict=True)
    return next((far for accuracy, far in pairs if accuracy is not None and accuracy >= target), None)


def mean_staleness(records: Iterable[Mapping[str, Any]]) -> float | None:
    """Of all that was applied in these rounds; None where nothing was, or they are synchronous."""
    counts: Counter[int] = Counter()
    for record in records:
        for tau, count in ((record.get("asynchronous") or {}).get("staleness") or {}).items():
            counts[int(tau)] += count
    applied = counts.total()
    return sum(tau * count for tau, count in counts.items()) / applied if applied else None
