"""The folder of a comparison: its plan, its runs and its results.

comparison.json       the axes, what all runs have in common, and the list of runs
runs/ID/        a run folder each; `error.txt` says why a run failed
shards/I-of-N/  folders like this one, each with a part of the runs, if the comparison was split
results.csv, curves.csv, summary.csv, summary.txt, *.png
"""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedsim.callbacks.checkpoints import FOLDER as CHECKPOINTS
from fedsim.comparison.plan import ComparisonPlan, PlannedRun, common_tables, plan_comparison, require_number
from fedsim.comparison.results import Comparison
from fedsim.config.files import read_toml
from fedsim.core.objects import names_in, with_objects
from fedsim.errors import ExperimentError, RecordError, show
from fedsim.records.axes import Axes
from fedsim.records.history import read_history
from fedsim.records.reader import COMPARISON, ComparisonFile, Run, failure_in, places_in, read_comparison_file
from fedsim.records.rows import canonical
from fedsim.records.run_folder import ERROR, EXPERIMENT
from fedsim.runs.resume import differences_of
from fedsim.system.files import (
    PART,
    is_file,
    locked,
    remedy,
    require_inside,
    to_json,
    write_atomically,
)

RUNS, SHARDS = "runs", "shards"


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` of a comparison: run k, counted from 0, belongs to part k mod count."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse `2/8`. Raises ExperimentError for anything else."""
        match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
        if not match or not int(match[1]) < int(match[2]):
            raise ExperimentError(f"--shard {show(text)}: must be i/n, from 0/n to n-1/n")
        return cls(int(match[1]), int(match[2]))

    def of(self, plan: ComparisonPlan) -> list[PlannedRun]:
        """Return the runs of this part."""
        return plan.runs[self.index :: self.count]

    def folder(self, whole: Path) -> Path:
        """Return the folder of this part in the folder of the whole comparison."""
        return whole / SHARDS / f"{self.index}-of-{self.count}"


@dataclass
class ComparisonRecords:
    """The folder of a comparison, to read.

    Attributes:
        path: of the folder.
        plan: the comparison, with the ids that its runs have in the folder.
    """

    path: Path
    plan: ComparisonPlan

    def run_folder(self, run: PlannedRun) -> Path:
        """Return the folder of a run's records. Raises RecordError if a link leads out of the comparison's folder."""
        return inner_folder(self.path, run.id)

    def result(self, run: PlannedRun, *, keeps_folder: bool = True) -> Run:
        """Return the result of a run; `kept` is False if the folder is temporary."""
        place = {axis: self._places[axis][canonical(value)] for axis, value in run.point.items()}
        result = result_in(self.run_folder(run), run)
        target = self.plan.settings.target
        return replace(result, folder=result.folder if keeps_folder else None, place=place, target=target)

    @functools.cached_property
    def _places(self) -> dict[str, dict[str, int]]:
        return places_in(self.plan.axes)

    def is_finished(self, run: PlannedRun) -> bool:
        """Whether all records of a run are there."""
        return result_in(self.run_folder(run), run).finished

    def comparison(self, *, keeps_folder: bool = True) -> Comparison:
        """Compare the runs; nothing is written. `kept` is False if the folder is temporary."""
        plan, runs = self.plan, [self.result(run, keeps_folder=keeps_folder) for run in self.plan.runs]
        if plan.settings.metric is not None:
            require_number(plan.settings.metric, [run.history[-1] for run in runs if run.finished])
        return Comparison(plan.name, plan.axes, runs, plan.settings, self.path if keeps_folder else None, plan.left_out)

    def take_ids(self, stored: ComparisonFile) -> None:
        """Give the runs of the comparison the ids of the stored runs with the same points."""
        ids = {canonical(run.point): run.id for run in stored.runs}
        runs = [replace(run, id=ids.get(canonical(run.point), run.id)) for run in self.plan.runs]
        self.plan = replace(self.plan, runs=runs)


class ComparisonFolder(ComparisonRecords):
    """The locked folder of a comparison, as a context manager: new, empty, or holding the same comparison.

    The axes may have more values than those in the folder.

    Attributes:
        path: of the folder.
        plan: the comparison; runs that the folder already has keep their ids.

    Raises RecordError if the folder holds something else, another comparison (with the differences), or is in use.
    """

    def __init__(self, path: Path, plan: ComparisonPlan) -> None:
        super().__init__(path, plan)
        with contextlib.ExitStack() as stack, _os_errors_as_record_errors(path, "cannot be the folder of a comparison"):
            path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(path, "another comparison"))  # first: another may be writing its first file
            stored = path / COMPARISON
            if stored.is_file():
                self._continue(
                    read_comparison_file(stored, names_in([run.experiment.model_dump() for run in plan.runs]))
                )
            elif any(each.name not in (SHARDS, PART.format(COMPARISON)) for each in path.iterdir()):
                raise RecordError(f"{path}: is not empty, and not a comparison (no {COMPARISON}); name another folder")
            self.write(COMPARISON, to_json(self._content(), indent=2).encode())
            self._lock = stack.pop_all()

    def make_ready(self, run: PlannedRun) -> None:
        """Remove the records of a run, unless it was interrupted and can be resumed."""
        folder = self.run_folder(run)
        if result_in(folder, run).failure is None and (folder / CHECKPOINTS).is_dir():
            with contextlib.suppress(ExperimentError):
                if not _differences_of_run(read_toml(folder / EXPERIMENT), run):
                    return
        self.clear(run)

    def clear(self, run: PlannedRun) -> None:
        """Remove the records of a run."""
        folder = self.run_folder(run)
        with _os_errors_as_record_errors(folder, "cannot be removed"), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)

    def note_failure(self, run: PlannedRun, error: str) -> None:
        """Write why a run failed. Raises RecordError, with both reasons, if that is impossible."""
        folder = self.run_folder(run)
        with _os_errors_as_record_errors(folder, "cannot be made"):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            write_atomically(folder / ERROR, error.encode())
        except RecordError as problem:
            raise RecordError(f"{run.id}: failed: {error.partition(chr(10))[0]}\n{problem}") from problem

    def write(self, name: str, content: bytes) -> None:
        """Write one of the comparison's own files."""
        write_atomically(self.path / name, content)

    def __enter__(self) -> ComparisonFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def _content(self) -> dict[str, Any]:
        plan = self.plan
        runs = [{"id": run.id, "point": run.point, "folder": f"{RUNS}/{run.id}"} for run in plan.runs]
        return {"name": plan.name, "axes": plan.axes, **plan.settings.given, "base": plan.base, "runs": runs}

    def _continue(self, stored: ComparisonFile) -> None:
        """Check that the stored comparison is a part of this one, and take over the ids of its runs."""
        self.take_ids(stored)
        lines = _differences_of_axes(stored.axes, self.plan.axes)
        if not lines:
            points = {canonical(run.point) for run in stored.runs}
            shared = [run for run in self.plan.runs if canonical(run.point) in points]
            lines = differences_of(stored.base, common_tables(shared))
            for run in shared:
                if not lines and self.is_finished(run):
                    there = read_toml(self.run_folder(run) / EXPERIMENT, self.run_folder(run))
                    lines = [f"{run.id}: {line}" for line in _differences_of_run(there, run)]
        if lines:
            raise RecordError(f"{self.path}: holds another comparison; name a new folder\n" + "\n".join(lines))


@contextlib.contextmanager
def _os_errors_as_record_errors(path: Path, problem: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RecordError(f"{path}: {problem}: {error.strerror}{remedy(path, error)}") from error


def result_in(folder: Path, run: PlannedRun) -> Run:
    """Return the result of a planned run from its folder; of damaged metrics, the rounds before the damage."""
    return Run(folder, run.tables, read_history(folder), id=run.id, point=run.point, failure=failure_in(folder))


def load_comparison(folder: str | Path, *, allow_imports: bool = False) -> Comparison:
    """Return the results of a comparison from its folder, as `fedsim.compare` returned them.

    Runs that are not finished count as failed. Nothing in the folder is changed, and no code of it is executed.

    Args:
        folder: of the comparison.
        allow_imports: whether its experiments may name anything that can be imported; see `load_experiment`.

    Raises RecordError if the folder holds no comparison or damaged files, and ExperimentError if an experiment is
    invalid or names what may not be imported.

    >>> import fedsim, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     axes = {"aggregate.rule": ["mean", "median"]}
    ...     comparison = fedsim.compare({"rounds": 1, "model": "logistic"}, axes, folder, jobs=1)
    ...     fedsim.load_comparison(folder).table == comparison.table
    True
    """
    folder = Path(folder)
    path = folder / COMPARISON
    if not is_file(path):
        shards = f"; its shards are not combined yet: fedsim compare {folder}" if (folder / SHARDS).is_dir() else ""
        raise RecordError(f"{folder}: is not the folder of a comparison (no {COMPARISON}){shards}")
    stored = read_comparison_file(path)
    plan = plan_comparison(stored.base, stored.axes, (), stored.settings, file=path, allow_imports=allow_imports)
    records = ComparisonRecords(folder, plan)
    records.take_ids(stored)
    return records.comparison()


def inner_folder(whole: Path, id: str) -> Path:
    """Return the folder of one run. Raises RecordError if a link leads out of the comparison's folder."""
    folder = whole / RUNS / id
    try:
        require_inside(folder, whole)
    except OSError as error:
        raise RecordError(f"{folder}: {error.strerror}") from None
    return folder


def differences_of_comparisons(there: ComparisonFile, here: ComparisonFile) -> list[str]:
    """Compare two stored comparisons, and return one line for each difference."""
    axes = [*_differences_of_axes(there.axes, here.axes), *_differences_of_axes(here.axes, there.axes)]
    return axes or differences_of(there.base, here.base)


def _differences_of_run(there: dict[str, Any], run: PlannedRun) -> list[str]:
    tables = with_objects(there, names_in(run.experiment.model_dump()))
    return differences_of(tables, run.tables)


def _differences_of_axes(there: Axes, here: Axes) -> list[str]:
    """Return a line for each axis or value that only one comparison has; more values here are no difference."""
    lines = [f"{key}: is an axis there, and not here" for key in there if key not in here]
    lines += [f"{key}: is an axis here, and not there" for key in here if key not in there]
    for key in filter(here.__contains__, there):
        values = set(map(canonical, here[key]))
        lost = [value for value in there[key] if canonical(value) not in values]
        lines += [f"{key} = {show(value)}: is there, and not here" for value in lost]
    return lines
