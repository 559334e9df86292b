"""`fedsim compare`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedsim.cli.early_check import check_names_of_comparison
from fedsim.cli.program import FAILED, errors_as_lines
from fedsim.cli.words import AllowImports, Quiet, complete_words, is_folder, source_and_overrides
from fedsim.config.files import experiments
from fedsim.errors import ExperimentError, show


def compare(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.toml] [KEY=VALUE,VALUE...]...",
            help="A TOML or YAML file, and the keys to vary, with their values: aggregate.rule=mean,median seed=0,1,2. "
            r"A file may list them in its table \[comparison]. KEY=VALUE sets one value in all runs. Or folders of "
            "comparisons, or of the parts of one (--shard), to merge.",
            show_default=False,
            autocompletion=complete_words,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Output folder. If it holds the same comparison, only its missing runs are run.",
            show_default="runs/NAME-comparison-DATE-TIME",
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Number of runs at a time.", show_default="by cores and memory; 1 on a GPU")
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Run only part I of N, counted from 0, in the folder shards/I-of-N of the output folder.",
            show_default="all",
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            help="Report the time until this test accuracy, such as 0.97, or this loss if the task has no accuracy, "
            "and from which value of a list of numbers on it is missed.",
            show_default="none",
        ),
    ] = None,
    tune: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=V1,V2",
            help="Choose the value with the best validation result for each combination: local.lr=0.03,0.1. Needs "
            "data.validation_fraction. With --worst, the worst validation result of each value counts.",
            show_default="none",
        ),
    ] = None,
    worst: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="Show the worst case along this axis, such as attack.name.", show_default="none"
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Compare this number of the last round, such as test_loss or metrics.r2. The table says whether a "
            "higher or a lower one is better; -NAME makes a lower one better, +NAME a higher one.",
            show_default="test accuracy",
        ),
    ] = None,
    skip_invalid: Annotated[
        bool,
        typer.Option(
            "--skip-invalid",
            help="Leave out the combinations that are invalid, such as a rule with more attackers than it allows, and "
            "list them.",
        ),
    ] = False,
    heatmap: Annotated[
        str | None,
        typer.Option(
            metavar="KEY,KEY",
            help="Draw heat maps over these two axes, such as partition.alpha,attack.fraction, with the best value of "
            "the first axis in each cell.",
            show_default="the first two",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the runs, list them, and stop.")] = False,
    quiet: Quiet = False,
    allow_imports: AllowImports = False,
) -> None:
    """Run an experiment with every combination of values, and compare the results: table, CSV and figures."""
    key, values = (tune or "").partition("=")[::2]
    all_words = [*(words or []), *([tune] if tune and values else [])]
    with errors_as_lines(quick=True):
        if tune is not None and not key.strip():
            raise ExperimentError(f"--tune {show(tune)}: must be a key and its values, such as local.lr=0.03,0.1")
        folders = [Path(word) for word in all_words if _is_comparison(word)]
        if not folders:
            source, changes = source_and_overrides(all_words, context)
            check_names_of_comparison(source, changes, skip_invalid=skip_invalid)
    with errors_as_lines(), contextlib.ExitStack() as stack:
        from fedsim.comparison import plan_comparison, run_comparison
        from fedsim.comparison.displays import ComparisonDisplay
        from fedsim.comparison.folder import Shard
        from fedsim.comparison.runner import merge
        from fedsim.records.axes import describe_point
        from fedsim.records.rows import ComparisonSettings
        from fedsim.records.run_folder import new_folder

        settings = ComparisonSettings(
            target=target,
            tune=key or None,
            worst=worst,
            metric=metric,
            skip_invalid=skip_invalid or None,
            heatmap=heatmap,
        )
        if folders:
            if len(folders) < len(all_words) or shard or dry_run:
                raise ExperimentError(
                    "to merge folders of comparisons, give only these folders, --out, --target, --tune, --worst, "
                    "--metric, --heatmap and --allow-imports"
                )
            folder = out or (
                folders[0] if len(folders) == 1 else stack.enter_context(new_folder(f"{folders[0].name}-comparison"))
            )
            comparison = merge(folders, folder, settings, allow_imports=allow_imports)
        else:
            plan = plan_comparison(source, None, changes, settings, allow_imports=allow_imports)
            part = Shard.parse(shard) if shard else None
            if part and out is None:
                raise ExperimentError("--shard: needs --out FOLDER, the same folder for all parts")
            if dry_run:
                planned = part.of(plan) if part else plan.runs
                print("\n".join(f"{run.id}: {describe_point(run.point)}" for run in planned))
                for line in plan.left_out:
                    print(f"left out: {line}")
                return
            folder = out or stack.enter_context(new_folder(f"{plan.name}-comparison"))
            folder = part.folder(folder) if part else folder
            with ComparisonDisplay(folder, quiet=quiet) as display:
                comparison = run_comparison(plan, folder, jobs, display, shard=part)
        if not quiet and not shard:
            print(comparison.table, end="\n\n")
        print(folder)
        for failed in comparison.failed:
            print(f"error: {failed.id}: {failed.error}", file=sys.stderr)
        if comparison.failed:
            raise typer.Exit(FAILED)


def _is_comparison(word: str) -> bool:
    """Whether a word is the path of a folder; one with the name of an experiment of fedsim must hold a comparison."""
    if not is_folder(word) or word not in experiments():
        return is_folder(word)
    from fedsim.comparison.folder import SHARDS
    from fedsim.records.reader import COMPARISON

    return any((Path(word) / name).exists() for name in (COMPARISON, SHARDS))
