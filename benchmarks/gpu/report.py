"""Read the test lines and summarize them as JSON and as a short table, without importing PyTorch or fedsim."""

from __future__ import annotations

import collections
import contextlib
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.gpu.goals import ASSERTIONS, BASELINES, Goal, Verdict, verdicts

MOST_FAILURES, MOST_WARNINGS, WIDTH = 20, 4, 150
WORKLOADS = ("w1", "w2", "w3", "w4", "w3-1000", "resnet20", "char_lstm", "gpt")
WAYS = ("batched", "no graphs", "tf32", "auto", "processes", "serial", *BASELINES)
LIMIT = "limit"  # column of the lower bounds
WORDS = "met", "missed", "not measured"
MACHINE = {"processor": "", "cores": " cores", "device": ""}  # metadata that names the machine, with their units


class Results:
    """The outcomes of all tests so far, with the recorded figures.

    Attributes:
        machine: output of `benchmarks.gpu.machine`, or its error.
        tests: last line of each test by name; a failure is not replaced. Further outcomes are "not reached", "cut" (the
            test was running at the time limit), "passed alone" and "failed twice" (it failed beside other tests, and
            was repeated without them).
        warnings: number of occurrences of each text.
    """

    PASSED = "passed", "passed alone", "skipped"
    FAILED = "failed", "failed twice"

    def __init__(self, lines: Path) -> None:
        self.machine: dict[str, Any] = {}
        self.tests: dict[str, dict[str, Any]] = {}
        self.warnings: collections.Counter[str] = collections.Counter()
        self._path = lines

    def read(self) -> None:
        """Read all lines again."""
        self.tests, self.warnings = {}, collections.Counter()
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        for line in text.splitlines():
            try:
                fields = json.loads(line)
            except ValueError:  # an incomplete line whose writer was killed
                continue
            for name in fields.get("selected", ()):
                self.tests.setdefault(name, {"outcome": "not reached"})
            if "warning" in fields:
                self.warnings[fields["warning"]] += 1
                continue
            name = fields.get("started", fields.get("test"))
            before = self.tests.get(name, {})
            if before.get("outcome") in self.FAILED:
                if fields.get("alone"):
                    alone = {"passed": "passed alone", "failed": "failed twice"}
                    self.tests[name] = {**before, "outcome": alone.get(fields["outcome"], before["outcome"])}
            elif name is not None:
                self.tests[name] = {"outcome": "cut"} if "started" in fields else fields

    def counted(self) -> str:
        counts = collections.Counter(test["outcome"] for test in self.tests.values())
        return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "no tests"

    @property
    def failed_tests(self) -> list[str]:
        return [name for name, test in self.tests.items() if test["outcome"] in self.FAILED]

    @property
    def failures(self) -> dict[str, str]:
        """Failed tests, with the reasons."""
        failed = {name: self.tests[name]["error"] for name in self.failed_tests}
        return {"machine": self.machine["error"], **failed} if "error" in self.machine else failed

    @property
    def complete(self) -> bool:
        """Whether tests have run and none of them failed, was cut off or was not reached."""
        return bool(self.tests) and all(test["outcome"] in self.PASSED for test in self.tests.values())

    def figures(self) -> dict[str, dict[str, Any]]:
        """Return the recorded figures by the part of the test's name in brackets, such as "w3, batched"."""
        return {measured(name): test["figures"] for name, test in self.tests.items() if "figures" in test}

    def verdicts(self) -> list[Verdict]:
        """Compare the figures with all goals. A CPU trains on few samples, so no goal counts as measured there."""
        return verdicts({} if self.machine.get("device") == "cpu" else self.figures())

    @property
    def assertions(self) -> dict[str, dict[str, Any]]:
        """The last line of each assertion by its name."""
        tests = {measured(name): test for name, test in self.tests.items()}
        return {name: tests.get(name, {"outcome": "not started"}) for name in ASSERTIONS}

    def reason(self, goal: Goal) -> str:
        """Return why the figure of a goal is unknown."""
        if "error" in self.machine or self.machine.get("device") == "cpu":
            return self.machine.get("error", "the goals are those of a GPU")
        test = next((test for name, test in self.tests.items() if measured(name) == goal.measurement), None)
        if test is None:
            return "not started"
        lacking = "the measurement lacks this figure" if test["outcome"] == "passed" else test["outcome"]
        return test.get("error") or lacking

    def as_json(self) -> dict[str, Any]:
        """Return the results in the format of the files in benchmarks/results."""
        metadata = self.machine
        return {
            **{"benchmark": "gpu", "outcomes": self.counted(), "figures": self.figures()},
            "assertions": {name: test["outcome"] for name, test in self.assertions.items()},
            "goals": [verdict.as_json() for verdict in self.verdicts()],
            **{"failures": self.failures, "warnings": self.warnings, "environment": metadata},
            "date": metadata.get("date", "")[: len("2026-01-01")],
            "machine": ", ".join(f"{metadata.get(key, '?')}{unit}" for key, unit in MACHINE.items()),
            "torch": metadata.get("packages", {}).get("torch"),
            "fedsim": metadata.get("git_commit") or metadata.get("fedsim"),
        }

    def write(self, path: Path) -> None:
        """Read all lines again and replace the file, which is complete at any time. A full disk leaves it as it was."""
        self.read()
        new = path.with_suffix(".new")
        with contextlib.suppress(OSError):
            new.write_text(json.dumps(self.as_json(), indent=1, default=str) + "\n", encoding="utf-8")
            os.replace(new, path)


