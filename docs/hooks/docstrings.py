"""Convert docstrings to Markdown."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")
HEADS = {"Args": "Arguments", "Attributes": "Attributes", "Raises": "Errors", "Returns": "Returns", "Yields": "Yields"}
ENTRY = re.compile(r"    (\S[^:]*): (.*)")
LABEL = re.compile(r"(?<!\S)(Cost|Draws|Returns|Raises|In a run(?=:))(:| )")


def markdown_of(target: Any, types: Mapping[str, str] | None = None) -> str:
    """Return the docstring of a function or class as Markdown.

    Args:
        target: the function or class.
        types: type and default of each parameter. These parameters are listed even if the docstring does not name them.
    """
    paragraphs = re.split(r"\n\s*\n", inspect.getdoc(target) or "")
    described = {name: text for part in paragraphs for name, text in _entries(part).items() if part.startswith("Args")}
    parts = [_paragraph(part) for part in paragraphs if not (types is not None and part.startswith("Args:"))]
    if types:
        lines = [f"- `{name}`, {type}{_after(described.get(name))}" for name, type in types.items()]
        parts.insert(1, "**Parameters**\n\n" + "\n".join(lines))
    return "\n\n".join(filter(None, parts))


def _after(text: str | None) -> str:
    return f": {escaped(text)}" if text else ""


def _paragraph(text: str) -> str:
    first, _, rest = text.partition("\n")
    if section := SECTION.fullmatch(first):
        return f"**{HEADS[section[1]]}**\n\n{_list(rest)}"
    if text.startswith(">>>"):
        return f"```pycon\n{text}\n```"
    if all(line.startswith("    ") for line in text.splitlines()):
        return f"```text\n{inspect.cleandoc(text)}\n```"
    return LABEL.sub(r"**\1**\2", escaped(text))


def _list(text: str) -> str:
    entries = _entries(f"Args:\n{text}")
    return "\n".join(f"- `{name}`: {escaped(entry)}" for name, entry in entries.items()) or escaped(text)


def _entries(section: str) -> dict[str, str]:
    """Return the described names of a section. `a, b: text` describes two names."""
    entries: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines()[1:]:
        if entry := ENTRY.fullmatch(line):
            names = entry[1].split(", ")
            entries |= dict.fromkeys(names, entry[2])
        elif names:
            entries |= {name: f"{entries[name]} {line.strip()}" for name in names}
    return entries


def escaped(text: str) -> str:
    """Return plain text that contains `code` as Markdown, in which all other characters are escaped."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([*_\\])", r"\\\1", part).replace("<", "&lt;") for part in parts
    )


def cell(text: str) -> str:
    """Return Markdown on one line, for a table cell."""
    return " ".join(text.split()).replace("|", "&#124;")
