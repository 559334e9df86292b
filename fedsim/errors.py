"""The exceptions and warnings of fedsim, and how values look in their messages."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Mapping
from typing import Any

MAX_PROBLEMS = 100  # reported of one experiment
MAX_NAME = 100  # characters of a name
MAX_TEXT = 300  # characters of a path, or of another library's message, in an error line
MAX_LINE = 1000  # characters of an error line on the terminal
MAX_VALUE = 80  # characters of a value in an error line
DEVICE_ASSERT = (
    "often an index is out of range, such as a label or a token of nn.Embedding; device=cpu shows which; this process "
    "cannot use the GPU any more"
)
PLACE = re.compile(r"[A-Za-z_][\w.\[\]-]*(?= = |: )")  # at the start of an error line


class FedsimError(Exception):
    """Base class of all errors that fedsim raises on purpose."""


class ExperimentError(FedsimError, ValueError):
    """The experiment is not valid: one line per problem, with place, value, and what is allowed.

    Args:
        lines: the problems. A line begins with the wrong key: `aggregate.f = 9: must be ...`, `clock: needs ...`.
        source: the file that holds the experiment; each line then begins with it.

    Attributes:
        lines: the problems, at most MAX_PROBLEMS and one line that counts the others.
        keys: the key of each line; "" for a line that names none.
        key: the first of these keys.

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
        return self.keys[0] if self.keys else ""


class DivergedError(ExperimentError):
    """Updates or the global model hold NaN or infinity.

    Args:
        what: that holds it, as the subject of a sentence.
        remedy: what to change, if that is known.
        round: in which this happened, if it is known.

    >>> str(DivergedError("an update holds NaN", "reduce local.lr", 3))
    'round 3: an update holds NaN; reduce local.lr'
    """

    def __init__(self, what: str, remedy: str, round: int | None = None) -> None:
        line = f"{what}; {remedy}" if remedy else what
        super().__init__(line if round is None else f"round {round}: {line}")
        self.what, self.remedy, self.round = what, remedy, round

    def __reduce__(self) -> tuple[type[DivergedError], tuple[str, str, int | None]]:
        """Processes send it to each other."""
        return type(self), (self.what, self.remedy, self.round)


class DataError(FedsimError):
    """A data set is missing, damaged, or cannot be downloaded."""


class RecordError(FedsimError):
    """A run folder cannot be created, read or written."""


class FedsimWarning(UserWarning):
    """The run continues, but differs from its description: one line."""


class SettingWarning(FedsimWarning):
    """A setting of the experiment has no effect, or an effect that is probably not intended: one line."""


class MissingPackageError(FedsimError, ImportError):
    """A package of one of fedsim's extras is needed and not installed."""


class StopRun(Exception):  # noqa: N818  # like StopIteration, it is no error
    """Raised by `on_round` to end the run after this round; `fedsim.run` returns its result.

    The text of the exception is the reason, `Result.stopped`.

    >>> import fedsim
    >>> def on_round(record):
    ...     if record.round == 2:
    ...         raise fedsim.StopRun("two rounds are enough")
    >>> result = fedsim.run(rounds=5, workers=2, model="logistic", engine="serial", on_round=on_round)
    >>> len(result.history), result.stopped
    (2, 'two rounds are enough')
    """


class WorkerError(FedsimError, RuntimeError):
    """A worker, or its process, failed: names the worker, the process, the round and the reason."""


class ProcessLostError(WorkerError):
    """A process that trains workers died or hangs. Another process could repeat its work.

    Attributes:
        why: what happened to the process, as the end of a sentence: "was killed by SIGKILL".
        process: its number.
        worker: the worker that it trained; None if it trained none, or several together.
    """

    def __init__(self, line: str, why: str, process: int, worker: int | None) -> None:
        super().__init__(line)
        self.why, self.process, self.worker = why, process, worker


def show_warnings_as_lines() -> None:
    """From now on print fedsim's warnings on stderr as one line, `warning: ...`; others stay as they are."""
    show_other = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **further: Any) -> None:
        if issubclass(category, FedsimWarning):
            print(f"warning: {printable(str(message))}", file=sys.stderr, flush=True)
        else:
            show_other(message, category, *place, **further)

    warnings.showwarning = show


def show(value: Any) -> str:
    """A value as an experiment file would write it, printable and shortened to MAX_VALUE characters."""
    text = printable(_as_toml(value))
    return text if len(text) <= MAX_VALUE else f"{text[:47]}...{text[-30:]}"  # the end of a path matters most


def _as_toml(value: Any) -> str:
    if isinstance(value, (str, bool)):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_as_toml, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {_as_toml(each)}' for key, each in value.items())}}}"
    return " ".join(repr(value).split())


def show_bytes(count: float) -> str:
    """A number of bytes with a decimal unit: `1.5 MB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PB"


def plural(count: int, thing: str) -> str:
    """`1 round`, `2 rounds`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def cut(text: str) -> str:
    """A text that may come from a file, printable and shortened to MAX_TEXT characters."""
    text = printable(text)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."


def one_line(error: BaseException) -> str:
    """Another library's exception as `Type: message`, on one line."""
    message = str(error)
    if "device-side assert" in message:  # the rest of CUDA's message is for programmers of kernels
        message = f"{message.partition(chr(10))[0]}; {DEVICE_ASSERT}"
    return f"{type(error).__name__}: {cut(' '.join(message.split()))}"


def first_line(error: BaseException) -> str:
    """The first line of a FedsimError; any other exception as `one_line`."""
    return str(error).splitlines()[0] if isinstance(error, FedsimError) else one_line(error)


def printable(text: str) -> str:
    """A text with `?` for each character that could control a terminal or break the line, at most MAX_LINE characters.

    The middle of a longer text is left out, since the end of an error line names the remedy.
    """
    text = text if len(text) <= MAX_LINE else f"{text[: MAX_LINE // 2]}...{text[3 - MAX_LINE // 2 :]}"
    return "".join(character if character.isprintable() else "?" for character in text)
