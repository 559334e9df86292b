"""The table with one line per finished round, in the terminal and in a notebook."""

from __future__ import annotations

from collections.abc import Sequence

from fedsim.core.confidence import fixed
from fedsim.records.record import METRICS, Metric, RoundRecord, metrics_in
from fedsim.records.worker_results import METRIC as OF_WORKERS

MOST_METRICS = 4  # maximum number of component metrics in the table; the files contain all of them
ROUND = Metric("Round", None, decimals=0, column="round", path=("round",))


def columns_of(record: RoundRecord, *, of_workers: bool = False) -> list[Metric]:
    """Return the columns of the table in the terminal, given the first record of a run.

    `of_workers`: whether later rounds test individual workers, even if this round does not.
    """
    asynchronous = record.asynchronous is not None and record.race is None
    on_clock = asynchronous or record.virtual_seconds is not None
    optional = ("virtual_seconds", "test_accuracy", "validation_accuracy", "validation_loss")
    absent = {key for key in optional if record[key] is None}
    score = "worker_loss" if record.test_accuracy is None else "worker_accuracy"
    tested = of_workers or record[score] is not None
    absent |= {"worker_accuracy", "worker_loss"} - ({score} if tested else set())
    absent |= set() if asynchronous else {"asynchronous.updates", "staleness"}
    absent |= set() if record.race else {"race.lost_fraction"}
    columns = [ROUND]
    columns += [
        metric for metric in METRICS if metric.column and metric.key not in absent and "{}" not in metric.column
    ]
    for group, most in (("seconds", 0 if on_clock else None), ("metrics", MOST_METRICS)):
        present = metrics_in([record])
        shown = [metric for metric in present if metric.path[0] == group and not OF_WORKERS.fullmatch(metric.key)]
        columns += shown[:most]
    return columns


def table_header(columns: Sequence[Metric]) -> str:
    """Return the header line of the table in the terminal."""
    return "  ".join(f"{column.column:>{_width(column)}}" for column in columns)


def table_line(columns: Sequence[Metric], record: RoundRecord) -> str:
    """Return one round as a line of the table in the terminal."""
    return "  ".join(f"{table_cell(column, record):>{_width(column)}}" for column in columns)


def table_cell(column: Metric, record: RoundRecord) -> str:
    """Return the number of a round for one column as text, or "-" if it is missing."""
    value = column.read(record)
    if value is None:
        return "-"
    counted = column.path[0] == "metrics" and float(value).is_integer()
    return fixed(value, 0 if counted else column.decimals)


def _width(column: Metric) -> int:
    return max(len(column.column), 5 if column is ROUND else 8)
