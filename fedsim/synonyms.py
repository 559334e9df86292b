"""Words of other libraries and papers, each with what fedsim calls it, for hints in error messages."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@functools.cache
def synonyms(table: str) -> dict[str, str]:
    """Return a table of `synonyms.toml`, with a separate entry for each phrase of a key."""
    entries = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))[table]
    return {phrase: text for phrases, text in entries.items() for phrase in phrases.split()}
