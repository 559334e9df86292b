"""The command line: `fedsim run`, `compare`, `tune`, `replay`, `report`, `list`; `run_experiment.py` is the first."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsim.catalog import experiments, list_experiments
from fedsim.errors import (
    ExperimentError,
    FedsimError,
    WorkerError,
    closest,
    cut,
    nearest,
    plural,
    printable,
    show,
    warnings_as_lines,
)
from fedsim.listing import PLUGS, describe_plug, list_plugs
from fedsim.notices import notice_if_slow
from fedsim.system.files import is_file
from fedsim.system.interrupts import Terminated, exit_on_interrupt, signals_as_exceptions
from fedsim.system.limits import told
from fedsim.version import __version__
from fedsim.wrapping import terminal_columns

if TYPE_CHECKING:
    from fedsim.engines.ranks import Ranks

EXPERIMENTS = "experiments"
KINDS = (*PLUGS, EXPERIMENTS)  # of things that `fedsim list` lists

BAD_INPUT, FAILED, INTERRUPTED, TERMINATED = 2, 1, 130, 143

app = typer.Typer(
    name="fedsim",
    help="Simulate distributed and federated SGD with N workers on one GPU or CPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
WORDS_LIKE_OPTIONS = {"ignore_unknown_options": True}  # `--rounds 3` comes as words, and is told to be `rounds=3`

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG.toml] [KEY=VALUE]...",
        help="An experiment file, or the name of a built-in experiment (`fedsim list experiments`), and the keys to "
        "change: rounds=5 local.lr=0.1 partition.strategy=iid. Without a file or name: the default experiment.",
        show_default=False,
    ),
]

AllowImports = Annotated[
    bool,
    typer.Option(
        "--allow-imports",
        help="Allow files to import Python code by package.module:name. Importing runs that code. Import paths that "
        "you type on the command line are always allowed.",
    ),
]


def _print_version(asked: bool) -> None:
    if asked:
        print(f"fedsim {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command(context_settings=WORDS_LIKE_OPTIONS)
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
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the output folder.")] = False,
    allow_imports: AllowImports = False,
) -> None:
    """Run an experiment and write its records to a folder."""
    with _errors_as_lines():
        import fedsim
        from fedsim.engines import engine as engines
        from fedsim.loading import load_experiment, to_toml
        from fedsim.records import experiment_of_run, new_folder_name

        source, overrides = _source_and_overrides(words or [], context)
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


@app.command(context_settings=WORDS_LIKE_OPTIONS)
def compare(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.toml] [KEY=VALUE,VALUE...]...",
            help="An experiment file, and the keys to vary, with their values: aggregate.rule=mean,median seed=0,1,2. "
            r"A file may list them in its table \[grid]. KEY=VALUE sets one value in all runs. Or folders of "
            "comparisons, or of the parts of one (--shard), to merge.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Output folder. If it holds the same comparison, the missing runs are done.",
            show_default="runs/NAME-grid-DATE-TIME",
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Runs at a time.", show_default="by cores and memory; 1 on a GPU")
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Do only part I of N (I counts from 0), in shards/I-of-N of the folder.",
            show_default="all",
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            help="A test accuracy, such as 0.97: report the time until a run reaches it.", show_default="none"
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the runs, list them, and stop.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the output folder.")] = False,
    allow_imports: AllowImports = False,
) -> None:
    """Run an experiment with every combination of values, and compare the results: table, CSV and figures."""
    with _errors_as_lines():
        from fedsim.comparison import load_grid, run_grid
        from fedsim.comparison.axes import describe_point
        from fedsim.comparison.display import GridDisplay
        from fedsim.comparison.gathering import Shard, gather
        from fedsim.records import new_folder_name

        folders = [Path(word) for word in words or [] if _is_folder(word)]
        if folders:
            if len(folders) < len(words or []) or shard or dry_run:
                raise ExperimentError(
                    "to merge folders of comparisons, give only these folders, --out, --target and --allow-imports"
                )
            folder = out or (folders[0] if len(folders) == 1 else new_folder_name(f"{folders[0].name}-grid"))
            comparison = gather(folders, folder, target, allow_imports=allow_imports)
        else:
            source, changes = _source_and_overrides(words or [], context)
            with notice_if_slow("checking all runs"):
                grid = load_grid(source, words=changes, target=target, allow_imports=allow_imports)
            part = Shard.parse(shard) if shard else None
            if part and out is None:
                raise ExperimentError("--shard: needs --out FOLDER, the same folder for all parts")
            if dry_run:
                planned = part.of(grid) if part else grid.runs
                print("\n".join(f"{run.id}: {describe_point(run.point)}" for run in planned))
                return
            folder = out or new_folder_name(f"{grid.name}-grid")
            folder = part.folder(folder) if part else folder
            with GridDisplay(folder, quiet=quiet) as display:
                comparison = run_grid(grid, folder, jobs, display, part=part.of(grid) if part else None)
        if not quiet and not shard:
            print(comparison.table, end="\n\n")
        print(folder)
        for failed in comparison.failed:
            print(f"error: {failed.id}: {failed.error}", file=sys.stderr)
        if comparison.failed:
            raise typer.Exit(FAILED)


@app.command(context_settings=WORDS_LIKE_OPTIONS)
def tune(context: typer.Context, words: Words = None, allow_imports: AllowImports = False) -> None:
    """Measure which engine is fastest for an experiment here, and print the lines to put into its file."""
    with _errors_as_lines():
        from fedsim.loading import load_experiment
        from fedsim.runs.tuning import Candidate, lines_for_file
        from fedsim.runs.tuning import tune as measure

        source, overrides = _source_and_overrides(words or [], context)
        experiment = load_experiment(source, overrides, allow_imports=allow_imports)

        def show_candidate(candidate: Candidate) -> None:
            total = f"{candidate.seconds(experiment.rounds):.1f} s"
            figures = f"{candidate.round_seconds:8.3f} s {candidate.start_seconds:6.1f} s {total:>12}"
            print(f"{candidate.label:<32}{candidate.refusal or figures}", flush=True)

        print("measuring rounds of a few steps, scaled to whole rounds; nothing else should run meanwhile", flush=True)
        print(f"{'':<32}{'a round':>10} {'start':>8} {plural(experiment.rounds, 'round'):>12}", flush=True)
        best = measure(experiment, show_candidate)
        print(f"\n{lines_for_file(best)}")


@app.command()
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
    with _errors_as_lines():
        from fedsim.comparison.axes import split_at_commas
        from fedsim.loading import parse_value
        from fedsim.runs.replay import applicable_rules, load_round, replay_json, replay_table
        from fedsim.runs.replay import replay as replay_rules

        stored = load_round(folder, round, allow_imports=allow_imports)
        chosen = (
            [parse_value(text.strip(), "--rules") for text in split_at_commas(rules)]
            if rules
            else applicable_rules(stored)
        )
        results = replay_rules(stored, chosen)
        print(replay_json(stored, results) if json else replay_table(stored, results, terminal_columns()))


@app.command()
def report(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN_OR_GRID", help="The folder of a run or of a comparison.", show_default=False)
    ],
    out: Annotated[Path | None, typer.Option(help="The HTML file.", show_default="report.html in that folder")] = None,
) -> None:
    """Write a self-contained HTML report of a run or a comparison."""
    with _errors_as_lines():
        from fedsim.report import write_report

        print(write_report(folder, out))


@app.command("list")
def list_command(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND|NAME|MODULE:NAME",
            help=f"A kind ({', '.join(KINDS)}), or one plug, such as krum or your own my_rules:clipped_mean, with its "
            "whole docstring.",
            show_default="all",
        ),
    ] = None,
) -> None:
    """List plugs with their parameters and defaults, and the experiments that come with fedsim, one line each."""
    with _errors_as_lines():
        if what is not None and what not in KINDS:
            print(describe_plug(what, KINDS))
            return
        plugs = [each for each in PLUGS if what in (None, each)]
        blocks = [list_plugs(plugs, terminal_columns())] if plugs else []
        if what in (None, EXPERIMENTS):
            blocks.append(list_experiments(terminal_columns()))
        print("\n\n".join(blocks))


def _source_and_overrides(words: list[str], context: typer.Context) -> tuple[str | None, list[str]]:
    """The configuration's path, if there is one among the words, and the key=value words."""
    for word, next_word in zip(words, [*words[1:], ""], strict=False):
        if word.startswith("-"):
            raise ExperimentError(_no_such_option(word, next_word, context))
    others = [word for word in words if not (is_file(Path(word)) or word in experiments())]
    _refuse_spaces(others)
    paths = [word for word in words if "=" not in word or word not in others]
    if len(paths) > 1:
        raise ExperimentError(f"{show(paths[1])}: expected key=value; the experiment is {show(paths[0])} already")
    return (paths[0] if paths else None), [word for word in words if word not in paths]


