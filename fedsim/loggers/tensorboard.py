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

from fedsim.loggers.logger import Log, LoggedRun, logger
from fedsim.system.files import append_atomically, write_error
from fedsim.system.packages import import_extra

FILE_VERSION = "brain.Event:2"  # every event file begins with it
START = 1  # the status of a session that begins at a step: TensorBoard hides later steps of earlier files


class TensorBoardWriter:
    """Writes a TensorBoard event file into a folder: `tensorboard --logdir runs` compares it with those of other runs.

    The file is created with the first round. Each round is in it whole, or not at all if writing fails.
    `SummaryWriter` is not used, since it writes in a thread, which loses errors.

    Args:
        folder: of the run.
        settings: the experiment by dotted keys; the tab HPARAMS compares runs by them.
        after: the round after which a run is resumed; TensorBoard hides later rounds of earlier files. None: a new run.

    Raises MissingPackageError if tensorboard is not installed, and RecordError where writing fails.
    """

    def __init__(self, folder: Path, settings: Mapping[str, bool | float | str], after: int | None = None) -> None:
        extra = {"extra": "tensorboard", "purpose": 'the logger "tensorboard"'}
        self._events = import_extra("tensorboard.compat.proto.event_pb2", **extra)
        self._framing = import_extra("tensorboard.summary.writer.record_writer", **extra)
        self._hyperparameters = import_extra("tensorboard.plugins.hparams.summary_v2", **extra).hparams_pb
        self._folder, self._settings, self._after = folder, settings, after
        self._path = folder
        self._file: io.FileIO | None = None

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """Append the numbers of one round, by tag."""
        file = self._file or self._open()
        values = [{"tag": tag, "simple_value": value} for tag, value in numbers.items()]
        self._append(file, [{"step": round, "summary": {"value": values}}])

    def _open(self) -> io.FileIO:
        seconds, fraction = divmod(time.time_ns(), 10**9)  # files of a run are read in the order of their names
        writer = f"{socket.gethostname()}.{os.getpid()}.{fraction:09d}"
        self._path = self._folder / f"events.out.tfevents.{seconds:010d}.{writer}"
        try:
            self._file = self._path.open("xb", buffering=0)
        except OSError as error:
            raise write_error(self._path, error) from error
        events: list[dict[str, Any]] = [{"file_version": FILE_VERSION}]
        if self._after is not None:
            events.append({"step": self._after + 1, "session_log": {"status": START}})
        events.append({"summary": self._hyperparameters(dict(self._settings))})
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


@logger("tensorboard")
@contextlib.contextmanager
def tensorboard(run: LoggedRun) -> Iterator[Log]:
    """TensorBoard: an event file in the run folder, none without a folder; `records.tensorboard = true` is the same."""
    if run.folder is None:
        yield lambda round, numbers: None
        return
    with TensorBoardWriter(run.folder, run.settings, run.done if run.resumed else None) as writer:
        yield writer.log
