"""The summary of all lines: at most 60 lines of at most 110 characters. Imports neither PyTorch nor fedsim."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.gpu.cases import BAD, CUT, DIED, ERROR, HUNG, NOT_REACHED, OK, SKIPPED, WRONG
from benchmarks.gpu.plan import REFERENCES, sections_of

LINES, WIDTH = 60, 110
MOST_FAILURES, MOST_WARNINGS = 14, 4
STATUSES = (OK, WRONG, ERROR, DIED, HUNG, CUT, SKIPPED, NOT_REACHED)
WORKLOADS = ("w1", "w2", "w3")
COLUMNS = ("batched", "no graphs", "tf32", "auto", "spawn", "serial", "bare loop", "naive")
TIMES_THE_LIMIT = 5.0
GOALS = {"w1": 5.0, "w2": 5.0, "w3": 20.0}  # times faster than one worker after another
FIGURES = {  # of constants: the case, and what is reported of it
    **{"launch": "us", "wait (item)": "us", "wait (nonzero)": "us", "copy to the device, 8 kB": "us"},
    **{"graph of 120 nodes": "us_per_node", "bandwidth": "gb_per_second"},
    **{f"product, {kind}": "tflop_per_second" for kind in ("float32", "tf32", "bf16", "float64")},
}
UNITS = {"us": "us", "us_per_node": "us a node", "gb_per_second": "GB/s", "tflop_per_second": "TFLOP/s"}

Line = Mapping[str, Any]


class Findings:
    """Lines by section and case."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = lines
        self._facts = {(line["section"], line["case"]): line.get("facts") or {} for line in lines}

    def fact(self, section: str, case: str, key: str) -> Any:
        """None where the case was not run, or did not get so far."""
        return self._facts.get((section, case), {}).get(key)


class Goal(NamedTuple):
    text: str
    met: bool | None  # None: not measured


def summarize(lines: Sequence[Line], *, device: str, seconds: float, budget: float, notes: Iterable[str] = ()) -> str:
    """The text that is printed last, and written to summary.txt."""
    findings = Findings(lines)
    parts = [
        [_headline(findings, device, seconds, budget), *notes],
        _table(lines),
        _failures(lines),
        _warnings(lines),
        _constants(findings),
        _workloads(findings),
        [
            f"{'goal met:' if goal.met else 'goal NOT met:'} {goal.text}"
            for goal in goals(findings)
            if goal.met is not None
        ],
    ]
    cut = [_shorten(line) for part in parts for line in part]
    if len(cut) > LINES:
        cut = [*cut[: LINES - 1], f"... {len(cut) - LINES + 1} more lines; lines.jsonl has everything"]
    return "\n".join(cut)


def _headline(findings: Findings, device: str, seconds: float, budget: float) -> str:
    kinds = {"": ("device", "name"), "PyTorch ": ("versions", "torch"), "commit ": ("import fedsim", "commit")}
    known = {word: findings.fact("machine", *where) for word, where in kinds.items()}
    shown = "".join(f", {word}{fact}" for word, fact in known.items() if fact is not None)
    return f"fedsim on {device}{shown}: {seconds:.0f} of {budget:.0f} s"


