"""Run a comparison, write its results, and merge the folders of a comparison that was split."""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.callbacks.painter import Painter
from fedsim.comparison.axes import with_points
from fedsim.comparison.displays import Callback, display_of
from fedsim.comparison.figures import heatmap_csv
from fedsim.comparison.folder import (
    SHARDS,
    ComparisonFolder,
    ComparisonRecords,
    Shard,
    differences_of_comparisons,
    inner_folder,
    result_in,
)
from fedsim.comparison.jobs import Job, default_jobs, run_here, run_in_jobs, why_runs_unsendable
from fedsim.comparison.leaderboard import leaderboard_csv
from fedsim.comparison.on_paper import (
    draw_curves,
    draw_heatmap,
    draw_leaderboard,
    draw_tuning,
    draw_values,
    draw_worker_comparison,
)
from fedsim.comparison.plan import ComparisonPlan, PlannedRun, plan_comparison
from fedsim.comparison.results import Comparison
from fedsim.comparison.rows import NO_SETTINGS, ComparisonSettings, canonical, numeric_axes, score_of
from fedsim.comparison.stored import COMPARISON, ComparisonFile, read_comparison_file
from fedsim.comparison.tables import (
    breaking_points,
    breaking_points_csv,
    curves_csv,
    pairs_csv,
    results_csv,
    summary_csv,
    tuning_csv,
)
from fedsim.config.engines import traits_of
from fedsim.config.experiment import Experiment, ExperimentKeys, Unpack
from fedsim.config.validation import warnings_about_objects
from fedsim.data.sources import data_loaded_once
from fedsim.errors import ExperimentError, FedsimWarning, RecordError, SettingWarning, one_line, show
from fedsim.processes.child_process import exit_if_imported_by_child
from fedsim.records.formatting import key_name
from fedsim.records.history import METRICS
from fedsim.records.run_folder import ERROR
from fedsim.runs.launch import check_copies
from fedsim.runs.session import Session
from fedsim.runs.setup import check_run
from fedsim.system.files import user_path
from fedsim.system.limits import without_inner_frames

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def compare(
    experiment: Experiment | Mapping[str, Any] | str | Path | None = None,
    plan: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    jobs: int | None = None,
    target: float | None = None,
    tune: str | None = None,
    worst: str | None = None,
    metric: str | None = None,
    skip_invalid: bool = False,
    heatmap: str | None = None,
    *,
    progress: bool | None = None,
    allow_imports: bool = False,
    **changes: Unpack[ExperimentKeys],
) -> Comparison:
    """Run an experiment for every combination of the given values, and compare the results.

    Runs with the same seed start from the same model and use the same batches. If a run fails, its error is reported,
    and the other runs continue.

    Args:
        experiment: an Experiment, nested dicts, the path of a TOML or YAML file, the name of an experiment that comes
            with fedsim, or None for the default experiment. Dicts and files may contain the values to compare in a
            table `comparison`.
        plan: the values to compare: a list for each dotted key. A value that is a dict changes several keys at once.
        out: folder of the records: a new or empty folder, or that of the same comparison, whose finished runs are not
            repeated.
        jobs: number of runs at a time. By default, it is chosen by cores and memory, and is 1 on a GPU.
        target: test accuracy to reach, or test loss for a task without accuracy. The table reports the time until it
            is reached.
        tune: key of a setting to tune, such as "local.lr". For each combination of the other values, only the value
            with the best validation result is reported. Needs `data.validation_fraction`.
        worst: key of a setting for which only the value with the worst result is reported, such as "attack.name".
        metric: metric of the last round to compare instead of the test accuracy, such as "test_loss" or
            "metrics.r2". Lower is better for losses, errors, times and similar metrics, otherwise higher is better. A
            sign overrides this: "-metrics.drift" if lower is better, "+metrics.drift" if higher is better.
        skip_invalid: leave out invalid combinations, such as krum with more Byzantine workers than it allows. By
            default they raise ExperimentError.
        heatmap: settings on the vertical and the horizontal axis of the heat maps, such as
            "partition.alpha,attack.fraction". Each cell names the best value of the first compared setting. By default,
            one heat map shows the results over the first two settings.
        progress: True prints a line for each run, False prints nothing. None shows a progress bar in notebooks only.
        allow_imports: allow a file to name any import path (see `load_experiment`).
        changes: settings for all runs, such as `rounds=3`. `fedsim.components("keys")` shows all settings.

    Raises:
        ExperimentError: an experiment is invalid. No run has started.
        DataError: data is missing. No run has started.
        RecordError: the folder holds other files or another comparison, or cannot be written.
        WorkerError: processes cannot be started.

    >>> result = compare({"rounds": 1, "model": "logistic"}, {"aggregate.rule": ["mean", "median"]}, jobs=1)
    >>> [row.point["aggregate.rule"] for row in result.summary], len(result.runs), result.failed
    (['mean', 'median'], 2, [])
    """
    settings = ComparisonSettings(
        target=target, tune=tune, worst=worst, metric=metric, skip_invalid=skip_invalid or None, heatmap=heatmap
    )
    with data_loaded_once(), contextlib.ExitStack() as stack:
        try:
            planned = plan_comparison(experiment, plan, (), settings, allow_imports=allow_imports, **changes)
        except ExperimentError as error:
            raise without_inner_frames(error) from error.__cause__
        folder = user_path(out) if out is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        display = stack.enter_context(display_of(None if out is None else folder, progress))
        return run_comparison(planned, folder, jobs, display, keeps_folder=out is not None)


