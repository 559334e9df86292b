"""Loggers: where the numbers of each round go besides the run folder: TensorBoard, Weights & Biases, MLflow.

A logger is a function that returns a context manager around the rounds of a run, whose value is called after each
round. Its argument `run` is a `LoggedRun`; its keyword-only parameters are its configuration:

    @logger("print")
    @contextlib.contextmanager
    def to_terminal(run, *, digits: int = 3):
        yield lambda round, numbers: print(run.name, round, {tag: f"{x:.{digits}g}" for tag, x in numbers.items()})

The context ends with the exception that ended the run, if there was one. Only the process that writes the records has
loggers. No
address or path is a parameter, since an experiment file may come from an unknown author: trackers write where their
package does by default, which its own environment variables change.
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
from fedsim.system.files import append_atomically, write_error
from fedsim.system.packages import import_extra

__all__ = ["Log", "LoggedRun", "logger"]

FILE_VERSION = "brain.Event:2"  # every event file begins with it
START = 1  # the status of a session that begins at a step: TensorBoard hides later steps of earlier files
ID = "fedsim_id"  # the tag under which MLflow holds the id of a run
MOST_PARAMETERS = 100  # of a call to MLflow

logger = Registry("logger", inputs=("run",))

Log = Callable[[int, Mapping[str, float]], object]  # called with the round and its numbers, by tag: `test/accuracy`


@dataclass(frozen=True)
class LoggedRun:
    """What a logger is told of a run before its first round.

    Attributes:
        name: of the run folder, or of the experiment if there is no folder; of a run of a comparison, its id.
        group: the name of the experiment, which all runs of a comparison share.
        settings: the experiment by dotted keys, as booleans, numbers and strings.
        id: 32 hexadecimal digits, different for each run; a resumed run has that of its first part.
        resumed: whether the run is resumed, so that a logger may hold its first part under this id.
        done: the rounds that a resumed run has finished before; later rounds of its first part are repeated.
        folder: the run folder; None without one.
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
    """TensorBoard: an event file in the run folder, none without a folder; `records.tensorboard = true` is the same.

    `tensorboard --logdir runs` compares the file with those of other runs, by settings in the tab HPARAMS. It is
    created with the first round. Each round is in it whole, or not at all if writing fails. `SummaryWriter` is not
    used, since it writes in a thread, which loses errors. TensorBoard hides the rounds that a resumed run repeats.
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
            seconds, fraction = divmod(time.time_ns(), 10**9)  # files of a run are read in the order of their names
            writer = f"{socket.gethostname()}.{os.getpid()}.{fraction:09d}"
            path = folder / f"events.out.tfevents.{seconds:010d}.{writer}"
            try:
                files.append(path.open("xb", buffering=0))
            except OSError as error:
                raise write_error(path, error) from error
            start = [{"step": run.done + 1, "session_log": {"status": START}}] if run.resumed else []
            append(path, {"file_version": FILE_VERSION}, *start, {"summary": hyperparameters(dict(run.settings))})
        values = [{"tag": tag, "simple_value": value} for tag, value in numbers.items()]
        append(Path(str(files[0].name)), {"step": round, "summary": {"value": values}})

    try:
        yield log
    finally:
        for file in files:
            with contextlib.suppress(OSError):  # each round has been written
                file.close()


@logger("wandb")
@contextlib.contextmanager
def wandb(run: LoggedRun, *, project: str = "fedsim", mode: Literal["offline", "online"] = "offline") -> Iterator[Log]:
    """Weights & Biases. `wandb sync wandb/offline-run-*` uploads offline runs; WANDB_DIR is the folder around `wandb`.

    Args:
        run: the run; a resumed one continues the run of the same id.
        project: of W&B.
        mode: "online" sends each round to the server that `wandb login` or WANDB_BASE_URL names.
    """
    package = import_extra("wandb", extra="wandb", purpose='the logger "wandb"')
    logged = package.init(
        project=project,
        name=run.name,
        group=run.group,
        id=run.id,
        config=dict(run.settings),
        mode=mode,
        resume="allow",
        reinit="create_new",  # a run of the program around it goes on
        settings=package.Settings(silent=True, console="off"),
    )
    with _ended(lambda failed: logged.finish(exit_code=int(failed))):
        yield lambda round, numbers: logged.log(dict(numbers), step=round)


@logger("mlflow")
@contextlib.contextmanager
def mlflow(run: LoggedRun, *, experiment: str = "fedsim") -> Iterator[Log]:
    """MLflow. Without MLFLOW_TRACKING_URI it writes to files in the working directory: `mlflow ui` shows them.

    Args:
        run: the run; a resumed one continues the run of the same id.
        experiment: of MLflow.
    """
    package = import_extra("mlflow", extra="mlflow", purpose='the logger "mlflow"')
    client, entities = package.MlflowClient(), package.entities
    known = client.get_experiment_by_name(experiment)
    place = known.experiment_id if known else client.create_experiment(experiment)
    runs = client.search_runs([place], f"tags.{ID} = '{run.id}'", max_results=1) if run.resumed else []
    if runs:
        name = runs[0].info.run_id
        client.update_run(name, "RUNNING")
    else:
        name = client.create_run(place, run_name=run.name, tags={ID: run.id, "group": run.group}).info.run_id
        settings = [entities.Param(key, str(value)) for key, value in run.settings.items()]
        for start in range(0, len(settings), MOST_PARAMETERS):
            client.log_batch(name, params=settings[start : start + MOST_PARAMETERS])

    def log(round: int, numbers: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        client.log_batch(name, [entities.Metric(tag, value, now, round) for tag, value in numbers.items()])

    with _ended(lambda failed: client.set_terminated(name, "FAILED" if failed else "FINISHED")):
        yield log


@contextlib.contextmanager
def _ended(finish: Callable[[bool], object]) -> Iterator[None]:
    """Call `finish(failed)` when the block ends."""
    try:
        yield
    except BaseException:
        finish(True)
        raise
    finish(False)
