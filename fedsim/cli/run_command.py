"""`fedsim run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsim.cli.program import errors_as_lines
from fedsim.cli.words import AllowImports, Quiet, Words, source_and_overrides
from fedsim.errors import ExperimentError


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
        bool, typer.Option("--dry-run", help="Print the experiment with all its settings, and stop.")
    ] = False,
    quiet: Quiet = False,
    allow_imports: AllowImports = False,
) -> None:
    """Run an experiment and write its records to a folder."""
    with errors_as_lines():
        import fedsim
        from fedsim.config.load import load_experiment
        from fedsim.config.toml import to_toml
        from fedsim.engines import engine as engines
        from fedsim.records.run_folder import experiment_of_run, new_folder_name

        source, overrides = source_and_overrides(words or [], context)
        if resume and out:
            raise ExperimentError("--resume and --out: --resume already names the output folder; omit --out")
        experiment = load_experiment(
            source or (resume and experiment_of_run(resume)), overrides, allow_imports=allow_imports
        )
        if dry_run:
            print(to_toml(experiment), end="")
            return
        folder = resume or out or new_folder_name(experiment.name)
        fedsim.run(experiment, folder, resume=bool(resume), progress=not quiet)
        if engines.get(experiment.engine).target.leads():
            print(folder)
