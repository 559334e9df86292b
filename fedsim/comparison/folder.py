"""Read and write the folder of a comparison, which contains:

comparison.json  the axes, the common settings and the list of runs
runs/ID/         the folder of one run; `error.txt` says why a run failed
shards/I-of-N/   folders of the same structure, each with a part of the runs, if the comparison was split
results.csv, curves.csv, summary.csv, pairs.csv, summary.txt, *.png  the results
"""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedsim.comparison.axes import Axes
from fedsim.comparison.plan import ComparisonPlan, PlannedRun, common_tables, plan_comparison, require_number
from fedsim.comparison.results import Comparison
from fedsim.comparison.rows import SEED, canonical
from fedsim.comparison.stored import COMPARISON, ComparisonFile, positions_in, read_comparison_file
from fedsim.config.engines import traits_of
from fedsim.config.files import read_toml
from fedsim.core.input_limits import leaves_of
from fedsim.core.objects import names_in, with_objects
from fedsim.errors import ExperimentError, RecordError, cut, plural, show
from fedsim.hints.attributes import hinting
from fedsim.records.checkpoints import FOLDER as CHECKPOINTS
from fedsim.records.history import read_history, read_object
from fedsim.records.reader import Run, failure_in
from fedsim.records.run_folder import ENVIRONMENT, ERROR, EXPERIMENT
from fedsim.runs.resume import differences_of
from fedsim.system.files import (
    PART,
    is_file,
    locked,
    os_errors_as_record_errors,
    require_inside,
    to_json,
    user_path,
    write_atomically,
)

RUNS, SHARDS = "runs", "shards"
SOFTWARE = "packages.torch", "cpu_capability"  # metadata of a run that influences its rounding
DEVICE = "device", "arithmetic.rows", "arithmetic.forward", "arithmetic.tf32"


