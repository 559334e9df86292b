"""The pages of the reference, which are generated from the code when the site is built."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any

import typer
from blocks import ROOT
from component_pictures import draw
from docstrings import cell, escaped, markdown_of

import fedsim
from fedsim.cli.main import app
from fedsim.clients.algorithm import ClientAlgorithm
from fedsim.clients.capabilities import CAPABILITIES
from fedsim.config.components import COMPONENTS, registry_of, trait_line
from fedsim.config.keys import attribute_docstrings, key_tables, type_text
from fedsim.errors import show
from fedsim.records import record
from fedsim.records.history import FILES

KINDS = {  # page title of each kind of component
    "rules": "Aggregation rules",
    "pre-aggregators": "Pre-aggregators",
    "attacks": "Attacks",
    "partitions": "Partitions",
    "client-algorithms": "Client algorithms",
    "server-optimizers": "Server optimizers",
    "schedules": "Learning-rate schedules",
    "sampling": "Sampling of cohorts",
    "processors": "Processors of updates",
    "privacy": "Privacy mechanisms",
    "policies": "Asynchronous policies",
    "topologies": "Topologies",
    "slowdowns": "Slowdowns of workers",
    "noises": "Noise of the time of work",
    "tasks": "Tasks",
    "metrics": "Metrics",
    "models": "Models",
    "datasets": "Data sets",
    "augmentations": "Augmentations",
    "engines": "Engines",
    "hooks": "Communication hooks",
    "loggers": "Loggers",
}
SOURCES = {  # files and folders that pages link to, as a code host does not show the reference; their reference page
    "fedsim/__init__.py": "python.md",
    "fedsim/aggregation/rules": "rules.md",
    "fedsim/asynchronous/policies": "policies.md",
    "fedsim/asynchronous/policies/topologies.py": "topologies.md",
    "fedsim/byzantine": "attacks.md",
    "fedsim/cli/main.py": "command-line.md",
    "fedsim/clients": "client-algorithms.md",
    "fedsim/clients/algorithm.py": "client-algorithms.md#methods-of-a-client-algorithm",
    "fedsim/config/schema.py": "experiment.md",
    "fedsim/core/metrics.py": "metrics.md",
    "fedsim/core/rows.py": "python.md#where-a-run-uses-these-names",
    "fedsim/data/partitions": "partitions.md",
    "fedsim/privacy/mechanisms.py": "privacy.md",
    "fedsim/processing/compressors.py": "processors.md",
    "fedsim/records/history.py": "run-folder.md",
    "fedsim/server/cohort.py": "sampling.md",
    "fedsim/server/optimizer.py": "server-optimizers.md",
}
SOURCE_LINK = re.compile(r"\]\(\.\./((?:\.\./)*)(fedsim/[^)#]*)\)")  # from a page of docs/ to a source file or folder
ROUND = "worker_state server_state message send start start_round step step_rows finish receive"  # in order
IN_A_RUN = re.compile(r"\*\*In a run\*\*: `(fedsim[\w.]+)`")  # in docstrings: a function that uses the described name
NAMED = re.compile(r"`(fedsim(?:\.[a-z_]+)*\.[A-Z_a-z]\w*(?:\.\w+)?)`")  # names of functions and classes
PYTHON = {  # section titles of the Python API page, and their names
    "Run experiments": "run Callback Result Session Experiment load_experiment load_run load_model StopRun",
    "Compare": "compare Comparison load_comparison plot",
    "Aggregate, attack and compress": "aggregate pre_aggregate attack compress",
    "Data": "load_dataset TensorData partition partition_transforms dataset_split CustomSubset label_counts "
    "heterogeneity Heterogeneity plot_partition",
    "Rows and training": "Layout bind new_rows pull_down train_epoch test Draws ServerOptimizer",
    "Lists of components": "components",
    "Errors": "FedsimError ExperimentError DataError RecordError WorkerError",
}
MODULES = (  # public modules besides fedsim
    "fedsim.aggregation",
    "fedsim.byzantine",
    "fedsim.data",
    "fedsim.data.partitions",
    "fedsim.models",
    "fedsim.clients",
    "fedsim.asynchronous.policies",
    "fedsim.integrations.ddp",
    "fedsim.integrations.lightning",
    "fedsim.integrations.flower",
    "fedsim.integrations.flower_datasets",
)


def component_page(kind: str, pictures: dict[str, str]) -> str:
    """Return the page of a kind of component. `pictures` maps components to the addresses of their pictures."""

    keys = " or ".join(f"`{key}`" if "," not in key else key for key in COMPONENTS[kind][0].split(", "))
    components = list(registry_of(kind))
    rows = [
        f"| [`{registration.name}`](#{registration.name}) | {cell(escaped(registration.summary))} |"
        for registration in components
    ]
    families = registry_of(kind).families.items()
    rows += [f"| `{prefix}:NAME` | {cell(escaped(_summary(make)))} |" for prefix, make in families]
    lead = (
        f"In an experiment: {keys}. `fedsim list {kind}` prints a list, `fedsim list {components[0].name}` one of them."
    )
    sections = [_component_section(registration, pictures.get(registration.name)) for registration in components]
    if kind == "client-algorithms":
        sections.append(_methods_of_algorithms())
    return "\n\n".join([f"# {KINDS[kind]}", lead, _table(["name", ""], rows), *sections])


def _methods_of_algorithms() -> str:
    """Return the section on the methods that a client algorithm may define."""
    methods = [(ClientAlgorithm, name) for name in ROUND.split()]
    methods += [(base, name) for base in CAPABILITIES for name in vars(base) if inspect.isfunction(vars(base)[name])]
    rows = []
    for base, name in methods:
        _, *parameters = inspect.signature(vars(base)[name]).parameters
        summary = cell(escaped(_summary(vars(base)[name])))
        rows.append(f"| `{name}({', '.join(parameters)})` | `{base.__name__}` | {summary} |")
    lead = (
        "A round calls the methods of `ClientAlgorithm` in this order. `row` is a flat parameter vector [d]. `rows` "
        "are one or several such vectors [..., d]. To define a method of another base class, derive from that class."
    )
    table = _table(["method", "base class", ""], rows)
    return "\n\n".join(["## Methods of a client algorithm", markdown_of(ClientAlgorithm, {}), lead, table])


def _summary(target: Any) -> str:
    return (inspect.getdoc(target) or "").partition("\n")[0]


def _component_section(registration: Any, picture: str | None) -> str:

    types = {}
    for name, field in registration.parameters.model_fields.items():
        types[name] = f"{type_text(field)}, {_default(field)}"
    lines = [f"## {registration.name} {{ #{registration.name} }}"]
    if picture:
        lines.append(f"![what {registration.name} does]({picture}){{ align=right loading=lazy }}")
    lines.append(markdown_of(registration.target, types))
    if line := trait_line(registration.target):
        lines.append(line[0].upper() + line[1:] + ".")
    if registration.takes:
        lines.append("Takes " + ", ".join(f"`{name}`" for name in registration.takes) + ".")
    module = registration.target.__module__
    lines.append(f"<small>`{module.replace('.', '/')}.py`</small>" + '\n\n<div style="clear: both"></div>')
    return "\n\n".join(lines)


def _default(field: Any) -> str:

    if field.is_required():
        return "required"
    return "by default unset" if field.default is None else f"by default `{show(field.default)}`"


def _table(head: list[str], rows: list[str]) -> str:
    """Return a table that the style sheet shows as a list on narrow screens, with labels if it has defaults."""
    table = "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows])
    classes = "listed settings" if head[-1] == "default" else "listed"
    return f'<div class="{classes}" markdown="1">\n\n{table}\n\n</div>'


def experiment_page() -> str:

    parts = [
        "# Keys of an experiment",
        "An experiment is a TOML file; `key=value` on the command line changes any key. A wrong key or value gives one "
        "line with the place, the value, what is allowed and the nearest right name. A table that names a component, "
        "such as `[partition]`, also holds the parameters of that component. A name stands for a table with only that "
        "name. "
        "`fedsim list keys` prints these keys, and `--dry-run` an experiment with all its settings.",
    ]
    for table in key_tables():
        if table.path:
            parts += [f"## [{table.path}] {{ #{table.path.replace('[]', '')} }}", escaped(table.description)]
        rows = [
            f"| `{key.path}` | {cell(escaped(key.description))} | {cell(key.type)} | `{cell(key.default)}` |"
            for key in table.keys
        ]
        if rows:
            parts.append(_table(["key", "meaning", "type", "default"], rows))
        if table.components:
            parts.append(
                "Further keys: the parameters of the named component, see "
                f"[{KINDS[table.components]}]({table.components}.md)."
            )
    return "\n\n".join(parts)


def command_page() -> str:

    parts = [
        "# Command line",
        "`fedsim COMMAND --help` prints the same. Exit codes: 0; 2 for a wrong input; 1 for a failed run.",
    ]
    for name, command in typer.main.get_command(app).commands.items():
        arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
        usage = " ".join(["fedsim", name, *(parameter.metavar or parameter.name.upper() for parameter in arguments)])
        parts += [f"## {name}", f"```text\n{usage}\n```", escaped(inspect.cleandoc(command.help or ""))]
        rows = []
        for parameter in command.params:
            option = parameter.param_type_name == "option"
            names = (
                ", ".join(f"`{name}`" for name in parameter.opts)
                if option
                else f"`{parameter.metavar or parameter.name.upper()}`"
            )
            default = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
            shown = "" if default in (None, False) or callable(default) else f"`{cell(str(default))}`"
            rows.append(f"| {names} | {cell(escaped(parameter.help or ''))} | {shown} |")
        parts.append(_table(["argument", "meaning", "default"], rows))
    return "\n\n".join(parts)


def python_page() -> str:
    parts = [
        "# Python",
        "The public names of `fedsim` and of [modules](#modules). Anything else may change without notice.",
    ]
    for title, names in PYTHON.items():
        parts.append(f"## {title}")
        for name in names.split():
            parts += _api_section(f"fedsim.{name}", getattr(fedsim, name))
    rows = []
    for module in MODULES:
        summary, names = public_names(module)
        rows.append(f"| `{module}` | {cell(escaped(summary))} | {', '.join(f'`{name}`' for name in names)} |")
    parts += ["## Modules", _table(["module", "", "public names"], rows)]
    return linked("\n\n".join(parts), IN_A_RUN, r"**In a run:** [`\1`](#\1)", "Where a run uses these names")


def public_names(module: str) -> tuple[str, list[str]]:
    """Return the first line of a module's docstring, and the names in its `__all__` or else its own names.

    The module is not imported, because some modules need packages that may be missing.
    """
    path = ROOT / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text())
    names = [node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
    return (ast.get_docstring(tree) or "").partition("\n")[0], [name for name in names if not name.startswith("_")]


def linked(page: str, names: re.Pattern[str], link: str, title: str) -> str:
    """Return a page in which names of functions and classes link to their source code, which a last section shows.

    Args:
        page: Markdown text.
        names: pattern of the text to replace. Its first group is a name, such as "fedsim.core.rows.Layout.of".
        link: replacement template, as in `re.sub`.
        title: title of the last section.
    """
    sources = [
        f"`{name}`\n{{ #{name} }}\n\n```python\n{textwrap.dedent(inspect.getsource(resolve_name(name)))}```"
        for name in dict.fromkeys(names.findall(page))
    ]
    return "\n\n".join([names.sub(link, page), f"## {title}", *sources])


def _api_section(path: str, target: Any) -> Iterator[str]:
    yield f"### {path} {{ #{path} }}"
    yield f"```python\n{_signature(path, target)}\n```"
    yield markdown_of(target)
    if isinstance(target, type) and not issubclass(target, BaseException):
        package = target.__module__.rpartition(".")[0]
        members = {}
        for base in reversed(target.__mro__):
            members |= vars(base) if base.__module__.startswith(package) else {}
        for name, member in members.items():
            if name.startswith("_") or not inspect.getdoc(member):
                continue
            function = getattr(member, "__func__", member)
            if isinstance(member, property) or inspect.isfunction(function):
                head = name if isinstance(member, property) else _signature(name, getattr(target, name))
                yield f"**`{' '.join(head.split())}`**"
                yield markdown_of(member)


def _signature(name: str, target: Any) -> str:
    """Return `name(parameter: type = default, ...) -> type`, on several lines if it is long."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return name
    if isinstance(target, type) and issubclass(target, BaseException):
        return name
    if target is fedsim.Experiment:  # pydantic replaces it by that of all fields when the class is used
        signature = inspect.signature(target.__init__.__get__(object()))
    parameters = [str(each).replace("'", "") for each in signature.parameters.values()]
    kinds = [each.kind for each in signature.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    annotation = signature.return_annotation
    result = "" if annotation is signature.empty else f" -> {str(annotation).strip(chr(39))}"
    line = f"{name}({', '.join(parameters)}){result}"
    return line if len(line) <= 90 else f"{name}(\n    " + ",\n    ".join(parameters) + f",\n){result}"


def run_folder_page() -> str:

    files = [f"| `{name}` | {cell(escaped(text))} |" for name, text in FILES.items()]
    comparison = inspect.getdoc(importlib.import_module("fedsim.comparison.folder")) or ""
    parts = ["# Run folder", "Every file is written whole or not at all.", _table(["file", ""], files)]
    kinds = {
        "A round": record.RoundRecord,
        "asynchronous": record.AsyncRecord,
        "timeline": record.TimelineRecord,
        "race": record.RaceRecord,
    }
    for title, kind in kinds.items():
        described = attribute_docstrings(kind)
        rows = [f"| `{name}` | {cell(escaped(described.get(name, '')))} |" for name in kind.__dataclass_fields__]
        heading = f"## {title}" if kind is record.RoundRecord else f"## The field `{title}`"
        parts += [heading, escaped((inspect.getdoc(kind) or "").partition(">>>")[0].strip())]
        parts.append(_table(["field", ""], rows))
    head, _, rest = comparison.partition("\n")
    parts += ["## Folder of a comparison", escaped(head), f"```text\n{rest.strip()}\n```"]
    return "\n\n".join(parts)


def index_page() -> str:
    pages = ["experiment.md", "command-line.md", "python.md", "run-folder.md"]
    titles = ["Keys of an experiment", "Command line", "Python", "Run folder"]
    lines = [f"- [{title}]({page})" for title, page in zip(titles, pages, strict=True)]
    components = [f"- [{title}]({kind}.md)" for kind, title in KINDS.items()]
    return "\n".join(["# Reference", "", *lines, "", "What an experiment can name:", "", *components])


def on_files(files: Any, config: Any) -> None:
    """mkdocs hook: add the pages."""
    from mkdocs.structure.files import File

    pages = {"index": index_page, "experiment": experiment_page, "command-line": command_page}
    pages |= {"python": python_page, "run-folder": run_folder_page}
    pages |= {kind: functools.partial(component_page, kind, {}) for kind in KINDS}
    for name, write in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=write()))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """mkdocs hook: add pictures of components, and link to the reference and to source code."""
    from mkdocs.structure.files import File

    markdown = SOURCE_LINK.sub(_link_to_reference, markdown)

    folder, _, name = page.file.src_uri.removesuffix(".md").rpartition("/")
    if page.file.src_uri == "explanation/architecture.md":
        return linked(markdown, NAMED, r"[`\1`](#\1)", "Source code")
    if folder != "reference" or name not in KINDS:
        return markdown
    addresses = {}
    for registration in registry_of(name):
        if (picture := draw(name, registration)) is not None:
            addresses[registration.name] = f"{name}-{registration.name}.svg"
            files.append(File.generated(config, f"reference/{addresses[registration.name]}", content=picture))
    return component_page(name, addresses)


def _link_to_reference(link: re.Match[str]) -> str:
    """Return the link to the reference page of a source, or the link itself if there is none."""
    return f"]({link[1]}reference/{SOURCES[link[2]]})" if link[2] in SOURCES else link[0]


def on_config(config: Any) -> None:
    """mkdocs hook: rebuild when the code changes, under `mkdocs serve`."""
    config.watch.append(str(ROOT / "fedsim"))
