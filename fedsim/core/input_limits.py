"""Limits on the values of files and of the command line, checked before their meaning; nested tables as flat keys."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

from fedsim.errors import MAX_NAME, MAX_TEXT, cut, show

MAX_DEPTH = 16  # nested tables and lists; experiments have five
MAX_BITS = 64  # of a whole number
DOTTED = re.compile(r"[^\s.,=\[\]{}]+(?:[ \t]*\.[ \t]*[^\s.,=\[\]{}]+)*")
CONTROL = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # categories of characters that control terminals or that no file can hold


def leaves_of(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables by dotted keys.

    >>> list(leaves_of({"rounds": 5, "local": {"lr": 0.1}}))
    [('rounds', 5), ('local.lr', 0.1)]
    """
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from leaves_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def problem_with_words(value: Any, place: str = "", *, any_text: bool = False) -> str | None:
    """The error line for a value that no experiment holds; None if there is no problem.

    Limits are the depth of nested tables and lists, the size of whole numbers, and the length of keys. Characters that
    control a terminal are refused, except with `any_text`, for values that are only shown on a page.
    """
    waiting = [(place, value, 0)]
    while waiting:  # not recursive: the value may be deep
        place, value, depth = waiting.pop()
        if depth > MAX_DEPTH:
            return f"{cut(place)}: more than {MAX_DEPTH} nested tables and lists"
        if isinstance(value, Mapping):
            for key, each in value.items():
                key = str(key)
                if len(key) > MAX_NAME or not (any_text or is_harmless(key)):
                    return f"{show(key)}: a key has at most {MAX_NAME} characters, all of them printable"
                waiting.append((f"{place}.{key}" if place else key, each, depth + 1))
        elif isinstance(value, (list, tuple)):
            waiting.extend((place, each, depth + 1) for each in value if type(each) is not float)  # there may be 10^6
        elif isinstance(value, int) and value.bit_length() > MAX_BITS:
            return f"{cut(place)}: a whole number of {value.bit_length()} bits; the largest have {MAX_BITS}"
        elif isinstance(value, str) and not (any_text or is_harmless(value)):
            return f"{cut(place)} = {show(value)}: contains unprintable characters"
    return None


def refuse_long_chains(text: str) -> None:
    """Raise ValueError for TOML with keys of very many dotted parts, which a parser would take hours to read."""
    for found in DOTTED.finditer(text):
        chain = found.group()
        if len(chain) > MAX_TEXT and chain.count(".") > MAX_DEPTH:
            raise ValueError(f"a key of more than {MAX_DEPTH} dotted parts")


def is_harmless(text: str) -> bool:
    """Whether a text can be written to a file and does not control a terminal."""
    return text.isprintable() or not any(unicodedata.category(character) in CONTROL for character in text)
