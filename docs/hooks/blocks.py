"""Run the fenced code blocks of pages, and keep their outputs in the pages.

    python docs/hooks/blocks.py [PAGE...]    run the blocks and write their outputs (default: all pages)

All blocks of a page run in order in one empty folder:

    ```python title="my_rules.py"   is saved as that file (so are blocks of other languages with a title)
    ```python                       is run; the Python blocks of a page share one namespace, as in a notebook
    ```bash                         is run, command by command
    ```text, or another language    is not run

`output="yes"`: the ```text block directly below shows what the block prints. A line `...` there stands for any lines.
`picture="PATH"`: the image below is a copy of the picture PATH that the block creates. `needs="PACKAGE..."` runs the
block only if these packages are installed. `run="no: REASON"` skips it. Pages with `<!-- slow -->` take more than a
second, and are written with one kind of CPU. `difference` says when an output counts as equal to the stored one.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RUN_BLOCKS = Path(__file__).parent / "run_blocks.py"
CPU = "AVX512"  # the kind of CPU, as PyTorch calls it, with which the slow pages are written
MOST_SECONDS = 1800  # time limit for all blocks of a page
MOST_LINES, HEAD, TAIL = 30, 16, 8  # a longer output is shortened to its first and last lines
MOST_WIDE, COLOURS = 900, 64  # pixels and colours of a stored picture
FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>```+)(?P<language>[\w+-]*)(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=indent)(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
OUTPUT = re.compile(r"\n\n *(?P<fence>```+)text\n(?P<text>.*?)^ *(?P=fence) *$", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"\n\n *!\[(?P<caption>[^]]*)\]\((?P<address>[^)]*)\)")
ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
OWN_ATTRIBUTES = {"output", "picture", "needs", "run"}
SLOW = "<!-- slow -->"
DOTS = re.compile(r" *\.\.\.")

PROGRESS = re.compile(r"(?:^\[ *\d+/\d+\] .*\n)+", re.MULTILINE)
# What differs between two runs or two machines, and its replacement before the comparison.
VARYING = [
    (re.compile(r"\d{8}-\d{6}|\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?)?"), "DATE"),
    (re.compile(r"\d[\d.,]*(?= (?:s|ms|seconds?|minutes?|hours?)\b)"), "TIME"),
    (re.compile(r"\d+\.\d+\.\d+[\w.+]*"), "VERSION"),
    (re.compile(r"(?<![^\s'\"(])/\S+"), "PATH"),
    (re.compile(r"0x[0-9a-f]+"), "ADDRESS"),
    (re.compile(r"[^;\n]* on cpu$|\d+ at a time$", re.MULTILINE), " ENGINE"),
    (PROGRESS, ""),  # runs of a comparison end in any order
]
NUMBER = re.compile(r"\d+\.\d+(?:e[+-]?\d+)?")
RELATIVE, ABSOLUTE = 0.05, 0.01  # largest differences of decimal numbers, by rounding on another processor

RunPython = Callable[[list[str], Path, dict[str, str]], tuple[int, str]]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, with what stands below it: the stored output and the address of the stored picture.

    `line` is the number of its first fence. `end` is the place after the block, and `end_below` after what stands
    below it.
    """

    language: str
    attributes: dict[str, str]
    code: str
    indent: str
    line: int
    start: int
    end: int
    end_below: int
    output: str = ""
    caption: str | None = None
    address: str | None = None

    @property
    def packages(self) -> list[str]:
        """Packages in the attribute `needs`."""
        return self.attributes.get("needs", "").split()

    @property
    def missing(self) -> list[str]:
        """Packages that the block needs and that are not installed."""
        return [name for name in self.packages if find_spec(name) is None]

    @property
    def action(self) -> str | None:
        """What is done with the block: "save", "python", "bash", or None for nothing."""
        if "run" in self.attributes or self.missing:
            return None
        if "title" in self.attributes:
            return "save"
        return self.language if self.language in ("python", "bash") else None


def blocks_of(markdown: str) -> list[Block]:
    """Return the fenced blocks of a page. Raises ValueError for an attribute `run` without a reason."""
    return list(_blocks(markdown))


