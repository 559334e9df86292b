"""The rounds of a run as scalars for TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedsim.extras import import_extra
from fedsim.progress import mean_staleness
from fedsim.records import RoundRecord

# Where a number of the record stands in TensorBoard: what comes before the slash groups the charts.
TAGS = {
    "test_accuracy": "test/accuracy",
    "test_loss": "test/loss",
    "train_loss": "train/loss",
    "attack_success": "attack/success",
    "bytes_up": "bytes/up",
    "bytes_down": "bytes/down",
    "virtual_seconds": "clock/virtual_seconds",
}
ASYNCHRONOUS = ("updates", "trips", "held", "wasted")


class ScalarBoard:
    """Writes a TensorBoard event file into a folder: `tensorboard --logdir runs` shows it beside those of other runs.

    The file is made with the first round. Of a run that is gone on with `after` a round, what an earlier file has of
    later ones is not shown. Raises MissingPackageError at once where tensorboard is not installed.
    """

    def __init__(self, folder: Path, after: int = 0) -> None:
        import_extra("tensorboard", extra="tensorboard", purpose="records.tensorboard = true")
        self._folder, self._after = folder, after
        self._writer: Any = None

    def round(self, record: RoundRecord) -> None:
        """Append the numbers of one round, and flush them."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self._after + 1 if self._after else None)
        for tag, value in scalars(record):
            self._writer.add_scalar(tag, value, record["round"])
        self._writer.flush()

    def __enter__(self) -> ScalarBoard:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()


def scalars(record: RoundRecord) -> Iterator[tuple[str, float]]:
    """(tag, number) of all that a record has a number for."""
    for key, tag in TAGS.items():
        if record.get(key) is not None:
            yield tag, record[key]  # type: ignore[literal-required]
    asynchronous = record.get("asynchronous") or {}
    for key in ASYNCHRONOUS:
        if key in asynchronous:
            yield f"asynchronous/{key}", asynchronous[key]
    if (staleness := mean_staleness([record])) is not None:
        yield "asynchronous/staleness", staleness
    for phase, seconds in record["seconds"].items():
        yield f"seconds/{phase}", seconds
