"""Limits on values from files and from the command line, checked before the values are interpreted."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

from fedsim.errors import MAX_NAME, MAX_TEXT, cut, show

MAX_DEPTH = 16  # maximum nesting depth of tables and lists; experiments use five levels
MAX_FLOAT = 3.4028234663852886e38  # the largest of 32 bits, in which models are trained
MAX_BITS = 64  # maximum size of an integer
DOTTED = re.compile(r"[^\s.,=\[\]{}]+(?:[ \t]*\.[ \t]*[^\s.,=\[\]{}]+)*")
CONTROL = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # Unicode categories that can control terminals or that files cannot store


def leaves_of(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested tables, each with its dotted key, which starts with `prefix`.

    >>> list(leaves_of({"rounds": 5, "local": {"lr": 0.1}}))
    [('rounds', 5), ('local.lr', 0.1)]
    """
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from leaves_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def problem_with_words(value: Any, place: str = "", *, any_text: bool = False) -> str | None:
    """Return an error message for a setting that is too large, too deeply nested or not printable, otherwise None.

    Args:
        value: a setting, or nested tables of settings.
        place: dotted key of the value, for the error message.
        any_text: whether to accept characters that control a terminal, for values that are only shown in a report.
    """
    waiting = [(place, value, 0)]
    while waiting:  # not recursive, because the value may be nested too deeply
        place, value, depth = waiting.pop()
        if depth > MAX_DEPTH:
            return f"{cut(place)}: tables and lists must not be nested more than {MAX_DEPTH} levels deep"
        if isinstance(value, Mapping):
            for key, item in value.items():
                key = str(key)
                if len(key) > MAX_NAME or not (any_text or is_harmless(key)):
                    return f"{show(key)}: keys must be printable and have at most {MAX_NAME} characters"
                waiting.append((f"{place}.{key}" if place else key, item, depth + 1))
        elif isinstance(value, (list, tuple)):
            waiting.extend(
                (place, item, depth + 1) for item in value if type(item) is not float or abs(item) > MAX_FLOAT
            )
        elif isinstance(value, float) and not any_text and MAX_FLOAT < abs(value) < math.inf:
            return f"{cut(place)} = {show(value)}: must be at most {MAX_FLOAT:.3g}, the largest float32 number"
        elif isinstance(value, int) and value.bit_length() > MAX_BITS:
            return f"{cut(place)}: integers must have at most {MAX_BITS} bits, not {value.bit_length()}"
        elif isinstance(value, str) and not (any_text or is_harmless(value)):
            return f"{cut(place)} = {show(value)}: contains unprintable characters"
    return None


def refuse_long_chains(text: str) -> None:
    """Raise ValueError for TOML keys with very many dotted parts, which would take hours to parse."""
    for match in DOTTED.finditer(text):
        chain = match.group()
        if len(chain) > MAX_TEXT and chain.count(".") > MAX_DEPTH:
            raise ValueError(f"a key has more than {MAX_DEPTH} dotted parts")


def is_harmless(text: str) -> bool:
    """Whether a text can be encoded and contains no characters that control a terminal."""
    return text.isprintable() or not any(unicodedata.category(character) in CONTROL for character in text)
