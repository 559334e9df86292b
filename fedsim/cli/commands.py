"""The commands of `fedsim`, except `compare`, which has a separate module."""

from __future__ import annotations

import contextlib
import importlib.util
import keyword
import platform
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsim.cli.program import FAILED, errors_as_lines
from fedsim.cli.words import AllowImports, Labels, Quiet, Words, complete_metrics, is_folder, source_and_overrides
from fedsim.config.components import COMPONENTS, list_module, registry_of
from fedsim.config.files import experiments
from fedsim.config.listing import KINDS, describe_component, list_kind, overview
from fedsim.core.status_line import status_line, with_status_line
from fedsim.core.text_wrapping import hang, terminal_columns
from fedsim.errors import ExperimentError, SettingWarning, cut, one_line, show
from fedsim.system.files import user_path
from fedsim.system.packages import EXTRAS
from fedsim.version import __version__

if TYPE_CHECKING:
    from fedsim.config.experiment import Experiment

COLUMNS = max(map(len, KINDS))
TEMPLATE_NAME = "my_project"
PACKAGE = Path(__file__).parent.parent
FOLDERS = (PACKAGE / "project_template", PACKAGE.parent / "project_template")  # in an installed wheel; in a checkout


Out = Annotated[
    Path | None, typer.Option(help="Output folder; it must be new or empty.", show_default="runs/NAME-DATE-TIME")
]
Resume = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN",
        help="Continue the run in this folder from its newest checkpoint. Set rounds=N to make the run longer. If "
        "the folder does not contain a run yet, CONFIG.toml starts one there.",
        show_default=False,
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check the run, print the experiment with all its settings, and stop.")
]


def run(
    context: typer.Context,
    words: Words = None,
    out: Out = None,
    resume: Resume = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    allow_imports: AllowImports = False,
) -> None:
    """Run an experiment and write its records to a folder."""
    with errors_as_lines():
        if resume and out:
            raise ExperimentError("--resume and --out: --resume already sets the output folder; omit --out")
        source, overrides = source_and_overrides(words or [], context)
        is_stored = bool(resume and not source)
        if resume and not source:
            from fedsim.records.history import experiment_of_run

            source = str(experiment_of_run(resume))
    with errors_as_lines("fedsim.runs.setup" if dry_run else "fedsim.runs.run"), contextlib.ExitStack() as stack:
        import fedsim
        from fedsim.config.load import load_experiment, with_data
        from fedsim.core.import_policy import reading_stored_run
        from fedsim.data.sources import data_loaded_once
        from fedsim.engines import engine as engines
        from fedsim.records.run_folder import new_folder
        from fedsim.runs.launch import under_launcher

        stack.enter_context(data_loaded_once())
        if is_stored:
            stack.enter_context(reading_stored_run())
        with status_line("checking the experiment and its data"):
            experiment = under_launcher(load_experiment(source, overrides, allow_imports=allow_imports))
            experiment = experiment if dry_run else with_data(experiment)
        if dry_run:
            _check(experiment)
            return
        main = engines.get(experiment.engine).target.is_main()
        chosen = resume or out or (None if main else Path(experiment.name))  # only the main process writes
        folder = chosen or stack.enter_context(new_folder(experiment.name))
        fedsim.run(experiment, folder, resume=bool(resume), progress=not quiet)
        if main:
            print(folder)