def _blocks(markdown: str) -> Iterator[Block]:
    position = 0
    while match := FENCE.search(markdown, position):
        attributes, position = dict(ATTRIBUTE.findall(match["info"])), match.end()
        line = markdown.count("\n", 0, match.start()) + 1
        if "run" in attributes and not re.match(r"no: \S", attributes["run"]):
            raise ValueError(f'line {line}: run="{attributes["run"]}": must be "no: REASON"')
        below: dict[str, Any] = {}
        if "output" in attributes and (output := OUTPUT.match(markdown, position)):
            below, position = {"output": textwrap.dedent(output["text"])}, output.end()
        if "picture" in attributes and (picture := PICTURE.match(markdown, position)):
            below, position = below | picture.groupdict(), picture.end()
        code, places = textwrap.dedent(match["code"]), (match.start(), match.end(), position)
        yield Block(match["language"], attributes, code, match["indent"], line, *places, **below)


def is_run(markdown: str) -> bool:
    """Whether a page has blocks that are saved or run."""
    return any(block.action for block in blocks_of(markdown))


def missing_packages(markdown: str) -> list[str]:
    """Return the missing packages because of which blocks of the page are skipped."""
    return sorted({name for block in blocks_of(markdown) for name in block.missing})


def pages() -> dict[str, str]:
    """Return the texts of all pages with blocks that are run, by path from the root of the project."""
    texts = {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))}
    return {path.relative_to(ROOT).as_posix(): text for path, text in texts.items() if is_run(text)}


# -- Running


