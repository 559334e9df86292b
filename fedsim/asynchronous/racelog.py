"""The log of a race whose server was locked: what has to be known of it so that the clock can do it again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedsim.bounds import problem_with_words
from fedsim.errors import ExperimentError, show
from fedsim.system.files import read_bounded
from fedsim.tables import leaves_of

FILE = "race.csv"
MOST_BYTES = 2**30
LARGEST = 2**63  # of what tensors hold
MARK = "# fedsim race "

KINDS = TAKEN, GIVEN_UP, LEFT = range(3)  # what became of a piece of work, or that a worker counted as gone

# What an experiment may differ in from the one that is replayed.
FREE = {"name", "engine", "processes", "threads_per_process", "timeout", "device", "mode", "rounds", "batched"} | {
    *("clock", "race", "records", "checkpoint", "compile", "cuda_graphs", "on_worker_failure", "worker_retries")
}


class Entry(NamedTuple):
    """A piece of work.

    Attributes:
        kind: TAKEN, or GIVEN_UP where an update had made it void; LEFT says that a worker who had ended its round
            counted as gone from here to the round's end.
        worker: whose it was.
        steps: of local training, where a piece of work is that; else 0.
        begun, taken: when it began and came in, in the order of all that happened under the server's lock.
        read, applied: version of the server when its model was read, and when it came in.
    """

    kind: int
    worker: int
    steps: int
    begun: int
    taken: int
    read: int
    applied: int


COLUMNS = ("run", "round", *Entry._fields)


def to_csv(described: Mapping[str, Any], rounds: Iterable[tuple[int, int, np.ndarray]]) -> bytes:
    """The log as a file: a line that says of what experiment, the names of columns, and a line for each entry.

    Args:
        described: the experiment, resolved.
        rounds: (run, round, entries [count, fields]), each of these.
    """
    out = StringIO()
    out.write(f"{MARK}{json.dumps(described)}\n{','.join(COLUMNS)}\n")
    for run, round, entries in rounds:
        in_order = entries[entries[:, Entry._fields.index("taken")].argsort()]
        out.writelines(f"{run},{round},{','.join(map(str, entry))}\n" for entry in in_order.tolist())
    return out.getvalue().encode()


def read_log(path: str, described: Mapping[str, Any], run: int = 1) -> dict[int, list[Entry]]:
    """The entries of one run of a race, by round, in the order in which they came in.

    Args:
        path: of the file, or of the run folder that it lies in.
        described: the experiment that is to replay it, resolved.

    Raises ExperimentError where it cannot be read, or is of a race of another experiment.
    """
    where = f"clock.log = {show(path)}"
    try:
        file = Path(path) / FILE if Path(path).is_dir() else Path(path)
        head, names, *lines = read_bounded(file, MOST_BYTES).decode("utf-8").splitlines()
        if not head.startswith(MARK) or names != ",".join(COLUMNS):
            raise ValueError("not a log of a race")
        raced = json.loads(head.removeprefix(MARK))
        if not isinstance(raced, dict) or problem_with_words(raced, any_text=True):
            raise ValueError("not an experiment")
        rounds: dict[int, list[Entry]] = {}
        for line in lines:
            its_run, round, *entry = map(int, line.split(","))
            whole = len(entry) == len(Entry._fields) and all(0 <= number < LARGEST for number in entry)
            if not whole or entry[0] not in KINDS:
                raise ValueError("not an entry")
            if its_run == run:
                rounds.setdefault(round, []).append(Entry(*entry))
        if any(all(entry.kind != TAKEN for entry in entries) for entries in rounds.values()):
            raise ValueError("a round without work")
    except OSError as error:
        raise ExperimentError(f"{where}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, RecursionError):
        raise ExperimentError(f"{where}: must be the {FILE} of a race whose policy locks the server") from None
    _check_fit(where, raced, described)
    return rounds


def _check_fit(where: str, raced: Mapping[str, Any], described: Mapping[str, Any]) -> None:
    there, here = (dict(leaves_of(tables)) for tables in (raced, described))
    for key in sorted(there.keys() | here.keys()):
        if key.partition(".")[0] not in FREE and there.get(key) != here.get(key):
            was, now = (show(each[key]) if key in each else "left out" for each in (there, here))
            raise ExperimentError(f"{where}: is of a race with {key} = {was}, and here it is {now}")
