"""Check and measure fedsim on a GPU, in one command of at most nine minutes: python -m benchmarks.gpu

This program needs nothing but Python; its sections need PyTorch and fedsim, and are processes. See
docs/explanation/gpu.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from benchmarks.gpu import packages
from benchmarks.gpu.cases import BAD
from benchmarks.gpu.driver import FILES, Options, Record, drive
from benchmarks.gpu.plan import BUDGET, sections_of
from benchmarks.gpu.section import ROOT
from benchmarks.gpu.summary import summarize


def main(words: Sequence[str] | None = None) -> int:
    """Run the check; 0 if no case failed, else 1."""
    options = options_of(words)
    if options.pack is not None:
        packages.pack(options.pack, options.data, options.python)
        return 0
    with tempfile.TemporaryDirectory(prefix="fedsim-gpu-", ignore_cleanup_errors=True) as scratch:
        return check(options, Path(scratch))


def check(options: argparse.Namespace, scratch: Path) -> int:
    out, notes = writable(options.out)
    environment, more = environment_of(options, scratch)
    notes += more
    print(f"results: {out}", flush=True)
    references = scratch / "references"
    references.mkdir()
    record = Record(out)
    given = Options(options.device, options.quick, options.budget, tuple(options.only), out, references, environment)
    with stopped_by_signals() as stop:
        drive(given, record, stop)
    reached = {line["section"] for line in record.lines}
    unknown = [word for word in options.only if word.partition(":")[0] not in reached]
    notes += [f"--only {word}: no case has such a name" for word in unknown]
    if record.problem:
        notes.append(record.problem)
    text = summarize(record.lines, device=options.device, seconds=record.seconds, budget=options.budget, notes=notes)
    try:
        (out / "summary.txt").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        print(f"{out / 'summary.txt'}: {error.strerror}")
    print(text, flush=True)
    return int(bool(unknown) or any(line["status"] in BAD for line in record.lines))


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set; the summary is written all the same."""
    stop = threading.Event()
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(kind, lambda *_: stop.set()) for kind in kinds]
    try:
        yield stop
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)


def writable(out: Path | None) -> tuple[Path, list[str]]:
    """The folder of results, or a temporary one where it cannot be written; and a note that says so."""
    notes: list[str] = []
    given = out or (Path(os.environ["OUT"]) if os.environ.get("OUT") else None)
    if given is not None:
        try:
            given.mkdir(parents=True, exist_ok=True)
            for name in (*FILES, "summary.txt"):  # of a check before
                (given / name).unlink(missing_ok=True)
            (given / FILES[0]).touch()
            return given.resolve(), notes
        except OSError as error:
            notes.append(f"{given}: {error.strerror}; the results are in a temporary folder")
    return Path(tempfile.mkdtemp(prefix="fedsim-gpu-out-")), notes


def environment_of(options: argparse.Namespace, scratch: Path) -> tuple[dict[str, str], list[str]]:
    """The environment of all processes: this checkout, packages and data that were carried; and what failed."""
    notes, paths, data = [], [str(ROOT)], options.data
    if options.packages is not None:
        problem = packages.install(options.packages, scratch / "packages")
        notes += [f"--packages: {problem}"] if problem else []
        paths.append(str(scratch / "packages"))
        data = data or packages.unpack_data(options.packages, scratch / "data")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    if data is not None:
        environment["FEDSIM_DATA"] = str(data.resolve())
    return environment, notes


def options_of(words: Sequence[str] | None) -> argparse.Namespace:
    sections = list(sections_of())
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ..., or cpu to try the check out")
    parser.add_argument("--out", type=Path, help="folder of the results; default: $OUT, else a temporary folder")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds after which everything has ended")
    parser.add_argument("--quick", action="store_true", help="run a few small cases of each section")
    listed = "SECTION or SECTION:TEXT, for cases whose names contain TEXT; sections: "
    parser.add_argument("--only", nargs="+", default=[], metavar="SECTION", help=listed + ", ".join(sections))
    parser.add_argument("--data", type=Path, help="folder that holds MNIST/raw; default: $FEDSIM_DATA")
    parser.add_argument("--packages", type=Path, help="folder of wheels to install first, as made by --pack")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="collect the wheels and MNIST, and do nothing else")
    version = ".".join(platform.python_version_tuple()[:2])
    parser.add_argument("--python", default=version, help="with --pack: the version of Python on the other machine")
    options = parser.parse_args(words)
    for word in options.only:
        name = word.partition(":")[0]
        if name not in sections:
            near = get_close_matches(name, sections, 1)
            hint = f"did you mean {near[0]}?" if near else f"sections: {', '.join(sections)}"
            parser.error(f"--only {word}: no such section; {hint}")
    if not options.budget > 0:
        parser.error(f"--budget {options.budget:g}: must be more than 0 seconds")
    return options


if __name__ == "__main__":
    sys.exit(main())
