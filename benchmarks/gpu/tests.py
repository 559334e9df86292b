"""The tests that are marked gpu, a case for each file."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.gpu.cases import Case, Context, Facts, NotApplicableError, check, need_gpu
from benchmarks.gpu.section import ROOT

LIMIT = 100.0


def cases(context: Context) -> list[Case]:
    return [Case(str(path), partial(run_file, context, path), LIMIT) for path in marked()]


def marked() -> list[Path]:
    """The files that have tests for a GPU; to collect the whole suite takes much longer."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path.relative_to(ROOT) for path in files if "mark.gpu" in path.read_text(encoding="utf-8")]


def run_file(context: Context, path: Path) -> Facts:
    need_gpu(context)
    options = ["-m", "gpu", "-q", "-n", "3", "--maxprocesses", "3", "-p", "no:cacheprovider", "-rfE", "--tb=short"]
    command = [sys.executable, "-m", "pytest", *options, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT - 5, check=False)
    print(done.stdout[-20_000:], done.stderr[-2_000:])
    lines = (done.stdout or done.stderr).splitlines()
    if done.returncode == 5:
        raise NotApplicableError("no test was selected")
    failed = [line[:300] for line in lines if line.startswith(("FAILED", "ERROR"))]
    return check(done.returncode == 0, "; ".join(failed)[:600] or lines[-1], last=lines[-1], failed=failed)