def _check(experiment: Experiment) -> None:
    """Check an experiment, and print it with all its settings."""
    from fedsim.asynchronous.policies.topologies import line_of
    from fedsim.config.files import to_toml
    from fedsim.config.validation import warnings_about
    from fedsim.runs.session import Session
    from fedsim.runs.setup import check_run

    with status_line("checking the run"), Session() as session:
        task = check_run(experiment, session, to_run=False)
    for line in warnings_about(experiment):
        warnings.warn(line, SettingWarning, stacklevel=1)
    if storage := task.storage_of_updates:
        print(f"# {storage}")
    if metadata := experiment.topology_metadata:
        print(f"# {line_of(metadata)}")
    print(to_toml(experiment), end="")
    for key, noise in experiment.noise_found(task.experiment).items():
        print(f"# {key} = {noise:g} for privacy.target_epsilon")


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
        int | None, typer.Option(help="Round whose updates were recorded.", show_default="the last")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    allow_imports: AllowImports = False,
) -> None:
    """Apply different rules to a recorded round of a run ('records.updates=[1,5]'), and compare the results."""
    with errors_as_lines("fedsim.cli.rule_replay"):
        from fedsim.cli.rule_replay import load_round, replay_json, replay_table
        from fedsim.cli.rule_replay import replay as replay_rules
        from fedsim.comparison.axes import split_at_commas
        from fedsim.config.overrides import parse_value

        chosen = [parse_value(text.strip(), "--rules") for text in split_at_commas(rules)] if rules else None
        with status_line("applying the rules"):
            stored = load_round(folder, round, allow_imports=allow_imports)
            results = replay_rules(stored, chosen)
        print(replay_json(stored, results) if json else replay_table(stored, results, terminal_columns()))


def privacy(
    context: typer.Context,
    words: Words = None,
    target_epsilon: Annotated[
        float | None, typer.Option(help="Also show which noise this epsilon needs.", show_default=False)
    ] = None,
    allow_imports: AllowImports = False,
) -> None:
    """Show which epsilon an experiment costs, before it runs."""
    with errors_as_lines():
        source, overrides = source_and_overrides(words or [], context)
        if target_epsilon is not None and not 0 < target_epsilon <= 1e6:
            raise ExperimentError(f"--target-epsilon = {target_epsilon:g}: must be greater than 0 and at most 1e6")
    with errors_as_lines("fedsim.cli.privacy_plan"):
        from fedsim.cli.privacy_plan import privacy_plan
        from fedsim.config.load import load_experiment

        with status_line("computing epsilon"):
            experiment = load_experiment(source, overrides, allow_imports=allow_imports)
            lines = privacy_plan(experiment, target_epsilon)
        for topic, text in lines:
            _print(topic, text)


def report(
    folder: Annotated[
        Path,
        typer.Argument(metavar="RUN_OR_COMPARISON", help="The folder of a run or of a comparison.", show_default=False),
    ],
    out: Annotated[
        Path | None, typer.Option(help="HTML file to write.", show_default="report.html in that folder")
    ] = None,
) -> None:
    """Write a self-contained HTML report of a run or a comparison."""
    with errors_as_lines("fedsim.report"):
        from fedsim.report import write_report

        with status_line("writing the report"):
            path = write_report(folder, out)
        print(path)


Subjects = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KIND|NAME|MODULE:NAME|FILE.py",
        help=f"A kind of component ({', '.join(KINDS)}), a component such as krum or my_rules:clipped_mean, or a "
        "Python file whose functions and classes are listed.",
        show_default="all",
    ),
]
Search = Annotated[
    str,
    typer.Option(
        help='List only entries whose name or documentation has words that start with these: --search "test set".',
        show_default=False,
    ),
]


def list_command(subjects: Subjects = None, search: Search = "") -> None:
    """List all components and built-in experiments by name, or the components of one kind with their parameters."""
    with errors_as_lines():
        with status_line("importing the components"):
            text = _listing(subjects or [], search, terminal_columns())
        print(text)


