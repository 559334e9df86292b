"""The README's commands install what they run, and the counts on the page about other simulators are right."""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from pathlib import Path

import pytest

import fedsim
from fedsim.clients.capabilities import client_algorithm
from tests.commands import ROOT
from tests.declared import PROJECT, distributions_of, owners, requirements
from tests.documents.test_documentation import DOCS, PAGES, blocks

TEXT = (ROOT / "README.md").read_text()
BLOCKS = blocks.blocks_of(TEXT)
COMMANDS = re.findall(
    r"pip install -e '?\.(?:\[([a-z,]+)\]')?(?: -c constraints\.txt)? && ([^`\n]+)", TEXT
)  # (extras, command)


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
    return names - sys.stdlib_module_names - {"fedsim", "tests", "benchmarks", "experiments", "tomli"}


def _of_programs():
    paths = [ROOT / "run_experiment.py", *(ROOT / "fedsim").rglob("*.py")]
    paths = [path for path in paths if "integrations" not in path.parts]
    return set().union(*(_imports(path.read_text(), of_module=True) for path in paths))


def _of_tests():
    """The imports of tests, except those that are skipped without a package, and the programs of such tests."""
    paths = [path for path in (ROOT / "tests").rglob("*.py") if not path.stem.endswith("_program")]
    codes = [code for code in (path.read_text() for path in paths) if "importorskip" not in code]
    return {"pytest", "xdist", *_of_site(), *_of_pages()}.union(*(_imports(code, of_module=True) for code in codes))


def _of_site():
    """The imports of the hooks."""
    paths = list((DOCS / "hooks").glob("*.py"))
    imported = set().union(*(_imports(path.read_text()) for path in paths))
    return {"mkdocs", "material", "pymdownx", *imported} - {path.stem for path in paths}


def _of_pages():
    """The imports of Python blocks that run with every installation."""
    every = [block for text in PAGES.values() for block in blocks.blocks_of(text)]
    codes = [block.code for block in every if block.action == "python" and not block.packages]
    return set().union(*map(_imports, codes)) - {Path(block.attributes.get("title", "")).stem for block in every}


IMPORTS = {"python run_experiment.py": _of_programs, "python -m pytest": _of_tests, "mkdocs serve": _of_site}


def test_the_table_of_simulators_has_the_right_numbers_of_components():
    table = (ROOT / "docs" / "explanation" / "other-simulators.md").read_text()

    def count(row):
        return int(re.search(rf"^\|{row}[^|]*\|(\d+)", table, re.MULTILINE)[1])

    assert count("aggregation rules besides means") == len(fedsim.components("rules")) - 2
    assert count("pre-aggregation") == len(fedsim.components("pre-aggregators"))
    assert count("attacks") == len(fedsim.components("attacks")) - 1  # without "none"
    optimizers = {"sgd", "adam", "adamw", "adagrad", "dp_sgd", "muon"}
    assert count("client algorithms") == len({*client_algorithm.names()} - optimizers)
    assert count("asynchronous policies") == len(fedsim.components("policies")) - 1  # without "sync"


def test_the_readme_quotes_the_classic_program():
    (quoted,) = (block.code for block in BLOCKS if "classic.py" in block.attributes.get("run", ""))
    assert textwrap.indent(quoted, "    ") in (ROOT / "experiments" / "classic.py").read_text()
