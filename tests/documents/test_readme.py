"""The README's commands and outputs are correct, and so are the counts on the page about other simulators."""

from __future__ import annotations

import ast
import functools
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedsim
from fedsim.cli.main import app
from fedsim.errors import plural
from tests.commands import ROOT
from tests.declared import PROJECT, distributions_of, owners, requirements
from tests.documents.test_documentation import DOCS, blocks

TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.DOTALL)
COMPARISONS = [  # the command, and the output shown below it
    (code.strip(), BLOCKS[place + 1][1])
    for place, (language, code) in enumerate(BLOCKS)
    if language == "bash" and code.startswith("fedsim compare")
]
NUMBER = re.compile(r"\d+\.\d+")


COMMANDS = re.findall(r"pip install -e '?\.(?:\[([a-z,]+)\]')? && ([^`\n]+)", TEXT)  # (extras, command)


@pytest.mark.parametrize(("extras", "command"), COMMANDS)
def test_the_commands_install_what_they_run(extras, command):
    """Every package that the code imports is a direct or indirect requirement of what pip installs before."""
    installed = distributions_of(f"{PROJECT['name']}[{extras}]", requirements())
    wanted = IMPORTS[command]()
    assert {module for module in wanted if not owners().get(module, set()) & installed} == set()
    assert set(re.findall(r"[a-z]+", extras)) <= PROJECT["optional-dependencies"].keys()


def test_the_three_commands_are_those_for_users_testers_and_writers():
    assert [command for _, command in COMMANDS] == list(IMPORTS)


def _imports(code, *, of_module=False):
    """Return the modules of other projects that Python code imports.

    of_module: without imports in functions, in `try` and in `if`, which the module itself does not need.
    """
    tree = ast.parse(code)
    names = set()
    for node in tree.body if of_module else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - {"fedsim", "fedsim_main", "tests", "benchmarks", "experiments", "tomli"}


def _of_programs():
    paths = [ROOT / "run_experiment.py", *(ROOT / "fedsim").rglob("*.py")]
    paths = [path for path in paths if "integrations" not in path.parts]
    return set().union(*(_imports(path.read_text(), of_module=True) for path in paths))


def _of_tests():
    """The imports of tests, except those that are skipped without a package, and the programs of such tests."""
    paths = [path for path in (ROOT / "tests").rglob("*.py") if not path.stem.endswith("_program")]
    codes = [code for code in (path.read_text() for path in paths) if "importorskip" not in code]
    return {"pytest", "xdist", *_of_site()}.union(*(_imports(code, of_module=True) for code in codes))


def _of_site():
    """The imports of the hooks, of notebooks, and of blocks that run on each page."""
    names, own = {"mkdocs", "material", "pymdownx"}, {path.stem for path in (DOCS / "hooks").glob("*.py")}
    codes = [path.read_text() for path in (DOCS / "hooks").glob("*.py")]
    for path in (DOCS / "notebooks").glob("*.ipynb"):
        codes += [
            "".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"
        ]
    for path in DOCS.rglob("*.md"):
        for block in blocks.blocks_of(path.read_text()):
            own |= {Path(block.attributes.get("title", "")).stem}
            if block.action == "python" and not block.packages:
                codes.append(block.code)
    return names.union(*map(_imports, codes)) - own


IMPORTS = {"python run_experiment.py": _of_programs, "python -m pytest": _of_tests, "mkdocs serve": _of_site}


def test_the_table_of_simulators_has_the_right_numbers_of_components():
    table = (ROOT / "docs" / "explanation" / "other-simulators.md").read_text()

    def count(row):
        return int(re.search(rf"^\| {row}[^|]*\| (\d+)", table, re.MULTILINE)[1])

    assert count("aggregation rules besides means") == len(fedsim.rules()) - 2
    assert count("pre-aggregation") == len(fedsim.pre_aggregators())
    assert count("attacks") == len(fedsim.attacks()) - 1  # without "none"
    assert count("asynchronous policies") == len(fedsim.policies()) - 1  # without "sync"


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_the_first_run_shows_what_the_readme_shows(rounds, tmp_path):
    """Numbers agree to three decimals; times differ."""
    done = CliRunner().invoke(app, ["run", "engine=serial", f"rounds={rounds}", "--out", str(tmp_path / "run")])
    shown = next(code for language, code in BLOCKS if language == "text")
    shown = shown.replace("2 forked processes", "serial")  # the README's run had two cores
    assert done.stdout.splitlines()[:2] == [
        line.replace("10 rounds", plural(rounds, "round")) for line in shown.splitlines()[:2]
    ]
    lines = [line.split() for line in shown.splitlines() if re.match(r" +\d+ ", line)]
    lines = [words for words in lines if int(words[0]) <= rounds]
    assert lines
    for words in lines:
        (printed,) = [each.split() for each in done.stdout.splitlines() if each.split()[:1] == words[:1]]
        assert list(map(float, printed[1:4])) == pytest.approx(list(map(float, words[1:4])), abs=5e-3)


EXAMPLES = [place for place, (language, code) in enumerate(BLOCKS) if language == "python" and not code.startswith(" ")]


def test_the_readme_quotes_the_classic_program():
    (quoted,) = (code for language, code in BLOCKS if language == "python" and code.startswith(" "))
    assert quoted in (ROOT / "experiments" / "classic.py").read_text()


@pytest.mark.parametrize("place", EXAMPLES)
def test_the_python_examples_print_what_the_readme_shows(place, capsys, monkeypatch):
    """The words are equal, and the numbers agree up to rounding on another processor."""
    monkeypatch.setattr(fedsim, "run", functools.partial(fedsim.run, engine="serial"))  # without processes
    (_, code), (language, shown) = BLOCKS[place : place + 2]
    assert language == "text"
    exec(code, {"__name__": "__main__"})
    assert_same_numbers(capsys.readouterr().out, shown)


def assert_same_numbers(printed, shown):
    assert NUMBER.sub("0", printed) == NUMBER.sub("0", shown)
    numbers, expected = ([float(word) for word in NUMBER.findall(text)] for text in (printed, shown))
    assert numbers == pytest.approx(expected, rel=0.05, abs=0.01), printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "shown"), COMPARISONS, ids=lambda text: text.split()[-1] if "\n" not in text else ""
)
def test_a_comparison_prints_what_the_readme_shows(command, shown, tmp_path):
    """The words are equal, and the numbers agree up to rounding on another processor."""
    done = CliRunner().invoke(app, [*shlex.split(command)[1:], "--out", str(tmp_path / "comparison")])
    assert done.exit_code == 0, done.output
    printed = {NUMBER.sub("0", line): line for line in done.stdout.splitlines()}
    for line in shown.splitlines():
        assert_same_numbers(printed[NUMBER.sub("0", line)], line)
