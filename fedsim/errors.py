"""Exceptions and warnings of fedsim, and functions that format the values in their messages."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

MAX_PROBLEMS = 100  # maximum number of error lines per experiment
MAX_NAME = 100  # maximum number of characters of a name
MAX_TEXT = 300  # maximum number of characters of a path, or of another library's message, in an error line
MAX_LINE = 1000  # maximum number of characters of an error line on the terminal
MAX_WORKER = 40  # maximum number of characters of a worker's name
MAX_VALUE = 80  # maximum number of characters of a value in an error line
DEVICE_ASSERT = (
    "often an index is out of range, such as a label or a token of nn.Embedding; run with device=cpu to see which; "
    "this process can no longer use the GPU"
)
WORKER_NAMES: ContextVar[Sequence[str | None]] = ContextVar("fedsim_worker_names", default=())  # those of the run
PLACE = re.compile(r"[A-Za-z_][\w.\[\]-]*(?= = |: )")  # the key at the start of an error line


class FedsimError(Exception):
    """Base class of all errors that fedsim raises intentionally."""


class ExperimentError(FedsimError, ValueError):
    """Error for an invalid experiment. The message has one line per problem: the key, its value, and what is allowed.

    Args:
        lines: error lines, each starting with the key concerned: `aggregate.f = 9: must be ...`, `clock: needs ...`.
        source: file that contains the experiment. Each line then starts with this file.

    Attributes:
        lines: at most MAX_PROBLEMS error lines, and one line that counts the remaining problems.
        keys: key of each line. "" for a line without a key.
        key: key of the first line.

    >>> error = ExperimentError("aggregate.f = 9: must be at most 3", source="my.toml")
    >>> error.key, str(error)
    ('aggregate.f', 'my.toml: aggregate.f = 9: must be at most 3')
    """

    def __init__(self, *lines: str, source: object = None) -> None:
        if len(lines) > MAX_PROBLEMS + 1:
            lines = (*lines[:MAX_PROBLEMS], f"and {len(lines) - MAX_PROBLEMS} more problems")
        self.keys = tuple(found[0] if (found := PLACE.match(line)) else "" for line in lines)
        self.lines = lines if source is None else tuple(f"{source}: {line}" for line in lines)
        super().__init__("\n".join(self.lines))

    @property
    def key(self) -> str:
        """Key at the start of the message's first line, such as `aggregate.f`, or "" if this line has no key."""
        return self.keys[0] if self.keys else ""


class DivergedError(ExperimentError):
    """Error for updates or a global model that contain NaN or infinity.

    Args:
        problem: sentence that says what contains NaN or infinity.
        remedy: what to change. "" if unknown.
        round: round in which the problem occurred. None if unknown.

    >>> str(DivergedError("an update contains NaN", "reduce local.lr", 3))
    'round 3: an update contains NaN; reduce local.lr'
    """

    def __init__(self, problem: str, remedy: str, round: int | None = None) -> None:
        line = f"{problem}; {remedy}" if remedy else problem
        super().__init__(line if round is None else f"round {round}: {line}")
        self.problem, self.remedy, self.round = problem, remedy, round

    def __reduce__(self) -> tuple[type[DivergedError], tuple[str, str, int | None]]:
        """Support pickling, because processes send this error to each other."""
        return type(self), (self.problem, self.remedy, self.round)


class DataError(FedsimError):
    """Error for a data set that is missing, damaged, unsuitable, or cannot be downloaded."""


class RecordError(FedsimError):
    """Error for a run folder, or a file in it, that cannot be created, read or written."""


class FedsimWarning(UserWarning):
    """Base class of fedsim's warnings: the run continues, but deviates from the experiment. The message is one line."""


class SettingWarning(FedsimWarning):
    """Warning about a setting without effect, or with an effect that is probably not intended, in one line."""


class MissingPackageError(FedsimError, ImportError):
    """Error for a package from one of fedsim's extras that is needed but not installed."""


class StopRun(Exception):  # noqa: N818  # not an error, like StopIteration
    """Exception that a user's `on_round` function raises to end the run after the current round.

    `fedsim.run` then returns the result so far. The exception's message becomes `Result.stopped`. With groups, the run
    ends after the next round in which the groups are aggregated.

    >>> import fedsim
    >>> def on_round(record):
    ...     if record.round == 2:
    ...         raise fedsim.StopRun("two rounds are enough")
    >>> result = fedsim.run(rounds=5, workers=2, model="logistic", engine="serial", on_round=on_round)
    >>> len(result.history), result.stopped
    (2, 'two rounds are enough')
    """


