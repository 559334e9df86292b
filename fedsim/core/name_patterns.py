"""Name patterns, which select parameters and layers of a model in an experiment."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from fedsim.errors import ExperimentError, show
from fedsim.hints.meanings import nearest


def matches(name: str, pattern: str) -> bool:
    """Whether a name matches a pattern with `*` and `?` as in a shell. `head` also matches `head.weight`.

    >>> from fedsim.core.name_patterns import matches
    >>> matches("head.weight", "head"), matches("head.weight", "*.bias")
    (True, False)
    """
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def matching(patterns: Sequence[str], names: Sequence[str], key: str, kind: str) -> list[str]:
    """Return those `names` that match one of the patterns, in their order.

    Args:
        patterns: patterns from an experiment.
        names: names of parameters or layers.
        key: setting that contains the patterns, for error messages.
        kind: kind of object that has these names, for error messages, such as "parameter".

    Raises ExperimentError if a pattern matches no name.
    """
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            modules = dict.fromkeys([*(name.rpartition(".")[0] or name for name in names), *names])
            raise ExperimentError(f"{key}: no {kind} matches {show(pattern)}; {nearest(pattern, modules)}")
    return [name for name in names if any(matches(name, pattern) for pattern in patterns)]
