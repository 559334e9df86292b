"""The rounds of a run as scalars for TensorBoard."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedsim.core.input_limits import leaves_of
from fedsim.records.formatting import label
from fedsim.records.record import RoundRecord, metrics_in
from fedsim.system.extras import import_extra
from fedsim.system.files import append_atomically, write_error

FILE_VERSION = "brain.Event:2"  # every event file begins with it
START = 1  # the status of a session that begins at a step: TensorBoard hides later steps of earlier files


class TensorBoardWriter:
    """Writes a TensorBoard event file into a folder: `tensorboard --logdir runs` compares it with those of other runs.

    The file is created with the first round. Each round is in it whole, or not at all if writing fails.
    `SummaryWriter` is not used, since it writes in a thread, which loses errors.

    Args:
        folder: of the run.
        settings: the experiment as nested tables; the tab HPARAMS compares runs by them.
        after: the round after which a run is resumed; TensorBoard hides later rounds of earlier files.

    Raises MissingPackageError if tensorboard is not installed, and RecordError where writing fails.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], after: int = 0) -> None:
        extra = {"extra": "tensorboard", "purpose": "records.tensorboard = true"}
        self._events = import_extra("tensorboard.compat.proto.event_pb2", **extra)
        self._framing = import_extra("tensorboard.summary.writer.record_writer", **extra)
        self._hyperparameters = import_extra("tensorboard.plugins.hparams.summary_v2", **extra).hparams_pb
        self._folder, self._settings, self._after = folder, settings, after
        self._path = folder
        self._file: io.FileIO | None = None

    def round(self, record: RoundRecord) -> None:
        """Append the numbers of one round."""
        file = self._file or self._open()
        values = [{"tag": tag, "simple_value": value} for tag, value in scalars(record).items()]
        self._append(file, [{"step": record.round, "summary": {"value": values}}])

    def _open(self) -> io.FileIO:
        self._path = self._folder / f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        try:
            self._file = self._path.open("xb", buffering=0)
        except OSError as error:
            raise write_error(self._path, error) from error
        events: list[dict[str, Any]] = [{"file_version": FILE_VERSION}]
        if self._after:
            events.append({"step": self._after + 1, "session_log": {"status": START}})
        events.append({"summary": self._hyperparameters(hyperparameters(self._settings))})
        self._append(self._file, events)
        return self._file

    def _append(self, file: io.FileIO, events: Iterable[Mapping[str, Any]]) -> None:
        content = io.BytesIO()
        writer = self._framing.RecordWriter(content)
        for event in events:
            writer.write(self._events.Event(wall_time=time.time(), **event).SerializeToString())
        append_atomically(file, self._path, content.getvalue())

    def __enter__(self) -> TensorBoardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # each round has been written
                self._file.close()


def hyperparameters(settings: Mapping[str, Any]) -> dict[str, bool | float | str]:
    """Settings by dotted key, as the types that TensorBoard takes: booleans, numbers and strings."""
    found = {key: value for key, value in leaves_of(settings) if value is not None}
    return {key: value if isinstance(value, (bool, int, float)) else label(value) for key, value in found.items()}


def scalars(record: RoundRecord) -> dict[str, float]:
    """The numbers of a record by their tag, as `Metric.tag` declares it."""
    values = {metric.tag: metric.read(record) for metric in metrics_in([record]) if metric.tag}
    return {tag: value for tag, value in values.items() if value is not None}
