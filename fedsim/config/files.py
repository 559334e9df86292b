"""Experiments as TOML and YAML files, found by path or by the name of a built-in experiment."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from fedsim.core.input_limits import MAX_DEPTH, problem_with_words, refuse_long_chains
from fedsim.core.text_wrapping import hang
from fedsim.errors import ExperimentError, cut, show
from fedsim.hints.names import closest, did_you_mean, has_words
from fedsim.system.files import decoded, is_file, read_bounded, user_path
from fedsim.system.packages import import_extra
from fedsim.toml import tomllib

if TYPE_CHECKING:
    from fedsim.config.experiment import Experiment

COMPARISON = "comparison"  # table that contains the axes of a comparison
EXPERIMENT = "experiment.toml"  # name of the file with all settings in a run folder
MAX_BYTES = 8 * 2**20  # maximum size of an experiment file: enough for the weights of a million workers
NAME_COLUMNS = 26
PACKAGE = Path(__file__).parent.parent
FOLDERS = (PACKAGE / "experiments", PACKAGE.parent / "experiments")  # in an installed wheel; in a checkout
TOML_REMEDY = (
    "write key = value with text in double quotes, true and false in lower case, lists in [ ]; name YAML files .yaml"
)
YAML_SCALARS = {  # scalars of the YAML 1.2 core schema by tag; `no` and `2024-01-01` are strings
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
YAML_TAGS = (*YAML_SCALARS, "str", "seq", "map")


def experiments() -> dict[str, Path]:
    """Return the files of the built-in experiments by name, such as `which_rule` or `reproduced/ifca`, in order."""
    folder = next(filter(Path.is_dir, FOLDERS), FOLDERS[0])
    paths = sorted(folder.rglob("*.toml"), key=lambda path: (len(path.parts), path))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}


def find_experiment(source: str | Path) -> Path:
    """Return the path `source` if it is a file, otherwise the file of the built-in experiment with this name."""
    path = user_path(source)
    return path if is_file(path) else experiments().get(str(source), path)


def list_experiments(columns: int | None = None, search: str = "") -> str:
    """Return the name, the command and the first line of each built-in experiment as text, wrapped to `columns`.

    Only experiments with all words of `search` in their name or file are listed. The text is "" if there are none.
    """
    lines = ["experiments (fedsim run NAME, fedsim compare NAME)"]
    for name, path in experiments().items():
        text = path.read_text(encoding="utf-8")
        if has_words(search, name, text):
            lines.append(hang(f"  {name:<{NAME_COLUMNS}} ", summary_of(text), columns))
    return "\n".join(lines) if len(lines) > 1 else ""


def summary_of(text: str) -> str:
    """Return the command of an experiment file and the file's first line, as in `run: Synchronous SGD on MNIST.`"""
    command = "compare" if "\n[comparison]" in text else "run"
    return f"{command}: {text.partition(chr(10))[0].removeprefix('# ')}"


def read_text(path: Path, kind: str, inside: Path | None = None) -> str:
    """Return the text of an experiment file. `kind`, "TOML" or "YAML", is for error messages.

    If `inside` is set, the file must lie in this folder. Raises ExperimentError if the file is missing, not a regular
    file, too large or not UTF-8.
    """
    where = cut(str(path))
    try:
        return decoded(read_bounded(path, MAX_BYTES, inside)).replace("\r\n", "\n")
    except FileNotFoundError:
        key, equals, value = str(path).partition("=")
        if "=" in value:
            raise ExperimentError(f'{where}: is not a file; pass the settings as a dict: {{"rounds": 5}}') from None
        if equals:  # in Python, as the command line separates settings from files
            raise ExperimentError(
                f"{where}: is not a file; pass settings as a dict: {{{show(key)}: {cut(value)}}}"
            ) from None
        by_stem = {Path(name).name: name for name in experiments()}
        close = did_you_mean(by_stem[each] for each in closest(path.stem, by_stem))
        is_name = not path.suffix and not path.is_absolute()
        hint = f"; {close or 'see fedsim list experiments'}" if is_name or path.stem in by_stem else ""
        raise ExperimentError(
            f"{where}: no such file; expected an experiment file ({kind}) or key=value{hint}"
        ) from None
    except IsADirectoryError:
        hint = f"write {where}/experiment.toml, or --resume {where} to continue that run"
        hint = hint if (path / "experiment.toml").is_file() else f"expected an experiment file ({kind})"
        raise ExperimentError(f"{where}: cannot be read: Is a directory; {hint}") from None
    except OSError as error:
        raise ExperimentError(
            f"{where}: cannot be read: {error.strerror}; expected an experiment file ({kind})"
        ) from None
    except ValueError as error:
        raise ExperimentError(f"{where}: cannot be read as {kind}: {cut(str(error))}") from None


