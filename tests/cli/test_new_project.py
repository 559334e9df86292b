"""`fedsim new`: the created folder runs as its README says."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedsim.cli import commands
from fedsim.cli.main import app
from fedsim.toml import tomllib
from tests.commands import ROOT, ended, start

TEMPLATE = ROOT / "project_template"
README = (TEMPLATE / "README.md").read_text()
COMMANDS = re.search(r"```bash\n(.*?)```", README, re.DOTALL)[1].splitlines()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Create a new project and make it the working directory."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["new", "my-study"])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == "next: cd my_study && fedsim run experiment.toml"
    monkeypatch.chdir("my_study")
    return Path("my_study")


def test_the_files_have_the_name_of_the_project(project):
    assert {path.name for path in Path().iterdir()} == {
        "README.md",
        "experiment.toml",
        "my_study.py",
        "test_my_study.py",
    }
    assert not [path for path in Path().iterdir() if "my_project" in path.read_text()]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_its_readme_run(project, command):
    words = shlex.split(command.replace("my_project", "my_study"))
    if words[0] == "fedsim":
        words[:1] = ["-m", "fedsim"]
        words += {"run": ["rounds=1"], "compare": ["rounds=1", "engine=serial", "--jobs", "1"]}.get(words[2], [])
    else:
        assert words.pop(0) == "python"
    codes, outs, errors = ended([start(*words, cwd=".")])
    dropped = "warning: aggregate.temperature = 0.5: does not apply to" if "compare" in command else ""
    assert codes == [0], outs
    assert errors[0].startswith(dropped)
    assert errors[0].count("\n") == bool(dropped)


def test_the_wheel_carries_the_template_where_it_is_looked_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert ROOT / included["project_template"] == commands.FOLDERS[0]
    assert commands.FOLDERS[1] == TEMPLATE


def test_its_readme_is_short_and_names_every_component():
    assert len(README.splitlines()) <= 40
    module = (TEMPLATE / "my_project.py").read_text()
    experiment = (TEMPLATE / "experiment.toml").read_text()
    components = re.findall(r"^(?:def|class) (\w+)", module, re.M)
    assert sorted(re.findall(r"^\| `(\w+)` \|", README, re.M)) == sorted(components)
    assert sorted(re.findall(r"my_project:(\w+)", experiment)) == sorted(components)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("taken", "taken: exists already; choose another name"),
        ("numpy", '"numpy": is the name of an installed Python module; choose another name'),
        ("3d", '"3d": is not a valid name of a Python module; use letters, digits and _, as in my_study'),
        (".", '"": is not a valid name of a Python module'),
        ("__main__", '"__main__": is the name of an installed Python module'),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_in_one_line(cli, tmp_path, name, message, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # as in the `fedsim` program
    (tmp_path / "taken").mkdir()
    done = cli("new", name)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {message}")
    assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["taken"]
