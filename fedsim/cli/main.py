"""The command line: `fedsim run`, `compare`, `replay`, `report`, `plot`, `list`, `doctor` and `new`."""

from __future__ import annotations

from typing import Annotated

import typer

from fedsim.cli.commands import list_command, replay, report, run
from fedsim.cli.compare_command import compare
from fedsim.cli.doctor import doctor
from fedsim.cli.new import new
from fedsim.cli.plot_command import plot
from fedsim.cli.program import run_program
from fedsim.cli.words import WORDS_LIKE_OPTIONS
from fedsim.version import __version__

app = typer.Typer(
    name="fedsim",
    help="Simulate distributed and federated SGD with N workers on one GPU or CPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (run, compare):
    app.command(context_settings=WORDS_LIKE_OPTIONS)(command)
app.command()(replay)
app.command()(report)
app.command()(plot)
app.command("list")(list_command)
app.command()(doctor)
app.command()(new)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"fedsim {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """The console script `fedsim`."""
    run_program(app)


def run_main() -> None:
    """The script `run_experiment.py`: `fedsim run` without the word `run`."""
    single = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    single.command(context_settings=WORDS_LIKE_OPTIONS)(run)
    run_program(single)