class WorkerError(FedsimError, RuntimeError):
    """Error in a worker or its process. The message names the worker, the process, the round and the reason."""


class ProcessLostError(WorkerError):
    """Error for a process that died or hangs while it trained workers. Another process can repeat its work.

    Attributes:
        why: what happened to the process, such as "was killed by SIGKILL".
        process: number of the process.
        worker: ID of the worker that the process was training. None if it was training no worker or several at once.
    """

    def __init__(self, line: str, why: str, process: int, worker: int | None) -> None:
        super().__init__(line)
        self.why, self.process, self.worker = why, process, worker


def show_warnings_as_lines() -> None:
    """Print each fedsim warning on stderr as one line, `warning: ...`. Warnings of other libraries do not change."""
    show_other = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **further: Any) -> None:
        if issubclass(category, FedsimWarning):
            erased = "\x1b[K" if sys.stderr.isatty() else ""  # a status line
            print(f"{erased}warning: {printable(str(message))}", file=sys.stderr, flush=True)
        else:
            show_other(message, category, *place, **further)

    warnings.showwarning = show


def show(value: Any) -> str:
    """Format a value as in an experiment file, with at most MAX_VALUE characters, all printable."""
    text = printable(_as_toml(value))
    return text if len(text) <= MAX_VALUE else f"{text[:47]}...{text[-30:]}"  # the end of a path matters


def _as_toml(value: Any) -> str:
    if isinstance(value, (str, bool)):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_as_toml, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {_as_toml(item)}' for key, item in value.items())}}}"
    return " ".join(repr(value).split())


@contextlib.contextmanager
def workers_named(names: Sequence[str | None] = ()) -> Iterator[None]:
    """Return a context manager in which messages show workers with their `names`, or with IDs only if it is empty."""
    token = WORKER_NAMES.set(names)
    try:
        yield
    finally:
        WORKER_NAMES.reset(token)


def called(worker: int, names: Sequence[str | None] | None = None) -> str:
    """Format the ID of a worker, followed by its name if it has one: `3 (hospital_2)`.

    `names`: name of each worker. None: the names in the current run.
    """
    names = WORKER_NAMES.get() if names is None else names
    return with_name(worker, names[worker] if worker < len(names) else None)


def with_name(worker: int, name: str | None) -> str:
    """Format the ID of a worker and its `name`, of which at most MAX_WORKER characters are shown."""
    name = printable(name or "")
    short = name if len(name) <= MAX_WORKER else f"{name[: MAX_WORKER // 2]}...{name[3 - MAX_WORKER // 2 :]}"
    return f"{worker} ({short})" if short.strip() else str(worker)


def show_bytes(count: float) -> str:
    """Format a number of bytes with a decimal unit: `1.5 MB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PB"


def plural(count: int, thing: str) -> str:
    """Return a count with its noun, in the plural unless the count is 1: `1 round`, `2 rounds`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def cut(text: str) -> str:
    """Make a text that may come from a file printable, and shorten it to MAX_TEXT characters."""
    text = printable(text)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."


def one_line(error: BaseException) -> str:
    """Format another library's exception as `Type: message` on one line."""
    message = str(error)
    if "device-side assert" in message:  # the rest of CUDA's message is for kernel developers
        message = f"{message.partition(chr(10))[0]}; {DEVICE_ASSERT}"
    return f"{type(error).__name__}: {cut(' '.join(message.split()))}"


def first_line(error: BaseException) -> str:
    """Return the first line of a FedsimError, or the result of `one_line` for any other exception."""
    return str(error).splitlines()[0] if isinstance(error, FedsimError) else one_line(error)


def printable(text: str) -> str:
    """Replace each character that could control a terminal or break the line by `?`.

    A text longer than MAX_LINE loses its middle, because the end of an error line says what to change.
    """
    text = text if len(text) <= MAX_LINE else f"{text[: MAX_LINE // 2]}...{text[3 - MAX_LINE // 2 :]}"
    return "".join(character if character.isprintable() else "?" for character in text)
