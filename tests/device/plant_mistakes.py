"""Plant one-token device mistakes in a copy of fedsim, one after another, and see which the device tests catch.

    python -m tests.device.plant_mistakes [--count 30] [--skip 0] [--list] [pytest arguments]

A mistake is the removal of one `.to(device)`, `.cpu()` or `device=...`. They are spread evenly over the packages.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ELSEWHERE = (  # code that needs other processes, which the pretend GPU does not show
    *("engines/distributed", "engines/pool", "asynchronous/race", "runs/loops/race_loop"),
    *("runs/recovery", "system/devices"),
)
TENSORS = ("losses", "updates", "rows", "x")  # names of tensors in `.to(tensor)`
TESTS = ("tests/device", "--ignore=tests/device/test_bounds.py")
LONGEST = 400  # seconds of one run of the tests


class Mistake(NamedTuple):
    """A part of a file, in bytes, that is removed."""

    path: Path
    line: int
    start: int
    end: int
    removed: str

    def plant(self, source: bytes) -> bytes:
        return source[: self.start] + source[self.end :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: without `{self.removed}`"


def mistakes_in(path: Path, source: bytes) -> Iterator[Mistake]:
    """All mistakes that can be made in a file, which lies at `path` in the package."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def begin(node: ast.AST) -> int:
        return starts[node.lineno - 1] + node.col_offset

    def end(node: ast.AST) -> int:
        return starts[node.end_lineno - 1] + node.end_col_offset

    def mistake(node: ast.AST, first: int, last: int) -> Mistake:
        return Mistake(path, node.end_lineno, first, last, " ".join(source[first:last].decode().strip(" ,").split()))

    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Attribute) and (call.func.attr == "cpu" or _names_a_device(call)):
            yield mistake(call, end(call.func) - len(f".{call.func.attr}"), end(call))
        for keyword in call.keywords:
            if keyword.arg == "device" and not isinstance(keyword.value, ast.Call):
                others = [node for node in (*call.args, *call.keywords) if end(node) < begin(keyword)]
                yield mistake(keyword, max(map(end, others), default=end(call.func) + 1), end(keyword))


def _names_a_device(call: ast.Call) -> bool:
    """Whether this is `x.to(...)` of a device, or of another tensor."""
    if call.func.attr != "to" or not call.args:
        return False
    first = ast.unparse(call.args[0])
    return ("device" in first and "dtype" not in first) or first in TENSORS


def all_mistakes(package: Path) -> dict[str, list[Mistake]]:
    """The mistakes that can be made, by package."""
    found: dict[str, list[Mistake]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package)
        if not str(inside.with_suffix("")).startswith(ELSEWHERE):
            found[str(inside.parent)] += mistakes_in(inside, path.read_bytes())
    return {name: mistakes for name, mistakes in found.items() if mistakes}


def chosen(package: Path, count: int, seed: int = 0) -> list[Mistake]:
    """So many mistakes, one after another from each package."""
    by_package = all_mistakes(package)
    for name, mistakes in by_package.items():
        random.Random(f"{seed} {name}").shuffle(mistakes)
    in_turn = chain.from_iterable(zip_longest(*by_package.values()))
    return list(islice((mistake for mistake in in_turn if mistake), count))


def caught_by(copy: Path, mistake: Mistake, arguments: Sequence[str]) -> str | None:
    """The first test that fails with this mistake, or None."""
    path = copy / "fedsim" / mistake.path
    source = path.read_bytes()
    path.write_bytes(mistake.plant(source))
    try:
        command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        return f"nothing ended within {LONGEST} s"
    finally:
        path.write_bytes(source)
    if run.returncode == 0:
        return None
    lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0].partition(" - ")[0] if lines else (run.stdout + run.stderr)[-200:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=30, help="how many mistakes to plant")
    parser.add_argument("--skip", type=int, default=0, help="how many of them to leave out, that were planted before")
    parser.add_argument("--seed", type=int, default=0, help="another seed chooses other mistakes")
    parser.add_argument("--list", action="store_true", help="print the mistakes, plant none")
    parser.add_argument("pytest", nargs="*", default=TESTS, help="what pytest runs")
    given = parser.parse_args()
    mistakes = chosen(ROOT / "fedsim", given.count, given.seed)[given.skip :]
    if given.list:
        print(*mistakes, sep="\n")
        return
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("fedsim", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "fedsim_main.py"):
            shutil.copy(ROOT / name, copy)
        for mistake in mistakes:
            begun = time.monotonic()
            test = caught_by(copy, mistake, given.pytest)
            if test is None:
                missed.append(mistake)
            print(f"{mistake}: {test or 'NOT CAUGHT'} ({time.monotonic() - begun:.0f} s)", flush=True)
    print(f"{len(mistakes) - len(missed)} of {len(mistakes)} mistakes were caught")
    print(*(f"not caught: {mistake}" for mistake in missed), sep="\n")


if __name__ == "__main__":
    main()