@dataclass(frozen=True)
class Shard:
    """One of `count` parts into which the runs of a comparison are split, for example to use several machines.

    Part `index` contains the runs number index, index + count, index + 2 count, and so on.
    """

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse a text such as "2/8": part number 2 (counted from 0) of the 8 parts of a comparison."""
        match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
        if not match or not int(match[1]) < int(match[2]):
            raise ExperimentError(
                f"--shard {show(text)}: must be i/n (part i of n parts, counted from 0), such as 0/2 and 1/2"
            )
        return cls(int(match[1]), int(match[2]))

    def of(self, plan: ComparisonPlan) -> list[PlannedRun]:
        """Return the runs of `plan` that belong to this part."""
        return plan.runs[self.index :: self.count]

    def folder(self, whole: Path) -> Path:
        """Return the folder of this part, given the folder of the whole comparison."""
        return whole / SHARDS / f"{self.index}-of-{self.count}"


@dataclass
class ComparisonRecords:
    """Reads the records in the folder of a comparison.

    Attributes:
        path: the folder.
        plan: the runs of the comparison.
    """

    path: Path
    plan: ComparisonPlan

    def run_folder(self, run: PlannedRun) -> Path:
        """Return the folder of one run."""
        return inner_folder(self.path, run.id)

    def result(self, run: PlannedRun, *, keeps_folder: bool = True) -> Run:
        """Return the result of a run, read from its folder.

        If `keeps_folder` is false (for a temporary folder), the result does not mention its folder.
        """
        position = {axis: self._positions[axis][canonical(value)] for axis, value in run.point.items()}
        result = result_in(self.run_folder(run), run)
        target = self.plan.settings.target
        return replace(result, folder=result.folder if keeps_folder else None, position=position, target=target)

    @functools.cached_property
    def _positions(self) -> dict[str, dict[str, int]]:
        return positions_in(self.plan.axes)

    def is_finished(self, run: PlannedRun) -> bool:
        """Whether the folder contains the complete records of a run."""
        return result_in(self.run_folder(run), run).finished

    def unfinished(self, shard: Shard | None) -> list[PlannedRun]:
        """Return the runs of a part of the comparison (None: all) that the folder does not contain completely."""
        runs = self.plan.runs if shard is None else shard.of(self.plan)
        return [run for run in runs if not self.is_finished(run)]

    def comparison(self, *, keeps_folder: bool = True) -> Comparison:
        """Return the results of all runs.

        If `keeps_folder` is false (for a temporary folder), the results do not mention their folder.
        """
        plan, runs = self.plan, [self.result(run, keeps_folder=keeps_folder) for run in self.plan.runs]
        if plan.settings.metric is not None:
            require_number(plan.settings.metric, [run.history[-1] for run in runs if run.finished])
        folder = self.path if keeps_folder else None
        return Comparison(plan.name, plan.axes, runs, plan.settings, folder, plan.left_out, warnings=plan.warnings)

    def rounding_difference(self, comparison: Comparison) -> str | None:
        """Return a warning that results of the finished runs may differ by rounding, or None if they cannot.

        For each engine other than the planned one, the line contains the number of runs that used this engine, and the
        ID of one of these runs. The line also counts the runs for each software version and kind of CPU, for each
        device of runs with the same `device` and `precision`, and for each stack width (number of workers trained at
        once) of runs that differ only in the seed, if there is more than one.
        """
        others = dict[str, list[str]]()  # engines other than planned
        alike = dict[str, dict[str, list[str]]]()  # for runs that should agree: their ways of computing
        for run in (run for run, result in zip(self.plan.runs, comparison.runs, strict=True) if result.finished):
            folder, tables = self.run_folder(run), run.tables
            metadata = dict[str, Any]()
            with contextlib.suppress(RecordError):  # the file is missing or damaged
                metadata = dict(leaves_of(read_object(folder / ENVIRONMENT)))
            there, here = read_toml(folder / EXPERIMENT, folder).get("engine", "auto"), tables["engine"]
            if there != here and ("width" in metadata or traits_of(here).stacks):
                others.setdefault(f"engine={there} instead of {here}", []).append(run.id)
            elif "engine" in metadata:
                same_but_seed = canonical({key: value for key, value in tables.items() if key not in ("name", SEED)})
                width = f"stacks of {metadata['width']} workers" if "width" in metadata else "single workers"
                alike.setdefault(same_but_seed, {}).setdefault(width, []).append(run.id)
            for scope, keys in ((), SOFTWARE), ((tables["device"], tables["precision"]), DEVICE):
                if way := " ".join(str(metadata[key]) for key in keys if key in metadata):
                    alike.setdefault(canonical([*scope]), {}).setdefault(way, []).append(run.id)
        groups = [others, *(group for group in alike.values() if len(group) > 1)]
        ways = (way for group in groups for way in group.items())
        parts = [f"{plural(len(ids), 'run')} with {cut(way)} (such as {ids[0]})" for way, ids in ways]
        return f"{self.path}: results may differ in the last bits: {'; '.join(parts)}" if parts else None

    def take_ids(self, stored: ComparisonFile) -> None:
        """Give each run the ID of the stored run with the same settings, if there is one."""
        ids = {canonical(run.point): run.id for run in stored.runs}
        runs = [replace(run, id=ids.get(canonical(run.point), run.id)) for run in self.plan.runs]
        self.plan = replace(self.plan, runs=runs)


class ComparisonFolder(ComparisonRecords):
    """Writes the records of a comparison into its folder. Use it as a context manager, which locks the folder.

    The folder must be new, empty, or contain the same comparison, possibly with fewer runs. Otherwise RecordError is
    raised.

    Attributes:
        path: the folder.
        plan: the runs of the comparison.
    """

    def __init__(self, path: Path, plan: ComparisonPlan) -> None:
        super().__init__(path, plan)
        with contextlib.ExitStack() as stack, os_errors_as_record_errors(path, "cannot be the folder of a comparison"):
            path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(path, "another comparison"))  # before any check: a second process may write
            stored = path / COMPARISON
            if stored.is_file():
                self._continue(
                    read_comparison_file(stored, names_in([run.experiment.model_dump() for run in plan.runs]))
                )
            elif any(entry.name not in (SHARDS, PART.format(COMPARISON)) for entry in path.iterdir()):
                raise RecordError(f"{path}: is not empty and has no {COMPARISON}; choose a new or an empty folder")
            self.write(COMPARISON, to_json(self._content(), indent=2).encode())
            self._lock = stack.pop_all()

    def make_ready(self, run: PlannedRun) -> None:
        """Prepare the folder of a run before it starts. Old records are removed unless the run can be continued."""
        folder = self.run_folder(run)
        if result_in(folder, run).failure is None and (folder / CHECKPOINTS).is_dir():
            with contextlib.suppress(ExperimentError):
                if not _differences_of_run(read_toml(folder / EXPERIMENT), run):
                    return
        self.clear(run)

    def clear(self, run: PlannedRun) -> None:
        """Remove the records of a run."""
        folder = self.run_folder(run)
        with os_errors_as_record_errors(folder, "cannot be removed"), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)

    def note_failure(self, run: PlannedRun, error: str) -> None:
        """Write the reason why a run failed to the file `error.txt` in the run's folder."""
        folder = self.run_folder(run)
        with os_errors_as_record_errors(folder, "cannot be created"):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            write_atomically(folder / ERROR, error.encode())
        except RecordError as problem:
            raise RecordError(f"{run.id}: failed: {error.partition(chr(10))[0]}\n{problem}") from problem

    def write(self, name: str, content: bytes) -> None:
        """Write the file `name` in the folder of the comparison."""
        write_atomically(self.path / name, content)

    def __enter__(self) -> ComparisonFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def _content(self) -> dict[str, Any]:
        plan = self.plan
        runs = [{"id": run.id, "point": run.point, "folder": f"{RUNS}/{run.id}"} for run in plan.runs]
        noted = {"warnings": plan.warnings} if plan.warnings else {}
        return {"name": plan.name, "axes": plan.axes, **plan.settings.given, **noted, "base": plan.base, "runs": runs}

    def _continue(self, stored: ComparisonFile) -> None:
        """Raise RecordError unless the comparison in the folder is the same as this one, or a part of it."""
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
            raise RecordError(f"{self.path}: holds another comparison; choose a new folder\n" + "\n".join(lines))


