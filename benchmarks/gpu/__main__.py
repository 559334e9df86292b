"""Check and measure fedsim on a GPU: run the tests marked `gpu`, then measure speed and memory.

python -m benchmarks.gpu --out results

Everything runs in pytest processes, and `plugin` continues after tests that fail, hang or crash. Each result is written
to `lines.jsonl` as soon as it is known, and `results.json` is complete at any time. What the time does not allow is
reported as not measured. See docs/how-to/gpu.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.report import Results, summarize

Store = Callable[[], None]  # writes results.json

ROOT = Path(__file__).resolve().parents[2]
FILES = ("lines.jsonl", "lines.jsonl.stacks", "log.txt", "results.json")
MACHINE_SECONDS = 90.0
LAST_SECONDS = 10.0  # seconds of the check that are left to the end of the last part and to the report
STORE_SECONDS = 0.5  # interval at which results.json is written
MOST_REPEATED = 20  # maximum number of failed tests that are repeated
GIB_PER_PROCESS = 4.0  # GPU memory of a test process and of the processes that its tests start


class Part(NamedTuple):
    """A part of the check.

    Attributes:
        share: fraction of the remaining time that the part may use.
        options: options of pytest.
        paths: files and folders of tests.
        exclusive: whether the tests need the device exclusively. Otherwise several processes run tests in parallel.
        seconds: time limit of a single test.
    """

    share: float
    options: tuple[str, ...]
    paths: tuple[str, ...]
    exclusive: bool
    seconds: float


GPU_TESTS = (
    *("-m", "gpu", "-W", "default::UserWarning", "-W", "error::fedsim.errors.FedsimWarning"),
    *("-W", 'ignore:buffers = "frozen"'),  # as in pyproject.toml
)
FULL_GPU = "tests/device/test_full_gpu.py"
WARNINGS = "-W", "default"  # warnings of PyTorch are reported but are not errors
PARTS = {  # in the order of their value
    "goals": Part(0.6, WARNINGS, ("benchmarks/gpu/measure.py::test_goal",), True, 100),
    "assertions": Part(0.5, WARNINGS, ("benchmarks/gpu/assertions.py",), True, 100),
    "tests": Part(0.6, (*GPU_TESTS, f"--ignore={FULL_GPU}"), ("tests/device",), False, 100),
    "a full GPU": Part(0.3, GPU_TESTS, (FULL_GPU,), True, 60),
    "other measurements": Part(1.0, WARNINGS, ("benchmarks/gpu/measure.py::test_measurement",), True, 100),
}
PYTEST = (
    *("-m", "pytest", "-p", "benchmarks.gpu.plugin", "-p", "no:cacheprovider", "--continue-on-collection-errors"),
    *("--max-worker-restart=1000", "--dist=load", "-rfE", "--tb=short", "-v"),
)


def main(words: Sequence[str] | None = None) -> int:
    """Run the check. Return 0 if no test failed and every test was reached, else 1."""
    options = options_of(words)
    deadline = time.monotonic() + 60 * options.minutes - LAST_SECONDS
    out = folder_of(options.out)
    print(f"results: {out}", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    if options.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # handled like Ctrl-C: the results so far are reported
    results = Results(out / "lines.jsonl")
    store = partial(results.write, out / "results.json")
    with contextlib.suppress(KeyboardInterrupt):
        store()
        results.machine = machine(environment)
        if options.device == "cuda" and results.machine.get("device") == "cpu":
            results.machine["error"] = "PyTorch finds no GPU; see `fedsim doctor`, or try the check with --device cpu"
        if options.device == "cpu" or results.machine.get("device", "cpu") != "cpu":
            run_parts(results, options.k, deadline, out, environment, store)
    store()
    print(summarize(results), flush=True)
    return int(not results.complete)


def run_parts(
    results: Results, expression: str, deadline: float, out: Path, environment: dict[str, str], store: Store
) -> None:
    """Run all parts, and repeat tests alone that failed beside others. Each part uses its share of the time left."""
    for name, part in PARTS.items():
        processes = 1 if part.exclusive else processes_for(results.machine)
        seconds, known = part.share * (deadline - time.monotonic()), set(results.failed_tests)
        run_part(part, processes, expression, seconds, out, environment, store)
        store()
        failed = tuple(test for test in results.failed_tests if test not in known)[:MOST_REPEATED]
        if processes > 1 and failed:
            seconds = min(part.share * (deadline - time.monotonic()), len(failed) * part.seconds)
            run_part(part._replace(paths=failed), 1, "", seconds, out, environment, store, alone=True)
            store()
        print(f"{max(0, deadline - time.monotonic()):5.0f} s left after {name}: {results.counted()}", flush=True)


def options_of(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the results (default: a temporary folder)")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of the check in minutes (default: 9)")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: try out the check without a GPU"
    )
    parser.add_argument(
        "-k", metavar="EXPRESSION", default="", help="only tests and measurements that match, as in pytest"
    )
    options = parser.parse_args(words)
    if not options.minutes > 0:
        parser.error(f"--minutes {options.minutes:g}: must be more than 0")
    return options


def folder_of(out: Path | None) -> Path:
    """Return the folder of the results after removing the files of an earlier check."""
    if out is None:
        return Path(tempfile.mkdtemp(prefix="fedsim-gpu-"))
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (out / name).unlink(missing_ok=True)
    return out.resolve()


def machine(environment: dict[str, str]) -> dict[str, object]:
    """Return the output of `benchmarks.gpu.machine`, or the reason of its failure under "error"."""
    command = [sys.executable, "-m", "benchmarks.gpu.machine"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=MACHINE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"the device does not answer within {MACHINE_SECONDS:g} s"}
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def processes_for(machine: Mapping[str, Any]) -> int:
    """Return how many processes run tests in parallel. One core in four is left to the processes that tests start."""
    by_memory = machine.get("gib", math.inf) / GIB_PER_PROCESS
    return max(1, int(min(0.75 * machine.get("cores", 1), by_memory)))


def run_part(
    part: Part,
    processes: int,
    expression: str,
    seconds: float,
    out: Path,
    environment: dict[str, str],
    store: Store,
    *,
    alone: bool = False,
) -> None:
    """Run pytest for at most `seconds`, then kill all of its processes. Call `store` again and again meanwhile.

    `alone`: whether failed tests are repeated without other tests beside them.
    """
    if seconds < 1:
        return
    command = [sys.executable, *PYTEST, *part.options, *part.paths, "-k", expression, "-n", str(processes)]
    command += ["--lines", str(out / "lines.jsonl"), "--test-seconds", str(part.seconds), *["--alone"] * alone]
    deadline = time.monotonic() + seconds
    with open(out / "log.txt", "ab") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True, stdin=subprocess.DEVNULL
        )
        try:
            while process.poll() is None and (left := deadline - time.monotonic()) > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(STORE_SECONDS, left))
                store()
            if process.returncode is None:
                log.write(f"\nended after {seconds:.0f} s\n".encode())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # a process that waits for a driver may survive even a kill
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)


if __name__ == "__main__":
    sys.exit(main())
