"""What the words of a file, or of the command line, may hold at all, before anybody asks what they mean."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from fedsim.errors import LONGEST_NAME, LONGEST_TEXT, cut, printable, show

DEEPEST = 16  # tables and lists in one another; experiments have five
MOST_BITS = 64  # of a whole number
DOTTED = re.compile(r"[^\s.,=\[\]{}]+(?:[ \t]*\.[ \t]*[^\s.,=\[\]{}]+)*")
OBEYED = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # categories of characters that terminals obey, or that no file can hold


def problem_with_words(value: Any, place: str = "", *, any_text: bool = False) -> str | None:
    """What in a value no experiment holds, as the line that says so; None where all is well.

    Bounded are how deep tables and lists lie in one another, whole numbers, and the lengths of names. Characters that
    a terminal obeys are refused, unless `any_text` is as good as another, as where it is only shown on a page.
    """
    waiting = [(place, value, 0)]
    while waiting:  # no recursion: the value may be deep
        place, value, depth = waiting.pop()
        if depth > DEEPEST:
            return f"{cut(place)}: more than {DEEPEST} tables and lists in one another"
        if isinstance(value, Mapping):
            for key, each in value.items():
                if len(key) > LONGEST_NAME or not (any_text or is_harmless(key)):
                    return f"{show(printable(key))}: a key has at most {LONGEST_NAME} characters, all of them printable"
                waiting.append((f"{place}.{key}" if place else key, each, depth + 1))
        elif isinstance(value, (list, tuple)):
            waiting.extend((place, each, depth + 1) for each in value)
        elif isinstance(value, int) and value.bit_length() > MOST_BITS:
            return f"{cut(place)}: a whole number of {value.bit_length()} bits; the largest have {MOST_BITS}"
        elif isinstance(value, str) and not (any_text or is_harmless(value)):
            return f"{cut(place)} = {show(printable(value))}: holds characters that cannot be printed"
    return None


def refuse_long_chains(text: str) -> None:
    """Raise ValueError for TOML with names of very many dotted parts, over which a parser would sit for hours."""
    for found in DOTTED.finditer(text):
        chain = found.group()
        if len(chain) > LONGEST_TEXT and chain.count(".") > DEEPEST:
            raise ValueError(f"a name of more than {DEEPEST} dotted parts")


def is_harmless(text: str) -> bool:
    """Whether a text holds nothing that a terminal obeys, and can be written to a file."""
    return text.isprintable() or not any(unicodedata.category(character) in OBEYED for character in text)
