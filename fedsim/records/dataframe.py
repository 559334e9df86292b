"""The rounds of a run as rows of numbers, and pandas data frames."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedsim.records.record import RoundRecord, metrics_in
from fedsim.system.packages import import_extra

if TYPE_CHECKING:
    from pandas import DataFrame

ALWAYS = ("test_accuracy", "test_loss", "train_loss")  # columns that every frame has


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
