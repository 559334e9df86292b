"""A pytest plugin that writes the outcome of each test as it ends, and ends tests that hang or break the device.

`python -m benchmarks.gpu` starts pytest with this plugin and with pytest-xdist. Tests run in worker processes, and
pytest-xdist replaces a worker that dies. A test that hangs, crashes or breaks the device for its process therefore does
not affect other tests.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
from collections.abc import Generator, Sequence
from typing import Any

import pytest

MOST_TEXT = 600  # maximum characters of an error or a warning


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lines", required=True, help="file to which JSON lines about the tests are appended")
    parser.addoption("--test-seconds", type=float, required=True, help="time limit of a test in seconds")
    parser.addoption("--alone", action="store_true", help="note that the tests run without others beside them")


def pytest_configure(config: pytest.Config) -> None:
    plugin = Guard if hasattr(config, "workerinput") else Lines
    config.pluginmanager.register(plugin(*map(config.getoption, ("lines", "test_seconds", "alone"))))


class Guard:
    """Guard of a worker process, which exits if a test takes too long or if the device no longer works afterwards."""

    def __init__(self, lines: str, seconds: float, alone: bool) -> None:
        self._seconds = seconds
        self._stacks = open(f"{lines}.stacks", "a")  # noqa: SIM115  # for as long as this process lives

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._stacks)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
            if not device_works():
                os._exit(3)


def device_works() -> bool:
    """Whether this process can compute on its GPU, if there is one. (For example, not after an illegal access.)"""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return True
    with contextlib.suppress(Exception):
        return torch.ones(3, device="cuda").sum().item() == 3
    return False


class Lines:
    """Writer in the main process: a JSON line with the names of all tests, and one per start, outcome and warning."""

    def __init__(self, lines: str, seconds: float, alone: bool) -> None:
        self._file = open(lines, "a", buffering=1)  # noqa: SIM115  # for as long as this process lives
        self._alone = alone
        self._selected = False

    def _write(self, **fields: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the tests
            self._file.write(json.dumps(fields, default=str) + "\n")

    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        if not self._selected:  # all workers collect the same tests
            self._selected = True
            self._write(selected=list(ids))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(test=report.nodeid, outcome="failed", error=reason(report))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(started=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        fields = {"seconds": round(report.duration, 2), "alone": self._alone, **dict(report.user_properties)}
        self._write(test=report.nodeid, outcome=report.outcome, **fields, error=reason(report))

    def pytest_warning_recorded(self, warning_message: Any, nodeid: str) -> None:
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        self._write(warning=" ".join(text.split())[:MOST_TEXT], test=nodeid)


def reason(report: Any) -> str | None:
    """Return why a test failed or was skipped, in one line, or None if it passed."""
    if report.passed:
        return None
    if isinstance(report.longrepr, tuple):  # (file, line, reason) of a skipped test
        return str(report.longrepr[2])[:MOST_TEXT]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = f"{crash.path}:{crash.lineno}: {crash.message}" if crash else str(report.longrepr)
    return " ".join(text.split())[:MOST_TEXT]
