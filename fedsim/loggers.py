"""Loggers send the numbers of each round to TensorBoard, Weights & Biases or MLflow, in addition to the run folder.

A logger is a function that returns a context manager. The rounds of a run are executed inside its `with` block. The
context manager yields a function of (round, numbers), which is called after each round. The argument `run` is a
`LoggedRun`. Keyword-only parameters are configuration:

    @logger("print")
    @contextlib.contextmanager
    def to_terminal(run, *, digits: int = 3):
        yield lambda round, numbers: print(run.name, round, {tag: f"{x:.{digits}g}" for tag, x in numbers.items()})

If an exception ends the run, the context manager receives it. Only the process that writes the records uses loggers.
No logger has an address or path as a parameter, because an experiment file may come from an unknown author. Each
tracker writes to the default location of its package, which environment variables of that package can change.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedsim.core.registry import Registry
from fedsim.system.files import append_atomically, os_errors_as_record_errors
from fedsim.system.packages import import_extra

__all__ = ["Log", "LoggedRun", "logger"]

FILE_VERSION = "brain.Event:2"  # first record of every event file
START = 1  # session status that makes TensorBoard hide later steps of earlier files
ID = "fedsim_id"  # MLflow tag with the id of a run
MOST_PARAMETERS = 100  # maximum per call to MLflow

logger = Registry("logger", inputs=("run",))

Log = Callable[[int, Mapping[str, float]], object]  # arguments: round, and its numbers by tag such as `test/accuracy`


@dataclass(frozen=True)
class LoggedRun:
    """Metadata of a run that a logger receives before the first round.

    Attributes:
        name: name of the run.
        group: name of the experiment, which all runs of a comparison share.
        settings: settings of the experiment by dotted key, as Booleans, numbers and strings.
        id: 32 hexadecimal digits, different for each run. A run that is continued keeps its ID.
        resumed: whether the run is continued, so that its first rounds may already be logged under this ID.
        done: number of rounds that were finished before the run was continued.
        folder: folder of the run's records, or None.
    """

    name: str
    group: str
    settings: Mapping[str, bool | float | str]
    id: str
    resumed: bool = False
    done: int = 0
    folder: Path | None = None


@logger("tensorboard")
@contextlib.contextmanager
def tensorboard(run: LoggedRun) -> Iterator[Log]:
    """TensorBoard: write an event file to the run folder. `records.tensorboard = true` has the same effect.

    `tensorboard --logdir runs` shows all runs. TensorBoard's tab HPARAMS compares the runs by their settings. Without a
    run folder, nothing is written.
    """
    if run.folder is None:
        yield lambda round, numbers: None
        return
    extra = {"extra": "tensorboard", "purpose": 'the logger "tensorboard"'}
    event = import_extra("tensorboard.compat.proto.event_pb2", **extra).Event
    framing = import_extra("tensorboard.summary.writer.record_writer", **extra)
    hyperparameters = import_extra("tensorboard.plugins.hparams.summary_v2", **extra).hparams_pb
    folder, files = run.folder, list[io.FileIO]()

    def append(path: Path, *events: Mapping[str, Any]) -> None:
        content = io.BytesIO()
        writer = framing.RecordWriter(content)
        for fields in events:
            writer.write(event(wall_time=time.time(), **fields).SerializeToString())
        append_atomically(files[0], path, content.getvalue())

    def log(round: int, numbers: Mapping[str, float]) -> None:
        if not files:
            seconds, fraction = divmod(time.time_ns(), 10**9)  # TensorBoard reads files in the order of their names
            writer = f"{socket.gethostname()}.{os.getpid()}.{fraction:09d}"
            path = folder / f"events.out.tfevents.{seconds:010d}.{writer}"
            with os_errors_as_record_errors(path):
                files.append(path.open("xb", buffering=0))
            start = [{"step": run.done + 1, "session_log": {"status": START}}] if run.resumed else []
            append(path, {"file_version": FILE_VERSION}, *start, {"summary": hyperparameters(dict(run.settings))})
        values = [{"tag": tag, "simple_value": value} for tag, value in numbers.items()]
        append(Path(str(files[0].name)), {"step": round, "summary": {"value": values}})

    try:
        yield log
    finally:
        for file in files:
            with contextlib.suppress(OSError):  # all rounds are already written
                file.close()


@logger("wandb")
@contextlib.contextmanager
def wandb(run: LoggedRun, *, project: str = "fedsim", mode: Literal["offline", "online"] = "offline") -> Iterator[Log]:
    """Weights & Biases: log offline or to a server. `wandb sync wandb/offline-run-*` uploads offline runs.

    Files are written to the folder `wandb` in the working directory, or in WANDB_DIR if this variable is set.

    Args:
        run: the run. A resumed run continues the W&B run with the same id.
        project: W&B project.
        mode: "offline", or "online" to send each round to the server set by `wandb login` or WANDB_BASE_URL.
    """
    package = import_extra("wandb", extra="wandb", purpose='the logger "wandb"')
    wandb_run = package.init(
        project=project,
        name=run.name,
        group=run.group,
        id=run.id,
        config=dict(run.settings),
        mode=mode,
        resume="allow",
        reinit="create_new",  # keeps other active W&B runs of the program open
        settings=package.Settings(silent=True, console="off"),
    )
    with _ended(lambda failed: wandb_run.finish(exit_code=int(failed))):
        yield lambda round, numbers: wandb_run.log(dict(numbers), step=round)


@logger("mlflow")
@contextlib.contextmanager
def mlflow(run: LoggedRun, *, experiment: str = "fedsim") -> Iterator[Log]:
    """MLflow: log to the server in MLFLOW_TRACKING_URI, or to files in the working directory.

    `mlflow ui` shows these files.

    Args:
        run: the run. A resumed run continues the MLflow run with the same id.
        experiment: MLflow experiment.
    """
    package = import_extra("mlflow", extra="mlflow", purpose='the logger "mlflow"')
    client, entities = package.MlflowClient(), package.entities
    existing = client.get_experiment_by_name(experiment)
    experiment_id = existing.experiment_id if existing else client.create_experiment(experiment)
    earlier_runs = client.search_runs([experiment_id], f"tags.{ID} = '{run.id}'", max_results=1) if run.resumed else []
    if earlier_runs:
        run_id = earlier_runs[0].info.run_id
        client.update_run(run_id, "RUNNING")
    else:
        tags = {ID: run.id, "group": run.group}
        run_id = client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id
        settings = [entities.Param(key, str(value)) for key, value in run.settings.items()]
        for start in range(0, len(settings), MOST_PARAMETERS):
            client.log_batch(run_id, params=settings[start : start + MOST_PARAMETERS])

    def log(round: int, numbers: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        client.log_batch(run_id, [entities.Metric(tag, value, now, round) for tag, value in numbers.items()])

    with _ended(lambda failed: client.set_terminated(run_id, "FAILED" if failed else "FINISHED")):
        yield log


@contextlib.contextmanager
def _ended(finish: Callable[[bool], object]) -> Iterator[None]:
    """Context manager that calls `finish(failed)` at the end. `failed` is true if an exception ended the block."""
    try:
        yield
    except BaseException:
        finish(True)
        raise
    finish(False)