def run_comparison(
    plan: ComparisonPlan,
    path: Path,
    jobs: int | None = None,
    callback: Callback | None = None,
    *,
    keeps_folder: bool = True,
    shard: Shard | None = None,
) -> Comparison:
    """Execute the unfinished runs of a comparison, and write the results to the folder `path`.

    Args:
        plan: the runs of the comparison.
        path: folder of the comparison.
        jobs: number of runs at a time. None: chosen by cores and memory.
        callback: its methods are called after each round and run.
        keeps_folder: false for a temporary folder, in which no tables and figures are written.
        shard: the part of the comparison to run. None: all.
    """
    callback = callback or Callback()
    if jobs is not None and jobs < 1:
        raise ExperimentError(f"jobs = {jobs}: must be at least 1")
    for run in plan.runs:
        if traits_of(run.experiment.engine).ranks:
            raise ExperimentError(
                f"engine = {show(run.experiment.engine)}: a comparison starts its own processes; use another engine, "
                "and --shard i/n for several machines"
            )
    if shard is None:
        check_copies(run.experiment for run in plan.runs)
    if jobs is not None and jobs > 1 and (reason := why_runs_unsendable(plan.runs)):
        raise ExperimentError(f"jobs = {jobs}: {reason}; use jobs=1")
    if jobs != 1:
        exit_if_imported_by_child()  # a child process would find the folder locked by its parent
    unfinished = ComparisonRecords(path, plan).unfinished(shard)
    formats = _formats(plan) if keeps_folder and shard is None else []
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(Session())
        # before the folder exists
        check_runs(unfinished, session, to_run=True, skip_invalid=bool(plan.settings.skip_invalid))
        folder = stack.enter_context(ComparisonFolder(path, plan))
        painter = stack.enter_context(Painter(formats, callback.on_drawing))
        plan, todo = folder.plan, folder.unfinished(shard)
        jobs = min(jobs or default_jobs(plan, todo), max(1, len(todo)))
        warn_about(plan, todo, keeps_folder=keeps_folder)
        callback.on_start(plan, todo, jobs)
        _run(todo, jobs, session, folder, callback, one_process=jobs > 1 and not plan.engine_chosen)
        if shard is not None:
            return Comparison(plan.name, plan.axes, list(map(folder.result, shard.of(plan))), plan.settings, path)
        return summarised(folder, painter if keeps_folder else None)


def check_runs(runs: Sequence[PlannedRun], session: Session, *, to_run: bool, skip_invalid: bool = False) -> None:
    """Raise ExperimentError if one of the runs is impossible with its data, for example with the partition of its seed.

    Args:
        runs: the runs to check.
        session: session that keeps the data for the runs.
        to_run: whether to check on the device of the run, and to download missing data; see `check_run`.
        skip_invalid: whether only missing data is an error. Impossible runs then fail when they start.
    """
    problems: dict[str, list[dict[str, Any]]] = {}  # maps an error line to the points with this error
    for run in runs:
        try:
            check_run(run.experiment, session, to_run=to_run)
        except ExperimentError as error:
            for line in error.lines:
                problems.setdefault(line, []).append(run.point)
    if problems and not skip_invalid:
        raise ExperimentError(
            *(with_points(line, affected, [run.point for run in runs]) for line, affected in problems.items())
        )