def result_in(folder: Path, run: PlannedRun) -> Run:
    """Return the result of a run, read from the given folder."""
    return Run(folder, run.tables, read_history(folder), id=run.id, point=run.point, failure=failure_in(folder))


@hinting
def load_comparison(folder: str | Path, *, allow_imports: bool = False) -> Comparison:
    """Load the results of a comparison from its folder, as `fedsim.compare` returned them.

    Unfinished runs count as failed. Loading does not change the folder and does not execute code from it.

    Args:
        folder: folder of the comparison.
        allow_imports: allow the experiments to name any import path (see `load_experiment`).

    Raises RecordError if the folder holds no comparison or damaged files, and ExperimentError if an experiment is
    invalid or names an import path that is not allowed.

    >>> import fedsim, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     axes = {"aggregate.rule": ["mean", "median"]}
    ...     comparison = fedsim.compare({"rounds": 1, "model": "logistic"}, axes, folder, jobs=1)
    ...     fedsim.load_comparison(folder).table == comparison.table
    True
    """
    folder = user_path(folder)
    path = folder / COMPARISON
    if not is_file(path):
        shards = f"; to combine its shards, run: fedsim compare {folder}" if (folder / SHARDS).is_dir() else ""
        raise RecordError(f"{folder}: is not the folder of a comparison (no {COMPARISON}){shards}")
    stored = read_comparison_file(path)
    plan = plan_comparison(
        stored.base, stored.axes, (), stored.settings, file=path, allow_imports=allow_imports, to_run=False
    )
    records = ComparisonRecords(folder, plan)
    records.take_ids(stored)
    return records.comparison()


def inner_folder(whole: Path, id: str) -> Path:
    """Return the folder of the run `id` in the folder of a comparison."""
    folder = whole / RUNS / id
    try:
        require_inside(folder, whole)
    except OSError as error:
        raise RecordError(f"{folder}: cannot be used: {error.strerror}") from None
    return folder


def differences_of_comparisons(there: ComparisonFile, here: ComparisonFile) -> list[str]:
    """Return one line of text for each difference between two stored comparisons."""
    first, second = "the first comparison", "the second comparison"
    lines = _differences_of_axes(there.axes, here.axes, first, second)
    lines += _differences_of_axes(here.axes, there.axes, second, first)
    return list(dict.fromkeys(lines)) or differences_of(there.base, here.base)


def _differences_of_run(there: dict[str, Any], run: PlannedRun) -> list[str]:
    tables = with_objects(there, names_in(run.experiment.model_dump()))
    return differences_of(tables, run.tables)


def _differences_of_axes(
    there: Axes, here: Axes, old: str = "the stored comparison", new: str = "the new comparison"
) -> list[str]:
    """Return one line of text for each difference between the compared settings of two comparisons.

    Args:
        there: compared settings and values of the first comparison.
        here: compared settings and values of the second comparison. Additional values do not count as a difference.
        old: name of the first comparison in the text.
        new: name of the second comparison in the text.
    """
    lines = [f"{key}: is an axis of {old}, but not of {new}" for key in there if key not in here]
    lines += [f"{key}: is an axis of {new}, but not of {old}" for key in here if key not in there]
    for key in filter(here.__contains__, there):
        values = set(map(canonical, here[key]))
        lost = [value for value in there[key] if canonical(value) not in values]
        lines += [f"{key} = {show(value)}: is in {old}, but not in {new}" for value in lost]
    return lines
