"""From a TOML file and `key=value` words to an Experiment."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from fedsim.bounds import DEEPEST, MOST_BITS, is_harmless, problem_with_words, refuse_long_chains
from fedsim.catalog import find_experiment, hint
from fedsim.data.sources import lacks_files
from fedsim.engines import Engine
from fedsim.engines import engine as engines
from fedsim.engines.engine import SETTINGS
from fedsim.errors import LONGEST_TEXT, ExperimentError, cut, printable, show
from fedsim.experiment import Experiment
from fedsim.objects import plain
from fedsim.permission import is_strangers, words_of
from fedsim.sections import Distributed
from fedsim.system.files import leads_out, read_bounded
from fedsim.tables import PlugTable, Table, leaves_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Change = tuple[list[str], Any]  # the parts of a dotted key, and the value that it is to have

GRID = "grid"  # the table of a comparison's axes

MOST_BYTES = 8 * 2**20  # of an experiment file: a weight for each of a million workers has room


def load_experiment(
    source: Experiment | Mapping[str, Any] | str | Path | None = None,
    overrides: Iterable[str] = (),
    *,
    allow_imports: bool = False,
    **changes: Any,
) -> Experiment:
    """The experiment that `source` describes, with `overrides` such as "local.lr=0.1" and `changes` applied.

        fedsim.load_experiment("experiment.toml", ["local.lr=0.1"])
        fedsim.load_experiment("experiment.toml", rounds=3, local={"lr": 0.1})

    Args:
        source: an Experiment, tables (keys may be dotted: {"local.lr": 0.1}), the path of a TOML file, the name of an
            experiment that comes with fedsim (`fedsim list experiments`), or None for the default experiment.
        overrides: words `key=value` with dotted keys; values as in TOML, and bare words are strings.
        allow_imports: whether a file may name whatever can be imported; see `fedsim.permission`. What stands in
            `overrides`, tables and Experiments is the caller's own word, and imported as it is named.
        changes: keys of the experiment, set after the overrides. A table changes the keys that it has.

    A default name in `source`, as a saved experiment has it, is derived again after changes.

    Raises ExperimentError, one line per problem, each with its place.
    """
    words = [parse_word(word) for word in overrides] + changes_in(changes)
    if isinstance(source, Experiment) and not words:
        return source
    description = describe(source)
    if words:
        with words_of(file_of(source), allowed=allow_imports):
            drop_default_name(description)
    override(description, words)
    try:
        if isinstance(description.get(GRID), dict):
            raise ExperimentError("the table [grid] describes several experiments; use fedsim compare")
        with words_of(file_of(source), (value for _, value in words), allowed=allow_imports):
            return experiment_of(description)
    except ExperimentError as error:
        if not isinstance(source, (str, Path)):
            raise
        raise ExperimentError(*(f"{source}: {line}" for line in error.lines)) from None


def file_of(source: object) -> Path | None:
    """The file that a source of a description is; None where it is the caller's own."""
    return find_experiment(source) if isinstance(source, (str, Path)) else None


