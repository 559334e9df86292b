from __future__ import annotations

import sys
import time

import pytest

import fedsim
from fedsim.core import notices
from fedsim.core.notices import SlowStepNotice, notice_if_slow


def test_a_slow_step_is_told_and_a_quick_one_is_not(monkeypatch):
    monkeypatch.setattr(notices, "SLOW_SECONDS", 0.05)
    told = []
    notice = SlowStepNotice(told.append)
    notice.begin("a quick step")
    notice.begin("a slow step")
    deadline = time.monotonic() + 10
    while not told and time.monotonic() < deadline:
        time.sleep(0.01)
    notice.begin("another quick step")
    notice.end()
    time.sleep(0.1)
    assert told == ["a slow step ..."]


@pytest.mark.parametrize(("terminal", "expected"), [(True, "sleeping ...\n"), (False, "")])
def test_a_slow_block_is_told_on_a_terminal_and_nowhere_else(terminal, expected, monkeypatch, capsys):
    monkeypatch.setattr(notices, "SLOW_SECONDS", 0.05)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with notice_if_slow("sleeping"):
        time.sleep(0.5)
    assert capsys.readouterr().err == expected


def test_a_run_tells_each_step_of_its_setup(tiny_experiment):
    steps, started = [], []
    fedsim.run(tiny_experiment, on_setup=steps.append, on_start=lambda prepared: started.append(len(steps)))
    assert [step.split()[0] for step in steps] == ["starting", "making", "loading", "partitioning", "getting"]
    assert started == [5]
