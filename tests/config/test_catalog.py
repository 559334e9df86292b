"""The experiments that come with fedsim, which are run by name."""

from __future__ import annotations

from fedsim.config import files
from fedsim.toml import tomllib
from tests.commands import ROOT

FOLDER = ROOT / "experiments"
PATHS = [*sorted(FOLDER.glob("*.toml")), *sorted(FOLDER.glob("reproduced/*.toml"))]
NAMES = [path.relative_to(FOLDER).with_suffix("").as_posix() for path in PATHS]


def test_an_experiment_is_found_by_its_name(cli):
    done = cli("compare", "staleness", "--dry-run")
    assert done.exit_code == 0, done.output
    assert len(done.stdout.splitlines()) == 48


def test_list_has_a_line_for_each_experiment(cli):
    assert NAMES
    lines = cli("list", "experiments").stdout.splitlines()[1:]
    assert [line.split()[0] for line in lines] == NAMES
    assert all(line.split()[1] in ("run:", "compare:") and line.endswith((".", "?")) for line in lines)
    assert all(len(line) <= 130 for line in lines)


def test_an_experiment_by_name_may_import_no_more_than_a_file(cli, tmp_path, monkeypatch):
    (tmp_path / "components.toml").write_text('model = "os:system"\n')
    monkeypatch.setattr(files, "experiments", lambda: {"components": tmp_path / "components.toml"})
    done = cli("run", "components", "--dry-run")
    assert done.exit_code == 2
    assert "--allow-imports" in done.stderr


def test_the_wheel_carries_the_experiments_where_they_are_looked_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert ROOT / included["experiments"] == files.FOLDERS[0]


def test_a_folder_that_holds_no_comparison_does_not_hide_an_experiment(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "which_rule").mkdir()
    assert cli("compare", "which_rule", "--dry-run").exit_code == 0
    (tmp_path / "which_rule" / "comparison.json").touch()
    assert "merging the folders of comparisons" in cli("compare", "which_rule", "--dry-run").stderr