def _listing(subjects: list[str], search: str, columns: int | None) -> str:
    """Return what `fedsim list` prints, wrapped to `columns` characters. Its arguments are those of the command."""
    words = [subject for subject in subjects if subject not in KINDS]
    if search and words:
        raise ExperimentError(
            f"--search: {show(words[0])} is not a kind of component ({', '.join(KINDS)}); to search for several words "
            f'write --search "{cut(" ".join([search, *words]))}"'
        )
    if len(subjects) > 1:
        raise ExperimentError(f"{show(subjects[1])}: is a second name; write fedsim list {cut(subjects[1])}")
    subject = subjects[0] if subjects else None
    if subject is not None and subject not in KINDS:
        if subject in experiments() and not any(subject in registry_of(kind).names() for kind in COMPONENTS):
            return experiments()[subject].read_text(encoding="utf-8").rstrip("\n")
        is_file = subject.endswith(".py")
        return list_module(user_path(subject), columns) if is_file else describe_component(subject)
    if subject is None and not search:
        more = "fedsim list KIND or NAME shows details; fedsim list keys shows the keys of an experiment"
        return "\n".join([overview(columns), "", hang("", f"{more}; --search finds words", columns)])
    blocks = [list_kind(kind, columns, search) for kind in KINDS if subject in (None, kind)]
    if not any(blocks):
        raise ExperimentError(f"--search {show(search)}: no entry contains these words; run fedsim list to see all")
    return "\n\n".join(filter(None, blocks))


PlottedWords = Annotated[
    list[str],
    typer.Argument(
        metavar="FOLDER... [KEY=VALUE,...]...",
        help="Folder of a comparison, or folders of one or more runs. For keys of a comparison, the values to "
        "draw: attack.name=none,alie.",
        show_default=False,
    ),
]
PlottedNumber = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Metric to draw, such as test_loss or metrics.drift.",
        show_default="the metric of the comparison",
        autocompletion=complete_metrics,
    ),
]
Scale = Annotated[
    str,
    typer.Option(
        "--x",
        metavar="SCALE",
        help="x axis: round, virtual_seconds, updates, arrivals, seconds, bytes or top_bytes, or a compared key "
        "with at least three numbers, such as attack.scale.",
    ),
]
FigureKind = Annotated[
    str, typer.Option(help="Kind of figure: curves, heatmap, or timeline (of a run on the virtual clock, or a race).")
]
Style = Annotated[str, typer.Option(help="Style: paper (8 pt, TrueType fonts, no title) or screen (with a title).")]
Width = Annotated[float | None, typer.Option(help="Width in inches.", show_default="3.35; 6.9 for several panels")]
Height = Annotated[float | None, typer.Option(help="Height in inches.", show_default="fits the content")]
XRange = Annotated[
    tuple[float, float] | None, typer.Option(metavar="LOW HIGH", help="Range of the x axis: --x-range 0 50.")
]
YRange = Annotated[
    tuple[float, float] | None, typer.Option(metavar="LOW HIGH", help="Range of the y axis: --y-range 0.9 1.")
]
FigureFile = Annotated[Path, typer.Option(help="File to write: .pdf, .svg or .png.")]


def plot(
    words: PlottedWords,
    metric: PlottedNumber = None,
    x: Scale = "round",
    kind: FigureKind = "curves",
    style: Style = "paper",
    width: Width = None,
    height: Height = None,
    x_range: XRange = None,
    y_range: YRange = None,
    label: Labels = None,
    out: FigureFile = Path("figure.pdf"),
) -> None:
    """Draw a figure of runs or of a comparison for a paper, and print a caption for the figure."""
    with errors_as_lines("fedsim.comparison"):
        from fedsim.comparison.axes import axis_called, split_labels
        from fedsim.comparison.labels import labels_of
        from fedsim.comparison.paper_figure import comparison_of_sources, timeline_table
        from fedsim.comparison.paper_figure import plot as draw

        keys = {word: word.partition("=") for word in words if "=" in word and not is_folder(word)}
        folders = [Path(word) for word in words if word not in keys]
        if not folders:
            raise ExperimentError(
                f"{show(words[0])}: is not a folder; put the folder of a run or of a comparison first"
            )
        with status_line("drawing the figure"):
            source = comparison_of_sources(folders)
            only = {
                key: split_labels(values, source.axes.get(axis_called(key), ())) for key, _, values in keys.values()
            }
            figure = draw(
                source,
                metric=metric,
                x=x,
                kind=kind,  # type: ignore[arg-type]  # checked there
                only=only,
                style=style,  # type: ignore[arg-type]
                width=width,
                height=height,
                x_range=x_range,
                y_range=y_range,
                labels=labels_of(label or [], source.axes),
                out=out,
            )
        if kind == "timeline":
            print(timeline_table(source, only))
        print(figure.get_label())
        print(out)


