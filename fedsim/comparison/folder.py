"""The folder of a comparison: which grid it holds, which of its runs are finished, and what came of them.

shards/I-of-N/  folders like this one, each with a part of the runs, where the comparison was cut
grid.json       the axes, what all runs have in common, and the runs
runs/ID/        a run folder each; `error.txt` in it says why a run failed
results.csv, summary.csv, summary.txt, *.png
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from fedsim.comparison.axes import IS_ID, canonical
from fedsim.comparison.grid import HOW, Grid, PlannedRun, common_tables, flat
from fedsim.errors import RecordError, show
from fedsim.files import remedy, to_json, write_whole
from fedsim.loading import read_toml
from fedsim.records import CURVE, EXPERIMENT, METRICS, MODEL, RoundRecord

if os.name == "posix":
    import fcntl
else:
    fcntl = None

GRID_FILE, RUNS, ERROR = "grid.json", "runs", "error.txt"
PARTS = "shards"  # of a comparison that is cut into parts


class GridFolder:
    """A folder for the runs of a grid: new, empty, or left by an earlier comparison of the same grid.

    Nobody else can work on it meanwhile. Raises RecordError where it holds anything else, and where it holds another
    grid, with the differences; values that have been added to an axis are no difference.
    """

    def __init__(self, path: Path, grid: Grid) -> None:
        self.path, self._grid = path, grid
        self._ids: dict[str, str] = {}  # by point, for those that had a name before
        with contextlib.ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()

    def _open(self, stack: contextlib.ExitStack) -> None:
        path, made = self.path, not self.path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            held = path / GRID_FILE
            if not held.is_file() and any(each.name != PARTS for each in path.iterdir()):
                raise RecordError(f"{path}: holds something already, and it is no comparison; name a new folder")
            self._lock(stack)
            if made:
                stack.callback(self._remove_if_empty)
            if held.is_file():
                self._go_on_with(read_grid(held))
            self.write(GRID_FILE, to_json(self._described(), indent=2).encode())
        except OSError as error:
            raise RecordError(
                f"{path}: cannot be the folder of a comparison: {error.strerror}{remedy(path, error)}"
            ) from error

    def run_folder(self, run: PlannedRun) -> Path:
        """Where a run keeps its records."""
        return self.path / RUNS / self._id(run)

    def is_finished(self, run: PlannedRun) -> bool:
        """Whether all records of a run are there."""
        return self.is_complete(self.run_folder(run), run)

    @staticmethod
    def is_complete(folder: Path, run: PlannedRun) -> bool:
        """Whether all records of a run are in this folder."""
        experiment = run.experiment
        wanted = [
            name for name, asked in ((MODEL, experiment.records.model), (CURVE, experiment.records.curve)) if asked
        ]
        complete = len(read_history(folder)) == experiment.rounds and all((folder / name).is_file() for name in wanted)
        return complete and not (folder / ERROR).exists()

    def history(self, run: PlannedRun) -> list[RoundRecord]:
        """The rounds of a run that are on record."""
        return read_history(self.run_folder(run))

    def error(self, run: PlannedRun) -> str | None:
        """Why a run failed, in full; None if it did not."""
        try:
            return (self.run_folder(run) / ERROR).read_text(encoding="utf-8")
        except OSError:
            return None

    def clear(self, run: PlannedRun) -> None:
        """Remove what an unfinished run has left."""
        try:
            shutil.rmtree(self.run_folder(run))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise RecordError(f"{self.run_folder(run)}: cannot be removed: {error.strerror}") from error

    def note_failure(self, run: PlannedRun, error: str) -> None:
        """Keep why a run failed beside what there is of it. Raises RecordError, with both reasons, where it cannot."""
        folder = self.run_folder(run)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / ERROR, error.encode())
        except OSError as problem:
            raise RecordError(f"{folder}: cannot be made: {problem.strerror}{remedy(folder, problem)}") from problem
        except RecordError as problem:
            reason = error.partition("\n")[0]
            raise RecordError(f"{self._id(run)}: failed: {reason}\n{problem}") from problem

    def write(self, name: str, content: bytes) -> None:
        """Write one of the comparison's own files."""
        write_whole(self.path / name, content)

    def __enter__(self) -> GridFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _id(self, run: PlannedRun) -> str:
        return self._ids.get(canonical(run.point), run.id)

    def _described(self) -> dict[str, Any]:
        runs = [
            {"id": self._id(run), "point": run.point, "folder": f"{RUNS}/{self._id(run)}"} for run in self._grid.runs
        ]
        target = {} if self._grid.target is None else {"target": self._grid.target}
        return {"name": self._grid.name, "axes": self._grid.axes, **target, "base": self._grid.base, "runs": runs}

    def _go_on_with(self, held: dict[str, Any]) -> None:
        """Check that what the folder holds is part of the grid, and take over the names of its runs."""
        lines = _differences_of_axes(held["axes"], self._grid.axes)
        self._ids = {canonical(run["point"]): run["id"] for run in held["runs"]}
        if not lines:
            both = [run for run in self._grid.runs if canonical(run.point) in self._ids]
            lines = _differences(held["base"], common_tables(both, self._grid.axes))
            for run in both:
                if not lines and self.is_finished(run):
                    there = read_toml(self.run_folder(run) / EXPERIMENT)
                    lines = [f"{self._id(run)}: {line}" for line in _differences(there, run.experiment.resolved())]
        if lines:
            raise RecordError(f"{self.path}: holds another grid; name a new folder\n" + "\n".join(lines))

    def _lock(self, stack: contextlib.ExitStack) -> None:
        """Keep others out; the system lets go of the lock when this process ends, however it does."""
        if fcntl is None:
            return
        folder = os.open(self.path, os.O_RDONLY)
        stack.callback(os.close, folder)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecordError(f"{self.path}: another comparison is at work there") from None

    def _remove_if_empty(self) -> None:
        with contextlib.suppress(OSError):
            self.path.rmdir()


