"""Long text for narrow terminals."""

from __future__ import annotations

import shutil
import sys
import textwrap

LEAST_ROOM = 20  # columns, however narrow the terminal
NO_BREAK = "\N{NO-BREAK SPACE}"  # which textwrap leaves alone
NOTES = 79  # columns of what is written to be read under a table


def terminal_columns() -> int | None:
    """How wide the terminal is that stdout leads to; None where it leads elsewhere, to a file or a filter."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def hang(head: str, text: str, columns: int | None) -> str:
    """`head` and behind it `text`, which goes on below where it began if both together need more columns.

    What is in brackets stays with the word before it.
    """
    if columns is None or len(head) + len(text) <= columns:
        return head + text
    tied = text.replace(" (", f"{NO_BREAK}(")
    lines = textwrap.wrap(tied, max(columns - len(head), LEAST_ROOM), break_on_hyphens=False)
    return head + f"\n{' ' * len(head)}".join(lines).replace(NO_BREAK, " ")


def note(text: str) -> str:
    """A sentence below a table, its further lines set in."""
    return textwrap.fill(text, NOTES, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
