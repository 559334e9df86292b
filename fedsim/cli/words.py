"""The arguments of a command: an experiment file and `key=value` changes, with hints for common mistakes."""

from __future__ import annotations

import glob
import itertools
import os
import re
import warnings
from pathlib import Path
from typing import Annotated

import typer

from fedsim.config.files import experiments
from fedsim.core.suggestions import answer, closest, meaning, nearest
from fedsim.errors import ExperimentError, SettingWarning, cut, show
from fedsim.system.files import is_file

EXPERIMENT_FILES = (".toml", ".yaml", ".yml")
WORDS_LIKE_OPTIONS = {
    "ignore_unknown_options": True
}  # passes `--rounds 3` on as words, so that an error can suggest rounds=3


def complete_words(incomplete: str) -> list[str]:
    """Return the experiments, files and folders whose names start with `incomplete`."""
    paths = sorted(glob.glob(f"{glob.escape(incomplete)}*"))
    files = [f"{path}/" if os.path.isdir(path) else path for path in paths]
    return [
        *(name for name in experiments() if name.startswith(incomplete)),
        *(path for path in files if path.endswith(("/", *EXPERIMENT_FILES))),
    ]


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG.toml] [KEY=VALUE]...",
        help="A TOML or YAML file, or the name of a built-in experiment (`fedsim list experiments`), and the "
        "keys to change: rounds=5 local.lr=0.1 partition.name=iid. Default: the default experiment.",
        show_default=False,
        autocompletion=complete_words,
    ),
]

AllowImports = Annotated[
    bool,
    typer.Option(
        "--allow-imports",
        help="Allow config files to import plugins (this executes code). Import paths on the command line are "
        "always allowed.",
    ),
]

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the output folder.")]


def source_and_overrides(words: list[str], context: typer.Context) -> tuple[str | None, list[str]]:
    """Return the name or file of the experiment on the command line (or None), and the `key=value` words."""
    for word, next_word in zip(words, [*words[1:], ""], strict=False):
        if word.startswith("-"):
            raise ExperimentError(_no_such_option(word, next_word, context))
    changes = [word for word in words if not (is_file(Path(word)) or word in experiments())]
    _refuse_spaces(changes)
    _refuse_values(words)
    settings: dict[str, str] = {}
    for key, _, value in (word.partition("=") for word in changes):
        if settings.setdefault(key, value) != value:
            warnings.warn(f"{key}: is set twice; the last value is used", SettingWarning, stacklevel=2)
    paths = [word for word in words if "=" not in word or word not in changes]
    if len(paths) > 1:
        raise ExperimentError(
            f"{show(paths[1])}: expected key=value, because {show(paths[0])} is already the experiment"
        )
    return (paths[0] if paths else None), [word for word in words if word not in paths]


def is_folder(word: str) -> bool:
    """Whether a word is the path of a folder."""
    try:
        return Path(word).is_dir()
    except OSError:  # too long for a path
        return False


def _refuse_values(words: list[str]) -> None:
    """Raise ExperimentError if the name of an experiment could also be another value of the key before it."""
    for before, word in itertools.pairwise(words):
        key, equals, _ = before.partition("=")
        if equals and word in experiments() and f"{key.removesuffix('.name')}={word}" in _settings_of(word):
            raise ExperimentError(
                f"{show(word)}: is an experiment, and could be a value of {key}; write the experiment first, or "
                f"several values as in {cut(before)},{word}"
            )


def _refuse_spaces(words: list[str]) -> None:
    """Raise ExperimentError if a `key=value` word was written with spaces, such as `rounds = 3`."""
    for index, word in enumerate(words):
        rest, before = words[index:], words[index - 1] if index else ""
        apart = re.match(r"([\w.]+)(?: ?[=:] ?| )([^\s=]+)(?!\S)", " ".join(rest[:3]))
        if "=" not in word.removesuffix("=") and apart and (hint := key_hint(apart[1], apart[2])):
            raise ExperimentError(f"{show(apart[0])}: {hint}, without spaces")
        if "=" not in word and not is_folder(word) and not Path(word).suffix:
            if "=" in before and (is_number(word) == is_number(before.partition("=")[2].rstrip(",").split(",")[-1])):
                more = itertools.takewhile(lambda each: "=" not in each, rest)
                values = re.sub(",+", ",", ",".join([before, *more])).rstrip(",")
                raise ExperimentError(
                    f"{show(word)}: expected key=value; for several values write fedsim compare {values}"
                )
            if hint := key_hint(word):
                raise ExperimentError(f"{word}: expected key=value; {hint}")
        pieces = itertools.accumulate(rest, "{} {}".format) if _is_open(word) else ()
        if whole := next((piece for piece in pieces if not _is_open(piece)), None):
            raise ExperimentError(f"{cut(whole)}: contains spaces; put the word in quotes, as in '{cut(whole)}'")


def _settings_of(component: str) -> list[str]:
    from fedsim.config.tables import settings_of  # imported here to keep `--help` fast

    return settings_of(component)


def is_number(text: str) -> bool:
    """Whether a text is a number, or several numbers with commas."""
    return re.fullmatch(r"[\d.,e+-]+", text) is not None


def key_hint(name: str, value: str | None = None) -> str:
    """Return how to write a key, which may be that of another library, with its value, or "" if it is unknown."""
    from fedsim.config.experiment import Experiment  # imported here to keep `--help` fast

    is_key = name.partition(".")[0] in Experiment.model_fields
    return f"write {name}={value or 'VALUE'}" if is_key else meaning(name, value)


def _is_open(word: str) -> bool:
    return sum(map(word.count, "[{")) > sum(map(word.count, "]}"))


def _no_such_option(word: str, next_word: str, context: typer.Context) -> str:
    """Return the error message for an unknown option, with a suggestion such as `rounds=3` for `--rounds 3`."""
    from fedsim.config.experiment import Experiment

    option, equals, value = word.partition("=")
    name, value = option.lstrip("-").replace("-", "_"), value if equals else next_word
    options = [flag for parameter in context.command.params for flag in parameter.opts if flag.startswith("--")]
    hint = answer(f"fedsim_{context.command.name}_{name}", value)
    if Path(value).suffix in EXPERIMENT_FILES:
        hint = f"write the file alone: fedsim {context.command.name} {value}"
    hint = hint or ("" if closest(name, options) else key_hint(name, value))
    if not hint and not closest(name, options) and (keys := closest(name, Experiment.model_fields)):
        hint = f"write {keys[0]}={value or 'VALUE'}"
    return f"{option}: no such option; {hint or nearest(name, [*options, '--help'])}"