def measured(test: str) -> str:
    """Return the part of a test's name in brackets, which is the name of a measurement."""
    return test.partition("[")[2].removesuffix("]")


def summarize(results: Results) -> str:
    """Return the final text: outcomes, failures, warnings and figures, and at the end the table of all goals."""
    machine, figures, failures = results.machine, results.figures(), results.failures
    lines = [f"fedsim {machine.get('git_commit') or ''} on {machine.get('device', 'no device')}: {results.counted()}"]
    for name, error in [*failures.items()][:MOST_FAILURES]:
        twice = results.tests.get(name, {}).get("outcome") == "failed twice"
        lines.append(f"FAILED {'twice, also alone: ' * twice}{name}: {error}")
    lines += [
        f"passed only alone: {name}: {test['error']}"
        for name, test in results.tests.items()
        if test["outcome"] == "passed alone"
    ]
    lines += [f"... {len(failures) - MOST_FAILURES} more failures, in results.json"] * (len(failures) > MOST_FAILURES)
    lines += [f"warning, {count} times: {text}" for text, count in results.warnings.most_common(MOST_WARNINGS)]
    lines += [f"{name}: {fields['us']} us" for name, fields in figures.items() if "us" in fields]
    lines += [*table(figures), *lines_of_assertions(results), *table_of_goals(results)]
    return "\n".join(line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in lines)


def lines_of_assertions(results: Results) -> list[str]:
    """Return a line for each assertion, with its figures or the reason why it does not hold or is unknown."""
    lines = []
    for name, test in results.assertions.items():
        word = {"passed": "holds", "failed": "DOES NOT HOLD"}.get(test["outcome"], test["outcome"])
        known = test.get("error") or ", ".join(f"{key} {value}" for key, value in test.get("figures", {}).items())
        lines.append(f"assertion {word}: {name}{': ' * bool(known)}{known}")
    return lines


def table_of_goals(results: Results) -> list[str]:
    """Return the counts of met, missed and unmeasured goals, followed by one line per goal."""
    all_goals = results.verdicts()
    counts = collections.Counter(verdict.word for verdict in all_goals)
    lines = [f"{len(all_goals)} goals: " + ", ".join(f"{counts[word]} {word}" for word in WORDS)]
    for verdict in all_goals:
        lines.append(f"{verdict}: {results.reason(verdict.goal)}" if verdict.met is None else str(verdict))
    return lines


def table(figures: dict[str, dict[str, Any]]) -> list[str]:
    """Return table lines of the milliseconds, peak memory, launches and kernels of a round for each way."""
    rows = [
        (name, key, unit)
        for name in WORKLOADS
        for key, unit in (
            ("round_ms", "ms/round"),
            ("peak_mib", "MiB"),
            ("launches", "launches"),
            ("kernels", "kernels"),
        )
        if any(cell(figures, name, way, key) is not None for way in WAYS)
    ]
    if not rows:
        return []
    widths = {way: max(10, len(way) + 1) for way in (*WAYS, LIMIT)}
    lines = [f"{'':<18}" + "".join(f"{way:>{width}}" for way, width in widths.items())]
    for name, key, unit in rows:
        cells = {way: cell(figures, name, way, key) for way in WAYS}
        cells[LIMIT] = figures.get(f"{name}, limit", {}).get("limit_ms") if key == "round_ms" else None
        texts = {way: "-" if value is None else f"{value:.4g}" for way, value in cells.items()}
        lines.append(f"{name + ' ' + unit:<18}" + "".join(f"{texts[way]:>{width}}" for way, width in widths.items()))
    return lines


def cell(figures: dict[str, dict[str, Any]], workload: str, way: str, key: str) -> float | None:
    """Return a measured or profiled figure of a workload in one way, or None if it is unknown."""
    name = f"{workload}, {way}"
    return {**figures.get(f"{name}, profile", {}), **figures.get(name, {})}.get(key)
