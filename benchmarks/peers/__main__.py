"""fedsim and other programs on the same work, side by side: whole runs, rounds, memory and their ratios.

    python -m benchmarks.peers setup [NAME ...]
    python -m benchmarks.peers page
    FEDSIM_DATA=... python -m benchmarks.peers [--workloads w1,w2] [--rivals bare,pfl] [--repeats 3] [--rounds 2]

`setup` creates the rivals' environments in .peers, and `page` writes the stored figures into the documentation.

The programs run in turn as whole processes, which are timed from outside and whose memory (PSS of all processes) is
sampled. A round is the median over all rounds except the first, with the test of the global model. `start_seconds` is
what a whole run takes beyond that many such rounds.

All programs get the same initial model, data in memory (fedsim loads the data set itself), cohorts and batches. Each
must train as many samples and steps, test on all test samples, and reach fedsim's accuracy up to 0.03. A program that
trains on the given batches must also have fedsim's model after a few float64 steps without dropout. A program that does
not gets no figures, and the command fails.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import textwrap
from typing import Any

from common import RESULTS, ROOT, report
from workloads import PUBLISHED
from workloads import WORKLOADS as OWN

from benchmarks.peers.compare import DifferentWorkError, Figures, measure
from benchmarks.peers.rivals import RIVALS, is_ready, set_up

WORKLOADS = OWN | PUBLISHED
FILE = RESULTS / "peers-cpu.json"
PAGE = ROOT / "docs" / "explanation" / "performance.md"
ROWS = {  # of the page: label, and for fedsim key, factor and format; for the others the ratio
    "run": ("run_seconds", 1, "{:.1f}"),
    "round": ("round_seconds", 1, "{:.2f}"),
    "memory": ("peak_mb", 0.001, "{:.2f}"),
}
COLUMNS = {  # of the printed table: key of the figures and format
    **{"round_seconds": "{:.3f} s", "round_over_fedsim": "{:.2f}", "round_over_bare": "{:.2f}"},
    **{"run_seconds": "{:.2f} s", "run_over_fedsim": "{:.2f}", "run_over_bare": "{:.2f}", "start_seconds": "{:.2f} s"},
    **{"peak_mb": "{:.0f} MB", "peak_over_fedsim": "{:.2f}", "peak_over_bare": "{:.2f}", "accuracy": "{:.4f}"},
}


def table(workloads: dict[str, dict[str, Figures]]) -> str:
    """Return a row per workload and program."""
    rows = [["", "", *COLUMNS]]
    for workload, programs in workloads.items():
        for name, figures in programs.items():
            cells = [form.format(figures[key]) if key in figures else "" for key, form in COLUMNS.items()]
            rows.append([workload, name, *([figures["error"]] if "error" in figures else cells)])
    widths = [max(len(row[place]) for row in rows if len(row) == len(rows[0])) for place in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def best_rival(programs: dict[str, Figures]) -> dict[str, Any]:
    """Return the best rival in rounds, whole runs and memory, apart from the bare loop, and its ratio to fedsim."""
    rivals = {name: each for name, each in programs.items() if name not in ("fedsim", "bare") and "error" not in each}
    best = {}
    for key in ("round_over_fedsim", "run_over_fedsim", "peak_over_fedsim"):
        if rivals:
            name = min(rivals, key=lambda rival: rivals[rival][key])
            best[key] = {"rival": name, "ratio": rivals[name][key]}
    return best


def markdown(stored: dict[str, Any]) -> str:
    """Return the table of the page about performance, with a comment that names the figures for tests/documents."""
    names = ["fedsim", *stored["versions"]]
    day = datetime.date.fromisoformat(stored["date"])
    lines = [f"Measured on {day.day} {day:%B} ({stored['machine']}):", ""]
    lines += ["| |" + "|".join(names) + "|", "|---" * (len(names) + 1) + "|"]
    keys: list[str] = []
    for workload in (name for name in WORKLOADS if name in stored):
        for label, (value, factor, form) in ROWS.items():
            ratio, programs = f"{value.rpartition('_')[0]}_over_fedsim", stored[workload]
            measured = [name for name in names[1:] if ratio in programs.get(name, {})]
            cells = [f"{programs[name][ratio]:.2f}" if name in measured else "-" for name in names[1:]]
            lines.append(
                "|".join(["", f"{workload}, {label}", form.format(factor * programs["fedsim"][value]), *cells, ""])
            )
            keys.append(f"{workload}/fedsim/{value}" + (f" * {factor}" if factor != 1 else ""))
            keys += [f"{workload}/({'|'.join(measured)})/{ratio}"] if measured else []
    comment = f"<!-- figures: {FILE.name}: {'; '.join(keys)} -->"
    return "\n".join([*lines, "", *textwrap.wrap(comment, 140, break_long_words=False, break_on_hyphens=False)])


def write_page() -> None:
    """Replace the table in the page, which stands between two comments."""
    before, start, rest = PAGE.read_text().partition("<!-- peers -->\n")
    _, end, after = rest.partition("<!-- end of peers -->\n")
    PAGE.write_text(f"{before}{start}\n{markdown(json.loads(FILE.read_text()))}\n\n{end}{after}")


def options_of(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, values in (("workloads", WORKLOADS), ("rivals", RIVALS)):
        parser.add_argument(
            f"--{name}", default=list(values), type=lambda text: text.split(","), help="comma-separated; default: all"
        )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--rounds", type=int, help="number of rounds for a trial, whose figures are not stored")
    options = parser.parse_args(words)
    for name, values in (("workloads", WORKLOADS), ("rivals", RIVALS)):
        if unknown := set(getattr(options, name)) - set(values):
            parser.error(f"--{name}: {', '.join(sorted(unknown))}: must be of {', '.join(values)}")
    if options.rounds is not None and options.rounds < 2:
        parser.error(f"--rounds: {options.rounds}: must be at least 2, since the first is left out")
    if missing := [name for name in options.rivals if not is_ready(name)]:
        parser.error(f"--rivals: {', '.join(missing)}: not installed; run python -m benchmarks.peers setup")
    return options


def set_up_rivals(names: list[str]) -> None:
    for name in names or RIVALS:
        set_up(name)
        print(name, *RIVALS[name].requirements)


def main() -> None:
    if sys.argv[1:2] == ["setup"]:
        set_up_rivals(sys.argv[2:])
        return
    if sys.argv[1:] == ["page"]:
        write_page()
        return
    options = options_of()
    workloads: dict[str, dict[str, Figures]] = {}
    for name in options.workloads:
        words = WORKLOADS[name]
        if options.rounds:
            words = (*(word for word in words if not word.startswith("rounds=")), f"rounds={options.rounds}")
        try:
            workloads[name] = measure(words, options.rivals, options.repeats)
        except (DifferentWorkError, subprocess.CalledProcessError) as error:
            workloads[name] = {"fedsim": {"error": str(error)}}
        report(  # after each workload, so that an interruption keeps those that are measured
            "peers",
            keep=options.rounds is None,
            **workloads,
            best={name: best_rival(programs) for name, programs in workloads.items()},
            versions={name: RIVALS[name].requirements for name in options.rivals},
            repeats=options.repeats,
        )
        print(table(workloads), flush=True)
    errors = [each["error"] for programs in workloads.values() for each in programs.values() if "error" in each]
    sys.exit("\n".join(errors) or None)


if __name__ == "__main__":
    main()
