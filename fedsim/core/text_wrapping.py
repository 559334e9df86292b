"""Wrap long text for narrow terminals."""

from __future__ import annotations

import shutil
import sys
import textwrap

MIN_COLUMNS = 20  # minimum width of the text column, even on narrower terminals
NO_BREAK = "\N{NO-BREAK SPACE}"  # textwrap does not break lines here
NOTE_COLUMNS = 79  # width of notes below a table


def terminal_columns() -> int | None:
    """Return the width of the terminal, or None if stdout is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def hang(head: str, text: str, columns: int | None) -> str:
    """Join `head` and `text`. If the line is longer than `columns`, wrap the text, indented by the length of the head.

    `columns` is the terminal's width, or None for no limit.

    >>> print(hang("name: ", "one two three (3)", 26))
    name: one two three (3)
    >>> print(hang("name: ", "one two three four (4)", 26))
    name: one two three
          four (4)
    """
    if columns is None or len(head) + len(text) <= columns:
        return head + text
    tied = text.replace(" (", f"{NO_BREAK}(")
    lines = textwrap.wrap(tied, max(columns - len(head), MIN_COLUMNS), break_on_hyphens=False)
    return head + f"\n{' ' * len(head)}".join(lines).replace(NO_BREAK, " ")


def note(text: str) -> str:
    """Return the text of a note below a table, wrapped to NOTE_COLUMNS, with all lines except the first indented."""
    return textwrap.fill(text, NOTE_COLUMNS, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
