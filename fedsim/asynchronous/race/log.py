"""The log of a race whose policy locks the server, from which `clock.replay_log` repeats the race."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from io import StringIO
from typing import Any, NamedTuple

import numpy as np

from fedsim.core.input_limits import leaves_of, problem_with_words
from fedsim.errors import ExperimentError, show
from fedsim.records.history import RACE_LOG
from fedsim.system.files import read_bounded, user_path

MOST_BYTES = 2**30
LARGEST = 2**63  # exclusive limit of int64
MARK = "# fedsim race "

KINDS = TAKEN, CANCELLED, LEFT = range(3)

# Keys that may differ between a race and the experiment that repeats it.
FREE = {
    "name",
    "engine",
    "processes",
    "threads_per_process",
    "process_timeout",
    "device",
    "mode",
    "rounds",
    "batched",
} | {*("clock", "race", "records", "checkpoint", "cuda_graphs", "max_restarts", "worker_state_memory")}


class LogEntry(NamedTuple):
    """One entry in the log of a race (asynchronous training in real time): a step or round of one worker.

    Attributes:
        kind: TAKEN (the result was used), CANCELLED (an update cancelled the work), or LEFT (the worker has finished
            its round and is absent until the round ends).
        worker: ID of the worker.
        steps: number of local steps if the policy sets it, else 0.
        begun, taken: event numbers of the start and of the arrival. All starts and arrivals in a round are numbered.
        read, applied: number of updates of the global model before the start and before the arrival.
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
    """Return the contents of a race's log file, in CSV format.

    Args:
        experiment: all settings of the race, as nested dicts.
        rounds: triples (run, round, entries), one for each round of each repetition of the race. `entries` is an
            integer array with one line per entry and one column per field of `LogEntry`.
    """
    out = StringIO()
    out.write(f"{MARK}{json.dumps(experiment)}\n{','.join(COLUMNS)}\n")
    for run, round, entries in rounds:
        in_order = entries[entries[:, LogEntry._fields.index("taken")].argsort()]
        out.writelines(f"{run},{round},{','.join(map(str, entry))}\n" for entry in in_order.tolist())
    return out.getvalue().encode()


def read_log(path: str, experiment: Mapping[str, Any], run: int = 1) -> dict[int, list[LogEntry]]:
    """Read the log of a race. Returns the entries of each round, in the order of arrival.

    Args:
        path: the log file, or the run folder that contains it.
        experiment: all settings of the experiment that repeats the race, as nested dicts.
        run: which repetition of the race to read, from 1.

    Raises ExperimentError if the file cannot be read, or is the log of a different experiment.
    """
    where = f"clock.replay_log = {show(path)}"
    try:
        given = user_path(path)
        file = given / RACE_LOG if given.is_dir() else given
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
        raise ExperimentError(
            f"{where}: is not a log of a race; use the file {RACE_LOG} of a run with mode=race and policy=locked, or "
            "another policy that locks the server's model during an update (other runs do not write this file)"
        ) from None
    _require_same_experiment(where, raced, experiment)
    return rounds


def _require_same_experiment(where: str, raced: Mapping[str, Any], experiment: Mapping[str, Any]) -> None:
    there, here = (dict(leaves_of(tables)) for tables in (raced, experiment))
    for key in sorted(there.keys() | here.keys()):
        if key.partition(".")[0] not in FREE and there.get(key) != here.get(key):
            was, now = (f"{key} = {show(keys[key])}" if key in keys else f"{key} not set" for keys in (there, here))
            raise ExperimentError(
                f"{where}: the race was run with {was}, but this experiment has {now}; use the setting of the race"
            )