def read_toml(path: Path, inside: Path | None = None) -> dict[str, Any]:
    """Return the tables of a TOML file. If `inside` is set, the file must lie in this folder.

    Raises ExperimentError if the file cannot be read, is not TOML, or contains values beyond the input limits.
    """
    where, text = cut(str(path)), read_text(path, "TOML", inside)
    try:
        refuse_long_chains(text)
        tables = tomllib.loads(text)
    except RecursionError:
        raise ExperimentError(
            f"{where}: tables and lists must not be nested more than {MAX_DEPTH} levels deep"
        ) from None
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"line (\d+)", str(error))
        line = text.split("\n")[int(place[1]) - 1] if place else text.rstrip().rpartition("\n")[2]
        is_repeated = re.match("Cannot (declare|overwrite)", str(error))
        remedy = "write each key and each [table] once" if is_repeated else TOML_REMEDY
        reason = f"{cut(str(error))}: {show(line.strip())}; {remedy}"
        raise ExperimentError(f"{where}: cannot be read as TOML: {reason}") from None
    except ValueError as error:  # a number with too many digits
        raise ExperimentError(f"{where}: cannot be read as TOML: {cut(str(error))}") from None
    if problem := problem_with_words(tables):
        raise ExperimentError(f"{where}: {problem}")
    return tables


def _strict_loader(yaml: Any) -> type[Any]:
    """Return a loader of the module `yaml` that refuses aliases, tags and repeated keys, and reads YAML 1.2 scalars."""

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # as in PyYAML

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                mark = self.peek_event().start_mark
                raise yaml.MarkedYAMLError(
                    problem="aliases (*) are not allowed; write the value again", problem_mark=mark
                )
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, Any]:
            table: dict[str, Any] = {}
            for key, value in node.value:
                if not isinstance(key.value, str) or key.value in table:
                    problem = (
                        f"{show(key.value)} is set twice" if isinstance(key.value, str) else "a key must be a name"
                    )
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                table[key.value] = self.construct_object(value, deep=deep)
            return table

    tags = [f"tag:yaml.org,2002:{name}" for name in YAML_TAGS]
    Loader.yaml_constructors = {tag: Loader.yaml_constructors[tag] for tag in tags}
    Loader.add_constructor(None, Loader.construct_undefined)
    Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
    for name, pattern in YAML_SCALARS.items():
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"(?:{pattern})$"), None)
    return Loader


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the tables of a YAML file. Keys may be dotted. An empty file has no tables.

    Aliases, tags and repeated keys are refused, so that a file cannot expand when it is read and executes nothing.

    Raises ExperimentError if the file cannot be read, is not YAML, or contains values beyond the input limits. Raises
    MissingPackageError if PyYAML is not installed.
    """
    yaml = import_extra("yaml", extra="yaml", purpose=f"{path}")
    where, text = cut(str(path)), read_text(path, "YAML")
    try:
        tables = yaml.load(text, _strict_loader(yaml)) or {}  # a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark else ""
        reason = getattr(error, "problem", None) or "contains characters that YAML does not allow"
        raise ExperimentError(f"{where}:{line} cannot be read as YAML: {cut(reason)}") from None
    except RecursionError:
        raise ExperimentError(
            f"{where}: tables and lists must not be nested more than {MAX_DEPTH} levels deep"
        ) from None
    except ValueError as error:  # a number with too many digits
        raise ExperimentError(f"{where}: {cut(str(error))}") from None
    if not isinstance(tables, dict):
        raise ExperimentError(f"{where}: must be one table of keys and values, such as rounds: 3")
    if problem := problem_with_words(tables):
        raise ExperimentError(f"{where}: {problem}")
    return tables


def to_toml(experiment: Experiment) -> str:
    """Format an experiment with all settings as TOML. Loading the text gives an equal experiment."""
    return tomli_w.dumps(experiment.resolved())