def summarised(folder: ComparisonFolder, painter: Painter | None) -> Comparison:
    """Return the results of all runs. If there is a `painter`, which draws figures, also write tables and figures."""
    comparison = folder.comparison(keeps_folder=painter is not None)
    if line := folder.rounding_difference(comparison):
        warnings.warn(line, FedsimWarning, stacklevel=3)
    if painter is not None:
        _write(comparison, folder, painter)
    return comparison


def warn_about(plan: ComparisonPlan, runs: Sequence[PlannedRun], *, keeps_folder: bool) -> None:
    """Show each warning about a comparison once, before `runs` are executed.

    `keeps_folder`: whether interrupted runs can be resumed.
    """
    lines = plan.warnings if runs else []
    if keeps_folder:
        resumable = [run.experiment for run in runs if run.experiment.checkpoint.every != 0]
        lines = [*lines, *(line for experiment in resumable for line in warnings_about_objects(experiment))]
    for line in dict.fromkeys(lines):
        warnings.warn(line, SettingWarning, stacklevel=3)


def _run(
    runs: Sequence[PlannedRun],
    jobs: int,
    session: Session,
    folder: ComparisonFolder,
    callback: Callback,
    *,
    one_process: bool,
) -> None:
    def on_end(run: PlannedRun, error: str | None) -> None:
        if error is not None:
            folder.note_failure(run, error)
        callback.on_end(folder.result(run))

    def on_retry(run: PlannedRun) -> None:
        folder.make_ready(run)
        callback.on_retry(run)

    planned_runs = []
    for run in runs:
        folder.make_ready(run)
        # one process gives bit-identical results
        experiment = run.experiment.model_copy(update={"processes": 1}) if one_process else run.experiment
        planned_runs.append(Job(run, experiment, folder.run_folder(run)))
    if jobs == 1:
        run_here(planned_runs, session, callback.on_round, on_end)
    else:
        session.close()  # each job loads the data itself
        run_in_jobs(planned_runs, jobs, callback.on_round, on_end, on_retry)


def _formats(plan: ComparisonPlan) -> list[str]:
    return list(plan.runs[0].experiment.records.figures)


def _write(comparison: Comparison, folder: ComparisonFolder, painter: Painter) -> None:
    runs, axes, settings = comparison.runs, comparison.axes, comparison.settings
    folder.write("results.csv", results_csv(comparison).encode())
    folder.write("curves.csv", curves_csv(comparison).encode())
    folder.write("summary.csv", summary_csv(comparison).encode())
    folder.write("summary.txt", f"{comparison.table}\n".encode())
    quantity = re.sub(r"[^A-Za-z0-9._=+-]+", "_", score_of(runs, settings.metric).path[-1].removeprefix("test_"))
    over = settings.heat_axes(list(axes))
    drawings: dict[str, Callable[[], Figure | None]] = {
        quantity: partial(draw_curves, comparison),
        "heatmap": partial(draw_heatmap, comparison, over=over),
        "workers": partial(draw_worker_comparison, comparison),
    }
    if over is not None:
        folder.write("heatmap.csv", heatmap_csv(comparison, over).encode())
    if any("virtual_seconds" in run.metrics for run in runs):
        drawings[f"{quantity}_virtual_seconds"] = partial(draw_curves, comparison, "virtual_seconds")
        drawings[f"{quantity}_updates"] = partial(draw_curves, comparison, "updates")
    drawings |= {
        f"{quantity}_{key}": partial(draw_values, comparison, key) for key in numeric_axes(axes, comparison.compared)
    }
    if (board := comparison.leaderboard) is not None:
        folder.write("leaderboard.csv", leaderboard_csv(board, comparison.compared[0]).encode())
        title = f"{key_name(comparison.compared[0])}: {comparison.name}"
        drawings["leaderboard"] = partial(draw_leaderboard, board, title)
    if comparison.pairs:
        folder.write("pairs.csv", pairs_csv(comparison).encode())
    if breaking_points(comparison):
        folder.write("breaking_points.csv", breaking_points_csv(comparison).encode())
    if settings.tune is not None:
        folder.write("tuning.csv", tuning_csv(comparison).encode())
        drawings["tuning"] = partial(draw_tuning, comparison)
    for name, content in painter.files(drawings).items():
        folder.write(name, content)


