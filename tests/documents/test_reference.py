"""The generated reference is complete."""

from __future__ import annotations

import ast
import fnmatch
import importlib
import re
import sys
from pathlib import Path

import pytest

import fedsim
from fedsim.config.components import COMPONENTS, registry_of
from fedsim.records.history import FILES

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs" / "hooks"))  # as mkdocs does
reference, docstrings, blocks = map(importlib.import_module, ("reference", "docstrings", "blocks"))


def test_every_public_name_is_in_one_section():
    names = [name for names in reference.PYTHON.values() for name in names.split()]
    assert sorted(names) == sorted(set(fedsim.__all__) - {"__version__"})


def names_used_by(code):
    """Return the names of fedsim that Python code uses, such as `fedsim.models.two_nn`."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "fedsim":
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"fedsim(\.\w+)+", name := ast.unparse(node)):
            names.add(name)
    return names


def test_pages_and_programs_use_public_names_only():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    codes = [block.code for page in pages for block in blocks.blocks_of(page.read_text()) if block.language == "python"]
    codes += [path.read_text() for name in ("experiments", "project_template") for path in (ROOT / name).rglob("*.py")]
    public = {"fedsim": fedsim.__all__} | {module: reference.public_names(module)[1] for module in reference.MODULES}
    used = set().union(*map(names_used_by, codes))
    assert len(used) > 30
    for name in used:
        module = max((module for module in public if f"{name}.".startswith(f"{module}.")), key=len)
        member = name.removeprefix(module).strip(".").partition(".")[0]
        assert not member or member in public[module], name


@pytest.mark.parametrize("kind", COMPONENTS)
def test_a_page_of_components_has_every_component_with_its_parameters(kind):
    page = reference.component_page(kind, {})
    for registration in registry_of(kind):
        section = page.partition(f"\n## {registration.name} {{")[2].partition("\n## ")[0]
        assert all(f"\n- `{name}`, " in section for name in registration.parameters.model_fields), registration.name


def test_a_docstring_becomes_markdown():
    def registration(updates, *, f, c=1.0):
        """The rows x_k with |x| < c * f.

            sum x

        Args:
            updates: [n, d].
            f, c: how many,
                and how large.

        Returns [d]. Cost: one pass.

        >>> 1 + 1
        2
        """

    assert docstrings.markdown_of(registration, {"f": "integer, required"}).split("\n\n") == [
        r"The rows x\_k with |x| &lt; c \* f.",
        "**Parameters**",
        "- `f`, integer, required: how many, and how large.",
        "```text\nsum x\n```",
        "**Returns** [d]. **Cost**: one pass.",
        "```pycon\n>>> 1 + 1\n2\n```",
    ]


def test_all_files_of_a_run_folder_are_described(tmp_path, tiny_experiment):
    tables = {
        **tiny_experiment,
        "rounds": 2,
        "data.local_test_fraction": 0.2,
        "worker_evaluation.every": 2,
        "checkpoint.every": 1,
    }
    tables |= {"records": {"updates": [1], "figures": ["png"], "model": True, "curve": True}}
    fedsim.run(tables, tmp_path / "run")
    files = [path.relative_to(tmp_path / "run").as_posix() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 8
    assert [file for file in files if not any(fnmatch.fnmatch(file, name) for name in FILES)] == []
    assert all(name.split("*")[0] in reference.run_folder_page() for name in FILES)
