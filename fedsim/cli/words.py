"""The arguments of a command: an experiment file and `key=value` changes, with hints for common mistakes."""

from __future__ import annotations

import glob
import itertools
import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from fedsim.config.files import experiments
from fedsim.errors import ExperimentError, cut, show
from fedsim.hints.meanings import answer, meaning
from fedsim.hints.names import closest, did_you_mean
from fedsim.system.files import is_file

EXPERIMENT_FILES = (".toml", ".yaml", ".yml")
WORDS_LIKE_OPTIONS = {"ignore_unknown_options": True}  # passes `--rounds 3` on, so that an error can suggest rounds=3


def complete_words(incomplete: str) -> list[str]:
    """Return the experiments, files and folders whose names start with `incomplete`."""
    paths = sorted(glob.glob(f"{glob.escape(incomplete)}*"))
    files = [f"{path}/" if os.path.isdir(path) else path for path in paths]
    return [
        *(name for name in experiments() if name.startswith(incomplete)),
        *(path for path in files if path.endswith(("/", *EXPERIMENT_FILES))),
    ]


def complete_metrics(incomplete: str) -> list[str]:
    """Return the names of recorded metrics that start with `incomplete`, for shell completion."""
    from fedsim.records.record import METRICS

    return [metric.key for metric in METRICS if metric.key.startswith(incomplete) and "{}" not in metric.label]


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

Labels = Annotated[
    list[str] | None,
    typer.Option(
        "--label",
        metavar="OLD=NEW",
        help="Show a compared key or value under another name: --label weighted_mean=FedAvg. Can be repeated.",
        show_default=False,
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
            raise ExperimentError(no_such_option(word, next_word, context.command))
    _refuse_spaces(words)
    changes = [word for word in words if not (is_file(Path(word)) or word in experiments())]
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
    """Raise ExperimentError if a `key=value` word was written with spaces: `rounds = 3`, `seed=0 1`."""
    for index, word in enumerate(words):
        rest, is_plain = words[index:], not (set("=[{") & {*word} or is_folder(word) or Path(word).suffix)
        if is_file(Path(word)):
            continue
        apart = re.match(r"([\w.]+)(?: ?[=:] ?| )([^\s=]+)(?!\S)", " ".join(rest[:3]))
        if is_plain and index and "=" in words[index - 1]:
            is_spaced = apart and re.match(r"[\w.]+ ?[=:]", apart[0]) and f"={apart[2]}" in key_hint(*apart.groups())
            values = " ".join([words[index - 1], *itertools.takewhile(lambda each: "=" not in each, rest)])
            values = re.sub("[, ]+", ",", values).rstrip(",")
            hint = f"write an experiment first, and several values as in fedsim compare {values}"
            if not is_spaced:
                raise ExperimentError(f"{show(word)}: expected key=value; {hint}")
        if word not in experiments() and "=" not in word[:-1]:
            if apart and f"={apart[2]}" in (hint := key_hint(*apart.groups())):
                raise ExperimentError(f"{show(apart[0])}: {hint}, without spaces")
            if is_plain and (hint := key_hint(word)):
                hints = [hint, *(name for name in experiments() if name.endswith(f"/{word}"))]
                raise ExperimentError(f"{word}: expected key=value; {' or '.join(hints)}")
        if whole := re.match(r"(\S+=)?[\[{](\S*[^]}\s])? .*[]}]", " ".join(rest)):
            raise ExperimentError(f"{cut(whole[0])}: contains spaces; put the word in quotes, as in '{cut(whole[0])}'")


def key_hint(name: str, value: str | None = None) -> str:
    """Return what to write to set the key `name`, perhaps a key of another library, or "" if it is unknown."""
    from fedsim.config.experiment import Experiment  # imported here to keep `--help` fast
    from fedsim.config.overrides import parse_value

    if name.partition(".")[0] in Experiment.model_fields:
        return f"write {name}={value or 'VALUE'}"
    return meaning(name, parse_value(value, name) if value else None)


def no_such_option(word: str, next_word: str, command: Any, *, takes_keys: bool = True) -> str:
    """Return the error message for an unknown option, with a suggestion such as `rounds=3` for `--rounds 3`.

    Args:
        word, next_word: the option, and the word that follows it.
        command: the command, with its options.
        takes_keys: whether the command accepts `key=value` words.
    """
    from fedsim.config.experiment import Experiment

    option, equals, value = word.partition("=")
    name, value = option.lstrip("-").replace("-", "_"), value if equals else next_word * ("=" not in next_word)
    options = [flag for each in command.params for flag in each.opts if flag.startswith("-")]
    hints = [
        f"write the file alone: fedsim {command.name} {value}" if Path(value).suffix in EXPERIMENT_FILES else "",
        f"write fedsim {name}" if name in getattr(command, "commands", ()) else "",
        answer(f"fedsim_{command.name}_{name}", value),
        did_you_mean(closest(name, options)),
        *(key_hint(key, value) for key in (name, *closest(name, Experiment.model_fields)) if takes_keys),
        f"allowed: {', '.join(flag for flag in [*options, '--help'] if flag.startswith('--'))}",
    ]
    return f"{option}: no such option; {next(filter(None, hints))}"
