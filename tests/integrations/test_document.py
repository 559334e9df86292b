"""The programs in the documents about other libraries run, and the tables are correct."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fedsim
from fedsim.aggregation.rule import rule as rules
from fedsim.cli.main import app
from tests.commands import ended, start, start_ranks

PAGES = ("aggregate-your-updates", "ddp-and-lightning", "coming-from")
TEXT = "".join((Path(__file__).parents[2] / "docs" / "how-to" / f"{page}.md").read_text() for page in PAGES)
PROGRAMS = dict(re.findall(r'```python title="(\w+\.py)"\n(.*?)```', TEXT, re.DOTALL))
UPDATES = torch.randn(11, 20, generator=torch.Generator().manual_seed(0))


def rows(title, head):
    """Return the cells of the table below a heading, without backquotes."""
    section = TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    table = section.partition(f"| {head} |")[2].partition("\n\n")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    assert lines
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]


def write(name, folder):
    path = folder / name
    path.write_text(PROGRAMS[name])
    return path


def requires(package):
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs the package {package}")


def test_every_program_is_run_below():
    names = {"updates.py", "loop.py", "train_ddp.py", "flower_app.py"}
    assert set(PROGRAMS) == names


@pytest.mark.parametrize(
    "name", ["updates.py", "loop.py", pytest.param("flower_app.py", marks=[requires("flwr"), requires("ray")])]
)
def test_a_program_of_one_process_runs(name, tmp_path):
    codes, [printed], errors = ended([start(write(name, tmp_path), cwd=tmp_path)], 150)
    assert codes == [0], errors
    if name == "flower_app.py":
        assert "[array([3., 3., 3.], dtype=float32)]" in printed


def test_the_program_of_ranks_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    codes, _, errors = ended(start_ranks(4, write("train_ddp.py", tmp_path), cwd=tmp_path), 60)
    assert codes == [0] * 4, errors


def test_the_rules_that_depend_on_the_origin_are_listed():
    listed = re.findall(r"`(\w+)`", TEXT.partition("but not to")[2].partition("\n\n")[0])
    parameters = {"f": 2, "c": 1.0, "tau": 1.0, "lam": 1.0}

    def result(registration, updates):
        params = {name: value for name, value in parameters.items() if name in registration.parameters.model_fields}
        root, losses = (
            updates[0] if "root" in registration.takes else None,
            torch.ones(11) if "losses" in registration.takes else None,
        )
        return fedsim.aggregate(updates, registration.name, root=root, losses=losses, **params)

    updates = UPDATES.double()
    moved = [
        registration.name
        for registration in rules
        if not {"models", "own"} & registration.takes.keys()
        and not torch.allclose(result(registration, updates + 5), result(registration, updates) + 5)
    ]
    assert set(listed) == set(moved)


@pytest.mark.parametrize("words", [words for _, words in rows("FedLab", "FedLab | `fedsim run ...`")])
def test_the_words_for_fedlab_are_an_experiment(words):
    done = CliRunner().invoke(app, ["run", "workers=8", *shlex.split(words), "--dry-run"])
    assert done.exit_code == 0, done.output
