"""The comparison itself: which runs are still to be done, who does them, and what they come to."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedsim.comparison.axes import canonical
from fedsim.comparison.display import GridDisplay, Watcher
from fedsim.comparison.folder import GridFolder
from fedsim.comparison.grid import Grid, PlannedRun, load_grid
from fedsim.comparison.jobs import run_here, run_in_jobs
from fedsim.comparison.pictures import draw_accuracy, draw_accuracy_against, draw_heatmap
from fedsim.comparison.results import RunResult, curves_csv, results_csv
from fedsim.comparison.summary import SummaryRow, summarise, summary_csv, summary_table
from fedsim.consistency import warnings_about
from fedsim.data import load_dataset
from fedsim.engines import engine as engines
from fedsim.errors import ExperimentError, FedsimWarning, SettingWarning, plural, show
from fedsim.experiment import Experiment
from fedsim.objects import names_in, why_unsendable
from fedsim.plotting import encode
from fedsim.preparation import task_of
from fedsim.rows import Layout
from fedsim.system.devices import free_memory, resolve_device, usable_cores
from fedsim.system.precision import PRECISIONS
from fedsim.system.processes import leave_if_being_started

ONE_PROCESS_ENGINE = "serial"
JOB_BYTES = 0.6e9  # of one more process: PyTorch, data and activations, generously
ROW_COPIES = 3  # of the cohort's rows: themselves, and what a rule makes of them


@dataclass(frozen=True)
class Comparison:
    """What a comparison came to.

    Attributes:
        grid: the axes and the runs.
        runs: what came of each, in the grid's order.
        summary: one row for each combination of values other than the seed; see `SummaryRow`.
        folder: of the records, if one was asked for.
    """

    grid: Grid
    runs: list[RunResult]
    summary: list[SummaryRow]
    folder: Path | None

    @property
    def failed(self) -> list[RunResult]:
        return [run for run in self.runs if run.error is not None]

    @property
    def table(self) -> str:
        """The summary as text."""
        return summary_table(self.grid, self.summary, self.runs)

    def __repr__(self) -> str:
        axes = " x ".join(f"{len(values)} {key}" for key, values in self.grid.axes.items())
        failed = f", {len(self.failed)} failed" if self.failed else ""
        where = f", in {self.folder}" if self.folder else ""
        return f"Comparison({self.grid.name}: {plural(len(self.runs), 'run')} ({axes}){failed}{where}; see .table)"


def compare(
    experiment: Experiment | Mapping[str, Any] | str | Path | None = None,
    grid: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    jobs: int | None = None,
    target: float | None = None,
    *,
    progress: bool = False,
    allow_imports: bool = False,
    **changes: Any,
) -> Comparison:
    """Run an experiment for every combination of the values on a grid's axes, and compare.

        fedsim.compare({"rounds": 5}, {"aggregate.rule": ["mean", "median"], "seed": [0, 1, 2]})

    Runs of one seed have the same start, cohorts and batches, so that their differences are differences of what
    is compared. A run that fails is noted, and the others go on.

    Args:
        experiment: an Experiment, tables, the path of a TOML file, the name of an experiment that comes with fedsim, or
            None for the default experiment, as for `run`; tables and files may hold the axes in a table `grid`.
        grid: by dotted key, the list of its values; one that is a table changes several keys at once.
        out: a folder for the records: new, or empty, or that of the same grid, whose finished runs are kept.
        jobs: runs at a time. By default as many as cores and memory bear, each in one process; but one where the
            experiment names its engine or its processes, or uses a card.
        target: a test accuracy: the summary says how long it took to reach it. Or `target` in the table `grid`.
        progress: whether to print a line for each run, as the command line does.
        allow_imports: whether a TOML file may name whatever can be imported; see `load_experiment`.
        changes: keys of the experiment, set in all runs: `compare(grid={"seed": [0, 1]}, rounds=3)`.

    Raises:
        ExperimentError: one of the experiments cannot be run as described; none has been run then.
        DataError: the data of one of them is missing; likewise.
        RecordError: the folder holds something else, or cannot be written.
        WorkerError: no processes can be started.
    """
    planned = load_grid(experiment, grid, target=target, allow_imports=allow_imports, **changes)
    with contextlib.ExitStack() as stack:
        folder = Path(out) if out is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        display = stack.enter_context(GridDisplay(folder if out is not None else None, quiet=not progress))
        return run_grid(planned, folder, jobs, display, kept=out is not None)


def run_grid(
    grid: Grid,
    path: Path,
    jobs: int | None = None,
    watcher: Watcher | None = None,
    *,
    kept: bool = True,
    part: Sequence[PlannedRun] | None = None,
) -> Comparison:
    """Do what is still to be done of a grid in the folder `path`, and write what it comes to; see `compare`.

    Of a grid that is cut into parts do these runs of it, and compare nothing.
    """
    watcher = watcher or Watcher()
    if jobs is not None and jobs < 1:
        raise ExperimentError(f"jobs = {jobs}: must be at least 1")
    _require_no_ranks(grid)
    if jobs is not None and jobs > 1 and (reason := _why_unsendable(grid.runs)):
        raise ExperimentError(f"jobs = {jobs}: {reason}; use jobs=1")
    if jobs != 1:
        leave_if_being_started()  # else it would find the folder taken, by its own parent
    with GridFolder(path, grid) as folder:
        todo = [run for run in (grid.runs if part is None else part) if not folder.is_finished(run)]
        _require_data(todo)
        jobs = min(jobs or default_jobs(grid, todo), max(1, len(todo)))
        _warn(todo)
        watcher.start(grid, todo, jobs)
        _run(grid, todo, jobs, folder, watcher)
        if part is not None:
            return Comparison(grid, [RunResult.read(run, folder) for run in part], [], path)
        return compared(grid, folder, kept=kept)


def compared(grid: Grid, folder: GridFolder, *, kept: bool = True) -> Comparison:
    """What the runs in a folder come to, which is written there too if the folder is to be kept."""
    runs = [RunResult.read(run, folder, kept) for run in grid.runs]
    comparison = Comparison(grid, runs, summarise(grid, runs), folder.path if kept else None)
    if kept:
        _write(comparison, folder)
    return comparison


def _require_no_ranks(grid: Grid) -> None:
    for run in grid.runs:
        if engines.get(run.experiment.engine).target.ranks:
            raise ExperimentError(
                f"engine = {show(run.experiment.engine)}: a comparison does whole runs, and its parts go to several "
                "machines by --shard i/n; use another engine"
            )


def _require_data(runs: Sequence[PlannedRun]) -> None:
    """Raise DataError where data is missing: then every run would fail of it, one after another."""
    tables = {canonical(data.model_dump(mode="json")): data for run in runs for data in [run.experiment.data]}
    for data in tables.values():
        load_dataset(data.dataset, data.root, **data.params)


def _warn(runs: Sequence[PlannedRun]) -> None:
    """Show each line once, whatever number of runs it is about."""
    of_one_kind = {}
    for experiment in (run.experiment for run in runs):
        tables = experiment.resolved()
        kind = canonical([tables["model"], tables["attack"], experiment.workers, experiment.cohort, experiment.buffers])
        of_one_kind[kind] = experiment
    for line in dict.fromkeys(line for experiment in of_one_kind.values() for line in warnings_about(experiment)):
        warnings.warn(line, SettingWarning, stacklevel=3)


def default_jobs(grid: Grid, runs: Sequence[PlannedRun]) -> int:
    """How many runs at once: where the experiment leaves that open, one on each core that there is memory for.

    On a CPU several runs in one process each are faster than one run in several processes, and give the same bits.
    """
    on_card = any(resolve_device(run.experiment.device).type != "cpu" for run in runs)
    if not runs or on_card or grid.engine_chosen:
        return 1
    if reason := _why_unsendable(runs):
        warnings.warn(f"{reason}; one run at a time", FedsimWarning, stacklevel=2)
        return 1
    threads = max(run.experiment.threads_per_process for run in runs)
    by_cores = usable_cores() // threads
    if min(by_cores, len(runs)) <= 1:
        return 1
    by_memory = 0.8 * free_memory() / max(job_bytes(run.experiment) for run in _of_different_size(runs))
    return max(1, int(min(len(runs), by_cores, by_memory)))  # memory may be infinite


def _why_unsendable(runs: Iterable[PlannedRun]) -> str | None:
    """Why the objects of these runs cannot be sent to other processes; None if they can be."""
    names = {name: name for run in runs for name in names_in(run.experiment.model_dump())}
    return why_unsendable(names.values())


def job_bytes(experiment: Experiment) -> float:
    """About how much memory a process needs that runs this experiment by itself."""
    parameters = Layout.of(task_of(experiment, torch.device("cpu")).new_module()).d
    row_bytes = parameters * PRECISIONS[experiment.precision].rows.itemsize
    return JOB_BYTES + ROW_COPIES * experiment.cohort_size * row_bytes


def _of_different_size(runs: Sequence[PlannedRun]) -> Iterable[PlannedRun]:
    sizes = {}
    for run in runs:
        experiment = run.experiment
        sizes[canonical([experiment.resolved()["model"], experiment.cohort_size, experiment.precision])] = run
    return sizes.values()


def _run(grid: Grid, todo: Sequence[PlannedRun], jobs: int, folder: GridFolder, watcher: Watcher) -> None:
    def end(run: PlannedRun, error: str | None) -> None:
        if error is not None:
            folder.note_failure(run, error)
        watcher.end(run, folder.history(run), error)

    def again(run: PlannedRun) -> None:
        folder.make_ready(run)
        watcher.again(run)

    for run in todo:
        folder.make_ready(run)
    if jobs == 1:
        run_here([(run, run.experiment, folder.run_folder(run)) for run in todo], watcher.round, end)
        return
    alone = not grid.engine_chosen
    work = [(run, _in_one_process(run.experiment) if alone else run.experiment, folder.run_folder(run)) for run in todo]
    run_in_jobs(work, jobs, watcher.round, end, again)


def _in_one_process(experiment: Experiment) -> Experiment:
    """The same experiment, run by the process that is asked; its parent watches over it, and does it again."""
    of_other_engines = ("timeout", "batched", "on_worker_failure", "worker_retries")
    defaults = {key: Experiment.model_fields[key].default for key in of_other_engines}
    return experiment.model_copy(update={"engine": ONE_PROCESS_ENGINE, **defaults})


def _write(comparison: Comparison, folder: GridFolder) -> None:
    grid, runs = comparison.grid, comparison.runs
    folder.write("results.csv", results_csv(grid, runs).encode())
    folder.write("curves.csv", curves_csv(grid, runs).encode())
    folder.write("summary.csv", summary_csv(grid, comparison.summary).encode())
    folder.write("summary.txt", f"{comparison.table}\n".encode())
    figures = {"accuracy": draw_accuracy(grid, runs), "heatmap": draw_heatmap(grid, comparison.summary)}
    if any(run.is_timed for run in runs):
        figures["accuracy_virtual_seconds"] = draw_accuracy_against(grid, runs, "virtual_seconds")
        figures["accuracy_updates"] = draw_accuracy_against(grid, runs, "updates")
    for name, figure in figures.items():
        for format in grid.runs[0].experiment.records.figures if figure else []:
            folder.write(f"{name}.{format}", encode(figure, format))