def read_history(folder: Path) -> list[RoundRecord]:
    """The rounds that a run folder has on record; a line that was cut off does not count."""
    try:
        lines = (folder / METRICS).read_text(encoding="utf-8").split("\n")[:-1]
        records = [json.loads(line) for line in lines]
    except (OSError, ValueError):
        return []
    for record in records:
        for loss in ("test_loss", "train_loss"):
            if record.get(loss, 0.0) is None:  # JSON has no word for it
                record[loss] = math.nan
    return records


def read_grid(path: Path) -> dict[str, Any]:
    """The grid that a folder's file describes. Raises RecordError where it cannot be read."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        if {"axes", "base", "runs"} <= held.keys() and all(IS_ID.match(run["id"]) for run in held["runs"]):
            return held
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        pass
    raise RecordError(f"{path}: cannot be read as the grid of a comparison; name a new folder")


def differences_of_grids(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """In what two grids, as their files have them, are not one and the same; [] where they are."""
    axes = [*_differences_of_axes(there["axes"], here["axes"]), *_differences_of_axes(here["axes"], there["axes"])]
    return axes or _differences(there["base"], here["base"])


def _differences_of_axes(there: dict[str, list[Any]], here: dict[str, list[Any]]) -> list[str]:
    lines = [f"{key}: is an axis there, and not here" for key in there if key not in here]
    lines += [f"{key}: is an axis here, and not there" for key in here if key not in there]
    for key in filter(here.__contains__, there):
        values = set(map(canonical, here[key]))
        lines += [
            f"{key} = {show(value)}: is there, and not here" for value in there[key] if canonical(value) not in values
        ]
    return lines


def _differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """The keys of two experiments that differ, except those that results do not depend on."""
    there, here = flat(there), flat(here)
    keys = [key for key in {**there, **here} if there.get(key) != here.get(key) and key not in HOW]
    return [f"{key}: {_said(there, key)} there, {_said(here, key)} here" for key in keys]


def _said(tables: dict[str, Any], key: str) -> str:
    return show(tables[key]) if key in tables else "not set"