def doctor() -> None:
    """Show the hardware and software that fedsim finds, what each engine would do here, and how to solve problems."""
    with errors_as_lines():
        problems, fatal = list[tuple[str, str]](), False
        for topic, text in _versions():
            _print(topic, text)
        try:
            with status_line("importing PyTorch"):
                from fedsim.cli.checkup import findings

            print("", flush=True)
            for finding in with_status_line("examining this machine", findings()):
                _print(finding.about, finding.found)
                problems += finding.problems
                fatal |= finding.fatal
        except (ImportError, OSError) as error:  # a library of PyTorch is missing, for example
            problems.append((f"fedsim cannot be imported: {one_line(error)}", "install PyTorch and fedsim again"))
            fatal = True
        print()
        for problem, remedy in problems:
            print(f"problem: {problem}\n     do: {remedy}")
        if not problems:
            print("no problems found")
        if fatal:
            raise typer.Exit(FAILED)


def _print(topic: str, text: str) -> None:
    print(hang(f"{topic:<{COLUMNS}} ", text, terminal_columns()), flush=True)


def _versions() -> Iterator[tuple[str, str]]:
    """Yield the names and versions of the packages that fedsim uses."""
    yield "fedsim", f"{__version__}, on Python {platform.python_version()}, {platform.platform(terse=True)}"
    yield "packages", ", ".join(f"{name} {_version(name) or 'missing'}" for name in ("torch", "torchvision", "numpy"))
    extras = [name for name, packages in EXTRAS.items() if all(map(_version, packages))]
    yield "extras", ", ".join(extras) or "none"
    if missing := [" ".join(packages) for name, packages in EXTRAS.items() if name not in extras]:
        yield "optional", f"not installed (pip install NAMES): {', '.join(missing)}"


def _version(package: str) -> str | None:
    from importlib import metadata  # imported here to keep `fedsim --help` fast

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def new(
    name: Annotated[
        Path, typer.Argument(metavar="NAME", help="Name of the folder and of the Python module in the folder.")
    ],
) -> None:
    """Create a folder with an experiment, your own components, tests for them, and a README that explains the files."""
    with errors_as_lines():
        folder = make_project(name)
        print("\n".join(str(folder / path.name) for path in sorted(folder.iterdir())))
        print(f"next: cd {folder} && fedsim run experiment.toml")


def make_project(path: Path) -> Path:
    """Create the folder of a new project, and return its path.

    Raises ExperimentError if the folder exists, or if its name cannot be the name of a Python module.
    """
    name = re.sub(r"[\s.-]", "_", path.name)
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ExperimentError(
            f"{show(path.name)}: is not a valid name of a Python module; use letters, digits and _, as in my_study"
        )
    folder = path.with_name(name)
    if folder.exists():
        raise ExperimentError(f"{folder}: exists already; choose another name")
    if name != TEMPLATE_NAME and (name in sys.modules or importlib.util.find_spec(name)):
        raise ExperimentError(f"{show(name)}: is the name of an installed Python module; choose another name")
    folder.mkdir(parents=True)
    for file in next(filter(Path.is_dir, FOLDERS)).glob("*.*"):
        text = file.read_text(encoding="utf-8").replace(TEMPLATE_NAME, name)
        (folder / file.name.replace(TEMPLATE_NAME, name)).write_text(text, encoding="utf-8")
    return folder
