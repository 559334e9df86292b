"""The log of a race whose policy locks the server: enough for the virtual clock to repeat the race."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedsim.core.input_limits import leaves_of, problem_with_words
from fedsim.errors import ExperimentError, show
from fedsim.system.files import read_bounded

FILE = "race.csv"
MOST_BYTES = 2**30
LARGEST = 2**63  # integers in tensors are smaller
MARK = "# fedsim race "

KINDS = TAKEN, CANCELLED, LEFT = range(3)

# Keys in which an experiment may differ from the race that it repeats.
FREE = {"name", "engine", "processes", "threads_per_process", "timeout", "device", "mode", "rounds", "batched"} | {
    *("clock", "race", "records", "checkpoint", "cuda_graphs", "process_retries", "worker_state_memory"),
}


class LogEntry(NamedTuple):
    """A work item.

    Attributes:
        kind: TAKEN; CANCELLED by an update; or LEFT: a worker that had finished its round counts as departed from here
            to the end of the round.
        worker: number of the worker.
        steps: number of local steps, if the policy sets it; else 0.
        begun, taken: event numbers of its start and its arrival, counted under the server's lock.
        read, applied: version of the server at its start and at its arrival.
    """

    kind: int
    worker: int
    steps: int
    begun: int
    taken: int
    read: int
    applied: int


COLUMNS = ("run", "round", *LogEntry._fields)


def to_csv(experiment: Mapping[str, Any], rounds: Iterable[tuple[int, int, np.ndarray]]) -> bytes:
    """Return the log as a file: a line with the experiment, the column names, and a line for each entry.

    Args:
        experiment: the resolved experiment.
        rounds: (run, round, entries [count, fields]).
    """
    out = StringIO()
    out.write(f"{MARK}{json.dumps(experiment)}\n{','.join(COLUMNS)}\n")
    for run, round, entries in rounds:
        in_order = entries[entries[:, LogEntry._fields.index("taken")].argsort()]
        out.writelines(f"{run},{round},{','.join(map(str, entry))}\n" for entry in in_order.tolist())
    return out.getvalue().encode()


def read_log(path: str, experiment: Mapping[str, Any], run: int = 1) -> dict[int, list[LogEntry]]:
    """Return the entries of one run of a race by round, in the order of their arrivals.

    Args:
        path: the file, or the run folder that holds it.
        experiment: the resolved experiment that repeats the race.

    Raises ExperimentError if the file cannot be read, or belongs to a race of another experiment.
    """
    where = f"clock.replay_log = {show(path)}"
    try:
        file = Path(path) / FILE if Path(path).is_dir() else Path(path)
        head, names, *lines = read_bounded(file, MOST_BYTES).decode("utf-8").splitlines()
        raced = json.loads(head.removeprefix(MARK))
        if not head.startswith(MARK) or names != ",".join(COLUMNS) or not isinstance(raced, dict):
            raise ValueError("not a log of a race")
        if problem_with_words(raced, any_text=True):
            raise ValueError("not an experiment")
        rounds: dict[int, list[LogEntry]] = {}
        for line in lines:
            entry_run, round, *numbers = map(int, line.split(","))
            entry = LogEntry(*numbers)  # TypeError unless there are as many numbers as fields
            if entry.kind not in KINDS or not all(0 <= number < LARGEST for number in entry):
                raise ValueError("not an entry")
            if entry_run == run:
                rounds.setdefault(round, []).append(entry)
    except OSError as error:
        raise ExperimentError(f"{where}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, RecursionError):
        raise ExperimentError(f"{where}: must be the {FILE} of a race whose policy locks the server") from None
    _require_same_experiment(where, raced, experiment)
    return rounds


def _require_same_experiment(where: str, raced: Mapping[str, Any], experiment: Mapping[str, Any]) -> None:
    there, here = (dict(leaves_of(tables)) for tables in (raced, experiment))
    for key in sorted(there.keys() | here.keys()):
        if key.partition(".")[0] not in FREE and there.get(key) != here.get(key):
            was, now = (show(each[key]) if key in each else "left out" for each in (there, here))
            raise ExperimentError(f"{where}: is the log of a race with {key} = {was}; in this experiment it is {now}")