def _refuse_spaces(words: list[str]) -> None:
    """Raise ExperimentError for key=value with spaces in it, which a shell takes apart: `rounds = 3`, `x=[0, 1]`."""
    from fedsim.experiment import keys_called

    for index, word in enumerate(words):
        rest = words[index:]
        apart = re.match(r"([\w.]+)(?: ?[=:] ?| )([^\s=]+)(?!\S)", " ".join(rest[:3]))
        if "=" not in word.removesuffix("=") and apart and (keys := keys_called(apart[1])):
            wanted = " or ".join(f"{key}={apart[2]}" for key in keys)
            raise ExperimentError(f"{show(apart[0])}: write {wanted}, without spaces")
        if "=" not in word and not _is_folder(word) and keys_called(word):
            raise ExperimentError(f"{word}: this key needs a value, as in {word}=VALUE")
        if index and re.fullmatch(r"[\d.,]+", word):
            raise ExperimentError(f"{show(word)}: expected key=value; several values are written seed=0,1,2")
        pieces = itertools.accumulate(rest, "{} {}".format) if _is_open(word) else ()
        if whole := next((piece for piece in pieces if not _is_open(piece)), None):
            raise ExperimentError(f"{cut(whole)}: has spaces; put it in quotes, as in '{cut(whole)}'")