def run_python(words: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Run `python *words` in a folder and return its exit code and standard error."""
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, text=True, capture_output=True, timeout=MOST_SECONDS
    )
    return done.returncode, done.stderr


def run(markdown: str, folder: Path, run_python: RunPython = run_python) -> list[dict[str, Any]]:
    """Run the blocks of a page in a folder, using `run_python`.

    Returns one {"output": str, "error": str or None} per block. Nothing is run after the first error.
    """
    steps = [{**asdict(block), "action": block.action} for block in blocks_of(markdown)]
    paths = [str(ROOT), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "COLUMNS": "110", "NO_COLOR": "1"}
    environment |= {"MPLBACKEND": "agg", "TTY_COMPATIBLE": "0", "PYTHONUNBUFFERED": "1"}
    if "python experiments/" in markdown:  # runs in a clone
        (folder / "experiments").symlink_to(ROOT / "experiments")
    with tempfile.TemporaryDirectory() as scratch:
        steps_file, results = Path(scratch) / "steps.json", Path(scratch) / "results.json"
        steps_file.write_text(json.dumps(steps))
        try:
            code, error = run_python([str(RUN_BLOCKS), str(steps_file), str(results)], folder, environment)
        except subprocess.TimeoutExpired:
            return [{"output": "", "error": f"the blocks took more than {MOST_SECONDS} seconds"} for _ in steps]
        if not results.is_file():
            return [{"output": "", "error": f"the process ended with code {code}\n{error}"}]
        return json.loads(results.read_text())


def error_of(markdown: str, results: list[dict[str, Any]], folder: Path) -> str | None:
    """Return the first error of a page as `line N: ...`, or None if all blocks ran and created their pictures."""
    for block, result in zip(blocks_of(markdown), results, strict=False):
        picture = block.attributes.get("picture")
        if result["error"]:
            return f"line {block.line}: {result['error']}"
        if picture and block.action and not (folder / picture).is_file():
            return f"line {block.line}: the block created no picture {picture}"
    return None


# -- Comparing


def difference(stored: str, printed: str) -> str | None:
    """Return how an output differs from the stored one, or None.

    The words must be equal, and decimal numbers agree up to RELATIVE or ABSOLUTE. VARYING, the seconds in a table and
    the widths of columns are not compared.
    """
    expected, lines = _comparable(stored), _comparable(arranged(stored, printed) or printed)
    for line, fresh in zip(expected, lines, strict=False):
        numbers = [[float(number) for number in NUMBER.findall(text)] for text in (line, fresh)]
        if _words(line) != _words(fresh) or not all(
            math.isclose(*pair, rel_tol=RELATIVE, abs_tol=ABSOLUTE) for pair in zip(*numbers, strict=True)
        ):
            return f"stored: {line}\nprinted: {fresh}"
    return None if len(expected) == len(lines) else f"{len(expected)} lines are stored, {len(lines)} are printed"


def arranged(stored: str, printed: str) -> str | None:
    """Return an output with the lines omitted for which a line `...` stands in the stored one, or None.

    None is returned for a stored output without `...`, and if the lines after a `...` are not found.
    """
    lines, kept, place = printed.rstrip().splitlines(), [], 0
    parts, dots = [[]], DOTS.fullmatch
    for line in stored.rstrip().splitlines():
        parts.append([]) if dots(line) else parts[-1].append(line)
    omissions = [line for line in stored.splitlines() if dots(line)]
    for number, part in enumerate(parts):
        places = range(place, len(lines) - len(part) + 1)
        if 0 < number < len(parts) - 1:
            places = [at for at in places if _words(part[0]) == _words(lines[at])]
        elif number and part:
            places = [at for at in places if at == len(lines) - len(part)]
        if len(parts) == 1 or not places:
            return None
        place = places[0] + len(part)
        kept += [*omissions[number - 1 : number], *lines[places[0] : place]]
    return "\n".join(kept) + "\n"


def _words(line: str) -> list[str]:
    return NUMBER.sub("0", "\n".join(_comparable(line))).split()


def _comparable(text: str) -> list[str]:
    """Return the lines without what varies, and without the seconds in the table of the rounds."""
    for varying, replacement in VARYING:
        text = varying.sub(replacement, text)
    lines, seconds, width = [], set(), 0
    for line in text.rstrip().splitlines():
        cells = re.split(r"  +", line.strip())
        times = {place for place, cell in enumerate(cells) if re.search(r"(?:^ms| s)$", cell)}
        if len(cells) > 2 and times:
            seconds, width = times, len(cells)
        elif len(cells) == width:
            cells = ["TIME" if place in seconds else cell for place, cell in enumerate(cells)]
        lines.append(" ".join(cells).rstrip())
    return lines


# -- Writing


def written(markdown: str, results: list[dict[str, Any]], stem: str) -> tuple[str, dict[str, str]]:
    """Return a page with the outputs of its blocks, and the pictures to store: their paths by address.

    A stored output stays if it does not differ. `stem` begins the addresses of new pictures.
    """
    pictures = {}
    for block, result in reversed(list(zip(blocks_of(markdown), results, strict=True))):
        if block.action is None:
            continue
        below = []
        if "output" in block.attributes:
            text = block.output
            if not text or difference(text, result["output"]):
                text = arranged(text, result["output"]) or _shortened(result["output"])
            fence = "`" * (1 + max([2, *map(len, re.findall("`+", text))]))
            below.append(f"{fence}text\n{text.rstrip()}\n{fence}" if text.strip() else "")
        if picture := block.attributes.get("picture"):
            address = block.address or f"{stem}-{picture.replace('/', '-')}"
            if address in pictures:
                raise ValueError(f"line {block.line}: two pictures have the address {address}; change one")
            below.append(f"![{block.caption or Path(picture).stem.replace('_', ' ')}]({address})")
            pictures[address] = picture
        text = "".join("\n\n" + textwrap.indent(each, block.indent) for each in below if each)
        markdown = markdown[: block.end] + text + markdown[block.end_below :]
    return markdown, pictures


def _shortened(output: str) -> str:
    lines = [line.rstrip() for line in PROGRESS.sub("...\n", output).rstrip().splitlines()]
    return "\n".join(lines if len(lines) <= MOST_LINES else [*lines[:HEAD], "...", *lines[-TAIL:]])


def store(picture: Any, target: Path) -> None:
    """Write a small copy of a picture: the path of a file, or an open file."""
    from PIL import Image

    image = Image.open(picture).convert("RGB")
    image.thumbnail((MOST_WIDE, MOST_WIDE), Image.Resampling.LANCZOS)
    image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE).save(target, optimize=True)


def write(path: Path) -> str | None:
    """Run the blocks of a page and write their outputs into it. Return the first error, or None."""
    markdown = path.read_text()
    with tempfile.TemporaryDirectory() as folder:
        results = run(markdown, Path(folder))
        if error := error_of(markdown, results, Path(folder)):
            return error
        text, pictures = written(markdown, results, path.stem)
        for address, picture in pictures.items():
            store(Path(folder) / picture, path.parent / address)
    path.write_text(text)
    return None


# -- mkdocs


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """mkdocs hook: return the page without the attributes that only this file knows, with outputs set apart."""
    for block in reversed(blocks_of(markdown)):
        below = markdown[block.end : block.end_below]
        if block.output:
            below = f'\n\n{block.indent}<div class="result" markdown>{below}\n\n{block.indent}</div>\n'
        head, newline, code = markdown[block.start : block.end].partition("\n")
        for name in OWN_ATTRIBUTES & block.attributes.keys():
            head = head.replace(f' {name}="{block.attributes[name]}"', "")
        markdown = markdown[: block.start] + head + newline + code + below + markdown[block.end_below :]
    return markdown


if __name__ == "__main__":
    failed = 0
    for name in sys.argv[1:] or pages():
        error = write(Path(name) if sys.argv[1:] else ROOT / name)
        print(f"{name}: {error or 'written'}", flush=True)
        failed += error is not None
    sys.exit(failed > 0)
