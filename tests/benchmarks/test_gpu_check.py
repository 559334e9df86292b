"""The GPU check: how it reports cases that fail, and some of its cases on the CPU."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as check
from benchmarks.gpu.cases import Context
from benchmarks.gpu.driver import FILES, Options, Record, drive
from benchmarks.gpu.plan import BUDGET, STAGES, SUMMARY_SECONDS, Section, Stage, sections_of
from benchmarks.gpu.section import cases_of, run_case
from benchmarks.gpu.summary import LINES, WIDTH, Findings, goals, summarize
from tests.device.pretend import pretend_gpu

ROOT = Path(__file__).parents[2]


def driven(out, *sections, budget=BUDGET, only=(), stop=None, seconds=60.0):
    """The record of some sections of tests/benchmarks."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    record = Record(out)
    stage = Stage(seconds * BUDGET / budget, tuple(Section(name, "", package="tests.benchmarks") for name in sections))
    options = Options("cpu", False, budget, only, out, out, environment)
    drive(options, record, stop or threading.Event(), (stage,))
    return record


def statuses(record):
    return {line["case"]: line["status"] for line in record.lines}


def test_a_case_that_fails_does_not_stop_the_others(tmp_path):
    record = driven(tmp_path, "failing")
    assert statuses(record) == {
        **{"right": "ok", "wrong": "wrong", "raises": "error", "does not apply": "skipped", "aborts": "died"},
        **{"exits": "died", "hangs": "hung", "prints": "ok", "last": "ok"},
    }
    lines = {line["case"]: line for line in record.lines}
    assert lines["wrong"]["facts"] == {"off": 2.0}
    assert "ZeroDivisionError" in lines["raises"]["error"]
    assert lines["raises"]["where"][-1].startswith("tests/benchmarks/failing.py:")
    assert "SIGABRT" in lines["aborts"]["error"]
    assert "exit status 7" in lines["exits"]["error"]
    written = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert written == record.lines
    child = int(re.search(r"child (\d+)", lines["hangs"]["output"])[1])
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()
    assert "{not json}" in (tmp_path / "log.txt").read_text(errors="replace")


def test_a_section_that_cannot_start_is_reported(tmp_path):
    record = driven(tmp_path, "broken", "failing", only=("broken", "failing:last"))
    assert statuses(record) == {"start": "died", "all cases": "not reached", "last": "ok"}
    assert any("No module named 'pydantic'" in line.get("error", "") for line in record.lines)


@pytest.mark.parametrize("how", ["stage", *(pytest.param(how, marks=pytest.mark.slow) for how in ("budget", "signal"))])
def test_cases_without_time_are_reported(how, tmp_path):
    stop = threading.Event()
    threading.Timer(1.0, stop.set if how == "signal" else dict).start()
    budget = 1.5 * BUDGET / (BUDGET - SUMMARY_SECONDS) if how == "budget" else BUDGET
    record = driven(tmp_path, "hanging", budget=budget, seconds=1.0 if how == "stage" else 60.0, stop=stop)
    assert [(line["case"], line["status"]) for line in record.lines] == [("hangs", "cut"), ("2 cases", "not reached")]
    assert record.lines[1]["names"] == ["second", "third"]


def test_a_full_disk_is_reported_and_stops_nothing(tmp_path):
    for name in FILES:
        (tmp_path / name).symlink_to("/dev/full")
    record = driven(tmp_path, "failing", only=("failing:right",))
    assert statuses(record) == {"right": "ok"}
    assert "No space left on device" in record.problem


def test_a_case_on_the_cpu(tmp_path, capsys):
    assert check.main(["--device", "cpu", "--out", str(tmp_path), "--only", "rules:rule krum, float64"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [line["status"] for line in lines] == ["ok"]
    shown = capsys.readouterr().out
    assert "no case failed" in shown
    assert (tmp_path / "summary.txt").read_text() in shown


@pytest.fixture
def gpu():
    """A pretend GPU for a test."""
    with pretend_gpu() as gpu:
        yield gpu


SLOW_CASES = ["draws:failed", "faults:captured", "memory:after runs, serial"]
GPU_CASES = [
    *("constants:graph of 30", "draws:graph"),
    *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW_CASES),
]


@pytest.mark.parametrize("word", GPU_CASES)
def test_cases_that_need_a_gpu_on_the_pretend_gpu(word, tmp_path, gpu):
    section = sections_of()[word.partition(":")[0]]
    cases = cases_of(section, Context("cuda", True, tmp_path, tmp_path, (word,)))
    assert [run_case(case)["status"] for case in cases] == ["ok"]


def test_a_summary_fits_on_a_screen():
    lines = [{"section": "rules", "case": f"case {k}", "status": "error", "error": "long " * 99} for k in range(99)]
    lines += [{"section": "ways", "case": str(k), "status": "ok", "warnings": [f"{k} " * 99]} for k in range(99)]
    shown = summarize(lines, device="cuda", seconds=1.0, budget=BUDGET, notes=["note"] * 99).splitlines()
    assert len(shown) == LINES
    assert max(map(len, shown)) <= WIDTH


def rounds(**milliseconds):
    """Lines of workload w3."""
    kinds = {"limit": "limit_ms"}
    return [
        {
            "section": "workloads",
            "case": f"w3, {way.replace('_', ' ')}",
            "status": "ok",
            "facts": {kinds.get(way, "round_ms"): ms},
        }
        for way, ms in milliseconds.items()
    ]


def test_goals_are_against_the_faster_of_the_baselines_and_against_the_limit():
    met = rounds(batched=10.0, serial=300.0, bare_loop=250.0, limit=2.5)
    assert [goal.met for goal in goals(Findings(met)) if goal.met is not None] == [True, True]
    missed = rounds(batched=10.0, serial=300.0, bare_loop=150.0, limit=1.5)
    assert [goal.met for goal in goals(Findings(missed)) if goal.met is not None] == [False, False]
    assert "goal NOT met: w3: 15 times faster" in summarize(missed, device="cuda", seconds=1.0, budget=BUDGET)


@pytest.mark.slow
def test_the_whole_check_on_the_cpu(tmp_path):
    assert check.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert {line["section"] for line in lines} >= {section.name for stage in STAGES for section in stage.sections}
    assert {line["status"] for line in lines} <= {"ok", "skipped"}
