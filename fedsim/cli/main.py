"""The program `fedsim`: `run`, `compare`, `replay`, `report`, `plot`, `privacy`, `list`, `doctor` and `new`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedsim.cli.commands import doctor, list_command, new, plot, privacy, replay, report, run
from fedsim.cli.compare_command import compare
from fedsim.cli.program import errors_as_lines, run_program
from fedsim.cli.words import WORDS_LIKE_OPTIONS, no_such_option
from fedsim.config.files import experiments
from fedsim.errors import ExperimentError, cut, printable, show
from fedsim.hints.meanings import answer, nearest
from fedsim.system.files import is_file
from fedsim.version import __version__

USAGE_ERROR: Any = typer.BadParameter.__base__
HELP = {"help_option_names": ["-h", "--help"]}


@contextlib.contextmanager
def _usage_errors_as_lines() -> Iterator[None]:
    """Context manager that shows an option or argument that typer refuses as one line."""
    try:
        yield
    except USAGE_ERROR as error:
        if not error.format_message():  # the command without arguments, for which typer shows the help
            raise
        with errors_as_lines():
            if hasattr(error, "possibilities"):  # no such option
                line = no_such_option(error.option_name, "", error.ctx.command, takes_keys=False)
                raise ExperimentError(line) from None
            command = f"fedsim {error.ctx.command.name}" if error.ctx else "fedsim"
            raise ExperimentError(f"{command}: {error.format_message().rstrip('.')}; see {command} --help") from None


class Commands(TyperGroup):
    """The commands of `fedsim`. For an unknown command, the error message suggests what to write instead."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands and not ctx.resilient_parsing:
            with errors_as_lines():
                raise ExperimentError(f"{show(args[0])}: no such command; {self._instead(*args)}")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        with _usage_errors_as_lines():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _usage_errors_as_lines():
            return super().invoke(ctx)

    def _instead(self, word: str, *arguments: str) -> str:
        """Return what to write instead of an unknown command, such as `write fedsim run --resume X` for `resume X`."""
        for name, command in self.commands.items():
            if any(f"--{word}" in parameter.opts for parameter in command.params):
                return cut(printable(f"write fedsim {' '.join((name, f'--{word}', *arguments))}"))
        if word in experiments() or "=" in word or is_file(Path(word)):
            return cut(printable(f"write fedsim run {' '.join((word, *arguments))}"))
        text = answer(f"fedsim_{word}", " ".join(arguments) or None)
        return cut(printable(text.removesuffix(" VALUE"))) if text else nearest(word, self.commands)


app = typer.Typer(
    name="fedsim",
    cls=Commands,
    context_settings=HELP,
    help="Simulate distributed and federated SGD with N workers on one GPU or CPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command(context_settings=WORDS_LIKE_OPTIONS)(run)
app.command(context_settings=WORDS_LIKE_OPTIONS)(compare)
app.command()(replay)
app.command()(report)
app.command()(plot)
app.command(context_settings=WORDS_LIKE_OPTIONS)(privacy)
app.command()(doctor)
app.command()(new)
app.command("list")(list_command)


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
    """Run the command `fedsim`."""
    run_program(app)


def run_main() -> None:
    """Run the script `run_experiment.py`, which does the same as `fedsim run`."""
    single = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    single.command(context_settings={**WORDS_LIKE_OPTIONS, **HELP})(run)
    run_program(single)
