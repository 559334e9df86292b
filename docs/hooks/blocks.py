"""Run the fenced code blocks of a page, and insert their output and pictures below them.

All blocks of a page run in order in one empty folder:

    ```python title="my_rules.py"   is saved as that file (so are blocks of other languages with a title)
    ```python                       is run; the Python blocks of a page share one namespace, as in a notebook
    ```bash                         is run, command by command
    ```text, or another language    is not run

`output="yes"` shows what the block printed. `picture="PATH"` shows a picture that it created. `needs="PACKAGE..."` runs
the block only if these packages are installed. `run="no: REASON"` skips it. Results are cached by the blocks and the
code of fedsim. FEDSIM_DOCS_RUN=no builds without running any block.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "docs"
HOOKS = Path(__file__).parent
RUN_BLOCKS = HOOKS / "run_blocks.py"
MOST_SECONDS = 1800  # time limit for all blocks of a page
FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>```+)(?P<language>[\w+-]*)(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=indent)(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
OWN_ATTRIBUTES = {"output", "picture", "needs", "run"}
SLOW = re.compile(r"\A---\n(?:.*\n)*?slow: true\n(?:.*\n)*?---\n")

RunPython = Callable[[list[str], Path, dict[str, str]], tuple[int, str]]

log = logging.getLogger("mkdocs.hooks.blocks")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. `line` is the number of its first fence."""

    language: str
    attributes: dict[str, str]
    code: str
    line: int

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
        if self.attributes.get("run", "").startswith("no") or self.missing:
            return None
        if "title" in self.attributes:
            return "save"
        return self.language if self.language in ("python", "bash") else None


def blocks_of(markdown: str) -> list[Block]:
    """Return the fenced blocks of a page. Raises ValueError for an attribute `run` without a reason."""
    return [_block(match, markdown) for match in FENCE.finditer(markdown)]


def _block(match: re.Match[str], markdown: str) -> Block:
    attributes = dict(ATTRIBUTE.findall(match["info"]))
    line = markdown.count("\n", 0, match.start()) + 1
    if "run" in attributes and not re.match(r"no: \S", attributes["run"]):
        raise ValueError(f'line {line}: run="{attributes["run"]}": must be "no: REASON"')
    return Block(match["language"], attributes, textwrap.dedent(match["code"]), line)


def is_run(markdown: str) -> bool:
    """Whether a page has blocks that are saved or run."""
    return any(block.action for block in blocks_of(markdown))


def missing_packages(markdown: str) -> list[str]:
    """Return the missing packages because of which blocks of the page are skipped."""
    return sorted({name for block in blocks_of(markdown) for name in block.missing})


def is_slow(markdown: str) -> bool:
    """Whether the front matter of a page says `slow: true`: its blocks take more than about a second."""
    return SLOW.match(markdown) is not None


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


def shown(markdown: str, results: list[dict[str, Any]], place: Callable[[str], str]) -> str:
    """Return the page with outputs and pictures below its blocks, and without the attributes that only fedsim knows.

    `place` maps the path of a picture in the folder to its address on the site.
    """
    remaining = iter(results)

    def replace(match: re.Match[str]) -> str:
        block, result = _block(match, markdown), next(remaining, None)
        attributes = "".join(
            f' {key}="{value}"' for key, value in block.attributes.items() if key not in OWN_ATTRIBUTES
        )
        head = f"{match['indent']}{match['fence']}{match['language']}{attributes}\n"
        text = f"{head}{match['code']}{match['indent']}{match['fence']}"
        if result is None or block.action is None:
            return text
        below = []
        if block.attributes.get("output") == "yes" and result["output"].strip():
            fence = "`" * (1 + max([2, *map(len, re.findall("`+", result["output"]))]))
            below.append(
                f'<div class="result" markdown>\n\n{fence}text\n{result["output"].rstrip()}\n{fence}\n\n</div>'
            )
        if picture := block.attributes.get("picture"):
            below.append(f"![{Path(picture).stem.replace('_', ' ')}]({place(picture)})")
        return text + "".join("\n\n" + textwrap.indent(each, match["indent"]) for each in below) + "\n" * bool(below)

    return FENCE.sub(replace, markdown)


def code_digest() -> str:
    """Return a digest of everything besides the blocks on which their results depend."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "fedsim").rglob("*.py"), *(ROOT / "experiments").glob("*.toml"), *HOOKS.glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def cached(markdown: str) -> tuple[list[dict[str, Any]], Path]:
    """Return the results of a page and its folder, cached while neither the blocks nor fedsim change."""
    steps = [{**asdict(block), "action": block.action} for block in blocks_of(markdown)]
    digest = hashlib.sha256(json.dumps([code_digest(), *steps]).encode())
    folder = CACHE / digest.hexdigest()[:24]
    if not (folder / "results.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "files").mkdir(parents=True)
        results = run(markdown, folder / "files")
        if error_of(markdown, results, folder / "files"):
            return results, folder / "files"
        (folder / "results.json").write_text(json.dumps(results))
    return json.loads((folder / "results.json").read_text()), folder / "files"


pages: dict[str, Future[tuple[list[dict[str, Any]], Path]]] = {}  # pages of the current build, by path


def on_files(files: Any, config: Any) -> None:
    """mkdocs hook: start running the pages, as many at a time as there are cores."""
    pages.clear()
    if os.environ.get("FEDSIM_DOCS_RUN") == "no":
        return
    pool = ThreadPoolExecutor(os.cpu_count())
    for file in files.documentation_pages():
        if file.abs_src_path and is_run(file.content_string):
            if missing := missing_packages(file.content_string):
                log.info("%s: some blocks are not run: %s is not installed", file.src_uri, ", ".join(missing))
            pages[file.src_uri] = pool.submit(cached, file.content_string)
    pool.shutdown(wait=False)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """mkdocs hook: insert outputs and pictures into a page. A failed block is a warning, so that `--strict` fails."""
    from mkdocs.structure.files import File

    if page.file.src_uri not in pages:
        return shown(markdown, [], str)
    results, folder = pages[page.file.src_uri].result()
    if error := error_of(markdown, results, folder):
        log.warning("%s: %s", page.file.src_uri, error)
        return shown(markdown, [], str)

    def place(picture: str) -> str:
        name = f"{Path(page.file.src_uri).stem}-{picture.replace('/', '-')}"
        path = Path(page.file.src_uri).with_name(name).as_posix()
        files.append(File.generated(config, path, abs_src_path=str(folder / picture)))
        return name

    return shown(markdown, results, place)
