"""The GPU check on the CPU: how it continues after failed tests, what it reports, and what it measures."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu import __main__ as check
from benchmarks.gpu.goals import ASSERTIONS, GOALS
from benchmarks.gpu.profiling import summarize as summarize_events
from benchmarks.gpu.report import MOST_FAILURES, WIDTH, Results, summarize
from tests.commands import stat_of

ROOT = Path(__file__).parents[2]
FAILING = """
import os, subprocess, sys, time
import pytest

def test_right(record_property):
    record_property("figures", {"us": 42})

def test_wrong():
    assert 1 == 2

def test_not_here():
    pytest.skip("not here")

def test_hangs():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open("child", "w").write(str(child.pid))
    time.sleep(600)

def test_last():
    pass
"""


@pytest.fixture(autouse=True)
def few_plugins(monkeypatch):
    """Let pytest start without the plugins that it does not need, which take half a second in each process."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")


def results_of(tmp_path, text, seconds, test_seconds):
    """Return the check's results for a test file with this text, in which each test may take `test_seconds`."""
    (tmp_path / "test_some.py").write_text(text)
    part = check.Part(1.0, ("--rootdir", str(tmp_path), "-c", os.devnull), ("test_some.py",), True, test_seconds)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    results = Results(tmp_path / "lines.jsonl")
    check.run_part(part, 1, "", seconds, tmp_path, environment, results.read)
    results.read()
    return results


def outcomes(results):
    return {name.rpartition("::")[2]: test["outcome"] for name, test in results.tests.items()}


def test_a_test_that_fails_or_hangs_stops_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "ROOT", tmp_path)
    results = results_of(tmp_path, FAILING, 60.0, 1.0)
    assert outcomes(results) == {
        **{"test_right": "passed", "test_wrong": "failed", "test_not_here": "skipped"},
        **{"test_hangs": "failed", "test_last": "passed"},
    }
    assert [*results.figures().values()] == [{"us": 42}]
    assert "assert 1 == 2" in results.failures["test_some.py::test_wrong"]
    assert "time.sleep" not in (tmp_path / "lines.jsonl").read_text()
    assert "test_hangs" in (tmp_path / "lines.jsonl.stacks").read_text()
    child, deadline = int((tmp_path / "child").read_text()), time.monotonic() + 5
    while (running := stat_of(child)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running, "the child is killed with its process group"
    assert not results.complete


def test_tests_without_time_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "ROOT", tmp_path)
    results = results_of(tmp_path, "import time\ndef test_a(): time.sleep(600)\ndef test_b(): pass\n", 5.0, 600.0)
    assert outcomes(results) == {"test_a": "cut", "test_b": "not reached"}
    assert not results.complete


CROWDED = """
import os, time
import pytest

@pytest.mark.parametrize("place", ["on the first try", "again and again"])
def test_fails(place):
    first = not os.path.exists(place)
    open(place, "w").close()
    assert not (first or place == "again and again"), place

def test_right():
    pass
"""


SLOW = """
import time
import pytest

@pytest.mark.parametrize("name", ["w1, batched", "w2, batched"])
def test_goal(name, record_property):
    if name == "w2, batched":
        time.sleep(600)
    record_property("figures", {"round_ms": 1.0})
"""


@pytest.fixture
def slow_check(tmp_path, monkeypatch):
    """Return the words of a check whose second measurement hangs, and the path of its results."""
    (tmp_path / "test_some.py").write_text(SLOW)
    words = ["--rootdir", str(tmp_path), "-c", os.devnull]
    program = f"""
import sys
from pathlib import Path
from benchmarks.gpu import __main__ as check

part = check.Part(1.0, {words}, ("test_some.py",), True, 600.0)
check.PARTS = {{"first": part, "second": part._replace(paths=("test_other.py",))}}
check.ROOT = Path({str(tmp_path)!r})
check.LAST_SECONDS = 1.0
check.machine = lambda environment: {{"device": "GPU", "cores": 2}}
sys.exit(check.main())
"""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return ["-c", program, "--out", str(tmp_path / "out")], tmp_path / "out" / "results.json"


