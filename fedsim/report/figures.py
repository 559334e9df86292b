"""What the page's charts are drawn from: plain lists and numbers, ready to become JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fedsim.report.reading import Partition, Round, Run
from fedsim.runs.progress import Progress

MOST_CELLS = 2_000_000  # of all heat maps of weights together; about 10 MB of page
MOST_COLUMNS = 250  # of a heat map over rounds: more could not be told apart, and would only fill the file


@dataclass(frozen=True)
class Metric:
    """A number that every round has."""

    label: str
    read: Callable[[Round], float | None]
    unit: str = ""
    share: bool = False  # from 0 to 1, and no band goes beyond


def total_seconds(record: Round) -> float | None:
    """Of all phases."""
    known = [seconds for seconds in record.seconds.values() if seconds is not None]
    return sum(known) if known else None


def total_bytes(record: Round) -> int | None:
    """Up and down."""
    known = [sent for sent in (record.bytes_up, record.bytes_down) if sent is not None]
    return sum(known) if known else None


METRICS = (
    Metric("Test accuracy", lambda record: record.test_accuracy, share=True),
    Metric("Test loss", lambda record: record.test_loss),
    Metric("Train loss", lambda record: record.train_loss),
    Metric("Attack success", lambda record: record.attack_success, share=True),
    Metric("Seconds", total_seconds, "s"),
    Metric("Bytes", total_bytes, "B"),
    Metric("Virtual seconds", lambda record: record.virtual_seconds, "s"),
    Metric("Updates", lambda record: record.asynchronous and record.asynchronous.updates),
    Metric("Mean staleness", lambda record: record.staleness),
    Metric("Wasted pieces of work", lambda record: record.asynchronous and record.asynchronous.wasted),
    Metric("Updates lost (fraction)", lambda record: record.race and record.race.lost_fraction),
    Metric("Torn reads (fraction)", lambda record: record.race and record.race.torn_reads),
    Metric("Locks that had to be waited for (fraction)", lambda record: record.race and record.race.lock_contention),
)


BOTH_LOSSES = "Test and train loss"  # in one chart


@dataclass(frozen=True)
class Scale:
    """What curves can be drawn against beside rounds."""

    label: str
    read: Callable[[Progress], float | None]

    def values(self, run: Run) -> list[float | None] | None:
        """Of every round; None where there is none of a run."""
        found = [short(self.read(progress)) for progress in run.progress]
        return None if all(value is None for value in found) else found


VIRTUAL_SECONDS = Scale("virtual seconds", lambda progress: progress.virtual_seconds)
SCALES = (
    VIRTUAL_SECONDS,
    Scale("updates", lambda progress: progress.updates),
    Scale("trips", lambda progress: progress.trips),
)


def scales_to_choose(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """The labels of the scales, and on which the curves open: virtual seconds, where all runs have them."""
    runs = list(runs)
    return [
        {"label": scale.label, "opens": scale is VIRTUAL_SECONDS and all(scale.values(run) for run in runs)}
        for scale in scales_of(runs)
    ]


def scales_of(runs: Iterable[Run]) -> list[Scale]:
    """Those there are; none where all runs are synchronous, and without a clock."""
    runs = list(runs)
    records = [record for run in runs for record in run.rounds]
    if all(record.virtual_seconds is None and record.asynchronous is None for record in records):
        return []
    return [scale for scale in SCALES if any(scale.values(run) for run in runs)]


def metrics_of(runs: Iterable[Run]) -> list[Metric]:
    """The metrics of which there is a value in any of the runs, or the first, so that there is one to choose."""
    records = [record for run in runs for record in run.rounds]
    found = [metric for metric in METRICS if any(metric.read(record) is not None for record in records)]
    return found or [METRICS[0]]


def phases_of(runs: Iterable[Run]) -> list[str]:
    """The names of the phases, in the order in which they come."""
    return list(dict.fromkeys(phase for run in runs for record in run.rounds for phase in record.seconds))


def run_curves(run: Run) -> dict[str, Any]:
    """The curves of one run: for each choice of metric, one series or more."""
    choices = []
    for metric in metrics_of([run]):
        series = [(metric.label.lower(), metric.read), *PARTS.get(metric.label, lambda _: [])(run)]
        choices.append(_choice(run, metric.label, metric.unit, series))
    labels = [choice["label"] for choice in choices]
    if "Test loss" in labels and "Train loss" in labels:
        both = [series for choice in choices for series in choice["series"] if series["name"].endswith("loss")]
        choices.insert(labels.index("Train loss") + 1, {"label": BOTH_LOSSES, "unit": "", "series": both})
    choices_of_scale, values = scales_to_choose([run]), [scale.values(run) for scale in scales_of([run])]
    scales = [{**choice, "values": found} for choice, found in zip(choices_of_scale, values, strict=True)]
    return {"rounds": rounds_of(run), "scales": scales, "metrics": choices}


def _choice(
    run: Run, label: str, unit: str, series: list[tuple[str, Callable[[Round], float | None]]]
) -> dict[str, Any]:
    values = [{"name": name, "values": [short(read(record)) for record in run.rounds]} for name, read in series]
    return {"label": label, "unit": unit, "series": values}


# Series that stand beside a metric's own, by its label.
PARTS: dict[str, Callable[[Run], list[tuple[str, Callable[[Round], float | None]]]]] = {
    "Seconds": lambda run: [
        (phase.replace("_", " "), lambda record, phase=phase: record.seconds.get(phase)) for phase in phases_of([run])
    ],
    "Bytes": lambda run: [
        ("up, from the workers", lambda record: record.bytes_up),
        ("down, to the workers", lambda record: record.bytes_down),
    ],
}


def rounds_of(run: Run) -> list[int] | None:
    """The numbers of the rounds; None stands for 1, 2, 3, ..., as they nearly always are."""
    rounds = [record.round for record in run.rounds]
    return None if rounds == list(range(1, len(rounds) + 1)) else rounds


def run_time(run: Run) -> dict[str, Any]:
    """Seconds of every round by phase."""
    phases = phases_of([run])
    seconds = [[short(record.seconds.get(phase)) for record in run.rounds] for phase in phases]
    return {"rounds": rounds_of(run), "phases": phases, "seconds": seconds}


def mean_time(runs: Sequence[Run], phases: Sequence[str]) -> list[float | None]:
    """Mean seconds of a round in each phase, over all rounds of several runs."""
    records = [record for run in runs for record in run.rounds]
    return [mean_or_none(record.seconds.get(phase) for record in records) for phase in phases]


def partition_picture(partition: Partition) -> dict[str, Any] | None:
    """Samples by label and worker."""
    if not any(partition.counts):
        return None
    byzantine = set(partition.byzantine)
    if partition.workers is None:
        return {"counts": partition.counts, "byzantine": sorted(byzantine)}
    return {
        "counts": partition.counts,
        "byzantine": sorted(byzantine & set(partition.workers)),
        "workers": partition.workers,
        "population": partition.population,
    }


def has_weights(run: Run) -> bool:
    """Whether any round says what weight workers had, or that one was screened out."""
    known = (weight is not None for record in run.rounds for _, weight in record.weights)
    return any(known) or any(record.excluded for record in run.rounds)


def weights_picture(run: Run, columns: int = MOST_COLUMNS) -> dict[str, Any] | None:
    """The weight of every worker in every round, in at most `columns` columns; None where there is no record of it.

    A column is a run of `per_column` rounds: a cell is the mean over those of them in which the worker took part, and
    counts as excluded if the worker was screened out in at least half of these.
    """
    if not has_weights(run):
        return None
    workers = sorted({worker for record in run.rounds for worker in [*record.cohort, *record.excluded]})
    columns = max(1, min(columns, MOST_CELLS // max(len(workers), 1)))
    row_of = {worker: row for row, worker in enumerate(workers)}
    per_column = math.ceil(len(run.rounds) / columns)
    parts = [run.rounds[start : start + per_column] for start in range(0, len(run.rounds), per_column)]
    weights: list[list[float | None]] = [[None] * len(parts) for _ in workers]
    excluded = []
    for column, part in enumerate(parts):
        for worker, cell in _weights_by_worker(part).items():
            weights[row_of[worker]][column] = mean_or_none(cell, digits=4)
        for worker in _mostly_excluded(part):
            excluded.append([row_of[worker], column])
    return {
        "rounds": [part[0].round for part in parts],
        "per_column": per_column,
        "workers": workers,
        "byzantine": sorted(run.byzantine & set(workers)),
        "weights": weights,
        "excluded": sorted(excluded),
    }


def _weights_by_worker(records: Sequence[Round]) -> dict[int, list[float | None]]:
    cells: dict[int, list[float | None]] = {}
    for record in records:
        for worker, weight in record.weights:
            cells.setdefault(worker, []).append(weight)
    return cells


def _mostly_excluded(records: Sequence[Round]) -> list[int]:
    took_part: dict[int, int] = {}
    out: dict[int, int] = {}
    for record in records:
        for worker in {*record.cohort, *record.excluded}:
            took_part[worker] = took_part.get(worker, 0) + 1
        for worker in set(record.excluded):
            out[worker] = out.get(worker, 0) + 1
    return [worker for worker, times in out.items() if 2 * times >= took_part[worker]]


def byzantine_weight(run: Run) -> float | None:
    """The share of all weight (in absolute value) that Byzantine workers had, in the mean of the rounds."""
    if not run.byzantine:
        return None
    return mean_or_none(_share(record, run.byzantine) for record in run.rounds)


def _share(record: Round, byzantine: frozenset[int]) -> float | None:
    weights = [(worker, abs(weight or 0.0)) for worker, weight in record.weights]
    total = sum(weight for _, weight in weights)
    return sum(weight for worker, weight in weights if worker in byzantine) / total if total else None


def mean_or_none(values: Iterable[float | None], digits: int = 8) -> float | None:
    """The mean of those values that there are."""
    known = [value for value in values if value is not None]
    return short(statistics.fmean(known), digits) if known else None


def short(value: float | None, digits: int = 8) -> float | None:
    """To so many digits, which is more than a chart can show; keeps the page small."""
    return value if value is None or isinstance(value, int) else float(f"{value:.{digits}g}")
