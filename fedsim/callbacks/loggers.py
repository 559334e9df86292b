"""Callback that passes the rounds of a run to its loggers (`records.loggers`)."""

from __future__ import annotations

import contextlib
import re
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from fedsim.callbacks.callback import Callback
from fedsim.config.experiment import Experiment
from fedsim.core.input_limits import leaves_of
from fedsim.errors import ExperimentError, FedsimError, FedsimWarning, cut, one_line, show
from fedsim.loggers import Log, LoggedRun
from fedsim.records.formatting import label
from fedsim.records.record import RoundRecord, metrics_in
from fedsim.records.run_folder import RunFolder
from fedsim.system.files import one_at_a_time

ID = "logged_as"  # key in `environment.json` for the ID under which loggers store the run
MOST_WAITING = 60.0  # maximum wait in seconds while other runs on this machine start their loggers

RunLogger = tuple[str, contextlib.AbstractContextManager[Log], Log]  # name, context manager, and function to call


class Loggers(Callback):
    """Callback that passes each round to the loggers, such as TensorBoard. Use it as a context manager around the run.

    If a logger fails to start, the run ends with an error. If a logger fails later, there is a warning, and the run
    continues without it.

    Args:
        experiment: the experiment of the run.
        folder: folder of the run, or None.
        done: number of rounds that were finished before the run was continued.

    Attributes:
        metadata: the ID under which the loggers store the run. Empty without loggers.
    """

    def __init__(self, experiment: Experiment, folder: RunFolder | None, done: int) -> None:
        self._tables, self._loggers = experiment.records.all_loggers, list[RunLogger]()  # names may repeat
        self.metadata: dict[str, str] = {}
        if self._tables:
            self._run = _logged_run(experiment, folder, done)
            self.metadata[ID] = self._run.id

    def on_round(self, record: RoundRecord) -> None:
        numbers = scalars(record) if self._loggers else {}
        for logger in list(self._loggers):
            name, _, log = logger
            try:
                log(record.round, numbers)
            except FedsimError:
                raise
            except Exception as error:
                self._loggers.remove(logger)
                _warn(f"the logger {show(name)} failed in round {record.round}", error)
                _end(logger, type(error), error, error.__traceback__)

    def __enter__(self) -> Loggers:
        with contextlib.ExitStack() as stack:
            stack.push(self.__exit__)
            for table in self._tables:
                try:
                    context = table.component(run=self._run)
                    if not isinstance(context, contextlib.AbstractContextManager):
                        raise TypeError(f"it must return a context manager, not {show(context)}")
                    with one_at_a_time(Path(__file__), MOST_WAITING):  # the first logger may create a database
                        self._loggers.append((table.name, context, context.__enter__()))
                except FedsimError:
                    raise
                except Exception as error:
                    raise ExperimentError(
                        f"records.loggers: the logger {show(table.name)} cannot start: {one_line(error)}"
                    ) from error
            stack.pop_all()
        return self

    def __exit__(self, *reason: Any) -> None:
        for logger in self._loggers:
            _end(logger, *reason)


def _end(
    logger: RunLogger, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    name, context, _ = logger
    try:
        context.__exit__(kind, error, trace)
    except Exception as failure:
        if failure is not error:
            _warn(f"the logger {show(name)} failed at the end of the run", failure)


def _warn(failure: str, error: Exception) -> None:
    text = f"{failure}: {one_line(error)}; the run continues without this logger"
    warnings.warn(text, FedsimWarning, stacklevel=4)


def _logged_run(experiment: Experiment, folder: RunFolder | None, done: int) -> LoggedRun:
    """Return the metadata of a run that its loggers receive.

    `done` is the number of rounds that were finished before the run was continued.
    """
    known = folder.environment().get(ID) if folder and folder.resumes else None
    resumed = isinstance(known, str) and re.fullmatch(r"[0-9a-f]{32}", known) is not None
    return LoggedRun(
        name=folder.path.resolve().name if folder else experiment.name,
        group=experiment.name,
        settings=hyperparameters(experiment.resolved()),
        id=str(known) if resumed else uuid.uuid4().hex,
        resumed=resumed,
        done=done,
        folder=folder.path if folder else None,
    )


def hyperparameters(settings: Mapping[str, Any]) -> dict[str, bool | float | str]:
    """Return the settings by dotted key, as Booleans, numbers and strings, which all loggers accept."""
    values = {key: value for key, value in leaves_of(settings) if value is not None}
    return {key: value if isinstance(value, (bool, int, float)) else cut(label(value)) for key, value in values.items()}


def scalars(record: RoundRecord) -> dict[str, float]:
    """Return the numbers of a record by their names in TensorBoard, such as "test/accuracy"."""
    values = {metric.tag: metric.read(record) for metric in metrics_in([record]) if metric.tag}
    return {tag: value for tag, value in values.items() if value is not None}
