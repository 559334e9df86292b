"""Long text on narrow terminals."""

from __future__ import annotations

import shutil
import sys
import textwrap

MIN_COLUMNS = 20  # for text, however narrow the terminal
NO_BREAK = "\N{NO-BREAK SPACE}"  # where textwrap does not break a line
NOTE_COLUMNS = 79  # of notes below a table


def terminal_columns() -> int | None:
    """The width of the terminal; None if stdout is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def hang(head: str, text: str, columns: int | None) -> str:
    """`head` and `text` on one line, or with the text wrapped in a column behind the head.

    Brackets stay on the line of the word before them.

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
    """A sentence below a table, with its further lines indented."""
    return textwrap.fill(text, NOTE_COLUMNS, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
