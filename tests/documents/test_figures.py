"""Every measured figure of the README and of the written pages is that of a file in benchmarks/results.

Outputs of blocks are compared in test_documentation.py, and results in the gallery in test_gallery.py.

A comment in a paragraph, or below a table, names the file and the keys of its figures in their order:

    A round took 25 ms with 100 workers and 28 ms with 1,000,000, and needed 301 MB.
    <!-- figures: scaling-cpu.json: population_seconds/0 * 1000; population_seconds/4 * 1000; population_peak_mb/4 -->

`(a|b)` stands for several keys, and `* 1000` changes the unit. `<!-- unstored: 300 s; 5 minutes -->` names numbers that
are settings or rough durations, and `<!-- unstored: counts of components -->` says so for all numbers of a block.
"""

from __future__ import annotations

import datetime
import itertools
import json
import re
from functools import cache

import pytest

from tests.commands import ROOT

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if path.parent.name != "gallery"
}
RESULTS = ROOT / "benchmarks" / "results"
TO_MEASURE_AGAIN = {"distributed-cpu.json"}  # measured with uncommitted changes
MACHINES = "AMD EPYC", "H200", "Intel"  # the first is that of all measurements unless the section names another

COMMENT = re.compile(r"<!--(.*?)-->", re.DOTALL)
HIDDEN = re.compile(r"<!--.*?-->|`[^`\n]*`|\]\([^)]*\)", re.DOTALL)  # comments, code and the targets of links
FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
NUMBER = r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?!\w|[.,]\d)"
UNIT = r"(?:[mµ]?s|seconds?|minutes?|hours?|[kMG]i?B|times|steps per second)(?!\w)"
CELL = re.compile(rf"\s*({NUMBER})(?: {UNIT})?\s*")


def blocks_of(page):
    """Return (text, contents of the comments) of each paragraph, list and table. Comments below belong to it."""
    result = []
    for block in re.split(r"\n\s*\n", FENCED.sub("", page)):
        comments = [" ".join(comment.split()) for comment in COMMENT.findall(block)]
        if result and not COMMENT.sub("", block).strip():
            result[-1][1].extend(comments)
        else:
            result.append((HIDDEN.sub(" ", block), comments))
    return result


def numbers_of(block):
    """Return (number as shown, whether it looks measured) of each number in a block, in order.

    Those with a unit look measured, and those alone in a cell of a table outside the first column.
    """
    if not block.lstrip().startswith("|"):
        text = " ".join(block.split())
        return [(match[0], bool(re.match(rf" ?{UNIT}", text[match.end() :]))) for match in re.finditer(NUMBER, text)]
    rows = [line.strip().strip("|").split("|")[1:] for line in block.strip().splitlines()[2:]]
    return [(match[1], True) for row in rows for cell in row if (match := CELL.fullmatch(cell))]


@cache
def stored(file):
    return json.loads((RESULTS / file).read_text())


def figures_of(comments):
    """Return (name, value) of each figure that the comments of a block name."""
    result = []
    for comment in comments:
        kind, _, rest = comment.partition(": ")
        if kind != "figures":
            continue
        file, _, keys = rest.partition(": ")
        for item in keys.split("; "):
            path, _, factor = item.partition(" * ")
            for parts in itertools.product(*(part.split("|") for part in re.split(r"[()]", path))):
                value = stored(file)
                for key in "".join(parts).split("/"):
                    value = value[int(key) if isinstance(value, list) else key]
                result.append((f"{file}: {''.join(parts)}", value * float(factor or 1)))
    return result


def unstored_of(comments):
    return [item for comment in comments if comment.startswith("unstored: ") for item in comment[10:].split("; ")]


def shows(shown, value):
    """Whether `shown`, a number on a page, is `value` rounded to the decimals of `shown`."""
    decimals = len(shown.partition(".")[2])
    return shown in (f"{value:,.{decimals}f}", f"{value:.{decimals}f}")


