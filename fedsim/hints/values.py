"""Hints for values of a wrong type or form."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from fedsim.errors import cut
from fedsim.hints.meanings import answer
from fedsim.hints.names import as_list, as_range

YES, NO, UNSET = ("yes", "on", "true", "1"), ("no", "off", "false", "0"), ("none", "null", "auto", "unset")
NUMBERS = {"a valid integer", "an integer", "a valid number"}


def value_hint(where: str, value: Any, wanted: Sequence[str]) -> str:
    """Return a hint on how to write a value of another form, or "" if none applies.

    Args:
        where: dotted key, which ends with an index for an element of a list.
        value: wrong value.
        wanted: accepted kinds of values, such as "a list".
    """
    text = str(value).lower()
    kind = "integer" if type(value) is int else "fraction"
    answers = (text for text in (answer(text), answer(f"{where}_{kind}", value)) if "VALUE" not in text)
    hint = next((text for text in answers if f" {where}=" in text and f" {where}={value}" not in text), "")
    if "a list" in wanted and isinstance(value, str) and (call := re.fullmatch(r"([\w-]+),\s*(\w+)=([\d.e-]+)", value)):
        return f'; write [{{name="{call[1]}",{call[2]}={call[3]}}}] (in single quotes in a shell)'
    if "a list" in wanted and not hint and type(value) in (str, int) and (len(wanted) == 1 or "," in text):
        return f"; write {cut(as_list(str(value)))} (in single quotes in a shell)"
    if wanted == ["a valid integer"] and isinstance(value, bool) and where.endswith("]"):
        return "; instead of a Boolean mask, pass indices: np.flatnonzero(mask)"
    if isinstance(value, str) and (numbers := as_range(value)):
        return f"; with fedsim compare write {numbers}"
    if "true or false" in wanted and text in (*YES, *NO):
        hint = f"write {str(text in YES).lower()}"
    elif NUMBERS.isdisjoint(wanted):
        pass
    elif text in UNSET:
        hint = "omit the key to leave it unset"
    elif (number := _as_number(text)) is not None:
        is_allowed = number == int(number) or "a valid number" in wanted
        hint = f"write {round(number, 6):.15g}" if is_allowed else hint or "write a whole number, not a fraction"
    several = "for several values use fedsim compare" if isinstance(value, (str, list)) and "," in text else ""
    return "".join(f"; {part}" for part in (hint, several) if part)


def _as_number(text: str) -> float | None:
    """Return the number that a text such as `0,1`, `10%` or `1/3` stands for, or None."""
    parts = re.fullmatch(r"([+-]?\d+)(?:[.,](\d+))?(?:%|/(0*[1-9]\d*))?", text)
    if not parts:
        return None
    number = float(f"{parts[1]}.{parts[2] or 0}") / float(parts[3] or (100 if "%" in text else 1))
    return number if math.isfinite(number) else None  # infinity for a text of hundreds of digits
