"""Base class of callbacks, which a run calls before its first round, after each round, and at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fedsim.errors import ExperimentError, StopRun, show
from fedsim.records.record import RoundRecord
from fedsim.runs.live_run import LiveRun
from fedsim.runs.metadata import RunMetadata
from fedsim.runs.result import Result


class Callback:
    """Base class for callbacks of `fedsim.run(..., callbacks=[...])`. Override the methods that you need.

    An exception in a method ends the run without a result. Finished rounds are already recorded, and a run with a
    folder can be resumed. With several ranks, every rank calls its callbacks, and rank 0 decides whether the run ends.
    With groups, a run that is asked to end goes on to the next aggregation of the groups, so that nothing is lost.

    >>> import fedsim
    >>> class Patience(fedsim.Callback):
    ...     def on_start(self, run):
    ...         self.run = run
    ...     def on_round(self, record):
    ...         if record.round > 1 and record.test_loss > self.run.history[-2].test_loss:
    ...             return "the test loss grows"
    >>> diverging = {"model": "logistic", "workers": 2, "engine": "serial", "local": {"lr": 20.0, "steps": 5}}
    >>> fedsim.run(diverging, rounds=9, callbacks=[Patience()]).stopped
    'the test loss grows'
    """

    def on_setup(self, step: str) -> None:
        """Called before each step of the preparation, such as "loading the data set mnist"."""

    def on_start(self, run: LiveRun) -> None:
        """Called before the first round, when data, model and engine are ready.

        Args:
            run: run in progress, with the attributes `experiment`, `metadata`, `history` and `stopped`, and the method
                `model()`, which returns a copy of the global model.
        """

    def on_round(self, record: RoundRecord) -> str | None:
        """Called after each round. Return a reason (str) to end the run after this round, or None to continue."""

    def on_end(self, result: Result) -> None:
        """Called after the last round, when all files are written. Not called if an exception ends the run."""


@dataclass(frozen=True)
class FunctionCallback(Callback):
    """Callback made of up to three functions.

    `setup(step)` is called before each step of the preparation, such as loading data, `start(metadata)` before the
    first round, and `round(record)` after each round.
    """

    setup: Callable[[str], object] | None = None
    start: Callable[[RunMetadata], object] | None = None
    round: Callable[[RoundRecord], object] | None = None

    def __post_init__(self) -> None:
        for name, function in vars(self).items():
            if function is not None and not callable(function):
                raise ExperimentError(f"on_{name} = {show(function)}: must be a function")

    def on_setup(self, step: str) -> None:
        if self.setup:
            self.setup(step)

    def on_start(self, run: LiveRun) -> None:
        if self.start:
            self.start(run.metadata)

    def on_round(self, record: RoundRecord) -> None:
        if self.round:
            self.round(record)


class UserCallbacks(Callback):
    """Callback that calls all user-defined callbacks in order."""

    def __init__(self, first: Callback, callbacks: Sequence[Callback]) -> None:
        if not isinstance(callbacks, Iterable):
            raise ExperimentError(f"callbacks = {show(callbacks)}: must be a list; pass a function as on_round")
        self._callbacks = [first, *callbacks]
        self._reason: str | None = None  # of the first request to end the run
        for callback in self._callbacks:
            if not isinstance(callback, Callback):
                raise ExperimentError(
                    f"callbacks: {show(callback)} must be an object of a class that derives from fedsim.Callback; pass "
                    "a function as on_round"
                )

    def on_setup(self, step: str) -> None:
        for callback in self._callbacks:
            callback.on_setup(step)

    def on_start(self, run: LiveRun) -> None:
        self._run = run
        for callback in self._callbacks:
            callback.on_start(run)

    def on_round(self, record: RoundRecord) -> str | None:
        reasons = [reason for callback in self._callbacks if (reason := _reason(callback, record))]
        self._reason = self._reason or next(iter(reasons), None)
        between = record.round % self._run.experiment.stopping[1]  # the global model lacks the groups' latest rounds
        reason = self._run.engine.broadcast(None if between else self._reason)
        self._run.on_request = reason is not None
        return reason

    def on_end(self, result: Result) -> None:
        for callback in self._callbacks:
            callback.on_end(result)


def _reason(callback: Callback, record: RoundRecord) -> str | None:
    try:
        reason = callback.on_round(record)
    except StopRun as stop:
        return str(stop) or "on_round raised StopRun"
    if reason is not None and not isinstance(reason, str):
        raise ExperimentError(
            f"callbacks: {type(callback).__name__}.on_round returned {show(reason)}; return a string to end the run, "
            "or None to continue"
        )
    return reason
