"""Run a grid: do the runs that are not finished yet, and write the results."""

from __future__ import annotations

import contextlib
import functools
import re
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedsim.comparison.compared_number import require_number
from fedsim.comparison.folder import GridFolder, GridRecords, Shard
from fedsim.comparison.grid import Grid, PlannedRun, plan_grid
from fedsim.comparison.grid_notebook import comparison_html, display_of
from fedsim.comparison.grid_terminal import Callback
from fedsim.comparison.job_count import default_jobs, distinct, in_one_process, why_runs_unsendable
from fedsim.comparison.jobs import Work, run_here, run_in_jobs
from fedsim.comparison.leaderboard_files import draw_leaderboard, leaderboard_csv, leaderboard_text
from fedsim.comparison.results import RunResult, curves_csv, results_csv, run_rows, tidy_rows
from fedsim.comparison.settings_check import untrained_part
from fedsim.comparison.summary import SummaryRow, answer_text, summarise, summary_csv, summary_table
from fedsim.comparison.tuned_values import draw_tuning, tuning_csv
from fedsim.config.experiment import Experiment
from fedsim.config.validation import warnings_about
from fedsim.core.plotting import encode
from fedsim.data import load_dataset
from fedsim.engines import engine as engines
from fedsim.errors import ExperimentError, SettingWarning, plural, show
from fedsim.records.axes import label
from fedsim.records.combinations import score_of
from fedsim.records.comparison_settings import ComparisonSettings
from fedsim.records.dataframe import to_frame
from fedsim.records.figures import heatmap_csv, table_of
from fedsim.records.formatting import key_name
from fedsim.records.leaderboard import Leaderboard, leaderboard
from fedsim.records.on_paper import draw_curves, draw_heatmap, draw_values, draw_worker_comparison
from fedsim.records.value_curves import breaking_points, breaking_points_csv, numeric_axes
from fedsim.system.child_process import exit_if_imported_by_child

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        grid: the axes and the runs.
        runs: the result of each run, in the grid's order.
        summary: one row for each combination of values other than the seed; see `SummaryRow`.
        folder: of the records, if they are kept.
    """

    grid: Grid
    runs: list[RunResult]
    summary: list[SummaryRow]
    folder: Path | None

    @property
    def failed(self) -> list[RunResult]:
        """The runs that failed."""
        return [run for run in self.runs if run.error is not None]

    @property
    def answer(self) -> str:
        """The best value of the first axis in words, with its interval; empty if nothing is compared."""
        return answer_text(self.grid, self.runs)

    @property
    def table(self) -> str:
        """The answer, the summary and the leaderboard as text, as `fedsim compare` prints them."""
        board = leaderboard_text(self.leaderboard, self.grid.compared[0]) if self.leaderboard else ""
        return f"{self.answer}\n\n{summary_table(self.grid, self.summary, self.runs)}\n\n{board}".strip()

    @functools.cached_property
    def leaderboard(self) -> Leaderboard | None:
        """The mean ranks of the first axis' values over all others; None with fewer than 3 values or 5 combinations."""
        combined = self.grid.settings.combined(self.runs, list(self.grid.axes))
        return leaderboard(combined, self.grid.compared, lambda each, axis: label(each.runs[0].point[axis]))

    def to_dataframe(self, per: Literal["round", "run"] = "round") -> DataFrame:
        """The results as a pandas data frame with one row per run and round, or one row per run.

        The first columns are `id` and the axes; a list or a table on an axis is its short name. Rows of rounds have the
        columns of `Result.to_dataframe`, and those of runs the columns of `results.csv`: the numbers of the last
        round, and `error`. A failed run has its rounds before the failure. Raises MissingPackageError without pandas.
        """
        if per not in ("round", "run"):
            raise ExperimentError(f'per = {show(per)}: must be "round" or "run"')
        rows = tidy_rows(self.runs) if per == "round" else run_rows(self.runs)
        return to_frame(rows, "Comparison.to_dataframe")

    def __repr__(self) -> str:
        failed = f", {len(self.failed)} failed" if self.failed else ""
        where = f", in {self.folder}" if self.folder else ""
        count = plural(len(self.runs), "run")
        return f"Comparison({self.grid.name}: {count} ({self.grid.shape}){failed}{where}; see .table)"

    def _repr_html_(self) -> str:
        return comparison_html(self)