def _is_open(word: str) -> bool:
    """Whether a list or table is not closed in it."""
    return sum(word.count(each) for each in "[{") > sum(word.count(each) for each in "]}")


def _is_folder(word: str) -> bool:
    try:
        return Path(word).is_dir()
    except OSError:  # too long a word to be a name
        return False


def _no_such_option(word: str, next_word: str, context: typer.Context) -> str:
    """What to write instead of `--rounds 3`, or which option was meant."""
    from fedsim.experiment import Experiment, keys_called

    option, equals, value = word.partition("=")
    name = option.lstrip("-").replace("-", "_")
    options = [each for parameter in context.command.params for each in parameter.opts if each.startswith("--")]
    keys = keys_called(name) or ([] if closest(name, options) else closest(name, Experiment.model_fields))
    if not keys:
        return f"{option}: no such option; {nearest(name, [*options, '--help'])}"
    value = value if equals else next_word
    words = " or ".join(f"{key}={value or 'VALUE'}" for key in keys)
    return f"{option}: no such option; did you mean {words}?"


def _import_library() -> None:
    """Import PyTorch and the library, which takes a second or more; the commands import from it what they need.

    Not at the top of this module, so that `--help` and `--version` answer at once.
    """
    with exit_on_interrupt(), notice_if_slow("importing PyTorch"):
        import fedsim.api  # noqa: F401


@contextlib.contextmanager
def _errors_as_lines() -> Iterator[None]:
    """Errors as lines on stderr and an exit code, without a traceback of fedsim's own."""
    try:
        with warnings_as_lines():
            _import_library()
            with signals_as_exceptions():
                yield
    except WorkerError as error:
        print(f"error: {_shown(str(error))}", file=sys.stderr)
        raise typer.Exit(FAILED) from None
    except FedsimError as error:
        for line in str(error).splitlines():
            print(f"error: {_shown(line)}", file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None
    except (OSError, MemoryError, RuntimeError) as error:  # what the system refuses, where nobody has foreseen it
        line = told(error)
        if line is None or (isinstance(sys.stdout, Output) and sys.stdout.failure is not None):  # `_start` tells that
            raise
        print(f"error: {line}", file=sys.stderr)
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except Terminated:
        print("terminated", file=sys.stderr)
        raise typer.Exit(TERMINATED) from None


def _shown(text: str) -> str:
    """Lines without what a terminal would obey, whatever files and folders are called."""
    return "\n".join(map(printable, text.split("\n")))


def main() -> None:
    """The console script `fedsim`."""
    _start(app)


def run_main() -> None:
    """The script `run_experiment.py`: `fedsim run` without the word."""
    single = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    single.command(context_settings=WORDS_LIKE_OPTIONS)(run)
    _start(single)


def _start(program: typer.Typer) -> None:
    """Run a program to its exit; where stdout takes no more, with a line on stderr, unless its reader has just gone."""
    if sys.stderr is None:  # closed, as by `2>&-`
        sys.stderr = io.TextIOWrapper(io.FileIO(os.devnull, "w"))
    if sys.stdout is None:  # closed, as by `>&-`
        return _run_to_exit(program)
    out = sys.stdout = Output(
        sys.stdout.buffer,
        sys.stdout.encoding,
        "backslashreplace"
        if sys.stdout.errors == "strict"
        else sys.stdout.errors,  # as stderr does: say it all the same
        line_buffering=sys.stdout.line_buffering,
        write_through=sys.stdout.write_through,
    )
    try:
        _run_to_exit(program)
    finally:
        with contextlib.suppress(OSError):
            out.flush()
        if out.failure is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # or Python complains at exit
            if not isinstance(out.failure, BrokenPipeError):
                print(f"error: standard output cannot be written: {out.failure.strerror}", file=sys.stderr)
            sys.exit(FAILED)


def _run_to_exit(program: typer.Typer) -> None:
    """Run a program; one rank of several, where it has failed, ends there."""
    try:
        program()
    except SystemExit as leaving:
        if leaving.code and (ranks := _joined_ranks()) is not None:
            sys.stdout.flush()
            ranks.end_program(leaving.code if isinstance(leaving.code, int) else FAILED)
        raise


def _joined_ranks() -> Ranks | None:
    """The ranks that this process has joined, if any; PyTorch is not imported only to find that there are none."""
    module = sys.modules.get("fedsim.engines.ranks")
    return None if module is None else module.Ranks.joined


class Output(io.TextIOWrapper):
    """A stdout that remembers why it could not be written, so that this is told from other failures."""

    failure: OSError | None = None

    def write(self, text: str) -> int:
        with self._failure_noted():
            return super().write(text)

    def flush(self) -> None:
        with self._failure_noted():
            super().flush()

    @contextlib.contextmanager
    def _failure_noted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = error
            raise