def goals_of(path):
    goals = {(goal["measurement"], goal["figure"]): goal["met"] for goal in json.loads(path.read_text())["goals"]}
    assert len(goals) == len(GOALS)
    return {measurement: met for (measurement, figure), met in goals.items() if figure == "round_ms"}


def test_a_check_that_is_killed_leaves_readable_results(slow_check):
    words, path = slow_check
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    try:
        while not (path.exists() and goals_of(path)["w1, batched"]):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
        for child in Path("/proc").glob("[0-9]*/cmdline"):  # killing the check spares its tests
            with contextlib.suppress(OSError):
                if str(path.parent / "lines.jsonl").encode() in child.read_bytes():
                    os.kill(int(child.parent.name), signal.SIGKILL)
    assert goals_of(path)["w2, batched"] is None


def test_what_does_not_fit_into_the_time_is_not_measured(slow_check):
    words, path = slow_check
    done = subprocess.run(
        [sys.executable, *words, "--minutes", "0.1"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    goals = goals_of(path)
    assert (goals["w1, batched"], goals["w2, batched"], goals["w3, batched"]) == (True, None, None)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "not measured w2, batched round_ms - (at most 50): cut" in lines


@pytest.mark.parametrize(("expression", "status"), [pytest.param("first or right", 0, marks=pytest.mark.slow), ("", 1)])
def test_a_test_that_failed_beside_others_is_repeated_alone(expression, status, tmp_path, monkeypatch, capsys):
    (tmp_path / "test_some.py").write_text(CROWDED)
    part = check.Part(1.0, ("--rootdir", str(tmp_path), "-c", os.devnull), ("test_some.py",), False, 60.0)
    monkeypatch.setattr(check, "PARTS", {"tests": part})
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(check, "machine", lambda environment: {"device": "GPU", "cores": 3})
    assert check.main(["--out", str(tmp_path / "out"), "-k", expression]) == status
    shown = capsys.readouterr().out
    assert "passed only alone: test_some.py::test_fails[on the first try]" in shown
    assert ("FAILED twice, also alone: test_some.py::test_fails[again and again]" in shown) == bool(status)


@pytest.fixture
def results(tmp_path):
    """Return the results of a check in which many tests failed and one workload was measured."""
    lines = [{"test": f"tests/a.py::test_{k}", "outcome": "failed", "error": "long " * 99} for k in range(99)]
    lines += [{"warning": f"{k} " * 99, "test": "a"} for k in range(99)]
    ms = {"batched": 10.0, "serial": 300.0, "bare loop": 150.0}
    figures = {**{way: {"round_ms": time} for way, time in ms.items()}, "limit": {"limit_ms": 1.5}}
    figures["batched, profile"] = {"launches": 12, "kernels": 3456}
    lines += [
        {"test": f"measure.py::test_measurement[w3, {way}]", "outcome": "passed", "figures": known}
        for way, known in figures.items()
    ]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"test": "half a li')
    results = Results(tmp_path / "lines.jsonl")
    results.read()
    return results


def test_a_summary_fits_on_a_screen_and_has_the_figures(results):
    lines = summarize(results).splitlines()
    assert len(lines) < MOST_FAILURES + len(ASSERTIONS) + len(GOALS) + 15
    assert max(map(len, lines)) <= WIDTH
    table = {line.partition("   ")[0].strip(): line.split() for line in lines}
    assert table["w3 ms/round"][2:] == ["10", "-", "-", "-", "-", "300", "150", "-", "-", "-", "-", "1.5"]
    assert table["w3 launches"][2] == "12"
    assert len(results.as_json()["failures"]) == 99


def test_the_summary_says_for_each_goal_whether_it_is_met(results):
    lines = [" ".join(line.split()) for line in summarize(results).splitlines()]
    assert "missed w3, batched round_ms 10 (at most 3.5), best baseline: bare loop 150" in lines
    (goal,) = [goal for goal in results.as_json()["goals"] if goal["measurement"] == "w3, batched" and goal["measured"]]
    assert (goal["most"], goal["measured"], goal["met"], goal["best_baseline"]) == (
        3.5,
        10.0,
        False,
        ("bare loop", 150),
    )
    results.machine = {"device": "cpu"}
    assert f"{len(GOALS)} goals: 0 met, 0 missed, {len(GOALS)} not measured" in summarize(results)
    assert [goal["met"] for goal in results.as_json()["goals"]] == [None] * len(GOALS)


def test_the_summary_ends_with_all_goals_and_says_why_some_are_not_measured(tmp_path):
    """Whatever has happened to a measurement: no goal is left out."""
    ended = {
        **{"w1, batched": {"outcome": "passed", "figures": {"round_ms": 59.0, "first_round_ms": 301.0}}},
        **{"w2, batched": {"outcome": "failed", "error": "CUDA out of memory"}},
        **{"which_rule": {"outcome": "passed", "figures": {"seconds": 12}}},
        **{"rules, 20 x 21840": {"outcome": "passed", "figures": {"ms": {"mean": 1.0}}}},
    }
    lines = [{"selected": [f"a.py::test_goal[{name}]" for name in (*ended, "w3, batched", "gpt, batched")]}]
    lines += [{"test": f"a.py::test_goal[{name}]", **fields} for name, fields in ended.items()]
    lines += [{"started": "a.py::test_goal[w3, batched]"}]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    results = Results(tmp_path / "lines.jsonl")
    results.machine = {"device": "GPU"}
    results.read()
    title, *table = [" ".join(line.split()) for line in summarize(results).splitlines()[-1 - len(GOALS) :]]
    assert title == f"{len(GOALS)} goals: 2 met, 1 missed, {len(GOALS) - 3} not measured"
    for verdict, line in zip(results.verdicts(), table, strict=True):
        assert line.startswith(f"{verdict.word} {verdict.goal.measurement} {verdict.goal.figure} "), line
    for line in (
        "met w1, batched round_ms 59 (at most 60)",
        "missed w1, batched first_round_ms 301 (at most 300)",
        "not measured w2, batched round_ms - (at most 50): CUDA out of memory",
        "not measured w3, batched round_ms - (at most 3.5): cut",
        "not measured gpt, batched round_ms - (at most 100): not reached",
        "not measured char_lstm, batched round_ms - (at most 300): not started",
        "not measured rules, 20 x 21840 most_over_byzfl - (at most 1): the measurement lacks this figure",
        "met which_rule seconds 12 (at most 12)",
    ):
        assert line in table
    results.machine = {"error": "no device"}
    assert summarize(results).splitlines()[-1].endswith(": no device")


def test_the_summary_says_for_each_assertion_whether_it_holds(tmp_path):
    holds, fails, *others = ASSERTIONS
    lines = [
        {"test": f"a.py::test_assertion[{holds}]", "outcome": "passed", "figures": {"difference": 0.5}},
        {"test": f"a.py::test_assertion[{fails}]", "outcome": "failed", "error": "it waits"},
        {"test": f"a.py::test_assertion[{others[0]}]", "outcome": "skipped", "error": "needs a GPU"},
    ]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    results = Results(tmp_path / "lines.jsonl")
    results.read()
    shown = [line for line in summarize(results).splitlines() if line.startswith("assertion")]
    assert shown[:3] == [
        f"assertion holds: {holds}: difference 0.5",
        f"assertion DOES NOT HOLD: {fails}: it waits",
        f"assertion skipped: {others[0]}: needs a GPU",
    ]
    assert shown[3:] == [f"assertion not started: {name}" for name in others[1:]]
    assert [*results.as_json()["assertions"].values()][:4] == ["passed", "failed", "skipped", "not started"]


def test_results_that_cannot_be_written_end_no_check(results, tmp_path, monkeypatch):
    def full(old, new):
        raise OSError(28, "No space left on device")

    path = tmp_path / "results.json"
    results.write(path)
    before = path.read_text()
    monkeypatch.setattr(os, "replace", full)
    results.machine = {"device": "GPU"}
    results.write(path)
    assert path.read_text() == before


def test_the_goals_of_the_next_card_are_among_the_goals():
    most = {goal.measurement.removesuffix(", batched"): goal.most for goal in GOALS if goal.figure == "round_ms"}
    assert most == {**{"w1": 60, "w2": 50, "w3": 3.5, "w3-1000": 20, "gpt": 100, "char_lstm": 300, "resnet20": 60}}


@pytest.mark.parametrize(
    ("machine", "line"),
    [({"error": "no device"}, "no device"), ({"device": "cpu"}, "PyTorch finds no GPU; see `fedsim doctor`, or try")],
)
def test_a_machine_without_a_working_gpu_is_a_failure(machine, line, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check, "machine", lambda environment: machine)
    assert check.main(["--out", str(tmp_path)]) == 1
    assert f"FAILED machine: {line}" in capsys.readouterr().out
    assert json.loads((tmp_path / "results.json").read_text())["failures"]["machine"].startswith(line)


def test_a_device_is_busy_while_a_kernel_runs():
    events = [("a", True, 0.0, 1000.0), ("b", True, 500.0, 1500.0), ("a", True, 3000.0, 4000.0)]
    events += [("cudaLaunchKernel", False, 0.0, 1.0), ("cudaStreamSynchronize", False, 0.0, 1.0)]
    figures = summarize_events(events)
    assert (figures["kernels"], figures["launches"], figures["waits"]) == (3, 1, 1)
    assert (figures["busy_ms"], figures["span_ms"], figures["busy_share"]) == (2.5, 4.0, 0.625)
    assert figures["top"] == [["a", 2, 2.0], ["b", 1, 1.0]]


def test_a_measurement_on_the_cpu(monkeypatch):
    from benchmarks.gpu import measure

    monkeypatch.setitem(measure.WORKLOADS, "w3", (*measure.WORKLOADS["w3"], "cohort=3"))
    assert measure.MEASUREMENTS["node of a graph"]()["us"] > 0
    assert measure.MEASUREMENTS["w3, batched"]()["round_ms"] > 0


@pytest.mark.parametrize(
    ("machine", "processes"),
    [
        ({"cores": 16, "gib": 139.8}, 12),
        ({"cores": 16, "gib": 11.0}, 2),
        ({"cores": 4, "gib": 80.0}, 3),
        ({"cores": 1, "gib": 2.0}, 1),
        ({"cores": 4}, 3),
        ({"error": "no device"}, 1),
    ],
)
def test_as_many_test_processes_run_as_cores_and_gpu_memory_allow(machine, processes, tmp_path, monkeypatch):
    numbers = []
    monkeypatch.setattr(check, "machine", lambda environment: {**machine, "device": "GPU"})
    monkeypatch.setattr(check, "run_part", lambda part, processes, *rest: numbers.append((processes, part.exclusive)))
    check.main(["--out", str(tmp_path)])
    assert numbers == [(1 if part.exclusive else processes, part.exclusive) for part in check.PARTS.values()]
    assert (processes, False) in numbers


def test_all_parts_and_repetitions_fit_into_the_minutes_in_the_order_of_their_value(tmp_path, monkeypatch):
    """Each part uses all the time that it may use, and one of its tests fails beside others."""
    clock, spent = [0.0], []

    def run_part(part, processes, expression, seconds, out, environment, store, alone=False):
        clock[0] += seconds
        spent.append((part.paths, alone))
        with open(out / "lines.jsonl", "a") as lines:
            lines.write(json.dumps({"test": part.paths[0], "outcome": "failed", "error": "1", "alone": alone}) + "\n")

    monkeypatch.setattr(check, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(check, "machine", lambda environment: {"device": "GPU", "cores": 4})
    monkeypatch.setattr(check, "run_part", run_part)
    assert check.main(["--minutes", "9", "--out", str(tmp_path)]) == 1
    assert clock[0] <= 9 * 60 - check.LAST_SECONDS + 1e-6
    tests = check.PARTS["tests"].paths
    in_order = [(part.paths, False) for part in check.PARTS.values()]
    place = in_order.index((tests, False)) + 1
    assert spent == [*in_order[:place], (tests, True), *in_order[place:]]
    assert [*check.PARTS][:2] == ["goals", "assertions"]


@pytest.mark.slow
def test_the_whole_check_on_the_cpu(tmp_path):
    assert check.main(["--device", "cpu", "--minutes", "60", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["failures"] == {}
    assert results["figures"]["w3, bare loop, same work"]["difference"] < 1e-6
