"""The folder of a comparison: which grid it holds, which of its runs are finished, and what came of them.

shards/I-of-N/  folders like this one, each with a part of the runs, where the comparison was cut
grid.json       the axes, what all runs have in common, and the runs
runs/ID/        a run folder each; `error.txt` in it says why a run failed
results.csv, curves.csv, summary.csv, summary.txt, *.png
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

from fedsim.bounds import problem_with_words
from fedsim.comparison.axes import IS_ID, canonical
from fedsim.comparison.grid import Grid, PlannedRun, common_tables
from fedsim.errors import ExperimentError, RecordError, show
from fedsim.loading import read_toml
from fedsim.objects import names_in, with_objects
from fedsim.records import CURVE, ERROR, EXPERIMENT, MODEL, RoundRecord
from fedsim.report.reading import MOST_ERROR_BYTES, MOST_GRID_BYTES
from fedsim.runs.checkpoints import FOLDER as CHECKPOINTS
from fedsim.runs.differences import differences_of
from fedsim.runs.history import read_history
from fedsim.system.files import is_file, locked, read_bounded, remedy, require_inside, to_json, write_whole

GRID_FILE, RUNS = "grid.json", "runs"
LONGEST_NAME_OF_A_FOLDER = 255  # characters
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
                raise RecordError(f"{path}: is not empty, and not a comparison (no {GRID_FILE}); name another folder")
            stack.enter_context(locked(path, "another comparison"))
            if made:
                stack.callback(self._remove_if_empty)
            if held.is_file():
                self._go_on_with(read_grid(held, path))
            self.write(GRID_FILE, to_json(self._described(), indent=2).encode())
        except OSError as error:
            raise RecordError(
                f"{path}: cannot be the folder of a comparison: {error.strerror}{remedy(path, error)}"
            ) from error

    def run_folder(self, run: PlannedRun) -> Path:
        """Where a run keeps its records. Raises RecordError where a link leads out of the comparison's folder."""
        return inner_folder(self.path, self._id(run))

    def is_finished(self, run: PlannedRun) -> bool:
        """Whether all records of a run are there."""
        return self.is_complete(self.run_folder(run), run)

    @staticmethod
    def is_complete(folder: Path, run: PlannedRun) -> bool:
        """Whether all records of a run are in this folder."""
        experiment = run.experiment
        records = experiment.records
        wanted = [MODEL] if records.model else []
        wanted += [CURVE.format(format=format) for format in records.figures] if records.curve else []
        complete = len(read_history(folder)) == experiment.rounds and all(is_file(folder / name) for name in wanted)
        return complete and not (folder / ERROR).exists()

    def history(self, run: PlannedRun) -> list[RoundRecord]:
        """The rounds of a run that are on record."""
        return read_history(self.run_folder(run))

    def error(self, run: PlannedRun) -> str | None:
        """Why a run failed, in full; None if it did not."""
        folder = self.run_folder(run)
        try:
            return read_bounded(folder / ERROR, MOST_ERROR_BYTES, folder).decode(errors="replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RecordError(f"{folder / ERROR}: cannot be read: {error.strerror}") from None

    def make_ready(self, run: PlannedRun) -> None:
        """Leave what an interrupted run can be gone on with; remove what is of no use, or has failed."""
        folder = self.run_folder(run)
        if self.error(run) is None and (folder / CHECKPOINTS).is_dir():
            with contextlib.suppress(ExperimentError):
                if not _differences_of_run(read_toml(folder / EXPERIMENT), run):
                    return
        self.clear(run)

    def clear(self, run: PlannedRun) -> None:
        """Remove what a run has left."""
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
        held = with_objects(held, names_in([run.experiment.model_dump() for run in self._grid.runs]))
        lines = _differences_of_axes(held["axes"], self._grid.axes)
        self._ids = {canonical(run["point"]): run["id"] for run in held["runs"]}
        if not lines:
            both = [run for run in self._grid.runs if canonical(run.point) in self._ids]
            lines = differences_of(held["base"], common_tables(both, self._grid.axes))
            for run in both:
                if not lines and self.is_finished(run):
                    there = read_toml(self.run_folder(run) / EXPERIMENT, self.run_folder(run))
                    lines = [f"{self._id(run)}: {line}" for line in _differences_of_run(there, run)]
        if lines:
            raise RecordError(f"{self.path}: holds another grid; name a new folder\n" + "\n".join(lines))

    def _remove_if_empty(self) -> None:
        with contextlib.suppress(OSError):
            self.path.rmdir()


def inner_folder(whole: Path, id: str) -> Path:
    """The folder of one run of a comparison. Raises RecordError where a link leads out of the comparison's folder."""
    folder = whole / RUNS / id
    try:
        require_inside(folder, whole)
    except OSError as error:
        raise RecordError(f"{folder}: {error.strerror}") from None
    return folder


def read_grid(path: Path, inside: Path | None = None) -> dict[str, Any]:
    """The grid that a folder's file describes. Raises RecordError where it cannot be read."""
    try:
        held = json.loads(read_bounded(path, MOST_GRID_BYTES, inside))
        if problem_with_words(held, any_text=True) is None and _is_grid(held):
            return held
    except (OSError, ValueError, RecursionError):
        pass
    raise RecordError(f"{path}: cannot be read as the grid of a comparison; name a new folder")


def _is_grid(held: Any) -> bool:
    """Whether it has the parts of a grid: axes with their values, a base, and runs whose names lead nowhere else."""
    if not isinstance(held, dict) or not isinstance(held.get("base"), dict):
        return False
    axes, runs = held.get("axes"), held.get("runs")
    if not isinstance(axes, dict) or not all(isinstance(values, list) for values in axes.values()):
        return False
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        return False
    return all(_is_id(run.get("id")) and "point" in run for run in runs)


def _is_id(name: Any) -> bool:
    return isinstance(name, str) and len(name) <= LONGEST_NAME_OF_A_FOLDER and bool(IS_ID.match(name))


def differences_of_grids(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """In what two grids, as their files have them, are not one and the same; [] where they are."""
    axes = [*_differences_of_axes(there["axes"], here["axes"]), *_differences_of_axes(here["axes"], there["axes"])]
    return axes or differences_of(there["base"], here["base"])


def _differences_of_run(there: dict[str, Any], run: PlannedRun) -> list[str]:
    """In what a run differs from the tables in its folder."""
    tables = with_objects(there, names_in(run.experiment.model_dump()))
    return differences_of(tables, run.experiment.resolved())


def _differences_of_axes(there: dict[str, list[Any]], here: dict[str, list[Any]]) -> list[str]:
    lines = [f"{key}: is an axis there, and not here" for key in there if key not in here]
    lines += [f"{key}: is an axis here, and not there" for key in here if key not in there]
    for key in filter(here.__contains__, there):
        values = set(map(canonical, here[key]))
        lines += [
            f"{key} = {show(value)}: is there, and not here" for value in there[key] if canonical(value) not in values
        ]
    return lines
