"""The rounds of a run as scalars for TensorBoard."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedsim.records import RoundRecord
from fedsim.report.words import label
from fedsim.runs.progress import mean_staleness
from fedsim.system.extras import import_extra
from fedsim.system.files import append_whole, cannot_write
from fedsim.tables import leaves_of

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
FILE_VERSION = "brain.Event:2"  # with which every event file begins
STARTS = 1  # the status of a session that begins at a step: what other files have of later ones is not shown
ASYNCHRONOUS = ("updates", "trips", "held", "wasted")


class ScalarBoard:
    """Writes a TensorBoard event file into a folder: `tensorboard --logdir runs` shows it beside those of other runs.

    Of a run that is gone on with `after` a round, what an earlier file has of later ones is not shown.
    `settings`, an experiment as nested tables, are hyperparameters, by which the tab HPARAMS compares runs.
    The file is made with the first round; each round is in it whole, or not at all where it cannot be written
    (TensorBoard's own writer does that in a thread, and loses what goes wrong there).
    Raises MissingPackageError at once where tensorboard is not installed, and RecordError where writing fails.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], after: int = 0) -> None:
        extra = {"extra": "tensorboard", "purpose": "records.tensorboard = true"}
        self._protocol = import_extra("tensorboard.compat.proto.event_pb2", **extra)
        self._framing = import_extra("tensorboard.summary.writer.record_writer", **extra)
        self._hyperparameters = import_extra("tensorboard.plugins.hparams.summary_v2", **extra)
        self._folder, self._settings, self._after = folder, settings, after
        self._path = folder
        self._file: io.FileIO | None = None

    def round(self, record: RoundRecord) -> None:
        """Append the numbers of one round."""
        file = self._file or self._begin()
        now = time.time()
        events = [
            {"wall_time": now, "step": record["round"], "summary": {"value": [{"tag": tag, "simple_value": value}]}}
            for tag, value in scalars(record)
        ]
        append_whole(file, self._path, self._framed(events))

    def _begin(self) -> io.FileIO:
        self._path = self._folder / f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        try:
            self._file = self._path.open("xb", buffering=0)
        except OSError as error:
            raise cannot_write(self._path, error) from error
        head = {"wall_time": time.time(), "file_version": FILE_VERSION}
        begins = {"wall_time": time.time(), "step": self._after + 1, "session_log": {"status": STARTS}}
        settings = {
            "wall_time": time.time(),
            "summary": self._hyperparameters.hparams_pb(hyperparameters(self._settings)),
        }
        events = [head, begins, settings] if self._after else [head, settings]
        append_whole(self._file, self._path, self._framed(events))
        return self._file

    def _framed(self, events: Iterable[Mapping[str, Any]]) -> bytes:
        """Events as they stand in a file: each with its length and checksums."""
        content = io.BytesIO()
        writer = self._framing.RecordWriter(content)
        for event in events:
            writer.write(self._protocol.Event(**event).SerializeToString())
        return content.getvalue()

    def __enter__(self) -> ScalarBoard:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # each round has been written
                self._file.close()


def hyperparameters(settings: Mapping[str, Any]) -> dict[str, bool | float | str]:
    """Settings by dotted key as TensorBoard takes them: truth values, numbers and texts."""
    found = {key: value for key, value in leaves_of(settings) if value is not None}
    return {key: value if isinstance(value, (bool, int, float)) else label(value) for key, value in found.items()}


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
