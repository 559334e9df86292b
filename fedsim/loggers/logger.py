"""The registry of loggers.

A logger is a function that returns a context manager around the rounds of a run, whose value is called after each
round. Its argument `run` is a `LoggedRun`; its keyword-only parameters are its configuration:

    @logger("print")
    @contextlib.contextmanager
    def to_terminal(run, *, digits: int = 3):
        yield lambda round, numbers: print(run.name, round, {tag: f"{x:.{digits}g}" for tag, x in numbers.items()})

The context ends with the exception that ended the run, if there was one. Only the process that writes the records has
loggers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedsim.core.registry import Registry

logger = Registry("logger", given=("run",))

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
