"""Count the words of the pages without code and outputs: python docs/hooks/count_words.py

Outputs are those of blocks, and the tables of stored results in the gallery. Comments do not count.
"""

from __future__ import annotations

import re
from pathlib import Path

from blocks import FENCE, ROOT
from gallery import RESULTS

DOCS = ROOT / "docs"
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
TABLE = re.compile(r"^ *\|.*\n", re.MULTILINE)
TABLE_RULE = re.compile(r"[|:-]+")  # between the cells of a table


def count(text: str) -> int:
    """Return the number of words of a page."""
    written = RESULTS.sub(lambda results: TABLE.sub("", results[0]), text)
    return sum(not TABLE_RULE.fullmatch(word) for word in COMMENT.sub("", FENCE.sub("", written)).split())


def counts() -> dict[Path, int]:
    """Return the number of words of each page."""
    return {path: count(path.read_text()) for path in sorted(DOCS.rglob("*.md"))}


if __name__ == "__main__":
    for path, words in counts().items():
        print(f"{words:6} {path.relative_to(DOCS)}")
    print(f"{sum(counts().values()):6} in all")
