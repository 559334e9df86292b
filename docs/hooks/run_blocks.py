"""The process that runs the blocks of one page in its working directory: python run_blocks.py STEPS RESULTS.

Both are JSON files. STEPS is a list of {action, code, attributes}, RESULTS is a list of {output, error}.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

SHELL = re.compile(r"[|<>;&`$*~]|\b(?:for|if|while)\b")  # requires a shell
BASH = 'set -e\nfedsim() { python -m fedsim "$@"; }\n'


def save(step: dict[str, Any], notebook: types.ModuleType) -> None:
    path = Path(step["attributes"]["title"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(step["code"])
    sys.modules.pop(path.stem, None)  # so that the next import finds the new file
    importlib.invalidate_caches()


def python(step: dict[str, Any], notebook: types.ModuleType) -> None:
    exec(compile(step["code"], f"<line {step['line']}>", "exec"), vars(notebook))


def bash(step: dict[str, Any], notebook: types.ModuleType) -> None:
    commands = step["code"].replace("\\\n", " ").splitlines()
    words = (
        [shlex.split(line, comments=True) for line in commands] if not SHELL.search(quoted_out(step["code"])) else []
    )
    if words and all(line[:1] in ([], ["fedsim"]) for line in words):
        for line in filter(None, words):
            fedsim(line[1:])
    else:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        subprocess.run(["bash", "-c", BASH + step["code"]], env={**os.environ, "PATH": path}, check=True)


def quoted_out(code: str) -> str:
    """Return shell code without comments and single-quoted words."""
    return re.sub(r"'[^']*'|(?:^|\s)#.*", " ", code)


def fedsim(words: list[str]) -> None:
    """Run a command of fedsim in this process. Raises RuntimeError if it fails."""
    from fedsim.cli.main import app

    try:
        app(words, prog_name="fedsim")
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"fedsim {shlex.join(words)}: exit code {end.code}") from None


@contextmanager
def output_to(file: TextIO) -> Iterator[None]:
    """Redirect standard output and error to a file, including those of child processes."""
    saved = os.dup(1), os.dup(2)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, former in zip((1, 2), saved, strict=True):
            os.dup2(former, number)
            os.close(former)


def run(step: dict[str, Any], notebook: types.ModuleType) -> dict[str, Any]:
    """Execute one step and return its output, and its error or None."""
    error = None
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        with output_to(file):
            try:
                if step["action"]:
                    globals()[step["action"]](step, notebook)
            except (Exception, SystemExit):
                error = traceback.format_exc(limit=-4)
        file.seek(0)
        output = file.read()
    return {"output": output, "error": None if error is None else f"{output[-4000:]}\n{error}"}


def main(results: Path, steps: list[dict[str, Any]]) -> None:
    """Execute the steps until one fails, in a module without a file (as in a notebook), and write the results."""
    notebook = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.path[0] = ""  # the working directory instead of the folder of this file
    done = []
    for step in steps:
        done.append(run(step, notebook))
        if done[-1]["error"]:
            break
    results.write_text(json.dumps(done))


if __name__ == "__main__":
    main(Path(sys.argv[2]), json.loads(Path(sys.argv[1]).read_text()))