def _table(lines: Sequence[Line]) -> list[str]:
    """How many cases of each section ended how."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    seconds: collections.Counter[str] = collections.Counter()
    for line in lines:
        counts[line["section"]][line["status"]] += len(line.get("names", "1"))
        seconds[line["section"]] += line.get("seconds", 0)
    head = f"{'section':<13}" + "".join(f"{status:>12}" for status in STATUSES)
    rows = [
        f"{section:<13}" + "".join(f"{counts[section][status] or '-':>12}" for status in STATUSES)
        for section in (*sections_of(), REFERENCES.name)
        if section in counts
    ]
    return [head, *rows]


def _failures(lines: Sequence[Line]) -> list[str]:
    failed = [line for line in lines if line["status"] in BAD and line["section"] != REFERENCES.name]
    if not failed:
        return ["no case failed" if lines else "no case was run"]
    shown = [
        f"{line['status'].upper()} {line['section']}: {line['case']}: {_one_line(line.get('error', ''))}"
        + "".join(f" [{place}]" for place in line.get("where", [])[-1:])
        for line in failed
    ]
    more = len(shown) - MOST_FAILURES
    return shown[:MOST_FAILURES] + ([f"... {more} more; see lines.jsonl"] if more > 0 else [])


def _warnings(lines: Sequence[Line]) -> list[str]:
    counts = collections.Counter(text for line in lines for text in line.get("warnings", []))
    shown = [f"warning, {count} times: {_one_line(text)}" for text, count in counts.most_common(MOST_WARNINGS)]
    more = len(counts) - MOST_WARNINGS
    return shown + ([f"... {more} more kinds of warnings; see lines.jsonl"] if more > 0 else [])


def _constants(findings: Findings) -> list[str]:
    shown = []
    for case, key in FIGURES.items():
        value = findings.fact("constants", case, key)
        if value is not None:
            shown.append(f"{case} {value:g} {UNITS[key]}")
    for line in findings.lines:
        facts = line.get("facts") or {}
        if line["section"] == "convolutions" and "us" in facts:
            fastest, now = facts["fastest"], facts["now"]
            gain = f", {facts['us'][now] / facts['us'][fastest]:.2g} times faster than {now}" if fastest != now else ""
            shown.append(f"convolution {line['case']}: {fastest}{gain}")
    return _pack(shown)


def _workloads(findings: Findings) -> list[str]:
    """Milliseconds of a round in each way, how they compare, and where a round goes."""
    rows, more = [], []
    for name in WORKLOADS:
        found = {way: findings.fact("workloads", f"{name}, {way}", "round_ms") for way in COLUMNS}
        if not any(found.values()):
            continue
        limit = findings.fact("workloads", f"{name}, limit", "limit_ms")
        rows.append(f"{name:<9}" + "".join(f"{_number(found[way]):>10}" for way in COLUMNS) + f"{_number(limit):>10}")
        if ours := found["batched"]:
            ratios = {way: found[way] / ours if found[way] else None for way in found}
            cells = "".join(f"{_number(ratios[way]):>10}" for way in COLUMNS)
            rows.append(f"{'/ batched':<9}{cells}{_number(limit / ours if limit else None):>10}")
        phases = findings.fact("workloads", f"{name}, batched", "phases_ms") or {}
        parts = [f"{phase} {value:g}" for phase, value in phases.items()]
        busy = findings.fact("workloads", f"{name}, profile", "busy_share")
        if busy is not None:
            parts.append(f"GPU busy {busy:.0%}, {findings.fact('workloads', f'{name}, profile', 'kernels')} kernels")
            top = findings.fact("workloads", f"{name}, profile", "top") or []
            parts += [f"{kernel[:24]} {ms:g}" for kernel, _, ms in top[:2]]
        more += [f"{name}: ms of a round: {', '.join(parts)}"] if parts else []
    if not rows:
        return []
    return [f"{'ms/round':<9}" + "".join(f"{way:>10}" for way in (*COLUMNS, "limit")), *rows, *more]


def goals(findings: Findings) -> list[Goal]:
    """Against one worker after another, the faster of engine serial and the bare loop; and against the limit."""
    found = []
    for name, wanted in GOALS.items():

        def fact(way: str, key: str = "round_ms", name: str = name) -> Any:
            return findings.fact("workloads", f"{name}, {way}", key)

        ours, limit = fact("batched"), fact("limit", "limit_ms")
        others = [each for each in (fact("serial"), fact("bare loop")) if each]
        ratio = min(others) / ours if ours and others else None
        text = f"{name}: {_number(ratio)} times faster than one worker after another (wanted: {wanted:g})"
        found.append(Goal(text, None if ratio is None else ratio >= wanted))
        over = ours / limit if ours and limit else None
        text = f"{name}: {_number(over)} times the limit (wanted: at most {TIMES_THE_LIMIT:g})"
        found.append(Goal(text, None if over is None else over <= TIMES_THE_LIMIT))
    return found


def _pack(words: Sequence[str]) -> list[str]:
    """As many words to a line as fit."""
    rows: list[str] = []
    for word in words:
        if rows and len(rows[-1]) + len(word) + 2 <= WIDTH:
            rows[-1] += f"; {word}"
        else:
            rows.append(word)
    return rows


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _shorten(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."
