"""The arguments of a command: an experiment file and `key=value` changes, with hints for common mistakes."""

from __future__ import annotations

import glob
import itertools
import os
import re
from pathlib import Path
from typing import Annotated

import typer

from fedsim.config.files import experiments
from fedsim.core.suggestions import closest, nearest
from fedsim.errors import ExperimentError, cut, show
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


def _refuse_spaces(words: list[str]) -> None:
    """Raise ExperimentError if a `key=value` word was written with spaces, such as `rounds = 3`."""
    for index, word in enumerate(words):
        rest = words[index:]
        apart = re.match(r"([\w.]+)(?: ?[=:] ?| )([^\s=]+)(?!\S)", " ".join(rest[:3]))
        if "=" not in word.removesuffix("=") and apart and (keys := _keys_called(apart[1])):
            wanted = " or ".join(f"{key}={apart[2]}" for key in keys)
            raise ExperimentError(f"{show(apart[0])}: write {wanted}, without spaces")
        if "=" not in word and not is_folder(word) and _keys_called(word):
            raise ExperimentError(f"{word}: this key needs a value, as in {word}=VALUE")
        if index and re.fullmatch(r"[\d.,]+", word):
            raise ExperimentError(f"{show(word)}: expected key=value; write several values as in seed=0,1,2")
        pieces = itertools.accumulate(rest, "{} {}".format) if _is_open(word) else ()
        if whole := next((piece for piece in pieces if not _is_open(piece)), None):
            raise ExperimentError(f"{cut(whole)}: contains spaces; put the word in quotes, as in '{cut(whole)}'")


def _keys_called(name: str) -> list[str]:
    from fedsim.config.experiment import Experiment  # imported here to keep `--help` fast
    from fedsim.config.tables import keys_called

    return keys_called(Experiment, name)


def _is_open(word: str) -> bool:
    return sum(map(word.count, "[{")) > sum(map(word.count, "]}"))


def _no_such_option(word: str, next_word: str, context: typer.Context) -> str:
    """Return the error message for an unknown option, with a suggestion such as `rounds=3` for `--rounds 3`."""
    from fedsim.config.experiment import Experiment

    option, equals, value = word.partition("=")
    name = option.lstrip("-").replace("-", "_")
    options = [flag for parameter in context.command.params for flag in parameter.opts if flag.startswith("--")]
    keys = _keys_called(name) or ([] if closest(name, options) else closest(name, Experiment.model_fields))
    if not keys:
        return f"{option}: no such option; {nearest(name, [*options, '--help'])}"
    value = value if equals else next_word
    suggestion = " or ".join(f"{key}={value or 'VALUE'}" for key in keys)
    return f"{option}: no such option; did you mean {suggestion}?"
