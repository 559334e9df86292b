"""The commands `fedsim run`, `replay`, `report` and `list`; `compare` has its own module."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from fedsim.cli.completion import complete_plugs
from fedsim.cli.early_check import check_names_of_run
from fedsim.cli.program import errors_as_lines
from fedsim.cli.words import AllowImports, Quiet, Words, source_and_overrides
from fedsim.config.catalog import experiments, list_experiments
from fedsim.config.plugs import PLUGS, describe_plug, list_module, list_plugs
from fedsim.config.source_catalog import keys_of_plug, source_plugs
from fedsim.core.text_wrapping import hang, terminal_columns
from fedsim.errors import ExperimentError, show

EXPERIMENTS, KEYS = "experiments", "keys"
KINDS = (*PLUGS, EXPERIMENTS, KEYS)
KIND_COLUMNS = max(map(len, KINDS))


def run(
    context: typer.Context,
    words: Words = None,
    out: Annotated[
        Path | None, typer.Option(help="Output folder; it must be new or empty.", show_default="runs/NAME-DATE-TIME")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Continue the run in this folder from its newest checkpoint. rounds=N makes the run longer. If the "
            "folder has no run yet, CONFIG.toml starts one there.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the run, print the experiment with all its settings, and stop.")
    ] = False,
    quiet: Quiet = False,
    allow_imports: AllowImports = False,
) -> None:
    """Run an experiment and write its records to a folder."""
    with errors_as_lines(quick=True):
        if resume and out:
            raise ExperimentError("--resume and --out: --resume already names the output folder; omit --out")
        source, overrides = source_and_overrides(words or [], context)
        if resume and not source:
            from fedsim.records.history import experiment_of_run

            source = str(experiment_of_run(resume))
        check_names_of_run(source, overrides)
    with errors_as_lines(), contextlib.ExitStack() as stack:
        import fedsim
        from fedsim.config.load import load_experiment
        from fedsim.config.toml import to_toml
        from fedsim.engines import engine as engines
        from fedsim.records.run_folder import new_folder
        from fedsim.runs.setup import check_run

        experiment = load_experiment(source, overrides, allow_imports=allow_imports)
        if dry_run:
            check_run(experiment)
            print(to_toml(experiment), end="")
            return
        main = engines.get(experiment.engine).target.is_main()
        given = resume or out or (None if main else Path(experiment.name))  # only the main process writes
        folder = given or stack.enter_context(new_folder(experiment.name))
        fedsim.run(experiment, folder, resume=bool(resume), progress=not quiet)
        if main:
            print(folder)


def replay(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)],
    rules: Annotated[
        str | None,
        typer.Option(
            help='Rules, separated by commas: median,krum,["nnm","trimmed_mean"],{rule="multi_krum",m=3}.',
            show_default="all rules that apply",
        ),
    ] = None,
    round: Annotated[
        int | None, typer.Option(help="A round whose updates were recorded.", show_default="the last")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    allow_imports: AllowImports = False,
) -> None:
    """Apply other rules to a recorded round of a run (records.updates=[1,5]), and compare their results."""
    with errors_as_lines():
        from fedsim.config.toml import parse_value
        from fedsim.records.axes import split_at_commas
        from fedsim.runs.rule_replay import applicable_rules, load_round, replay_json, replay_table
        from fedsim.runs.rule_replay import replay as replay_rules

        stored = load_round(folder, round, allow_imports=allow_imports)
        chosen = (
            [parse_value(text.strip(), "--rules") for text in split_at_commas(rules)]
            if rules
            else applicable_rules(stored)
        )
        results = replay_rules(stored, chosen)
        print(replay_json(stored, results) if json else replay_table(stored, results, terminal_columns()))


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN_OR_GRID", help="The folder of a run or of a comparison.", show_default=False)
    ],
    out: Annotated[Path | None, typer.Option(help="The HTML file.", show_default="report.html in that folder")] = None,
) -> None:
    """Write a self-contained HTML report of a run or a comparison."""
    with errors_as_lines():
        from fedsim.report import write_report

        print(write_report(folder, out))


def list_command(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND|NAME|MODULE:NAME|FILE.py",
            help=f"A kind ({', '.join(KINDS)}), a plug to describe, such as krum or my_rules:clipped_mean, or a Python "
            "file whose functions and classes to list.",
            show_default="all",
            autocompletion=complete_plugs,
        ),
    ] = None,
    search: Annotated[
        str, typer.Option(help="Only what has these words in its name or documentation.", show_default=False)
    ] = "",
) -> None:
    """List the names of all plugs and built-in experiments; those of a kind, or one of them, with their parameters."""
    with errors_as_lines(quick=True):
        columns = terminal_columns()
        if what is not None and what not in KINDS:
            if search:
                raise ExperimentError(f"--search: searches all, or a kind: {', '.join(KINDS)}; {show(what)} is none")
            if what in experiments() and not keys_of_plug(what):
                print(experiments()[what].read_text(encoding="utf-8"), end="")
                return
            print(list_module(Path(what), columns) if what.endswith(".py") else describe_plug(what, KINDS))
            return
        if what is None and not search:
            print(_overview(columns))
            return
        blocks = []
        if plugs := [each for each in PLUGS if what in (None, each)]:
            blocks.append(list_plugs(plugs, columns, search))
        if what in (None, EXPERIMENTS):
            blocks.append(list_experiments(columns, search))
        if what == KEYS or (what is None and search):  # they are many
            from fedsim.config.keys import list_keys

            blocks.append(list_keys(columns, search))
        if not any(blocks):
            raise ExperimentError(f"--search {show(search)}: nothing has these words; fedsim list shows all")
        print("\n\n".join(filter(None, blocks)))


def _overview(columns: int | None) -> str:
    """A line for each kind with its names, wrapped to the columns of a terminal; PyTorch is not imported."""
    names = {kind: ", ".join(source_plugs(kind)) for kind in PLUGS} | {EXPERIMENTS: ", ".join(experiments())}
    lines = [hang(f"{kind:<{KIND_COLUMNS}} ", text, columns) for kind, text in names.items()]
    more = "fedsim list KIND or NAME describes them, fedsim list keys the keys of an experiment; --search finds words"
    return "\n".join([*lines, "", hang("", more, columns)])