def compare(
    experiment: Experiment | Mapping[str, Any] | str | Path | None = None,
    grid: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    jobs: int | None = None,
    target: float | None = None,
    tune: str | None = None,
    worst: str | None = None,
    by: str | None = None,
    skip_invalid: bool = False,
    heatmap: str | None = None,
    *,
    progress: bool | None = None,
    allow_imports: bool = False,
    **changes: Any,
) -> Comparison:
    """Run an experiment for every combination of the values on a grid's axes, and compare the results.

    Runs with the same seed have the same initial model, cohorts and batches, so their differences are paired. A run
    that fails is reported; the others continue.

    Args:
        experiment: an Experiment, tables, the path of a TOML or YAML file, the name of an experiment that comes with
            fedsim, or None for the default experiment, as for `run`; tables and files may hold the axes in a table
            `grid`.
        grid: the list of values of each dotted key; a value that is a table changes several keys at once.
        out: the folder of the records: new, empty, or that of the same grid, whose finished runs are kept.
        jobs: runs at a time. By default as many as cores and memory allow, each in one process; but one if the
            experiment sets its engine or processes, or uses a GPU.
        target: a test accuracy, or a test loss of tasks without accuracy; the summary reports the time to reach it. The
            table `grid` may have it too.
        tune: an axis. For each combination of the others, the value with the best validation result is reported; of
            several attacks, of an axis `worst`, the worst result counts. It needs `data.validation`.
        worst: an axis, such as "attack.name": the value with the worst result is reported.
        by: the number of the last round that is compared, in place of the test accuracy: "test_loss",
            "metrics.personal_worker_accuracy_mean", ... A higher one is better, except of losses, errors, perplexity,
            attack success, inequality (`..._std`, `..._gini`), seconds, bytes, staleness, discarded results, and
            metrics with `higher_is_better = False`. A sign says which is better: "-metrics.drift" a lower one, "+..." a
            higher one.
        skip_invalid: leave out the combinations that are invalid experiments, such as krum with more Byzantine workers
            than it allows, and say so; else they are an error.
        heatmap: two axes besides the first, such as "partition.alpha,attack.fraction", down and across: the heat maps
            are over these, with the best value of the first axis in each cell. By default the first two axes.
        progress: print a line for each run, as the command line does; None: show a bar in a notebook, else nothing.
        allow_imports: allow a file to name any import path; see `load_experiment`.
        changes: keys of the experiment, set in all runs: `compare(grid={"seed": [0, 1]}, rounds=3)`.

    Raises:
        ExperimentError: one of the experiments is invalid; no run has been started.
        DataError: data is missing; no run has been started.
        RecordError: the folder holds something else, or cannot be written.
        WorkerError: processes cannot be started.

    >>> result = compare({"rounds": 1, "model": "logistic"}, {"aggregate.rule": ["mean", "median"]}, jobs=1)
    >>> [row.point["aggregate.rule"] for row in result.summary], len(result.runs), result.failed
    (['mean', 'median'], 2, [])
    """
    settings = ComparisonSettings(
        target=target, tune=tune, worst=worst, by=by, skip_invalid=skip_invalid or None, heatmap=heatmap
    )
    try:
        planned = plan_grid(experiment, grid, (), settings, allow_imports=allow_imports, **changes)
    except ExperimentError as error:
        raise error.with_traceback(None) from error.__cause__  # frames within fedsim are of no help
    with contextlib.ExitStack() as stack:
        folder = Path(out) if out is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        display = stack.enter_context(display_of(None if out is None else folder, progress))
        return run_grid(planned, folder, jobs, display, kept=out is not None)


def run_grid(
    grid: Grid,
    path: Path,
    jobs: int | None = None,
    callback: Callback | None = None,
    *,
    kept: bool = True,
    shard: Shard | None = None,
) -> Comparison:
    """Do the runs of a grid that are not finished yet, and write the results to the folder `path`; see `compare`.

    Of a `shard` only its runs are done, and nothing is compared.
    """
    callback = callback or Callback()
    if jobs is not None and jobs < 1:
        raise ExperimentError(f"jobs = {jobs}: must be at least 1")
    for run in grid.runs:
        if engines.get(run.experiment.engine).target.traits.ranks:
            raise ExperimentError(
                f"engine = {show(run.experiment.engine)}: a comparison starts its own processes; use another engine, "
                "and --shard i/n for several machines"
            )
    if jobs is not None and jobs > 1 and (reason := why_runs_unsendable(grid.runs)):
        raise ExperimentError(f"jobs = {jobs}: {reason}; use jobs=1")
    if jobs != 1:
        exit_if_imported_by_child()  # else it would find the folder locked by its own parent
    with GridFolder(path, grid) as folder:
        grid = folder.grid
        runs = grid.runs if shard is None else shard.of(grid)
        todo = [run for run in runs if not folder.is_finished(run)]
        for data in (run.experiment.data for run in distinct(todo, lambda experiment: experiment.resolved()["data"])):
            load_dataset(data.dataset, data.root, **data.params)  # now: else every run would fail of missing data
        jobs = min(jobs or default_jobs(grid, todo), max(1, len(todo)))
        _warn(todo, grid.settings.by)
        callback.on_start(grid, todo, jobs)
        _run(todo, jobs, folder, callback, one_process=jobs > 1 and not grid.engine_chosen)
        if shard is not None:
            return Comparison(grid, [RunResult.read(run, folder) for run in runs], [], path)
        return summarised(folder, kept=kept)