def describe(source: Experiment | Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """What `source` says of an experiment, as nested tables of its own; what it leaves to defaults is left out."""
    if isinstance(source, (str, Path)):
        return read_toml(find_experiment(source))
    if isinstance(source, Experiment):
        return source.model_dump(exclude_none=True, exclude_unset=True)
    if source is not None and not isinstance(source, Mapping):
        raise ExperimentError(f"{show(source)}: must be an Experiment, a table (dict) or the path of a TOML file")
    tables = dict(source or {})
    grid = _take_grid(tables)
    tables = plain(tables)
    if any("." in str(key) for key in tables):
        changes, tables = changes_in(tables), {}
        override(tables, changes)
    return {**tables, **grid}


def _take_grid(tables: dict[str, Any]) -> dict[str, Any]:
    """Remove the axes from tables; {"grid": {dotted key: values}}, or {} if there are none.

    They do not become nested tables, since both `attack` and `attack.fraction` may be axes.
    """
    keys = [key for key in tables if str(key).partition(".")[0] == GRID]
    if not keys or (keys == [GRID] and not isinstance(tables[GRID], Mapping)):
        return {}
    axes: dict[str, Any] = {}
    for key, values in leaves_of({key: tables.pop(key) for key in keys}):
        axis = key.partition(".")[2]
        if axis in axes:
            raise ExperimentError(f"{key}: is given twice")
        axes[axis] = values
    return {GRID: axes}


def drop_default_name(description: dict[str, Any]) -> None:
    """Remove the name from nested tables if it is the default one, so that it follows later changes."""
    if "name" in description and GRID not in description:
        unnamed = {key: value for key, value in description.items() if key != "name"}
        with contextlib.suppress(ExperimentError):  # a change may mend them
            if experiment_of(unnamed).name == description["name"]:
                del description["name"]


def changes_in(tables: Mapping[str, Any]) -> list[Change]:
    """The keys that tables set, nested or dotted: {"local": {"lr": 0.1}} and {"local.lr": 0.1} are one change.

    Raises ExperimentError if two of them set the same key.
    """
    changes = [(key.split("."), value) for key, value in leaves_of(plain(tables))]
    count = Counter(key_changed(*change) for change in changes)
    lines = [f"{key}: is given twice" for key in count if count[key] > 1]
    for keys, value in changes:
        tables_of = (".".join(keys[:depth]) for depth in range(1, len(keys)))
        lines += [f"{'.'.join(keys)} = {show(value)}: {table} is not a table" for table in tables_of if table in count]
    if lines:
        raise ExperimentError(*lines)
    return changes


def override(description: dict[str, Any], changes: Iterable[Change]) -> None:
    """Set keys of nested tables; the order of a plug's name and its parameters does not matter.

    A change of the engine drops the settings of the description that only other engines use.

    Raises ExperimentError where the changes themselves are at odds, such as local.epochs with local.steps.
    """
    changes = sorted(changes, key=lambda change: not _names_a_plug(change[0]))
    _refuse_alternatives(changes)
    before = _engine_named(description)
    for keys, value in changes:
        _override(description, keys, value)
    if _engine_named(description) != before:
        _drop_idle_settings(description, {keys[0] for keys, _ in changes})


def experiment_of(description: Mapping[str, Any]) -> Experiment:
    """The experiment that nested tables describe. Raises ExperimentError, one line per problem."""
    experiment = Experiment(**{str(key): value for key, value in description.items()})
    _refuse_places(experiment)
    return experiment


def _refuse_places(experiment: Experiment) -> None:
    """Raise ExperimentError where a file says with whom to meet, or where to put downloads; see `permission`."""
    init, data = experiment.distributed.init, experiment.data
    if init != Distributed().init and is_strangers(init):
        raise ExperimentError(
            f"distributed.init = {show(init)}: a file may not set this address; set it on the command line"
        )
    if data.root is None or not is_strangers(data.root):
        return
    if leads_out(Path(os.path.expanduser(data.root)), Path.cwd()) and lacks_files(data.dataset, data.root):
        raise ExperimentError(
            f"data.root = {show(data.root)}: has no {data.dataset}, and a file may not download data to a folder "
            "outside the working directory; set it on the command line"
        )


def read_toml(path: Path, inside: Path | None = None) -> dict[str, Any]:
    """The tables of a TOML file, which has to lie `inside` a folder if one is named.

    Raises ExperimentError where it is missing, no regular file, too large or no TOML, or holds what none does.
    """
    where = cut(printable(str(path)))
    try:
        text = read_bounded(path, MOST_BYTES, inside).decode("utf-8").replace("\r\n", "\n")
        refuse_long_chains(text)
        tables = tomllib.loads(text)
    except FileNotFoundError:
        expected = "expected an experiment (TOML) or key=value"
        raise ExperimentError(f"{where}: no such file; {expected}{hint(path)}") from None
    except OSError as error:
        raise ExperimentError(f"{where}: cannot be read: {error.strerror}; expected an experiment (TOML)") from None
    except RecursionError:
        raise ExperimentError(f"{where}: more than {DEEPEST} tables and lists in one another") from None
    except tomllib.TOMLDecodeError as error:
        raise ExperimentError(f"{where}: {cut(printable(_why_not_toml(text, error)))}") from None
    except ValueError as error:  # not UTF-8, or a number of too many digits
        raise ExperimentError(f"{where}: cannot be read as TOML: {cut(printable(str(error)))}") from None
    if problem := problem_with_words(tables):
        raise ExperimentError(f"{where}: {problem}")
    return tables


def _why_not_toml(text: str, error: ValueError) -> str:
    """What is wrong with a text that is not TOML and, for common mistakes, what to write instead."""
    if text.lstrip().startswith("{"):
        return 'experiments are TOML files, not JSON: write rounds = 3 for "rounds": 3, and [local] for "local": {...}'
    lines, place = text.split("\n"), re.search(r"at line (\d+)", str(error))
    number = int(place[1]) if place else len(lines)  # it says so where it is the end of the text
    line, where = lines[number - 1].strip(), f"line {number}"
    if len(line) > LONGEST_TEXT:
        return f"cannot be read as TOML: {error}"
    if str(error).startswith("Cannot overwrite") or "twice" in str(error):
        return f"{where}: {line.partition('=')[0].strip()} is there twice"
    if re.match(r"---|[\w.-]+\s*:", line):
        return f"{where}: experiments are TOML files, not YAML: write rounds = 3 for rounds: 3, and [local] for local:"
    pair = re.fullmatch(r"([\w.-]+)\s*=\s*([^#]*?)([,;]?)\s*(#.*)?", line)
    if pair and pair[2] in ("None", "null"):
        return f"{where}: TOML cannot express {pair[2]}; omit the key {pair[1]}"
    for value in _right_values(pair[2], pair[3]) if pair else ():
        with contextlib.suppress(ValueError):
            tomllib.loads(f"{pair[1]} = {value}")
            return f"{where}: {show(line)} is not TOML; write {pair[1]} = {value}"
    return f"cannot be read as TOML: {error}"


def _right_values(value: str, end: str) -> Iterator[str]:
    """What may be meant by a value that is not TOML: without what ends it, in lower case, quoted, in brackets."""
    quoted = re.sub(r"[A-Za-z_][\w.:/-]*(?![\w.:/-]|\s*=)", r'"\g<0>"', value.replace(": ", " = "))
    if end:
        yield value
    if value != value.lower():
        yield value.lower()
    if value.startswith("."):
        yield f"0{value}"
    if value != quoted:
        yield quoted
    if "," in value:
        yield from (f"[{value}]", f"[{quoted}]")
    if re.fullmatch(r"[^\s,={}\[\]\"']*[A-Za-z/][^\s,={}\[\]\"']*", value):
        yield f'"{value}"'


def to_toml(experiment: Experiment) -> str:
    """The resolved experiment as TOML; reading it again gives an equal experiment."""
    return tomli_w.dumps(experiment.resolved())


def parse_word(word: str) -> Change:
    """A word `a.b=value` as its key and value."""
    keys, text = split_word(word)
    return keys, parse_value(text, ".".join(keys))


def split_word(word: str) -> tuple[list[str], str]:
    """A word `a.b=value` as the parts of its key, and the text behind the sign."""
    key, equals, text = word.partition("=")
    keys = [part.strip() for part in key.split(".")]
    if not equals or not all(keys):
        raise ExperimentError(f"{show(word)}: expected key=value, such as rounds=5 or local.lr=0.1")
    if len(keys) > DEEPEST or len(key) > LONGEST_TEXT or not is_harmless(word):
        raise ExperimentError(
            f"{show(printable(word))}: a key has at most {DEEPEST} parts and {LONGEST_TEXT} characters, and a word "
            "nothing that cannot be printed"
        )
    return keys, text


def parse_value(text: str, place: str) -> Any:
    """A value as in TOML; a bare word is a string, even nan and inf: attacks go by these names, and no number is one.

    Raises ExperimentError, with the place, for half a list or table.
    """
    if text.strip() in ("nan", "inf"):
        return text.strip()
    try:
        refuse_long_chains(text)
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        if text.startswith(("[", "{")):
            raise ExperimentError(
                f"{place} = {cut(text)}: is neither a list nor a table of TOML; names in it need double quotes, and a "
                """shell single ones around it: '["nnm","median"]', '{name="net",dropout=0.1}'"""
            ) from None
        value = text
    except (ValueError, RecursionError):
        raise ExperimentError(
            f"{place} = {show(text)}: has a number of more than {MOST_BITS} bits, or more than {DEEPEST} lists in one "
            "another"
        ) from None
    if problem := problem_with_words(value, place):
        raise ExperimentError(problem)
    return value


def plug_table(keys: Sequence[str]) -> tuple[type[PlugTable] | None, list[str]]:
    """The table of a plug in which a key lies, if it lies in one, and what the key is there; [] is the table itself."""
    for depth in range(1, len(keys) + 1):
        if table := PLUG_TABLES.get(".".join(keys[:depth])):
            return table, list(keys[depth:])
    return None, []


def key_changed(keys: Sequence[str], value: Any) -> str:
    """The dotted key that a change sets; a name for a whole table of a plug sets the key that names the plug."""
    table, within = plug_table(keys)
    if table and not within and not isinstance(value, dict):
        keys = [*keys, table.named_by]
    return ".".join(keys)


def _names_a_plug(keys: list[str]) -> bool:
    """Whether a key is one that names a plug; those come first, since a plug's parameters belong to its name."""
    table, within = plug_table(keys)
    return table is not None and within in ([], [table.named_by])


def _refuse_alternatives(changes: Iterable[Change]) -> None:
    given = {".".join(keys) for keys, _ in changes}
    given |= {
        f"{keys[0]}.{key}" for keys, value in changes if len(keys) == 1 and isinstance(value, dict) for key in value
    }
    for place, table in PLUG_TABLES.items():
        if len(given & {f"{place}.{key}" for key in table.alternatives}) > 1:
            raise table.not_both()


def _override(description: dict[str, Any], keys: list[str], value: Any) -> None:
    """Set one key of nested tables.

    What is on the command line is what is wanted: naming another plug leaves the parameters of the one named before
    behind, and `local.steps` takes the place of `local.epochs` (and the reverse).
    """
    of_plug, within = plug_table(keys)
    if of_plug and not within and of_plug.is_name(value):
        keys, within = [*keys, of_plug.named_by], [of_plug.named_by]
    table = description
    for depth, key in enumerate(keys[:-1], start=1):
        if of_plug and depth == len(keys) - len(within) and of_plug.is_name(table.get(key)):
            table[key] = {of_plug.named_by: table[key]}
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ExperimentError(f"{'.'.join(keys)} = {show(value)}: {'.'.join(keys[:depth])} is not a table")
    if of_plug and len(within) == 1:
        _make_room(table, of_plug, within[0], value)
    table[keys[-1]] = value


def _engine_named(description: Mapping[str, Any]) -> Any:
    return description.get("engine", Experiment.model_fields["engine"].default)


def _drop_idle_settings(description: dict[str, Any], given: Collection[str]) -> None:
    """Remove the settings that the engine does not use; those `given` beside its name stay, and are refused later."""
    try:
        target = engines.get(_engine_named(description), "engine").target
    except ExperimentError:  # no such engine, which is refused later
        return
    sizes = [description.get(key) for key in ("processes", "cohort", "workers")]
    sizes = [size for size in sizes if isinstance(size, int)] or [Experiment.model_fields["workers"].default]
    if isinstance(target, type) and issubclass(target, Engine):
        for key in SETTINGS - target.settings(min(sizes)) - set(given):
            description.pop(key, None)


def _make_room(table: dict[str, Any], plug_table: type[PlugTable], key: str, value: Any) -> None:
    """Take out of a plug's table what cannot stand beside `key = value`."""
    if key == plug_table.named_by and value != table.get(key, plug_table.model_fields[key].default):
        for parameter in set(table) - set(plug_table.model_fields):
            del table[parameter]
    if key in plug_table.alternatives:
        for other in plug_table.alternatives:
            table.pop(other, None)


def _plug_tables(table: type[Table], prefix: str = "") -> Iterator[tuple[str, type[PlugTable]]]:
    for name, item in table.model_fields.items():
        inner = item.annotation
        if isinstance(inner, type) and issubclass(inner, PlugTable):
            yield f"{prefix}{name}", inner
        elif isinstance(inner, type) and issubclass(inner, Table):
            yield from _plug_tables(inner, f"{prefix}{name}.")


PLUG_TABLES = dict(_plug_tables(Experiment))  # by dotted key: `local`, ..., `clock.speed`
