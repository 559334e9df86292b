"""A line in the terminal that says what a command is doing while it prints nothing else."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

ERASE = "\x1b[K"  # erases the rest of the terminal's line


@contextlib.contextmanager
def status_line(text: str) -> Iterator[None]:
    """Context manager that shows `text` in the terminal (stderr), and erases it at the end. Print nothing inside."""
    terminal = sys.stderr if sys.stderr.isatty() else None
    if terminal:
        print(text, end="\r", file=terminal, flush=True)
    try:
        yield
    finally:
        if terminal:
            print(ERASE, end="", file=terminal, flush=True)


def with_status_line(text: str, items: Iterable[T]) -> Iterator[T]:
    """Yield the items, and show `text` in the terminal while the next item is computed."""
    remaining = iter(items)
    while True:
        with status_line(text):
            try:
                item = next(remaining)
            except StopIteration:
                return
        yield item