def summarised(folder: GridFolder, *, kept: bool = True) -> Comparison:
    """Compare the runs in a folder, and write the tables and figures unless the folder is temporary."""
    comparison = comparison_in(folder, kept=kept)
    if kept:
        _write(comparison, folder)
    return comparison


def comparison_in(folder: GridRecords, *, kept: bool = True) -> Comparison:
    """Compare the runs in a folder; nothing is written. `kept` is False if the folder is temporary."""
    grid = folder.grid
    runs = [RunResult.read(run, folder, kept) for run in grid.runs]
    if grid.settings.by is not None:
        require_number(grid.settings.by, [run.history[-1] for run in runs if run.finished])
    return Comparison(grid, runs, summarise(grid, runs), folder.path if kept else None)


def _warn(runs: Sequence[PlannedRun], by: str | None) -> None:
    """Show each warning once, however many runs it concerns."""

    def relevant(experiment: Experiment) -> list[Any]:
        tables = experiment.resolved()
        return [tables["model"], tables["attack"], experiment.workers, experiment.cohort, experiment.buffers]

    lines = [line for run in distinct(runs, relevant) for line in warnings_about(run.experiment)]
    if by is None and (found := untrained_part(run.experiment for run in runs)):
        solver, number = found
        lines.append(
            f"{solver}: runs are compared by tests of the global model, of which a part stays untrained, since workers "
            f"keep their own; compare with by={number}"
        )
    for line in dict.fromkeys(lines):
        warnings.warn(line, SettingWarning, stacklevel=3)


def _run(runs: Sequence[PlannedRun], jobs: int, folder: GridFolder, callback: Callback, *, one_process: bool) -> None:
    def on_end(run: PlannedRun, error: str | None) -> None:
        if error is not None:
            folder.note_failure(run, error)
        callback.on_end(RunResult.read(run, folder))

    def on_retry(run: PlannedRun) -> None:
        folder.make_ready(run)
        callback.on_retry(run)

    for run in runs:
        folder.make_ready(run)
    experiments = [in_one_process(run.experiment) if one_process else run.experiment for run in runs]
    work = [Work(run, each, folder.run_folder(run)) for run, each in zip(runs, experiments, strict=True)]
    if jobs == 1:
        run_here(work, callback.on_round, on_end)
    else:
        run_in_jobs(work, jobs, callback.on_round, on_end, on_retry)


def _write(comparison: Comparison, folder: GridFolder) -> None:
    grid, runs, summary = comparison.grid, comparison.runs, comparison.summary
    folder.write("results.csv", results_csv(grid, runs).encode())
    folder.write("curves.csv", curves_csv(grid, runs).encode())
    folder.write("summary.csv", summary_csv(grid, summary).encode())
    folder.write("summary.txt", f"{comparison.table}\n".encode())
    what = re.sub(r"[^A-Za-z0-9._=+-]+", "_", score_of(runs, grid.settings.by).path[-1].removeprefix("test_"))
    over = grid.settings.heat_axes(list(grid.axes))
    figures = {what: draw_curves(grid, runs), "heatmap": draw_heatmap(grid, runs, over=over)}
    if over is not None:
        folder.write("heatmap.csv", heatmap_csv(table_of(grid, runs), over).encode())
    figures["workers"] = draw_worker_comparison(grid, runs)
    if any("virtual_seconds" in run.metrics for run in runs):
        figures[f"{what}_virtual_seconds"] = draw_curves(grid, runs, "virtual_seconds")
        figures[f"{what}_updates"] = draw_curves(grid, runs, "updates")
    figures |= {f"{what}_{key}": draw_values(grid, runs, key) for key in numeric_axes(grid.axes, grid.compared)}
    if (board := comparison.leaderboard) is not None:
        folder.write("leaderboard.csv", leaderboard_csv(board, grid.compared[0]).encode())
        figures["leaderboard"] = draw_leaderboard(board, f"{key_name(grid.compared[0])}: {grid.name}")
    if points := breaking_points(grid, runs):
        folder.write("breaking_points.csv", breaking_points_csv(grid, points).encode())
    if grid.settings.tune is not None:
        _, tuned = grid.settings.of(runs, list(grid.axes))
        folder.write("tuning.csv", tuning_csv(grid, tuned).encode())
        figures["tuning"] = draw_tuning(grid, tuned)
    for name, figure in figures.items():
        if figure is not None:
            for format in grid.runs[0].experiment.records.figures:
                folder.write(f"{name}.{format}", encode(figure, format))
