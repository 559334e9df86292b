"""Experiments as TOML: read, with hints for common mistakes, and written."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from fedsim.config.catalog import hint
from fedsim.core.input_limits import MAX_BITS, MAX_DEPTH, problem_with_words, refuse_long_chains
from fedsim.errors import MAX_TEXT, ExperimentError, cut, show
from fedsim.system.files import read_bounded

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from fedsim.config.experiment import Experiment

MAX_BYTES = 8 * 2**20  # of an experiment file: enough for a weight for each of a million workers


def to_toml(experiment: Experiment) -> str:
    """The experiment with all its settings as TOML; reading it gives an equal experiment."""
    return tomli_w.dumps(experiment.resolved())


def read_text(path: Path, kind: str, inside: Path | None = None) -> str:
    """The text of an experiment file; with `inside`, the file must lie in that folder.

    Raises ExperimentError if the file is missing, not a regular file, too large or not UTF-8. `kind` is TOML or YAML.
    """
    where = cut(str(path))
    try:
        return read_bounded(path, MAX_BYTES, inside).decode("utf-8").replace("\r\n", "\n")
    except FileNotFoundError:
        expected = f"expected an experiment ({kind}) or key=value"
        raise ExperimentError(f"{where}: no such file; {expected}{hint(path)}") from None
    except OSError as error:
        raise ExperimentError(f"{where}: cannot be read: {error.strerror}; expected an experiment ({kind})") from None
    except ValueError as error:
        raise ExperimentError(f"{where}: cannot be read as {kind}: {cut(str(error))}") from None


def read_toml(path: Path, inside: Path | None = None) -> dict[str, Any]:
    """The tables of a TOML file; with `inside`, the file must lie in that folder.

    Raises ExperimentError if the file cannot be read, is not TOML, or holds values that no experiment holds.
    """
    where, text = cut(str(path)), read_text(path, "TOML", inside)
    try:
        refuse_long_chains(text)
        tables = tomllib.loads(text)
    except RecursionError:
        raise ExperimentError(f"{where}: more than {MAX_DEPTH} nested tables and lists") from None
    except tomllib.TOMLDecodeError as error:
        raise ExperimentError(f"{where}: {cut(_explain_toml(text, error))}") from None
    except ValueError as error:  # a number of too many digits
        raise ExperimentError(f"{where}: cannot be read as TOML: {cut(str(error))}") from None
    if problem := problem_with_words(tables):
        raise ExperimentError(f"{where}: {problem}")
    return tables


def parse_value(text: str, place: str) -> Any:
    """A value as in TOML; any other text is a string, also `nan` and `inf`, which are names of attacks.

    Raises ExperimentError for a list or table that is not TOML. `place` is the key, for errors.
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
            f"{place} = {show(text)}: has a number of more than {MAX_BITS} bits, or more than {MAX_DEPTH} nested lists"
        ) from None
    if problem := problem_with_words(value, place):
        raise ExperimentError(problem)
    return value


def _explain_toml(text: str, error: ValueError) -> str:
    """What is wrong with a text that is not TOML and, for common mistakes, what to write instead."""
    if text.lstrip().startswith("{"):
        return 'experiments are TOML files, not JSON: write rounds = 3 for "rounds": 3, and [local] for "local": {...}'
    lines, place = text.split("\n"), re.search(r"at line (\d+)", str(error))
    number = int(place[1]) if place else len(lines)  # without a number, the error is at the end
    line, where = lines[number - 1].strip(), f"line {number}"
    if len(line) > MAX_TEXT:
        return f"cannot be read as TOML: {error}"
    if str(error).startswith("Cannot overwrite") or "twice" in str(error):
        return f"{where}: {line.partition('=')[0].strip()} is there twice"
    if re.match(r"---|[\w.-]+\s*:", line):
        return (
            f"{where}: is YAML, in a file that is not called .yaml; rename it, or write rounds = 3 for rounds: 3, and "
            "[local] for local:"
        )
    pair = re.fullmatch(r"([\w.-]+)\s*=\s*([^#]*?)([,;]?)\s*(#.*)?", line)
    if pair and pair[2] in ("None", "null"):
        return f"{where}: TOML cannot express {pair[2]}; omit the key {pair[1]}"
    for value in _corrections(pair[2], pair[3]) if pair else ():
        corrected = f"{line.partition('=')[0].strip()} = {value}"
        with contextlib.suppress(ValueError):
            tomllib.loads(corrected)
            return f"{where}: {show(line)} is not TOML; write {corrected}"
    return f"cannot be read as TOML: {error}"


def _corrections(value: str, end: str) -> Iterator[str]:
    """What a value that is not TOML may mean: without the `end` behind it, in lower case, quoted, in brackets."""
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
