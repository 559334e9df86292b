"""The rounds that a run has on record, as they can be read: the file may be torn, or a stranger's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedsim.records import METRICS, RoundRecord
from fedsim.report.reading import LARGEST, MOST_METRICS_BYTES, Round
from fedsim.system.files import read_bounded

LOSSES = ("test_loss", "train_loss")
NUMBERS = ("attack_success", "virtual_seconds")  # of a record, where they are not null


def read_history(folder: Path) -> list[RoundRecord]:
    """The rounds that a run folder has on record, one after another from the first.

    A line that was cut off does not count, nor do lines after one that is not as a run writes it.
    """
    try:
        lines = read_bounded(folder / METRICS, MOST_METRICS_BYTES, folder).decode("utf-8").split("\n")[:-1]
    except (OSError, ValueError):
        return []
    records: list[RoundRecord] = []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not _is_record(record, line) or record.get("round") != len(records) + 1:
            break
        for loss in LOSSES:
            if record[loss] is None or not abs(record[loss]) <= LARGEST:  # JSON has no word for it
                record[loss] = math.nan
        records.append(record)
    return records


def _is_record(record: Any, line: str) -> bool:
    """Whether it has what tables and pictures ask of a round."""
    try:
        read = Round.model_validate_json(line)
    except ValidationError:
        return False
    complete = {*LOSSES, "seconds"} <= record.keys() and None not in read.seconds.values()
    accuracy = read.test_accuracy is not None and 0 <= read.test_accuracy <= 1
    lost = [key for key in NUMBERS if record.get(key) is not None and getattr(read, key) is None]
    return complete and accuracy and not lost
