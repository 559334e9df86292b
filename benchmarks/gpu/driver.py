"""Runs each section in its own process, limits its time, and continues after a case that failed.

A thread looks after each process: it reads the lines of its cases from a pipe, and what it prints from another. It
kills the whole process group of a case that takes too long, and starts a new process behind a case that has died.
Imports neither PyTorch nor fedsim.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.cases import BAD, CUT, DIED, ERROR, HUNG, NOT_REACHED
from benchmarks.gpu.plan import BUDGET, REFERENCES, STAGES, SUMMARY_SECONDS, Section, Stage, text_asked
from benchmarks.gpu.section import ROOT, SPOILT

FILES = ("lines.jsonl", "log.txt")  # that are written here, in the folder of results
MOST_OUTPUT = 5_000_000  # characters that are kept of what processes print
TAIL = 1500  # characters of it that go into the line of a case that has died
POLL = 0.2  # seconds
WAIT_FOR_REFERENCES = 20.0  # seconds, before a stage that must be alone


class Options(NamedTuple):
    """What the command was asked for.

    Attributes:
        only: sections, or section:text for the cases whose names contain the text; empty: all.
        out: the folder of results; None where none can be written.
        environment: of the processes.
    """

    device: str
    quick: bool
    budget: float
    only: tuple[str, ...]
    out: Path
    references: Path
    environment: dict[str, str]


class Record:
    """All lines, in memory and in lines.jsonl; and in log.txt what the processes print. A full disk stops nothing."""

    def __init__(self, out: Path) -> None:
        self.started = time.monotonic()
        self.lines: list[dict[str, Any]] = []
        self.problem: str | None = None  # why something is not in the files
        self._lock = threading.Lock()
        self._paths = {name: out / name for name in FILES}
        self._left = MOST_OUTPUT

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def add(self, section: str, case: str, **fields: Any) -> None:
        line = {"section": section, "case": case, **fields, "at": round(self.seconds, 1)}
        with self._lock:
            self.lines.append(line)
        self._append("lines.jsonl", json.dumps(line) + "\n")

    def log(self, text: str) -> None:
        with self._lock:
            text = text[: self._left]
            self._left -= len(text)
        self._append("log.txt", text)

    def _append(self, name: str, text: str) -> None:
        try:
            with self._lock, self._paths[name].open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            self.problem = f"{self._paths[name]}: {error.strerror}; the summary on the terminal is complete"


class Lane:
    """The part of a section that one process at a time works on.

    Args:
        part, parts: of all cases, every `parts`-th from number `part` on.
    """

    def __init__(self, section: Section, part: int, parts: int, options: Options, record: Record) -> None:
        self._section, self._part, self._parts = section, part, parts
        self._options, self._record = options, record
        self._names: list[str] | None = None  # of the cases, after the first process has sent them
        self._tail = ""  # of what the process prints

    def run(self, deadline: float, stop: threading.Event) -> None:
        """Run all cases of this part, in as many processes as it takes; a line for each, whatever happens."""
        self._deadline, self._stop = deadline, stop
        try:
            self._run()
        except Exception as error:  # no process can be started, say
            self._add("start", status=ERROR, error=f"{type(error).__name__}: {error}")

    def _run(self) -> None:
        begin: int | None = 0
        while begin is not None and not self._over():
            following = self._run_process(begin)
            if following == begin:
                break  # it cannot even start
            begin = following
        missing = ["all cases"] if self._names is None else self._names[begin:] if begin is not None else []
        if missing:
            name = missing[0] if len(missing) == 1 else f"{len(missing)} cases"
            self._add(name, status=NOT_REACHED, names=missing)

    def _over(self) -> bool:
        return self._stop.is_set() or time.monotonic() > self._deadline

    def _run_process(self, begin: int) -> int | None:
        """The number of the case that a new process is to go on with; None where all have been run."""
        lines, theirs = os.pipe()
        process = subprocess.Popen(
            self._command(begin, theirs),
            cwd=ROOT,
            env=self._options.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs],
            start_new_session=True,  # and so a process group, which can be killed as a whole
        )
        os.close(theirs)
        self._tail, self._case_ends = "", self._deadline
        current: int | None = None
        following, started = begin, time.monotonic()
        try:
            for message in self._messages(lines, process):
                if "cases" in message:
                    self._names = message["cases"]
                elif "begin" in message:
                    current, started = message["begin"], time.monotonic()
                    self._case_ends = started + message["limit"]
                elif "end" in message:
                    self._add(self._names[message["end"]], **message["line"])
                    current, following, self._case_ends = None, message["end"] + 1, self._deadline
        finally:
            status = _end(process)
            os.close(lines)
            process.stdout.close()
        if current is not None:
            self._add_lost(self._names[current], status, time.monotonic() - started)
            return current + 1
        if status == 0:
            return None
        if status != SPOILT and not (status is None and self._names is not None):
            self._add_lost("start", status, time.monotonic() - started)
        return following

    def _add_lost(self, case: str, status: int | None, seconds: float) -> None:
        """The line of a case whose process has died, with this status, or was killed here, with None."""
        if status is not None:
            outcome, why = DIED, f"{_how(status)}: {self._last_line()}"
        elif self._over():
            outcome, why = CUT, f"the time of the section was over, {seconds:.0f} s after the case began"
        else:
            outcome, why = HUNG, f"it had not ended after {seconds:.0f} s"
        self._add(case, status=outcome, error=why, seconds=round(seconds, 3), output=self._tail)

    def _messages(self, pipe: int, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
        """What the process tells, until it ends or its time is over."""
        rest = b""
        with selectors.DefaultSelector() as selector:
            output = process.stdout.fileno()
            for each in (pipe, output):
                os.set_blocking(each, False)
                selector.register(each, selectors.EVENT_READ)
            while True:
                ended = process.poll() is not None  # before reading, so that all its output is in the pipes
                ready = [key.fd for key, _ in selector.select(0 if ended else POLL)]
                for each in ready:
                    if not (read := os.read(each, 65536)):
                        selector.unregister(each)
                    elif each == output:
                        self._hear(read.decode(errors="replace"))
                    else:
                        *whole, rest = (rest + read).split(b"\n")
                        for line in whole:
                            with contextlib.suppress(ValueError):
                                yield json.loads(line)
                if (ended and not ready) or self._over() or time.monotonic() > self._case_ends:
                    return

    def _hear(self, text: str) -> None:
        self._record.log(text)
        self._tail = (self._tail + text)[-TAIL:]

    def _last_line(self) -> str:
        return next((line for line in reversed(self._tail.splitlines()) if line.strip()), "it said nothing")[:300]

    def _add(self, case: str, **fields: Any) -> None:
        self._record.add(self._section.name, case, **fields)

    def _command(self, begin: int, pipe: int) -> list[str]:
        options = self._options
        given = {
            **{"lines": pipe, "device": options.device, "references": options.references, "out": options.out},
            **{"part": self._part, "parts": self._parts, "begin": begin},
        }
        words = [f"--{name}={value}" for name, value in given.items()] + [f"--only={word}" for word in options.only]
        start = [sys.executable, "-u", "-m", "benchmarks.gpu.section", json.dumps(self._section._asdict())]
        return [*start, *words, *(["--quick"] if options.quick else [])]


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """Kill what is left of a process group; the exit status of a process that had ended by itself, else None."""
    status = process.poll()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a process that waits for a driver may not even die
        process.wait(2)
    return status


def _how(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def drive(options: Options, record: Record, stop: threading.Event, stages: Sequence[Stage] = STAGES) -> None:
    """Run all stages within the budget. Setting `stop` from elsewhere ends it early."""
    scale = options.budget / BUDGET
    end = record.started + options.budget - SUMMARY_SECONDS * min(1.0, scale)

    def asked(section: Section) -> bool:
        return text_asked(options.only, section.name) is not None

    chosen = [
        stage._replace(sections=tuple(section for section in stage.sections if asked(section))) for stage in stages
    ]
    background = _Lanes([], options, record, end, stop)
    if any(section.compared for stage in chosen for section in stage.sections):
        background = _Lanes([REFERENCES], options, record, end, stop)
    for stage in chosen:
        if not stage.sections or stop.is_set():
            continue
        if stage.alone:
            background.finish(min(WAIT_FOR_REFERENCES * scale, end - time.monotonic()))
        deadline = min(end, time.monotonic() + stage.seconds * scale)
        _Lanes(stage.sections, options, record, deadline, stop).finish()
        _print_progress(stage, record)
        if _no_device(record):
            break
    background.finish(0)


def _print_progress(stage: Stage, record: Record) -> None:
    for section in stage.sections:
        counts = collections.Counter(line["status"] for line in record.lines if line["section"] == section.name)
        statuses = ", ".join(f"{count} {status}" for status, count in counts.items())
        print(f"{record.seconds:5.0f} s  {section.name}: {statuses}", flush=True)


def _no_device(record: Record) -> bool:
    known = [line["status"] for line in record.lines if (line["section"], line["case"]) == ("machine", "device")]
    return any(status in BAD for status in known)


class _Lanes:
    """Sections at work side by side, as many processes at a time as there are cores."""

    def __init__(
        self,
        sections: Sequence[Section],
        options: Options,
        record: Record,
        deadline: float,
        stop: threading.Event,
    ) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        lanes = [
            Lane(section, part, parts, options, record)
            for section in sections
            for parts in [min(section.processes, cores)]
            for part in range(parts)
        ]
        self._deadline, self._stop_all, self._stop = deadline, stop, threading.Event()
        self._pool = ThreadPoolExecutor(max(2, cores))
        self._futures = [self._pool.submit(lane.run, deadline, self._stop) for lane in lanes]

    def finish(self, seconds: float | None = None) -> None:
        """Wait for all, or so many seconds at most; then kill what still runs."""
        ends = self._deadline if seconds is None else time.monotonic() + seconds
        while not all(future.done() for future in self._futures):
            if self._stop_all.is_set() or time.monotonic() > ends + POLL:
                self._stop.set()
            time.sleep(POLL / 4)
        self._pool.shutdown()
