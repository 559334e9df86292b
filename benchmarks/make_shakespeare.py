"""Make the file of the data set `shakespeare`, fedsim/data/shakespeare.json.xz, from the texts of the 37 plays.

    python benchmarks/make_shakespeare.py FOLDER

FOLDER holds one file NAME_gut.txt per play. A speech is a paragraph whose first line is the name of a role, followed by
a full stop. Stage directions in brackets are left out. The result is a JSON object {play: {role: speeches}}. The same
texts give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
from collections.abc import Iterator
from pathlib import Path

from fedsim.data.formats.text import SHAKESPEARE_FILE

WORD = r"(?:[A-Z0-9][A-Za-z0-9'-]*|and|of|the|&|&C)"
ROLE = re.compile(rf"({WORD}(?:[ ,.]+{WORD}){{0,5}})(\.?),?(?:\s*[\[{{(].*[\]}})])?$")  # perhaps with a direction
HEADING = re.compile(r"(ACT|SCENE|Act|Scene|EPILOGUE|SONG|Song|[IVX]+\.)")
OPENING = re.compile(r"\[Enter|ACT I\b|ACT 1|Act I\b|ACT FIRST|INDUCTION")  # what follows the list of roles
DIRECTION = re.compile(r"\s*[\[{][^\]}]*[\]}]")
WITHOUT_STOPS = "midsummer_nights_dream"  # the one play whose roles have no full stop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path, help="folder of the files NAME_gut.txt")
    files = sorted(parser.parse_args().folder.glob("*_gut.txt"))
    plays = {file.stem.removesuffix("_gut"): roles_of(file) for file in files}
    SHAKESPEARE_FILE.write_bytes(lzma.compress(json.dumps(plays).encode(), preset=9 | lzma.PRESET_EXTREME))
    texts = [text for roles in plays.values() for text in roles.values()]
    print(f"{len(plays)} plays, {len(texts):,} roles, {sum(map(len, texts)):,} characters")
    print(f"{sum(len(text) >= 1000 for text in texts)} roles with 1,000 characters or more")
    print(f"{SHAKESPEARE_FILE}: {SHAKESPEARE_FILE.stat().st_size:,} bytes")


def roles_of(file: Path) -> dict[str, str]:
    """Return what each role of a play says, one speech after the other, with a line break between."""
    speeches: dict[str, list[str]] = {}
    for role, speech in speeches_of(file.read_text(encoding="ascii"), WITHOUT_STOPS in file.name):
        speeches.setdefault(role, []).append(speech)
    return {role: "\n".join(of_role) for role, of_role in speeches.items()}


def speeches_of(text: str, without_stops: bool) -> Iterator[tuple[str, str]]:
    """Yield the role and the text of each speech, in order."""
    paragraphs = [paragraph.strip() for paragraph in re.split(r"\n\s*\n", text)]
    start = next(index for index, paragraph in enumerate(paragraphs) if OPENING.match(paragraph))
    for paragraph in paragraphs[start:]:
        first, _, rest = paragraph.partition("\n")
        match = ROLE.match(first.strip())
        if match is None or HEADING.match(first) or not (match[2] or (without_stops and first.strip().isupper())):
            continue
        lines = (re.sub(" +", " ", line).strip() for line in DIRECTION.sub("", rest).split("\n"))
        if speech := "\n".join(line for line in lines if line):
            yield re.sub(" +", " ", match[1]), speech


if __name__ == "__main__":
    main()