def error_of(block, comments):
    """Return which figure of a block is not that of its file, or None."""
    numbers, figures, unstored = numbers_of(block), figures_of(comments), unstored_of(comments)
    settings = {item.split()[0] for item in unstored if item[0].isdigit()}
    if missing := settings - {number for number, _ in numbers}:
        return f"{missing} is not there"
    reached = {0}  # how many figures the numbers so far may show
    for shown, measured in numbers:
        before, reached = reached, set()
        for count in before:
            if count < len(figures) and shows(shown, figures[count][1]):
                reached.add(count + 1)
            if not measured or shown in settings or len(unstored) > len(settings):
                reached.add(count)
        if not reached:
            return f"{shown} is not stored, or not {figures[max(before) :][:1]}"
    return None if len(figures) in reached else f"{figures[max(reached)]} is not shown"


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_of_the_page_is_stored(page):
    errors = [(block[:60], error) for block, comments in blocks_of(PAGES[page]) if (error := error_of(block, comments))]
    assert errors == []


def test_a_page_that_shows_another_figure_than_the_file_is_an_error(monkeypatch):
    for page in PAGES.values():
        for block, comments in blocks_of(page):
            figures = figures_of(comments)
            for place, (name, value) in enumerate(figures):
                changed = [*figures[:place], (name, 1.5 * value + 1), *figures[place + 1 :]]
                with monkeypatch.context() as patch:
                    patch.setitem(globals(), "figures_of", lambda _, changed=changed: changed)
                    assert error_of(block, comments) is not None, name


SCALING = "figures: scaling-cpu.json: population_seconds/(0|4) * 1000"


@pytest.mark.parametrize(
    ("text", "comments", "error"),
    [
        ("A round took 25 ms, and then 28 ms.", [SCALING], None),
        ("A round took 25 or 28 ms.", [SCALING], None),
        ("| a | b |\n|---|---|\n| 10 | 25 |\n| 20 | 28 ms |", [SCALING], None),
        ("A round took 25 ms of 300 s.", ["unstored: 25 ms; 300 s"], None),
        ("One CPU took 25 ms.", ["unstored: rough durations"], None),
        ("PyTorch 2.13.0 has 4 workers.", [], None),
        ("A round took 25 ms, and then 27 ms.", [SCALING], "27 is not stored"),
        ("A round took 28 ms, and then 25 ms.", [SCALING], "28 is not stored"),
        ("A round took 25 ms.", [SCALING], "population_seconds/4"),
        ("A round took 25 ms.", [], "25 is not stored"),
        ("A round took 14.33 µs.", [], "14.33 is not stored"),
        ("It needs 1,301 MB.", [], "1,301 is not stored"),
        ("It is 1.3 times as fast.", [], "1.3 is not stored"),
        ("| a | b |\n|---|---|\n| 10 | 25 |", [], "25 is not stored"),
        ("It ends.", ["unstored: 300 s"], "300"),
    ],
)
def test_a_number_with_a_unit_or_in_a_cell_needs_a_file(text, comments, error):
    found = error_of(text, comments)
    assert found is None if error is None else error in found


def test_sections_name_the_day_and_the_machine_of_their_files():
    for page in PAGES.values():
        for section in re.split(r"^## ", page, flags=re.MULTILINE):
            if "performance.md#" in section:
                continue  # the section there names them
            text = " ".join(HIDDEN.sub(" ", section).split())
            for file in set(re.findall(r"figures: (\S+\.json)", section)):
                day, machine = datetime.date.fromisoformat(stored(file)["date"]), stored(file)["machine"]
                assert f"{day.day} {day:%B}" in text, f"{file}: {day}"
                (name,) = [name for name in MACHINES if name in machine][:1]
                assert name == "AMD EPYC" or name in text, f"{file}: {machine}"


def test_the_page_says_that_the_limit_of_the_ranks_does_not_hold():
    assert ("own limit" in PAGES["docs/explanation/performance.md"]) != stored("distributed-cpu.json")["holds"]


def test_only_these_files_name_a_commit_with_other_code():
    dirty = {path.name for path in RESULTS.glob("*.json") if stored(path.name)["fedsim"].endswith("+dirty")}
    assert dirty == TO_MEASURE_AGAIN