def merge(
    folders: Sequence[Path],
    out: Path | None,
    settings: ComparisonSettings = NO_SETTINGS,
    *,
    allow_imports: bool = False,
) -> Comparison:
    """Copy the runs of several folders into the folder `out`, and compare them. Nothing is trained.

    Args:
        folders: folders of the same comparison, or of parts of it.
        out: folder of the merged comparison. None: the first of `folders`, whose files keep its own settings.
        settings: settings of the returned comparison, such as `target`. Default: those in the first folder.
        allow_imports: allow the folders to name any import path (see `load_experiment`).

    Raises RecordError if a folder contains no comparison, or if the comparisons differ.
    """
    sources = [source for folder in folders for source in _sources(folder)]
    comparisons = {source: read_comparison_file(source / COMPARISON) for source in sources}
    first = comparisons[sources[0]]
    for source, source_plan in comparisons.items():
        if lines := differences_of_comparisons(first, source_plan):
            raise RecordError(f"{source}: holds a different comparison than {sources[0]}\n" + "\n".join(lines))
    only_shown = out is None and settings != NO_SETTINGS
    settings = ComparisonSettings(**first.settings.given | settings.given)
    if only_shown:
        settings = replace(settings, heatmap=None)  # which is not drawn, and may need the axis of `worst`
    file = sources[0] / COMPARISON
    plan = plan_comparison(first.base, first.axes, (), settings, file=file, allow_imports=allow_imports, to_run=False)
    stored = first.settings if only_shown else plan.settings
    with ComparisonFolder(out or folders[0], replace(plan, settings=stored)) as folder:
        for run in folder.plan.runs:
            if not folder.is_finished(run) and (source_folder := _find(run, comparisons, folder.run_folder(run))):
                folder.clear(run)
                _copy(source_folder, folder.run_folder(run))
        comparison = summarised(folder, Painter(_formats(folder.plan)))
        folder.plan = replace(folder.plan, settings=plan.settings)
        return folder.comparison() if only_shown else comparison


def _sources(folder: Path) -> list[Path]:
    """Return the folders in and below `folder` that contain a comparison or a part of it."""
    sources = [path for path in (folder, *sorted((folder / SHARDS).glob("*"))) if (path / COMPARISON).is_file()]
    if not sources:
        is_run = (folder / METRICS).is_file()
        hint = "; to draw single runs in one figure, run: fedsim plot FOLDER FOLDER" if is_run else ""
        reason = f"no {COMPARISON}, and no shards in {SHARDS}/"
        raise RecordError(f"{folder}: is not the folder of a comparison ({reason}){hint}")
    return sources


def _find(run: PlannedRun, comparisons: dict[Path, ComparisonFile], besides: Path) -> Path | None:
    """Return a folder in which a run is stored, or None. Finished runs are preferred to failed ones.

    Args:
        run: the run.
        comparisons: the comparisons to search, by folder.
        besides: a folder to ignore.
    """
    point = canonical(run.point)
    stored = [
        (source, planned)
        for source, plan in comparisons.items()
        for planned in plan.runs
        if canonical(planned.point) == point
    ]
    folders = [inner_folder(source, planned.id) for source, planned in stored]
    folders = [folder for folder in folders if folder.is_dir() and folder != besides]
    complete = (folder for folder in folders if result_in(folder, run).finished)
    failed = (folder for folder in folders if (folder / ERROR).is_file())
    return next(itertools.chain(complete, failed), None)


def _copy(source: Path, to: Path) -> None:
    """Copy the folder of a run. Raises RecordError if it contains links."""
    try:
        for path in (source, *source.rglob("*")):
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise RecordError(f"{path}: is not a regular file or folder, so it cannot be copied; remove it")
        shutil.copytree(source, to)
    except (OSError, shutil.Error) as error:
        raise RecordError(f"{source}: cannot be copied: {one_line(error)}") from None
