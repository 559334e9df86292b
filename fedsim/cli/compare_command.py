"""The command `fedsim compare`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsim.cli.program import FAILED, errors_as_lines
from fedsim.cli.words import (
    AllowImports,
    Labels,
    Quiet,
    complete_metrics,
    complete_words,
    is_folder,
    source_and_overrides,
)
from fedsim.config.files import experiments
from fedsim.core.status_line import status_line
from fedsim.errors import ExperimentError, show

if TYPE_CHECKING:
    from fedsim.comparison.folder import Shard
    from fedsim.comparison.plan import ComparisonPlan
    from fedsim.comparison.results import Comparison
    from fedsim.comparison.rows import ComparisonSettings


ComparedWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG.toml] [KEY=VALUE,VALUE...]...",
        help="A TOML or YAML file, and keys to vary with their values: aggregate.rule=mean,median seed=0,1,2. A "
        r"file can contain these keys in a table \[comparison]. KEY=VALUE sets one value in all runs. To "
        "merge comparisons, or the parts of one comparison (--shard), give their folders instead.",
        show_default=False,
        autocompletion=complete_words,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Output folder. If it already contains this comparison, only the missing runs are executed. Without "
        "--out, options for the folder of a comparison change only what is printed.",
        show_default="runs/NAME-comparison-DATE-TIME",
    ),
]
Jobs = Annotated[
    int | None, typer.Option(help="Number of concurrent runs.", show_default="depends on cores and memory; 1 on a GPU")
]
Part = Annotated[
    str | None,
    typer.Option(
        metavar="I/N",
        help="Run only part I of N (I starts at 0), in the subfolder shards/I-of-N of the output folder.",
        show_default="all",
    ),
]
Target = Annotated[
    float | None,
    typer.Option(
        help="Report the time until this test accuracy, such as 0.97, is reached (for tasks without accuracy: this "
        "test loss). For an axis of numbers, also report the value from which the target is missed.",
        show_default="none",
    ),
]
Tune = Annotated[
    str | None,
    typer.Option(
        metavar="KEY=V1,V2",
        help="For each combination of the other keys, choose the value with the best validation result: "
        "local.lr=0.03,0.1. Needs data.validation_fraction. With --worst, each value is judged by its worst case.",
        show_default="none",
    ),
]
Worst = Annotated[
    str | None,
    typer.Option(metavar="KEY", help="Show the worst case along this axis, such as attack.name.", show_default="none"),
]
ComparedNumber = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Metric of the last round to compare, such as worker_accuracy, test_loss or metrics.r2. The table says "
        "whether higher or lower values are better; write -NAME if lower values are better, and +NAME "
        "if higher values are.",
        show_default="test accuracy",
        autocompletion=complete_metrics,
    ),
]
SkipInvalid = Annotated[
    bool,
    typer.Option(
        "--skip-invalid",
        help="Leave out invalid combinations, such as a rule with more attackers than it tolerates, and list them.",
    ),
]
HeatMap = Annotated[
    str | None,
    typer.Option(
        metavar="KEY,KEY",
        help="Draw heat maps over these two axes, such as partition.alpha,attack.fraction. Each cell shows the "
        "best value of the first axis.",
        show_default="the first two",
    ),
]
Table = Annotated[
    str | None,
    typer.Option(metavar="FORM", help="Form of the printed table: text, markdown or latex.", show_default="text"),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check all runs, list them, and stop.")]


def compare(
    context: typer.Context,
    words: ComparedWords = None,
    out: Out = None,
    jobs: Jobs = None,
    shard: Part = None,
    target: Target = None,
    tune: Tune = None,
    worst: Worst = None,
    metric: ComparedNumber = None,
    skip_invalid: SkipInvalid = False,
    heatmap: HeatMap = None,
    table: Table = None,
    label: Labels = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    allow_imports: AllowImports = False,
) -> None:
    """Run an experiment with every combination of values, and compare the results: table, CSV and figures."""
    key, values = (tune or "").partition("=")[::2]
    all_words = [*(words or []), *([tune] if tune and values else [])]
    with errors_as_lines():
        if tune is not None and not key.strip():
            raise ExperimentError(f"--tune {show(tune)}: must be a key and its values, such as local.lr=0.03,0.1")
        folders = [Path(word) for word in all_words if _is_comparison(word)]
        if not folders:
            source, changes = source_and_overrides(all_words, context)
    with errors_as_lines("fedsim.comparison"), contextlib.ExitStack() as stack:
        from fedsim.comparison import plan_comparison
        from fedsim.comparison.folder import Shard
        from fedsim.comparison.labels import labels_of
        from fedsim.comparison.rows import NO_SETTINGS, ComparisonSettings
        from fedsim.comparison.typeset import TABLES
        from fedsim.data.sources import data_loaded_once

        stack.enter_context(data_loaded_once())
        if (table or label) and (quiet or shard):
            raise ExperimentError("--table and --label: no table is printed with --quiet or --shard; omit them")
        table = table or "text"
        if table not in TABLES:
            raise ExperimentError(f"--table {show(table)}: must be one of {', '.join(TABLES)}")
        lines = sys.stdout if table == "text" else sys.stderr  # so that `> table.tex` writes the table alone
        settings = ComparisonSettings(
            target=target,
            tune=key or None,
            worst=worst,
            metric=metric,
            skip_invalid=skip_invalid or None,
            heatmap=heatmap,
        )
        only_shown = False  # a finished comparison, with other settings
        if folders:
            if len(folders) < len(all_words) or shard or dry_run or skip_invalid or jobs is not None:
                raise ExperimentError(
                    "merging the folders of comparisons supports only the options --out, --target, --tune, --worst, "
                    "--metric, --heatmap, --table, --label, --quiet and --allow-imports; remove all other options and "
                    "arguments"
                )
            only_shown = out is None and len(folders) == 1 and settings != NO_SETTINGS
            if only_shown and heatmap is not None:
                raise ExperimentError(f"--heatmap: draws figures, so it needs an output folder; add --out {folders[0]}")
            with status_line("reading the runs and drawing the figures"):
                comparison = _merge(folders, out, settings, allow_imports=allow_imports)
            labels = labels_of(label or [], comparison.axes)
        else:
            with status_line("checking the runs"):
                plan = plan_comparison(source, None, changes, settings, allow_imports=allow_imports)
            labels = labels_of(label or [], plan.axes)
            part = Shard.parse(shard) if shard else None
            if part and out is None:
                raise ExperimentError("--shard: needs --out FOLDER; use the same folder for all shards")
            if dry_run:
                _list_runs(plan, part, skip_invalid=skip_invalid)
                return
            with contextlib.redirect_stdout(lines):
                comparison = _run(plan, part, out, jobs, quiet=quiet)
        if not quiet and not shard:
            print(TABLES[table](comparison.renamed(labels)), end="\n\n")
            if only_shown:
                print(f"the files keep their settings; to change them, add --out {folders[0]}", file=lines)
        print(comparison.folder, file=lines)
        for failed in comparison.failed:
            print(f"error: {failed.id}: {failed.error}", file=sys.stderr)
        if comparison.failed:
            raise typer.Exit(FAILED)


def _merge(folders: list[Path], out: Path | None, settings: ComparisonSettings, *, allow_imports: bool) -> Comparison:
    """Merge the comparisons in `folders` into the folder `out`. Default: the only folder, or a new one."""
    from fedsim.comparison.runner import merge
    from fedsim.records.run_folder import new_folder

    with contextlib.ExitStack() as stack:
        if out is None and len(folders) > 1:
            out = stack.enter_context(new_folder(f"{folders[0].name}-comparison"))
        return merge(folders, out, settings, allow_imports=allow_imports)


def _list_runs(plan: ComparisonPlan, part: Shard | None, *, skip_invalid: bool) -> None:
    """Check the runs of a comparison, or of a part of it, and print them."""
    from fedsim.comparison.axes import describe_point
    from fedsim.comparison.runner import check_runs, warn_about
    from fedsim.runs.launch import check_copies
    from fedsim.runs.session import Session

    planned = part.of(plan) if part else plan.runs
    if not part:
        check_copies(run.experiment for run in planned)
    if not skip_invalid:
        with status_line("checking the runs"), Session() as session:
            check_runs(planned, session, to_run=False)
    print("\n".join(f"{run.id}: {describe_point(run.point)}" for run in planned))
    for line in plan.left_out:
        print(f"left out: {line}")
    warn_about(plan, planned, keeps_folder=True)


def _run(plan: ComparisonPlan, part: Shard | None, out: Path | None, jobs: int | None, *, quiet: bool) -> Comparison:
    """Execute the unfinished runs of a comparison, or of a part of it, in the folder `out`. Default: a new one."""
    from fedsim.comparison import run_comparison
    from fedsim.comparison.displays import ComparisonDisplay
    from fedsim.records.run_folder import new_folder

    with contextlib.ExitStack() as stack:
        folder = out or stack.enter_context(new_folder(f"{plan.name}-comparison"))
        folder = part.folder(folder) if part else folder
        display = stack.enter_context(ComparisonDisplay(folder, quiet=quiet))
        return run_comparison(plan, folder, jobs, display, shard=part)


def _is_comparison(word: str) -> bool:
    """Whether a word of the command line is the folder of a comparison, and not the name of an experiment."""
    if not is_folder(word) or word not in experiments():
        return is_folder(word)
    from fedsim.comparison.folder import SHARDS
    from fedsim.comparison.stored import COMPARISON

    return any((Path(word) / name).exists() for name in (COMPARISON, SHARDS))
