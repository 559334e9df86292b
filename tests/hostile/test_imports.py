"""Which imports a file can cause, and how the user allows them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import tomli_w

import fedsim
from fedsim.cli.rule_replay import load_round
from fedsim.comparison import plan_comparison
from fedsim.comparison.runner import merge
from fedsim.config.components import COMPONENTS
from fedsim.core import import_policy
from fedsim.data.formats.images import MNIST_FILES as FILES
from fedsim.errors import ExperimentError, MissingPackageError, SettingWarning
from fedsim.records import run_folder
from fedsim.system.packages import import_extra
from tests.commands import run_python


def naming(kind):
    """Return tables that name a component of this kind as NAME."""
    if kind == "pre-aggregators":
        return {"aggregate": {"rule": [{"rule": "NAME"}, "mean"]}}
    *outer, last = COMPONENTS[kind][0].partition(",")[0].split(".")
    tables = {last: "NAME"}
    for key in reversed(outer):
        tables = {key: tables}
    return tables


NAMED = {kind: naming(kind) for kind in COMPONENTS if kind != "hooks"}  # hooks cannot be imported
LOCAL_COMPONENTS = """
import os
from functools import partial
from os import system
from torch import nn

class Inner:
    @staticmethod
    def model(): return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))

def perceptron(*, hidden: int = 3):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, hidden), nn.Linear(hidden, 10))
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Yield a working directory that contains its own modules."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_components.py").write_text(LOCAL_COMPONENTS)
    (tmp_path / "canary.py").write_text("raise SystemExit('imported')")
    yield tmp_path
    for name in ("own_components", "own_package", "own_package.deep", "own_folder", "canary"):
        sys.modules.pop(name, None)


def write(path, tables, name="NAME"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tables) and tomli_w.dumps(tables).replace("NAME", name))
    return path


@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize("name", ["os:system", "torch.hub:load", "canary:boom"])
def test_a_file_names_no_import_path(here, kind, name):
    key = COMPONENTS[kind][0].partition(",")[0]
    with pytest.raises(ExperimentError) as caught:
        fedsim.load_experiment(write(here / "sub" / "x.toml", NAMED[kind], name))
    (line,) = caught.value.lines
    assert line.startswith(f"{here}/sub/x.toml: {key.partition('.')[0]}")
    assert f'"{name}": a file may import this only with --allow-imports (in Python: allow_imports=True)' in line
    assert "canary" not in sys.modules


def test_a_component_that_the_command_line_replaces_is_not_imported(here):
    path = write(here / "sub" / "x.toml", {"aggregate": {"rule": "NAME", "bound": 2}}, "canary:boom")
    line = 'aggregate.bound = 2: does not apply to aggregate.rule = "mean", because it was set for "canary:boom"'
    with pytest.warns(SettingWarning, match=line):
        fedsim.load_experiment(path, ["aggregate.rule=mean"])
    with pytest.warns(SettingWarning, match=line):
        plan_comparison(path, {"seed": [0, 1]}, ["aggregate.rule=mean"])


@pytest.mark.parametrize("kind", NAMED)
def test_a_comparison_names_no_import_path(here, kind):
    path = write(here / "sub" / "x.toml", {**NAMED[kind], "comparison": {"seed": [0, 1]}}, "canary:boom")
    with pytest.raises(ExperimentError, match="--allow-imports"):
        plan_comparison(path)
    held = {
        "name": "x",
        "axes": {"seed": [0, 1]},
        "base": NAMED[kind],
        "runs": [{"id": "a", "point": {"seed": 0}, "folder": "runs/a"}],
    }
    (here / "sub" / "comparison.json").write_text(json.dumps(held).replace("NAME", "canary:boom"))
    with pytest.raises(ExperimentError, match="--allow-imports"):
        merge([here / "sub"], here / "out")
    assert not (here / "out").exists()


@pytest.mark.parametrize(
    "axes", [{"model": ["net", "canary:boom"]}, {"variant": [{"label": "a"}, {"label": "b", "model": "canary:boom"}]}]
)
def test_values_on_axes_name_no_import_path(here, axes):
    with pytest.raises(ExperimentError, match="--allow-imports"):
        plan_comparison(write(here / "sub" / "x.toml", {"comparison": axes}))


@pytest.mark.parametrize("name", ["own_components:perceptron", "own_components:Inner.model"])
def test_a_file_of_the_working_directory_names_what_its_own_modules_define(here, name):
    assert fedsim.load_experiment(write(here / "x.toml", NAMED["models"], name)).model.name == name
    assert fedsim.load_experiment("x.toml", ["rounds=3"]).rounds == 3


def test_a_package_of_the_working_directory_is_local(here):
    (here / "own_package").mkdir()
    (here / "own_package" / "deep.py").write_text(LOCAL_COMPONENTS)
    path = write(here / "x.toml", NAMED["models"], "own_package.deep:perceptron")
    with pytest.raises(ExperimentError, match="--allow-imports"):
        fedsim.load_experiment(path)  # any folder could be such a package, for example an unpacked archive
    (here / "own_package" / "__init__.py").write_text("")
    assert fedsim.load_experiment(path).model.component()


LOCAL_NAMES = "os.system", "system", "nn.Linear", "partial", "__builtins__", ""


@pytest.mark.parametrize(
    "name",
    [
        *(f"own_components:{name}" for name in LOCAL_NAMES),
        *("own_components", "json:loads", "__main__:x", ".own_components:perceptron", ":perceptron"),
    ],
)
def test_a_local_module_gives_no_access_to_other_modules(here, name):
    (here / "json.py").write_text("def loads(): ...")  # Python's own json module takes precedence
    with pytest.raises(ExperimentError, match=r"--allow-imports|no such model"):
        fedsim.load_experiment(write(here / "x.toml", NAMED["models"], name))


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Yield a working directory outside `sys.path`, with modules that other modules try to import by name."""
    monkeypatch.chdir(tmp_path)
    for name in ("canary", "optional_package", "multiprocessing", "types", "resource"):
        (tmp_path / f"{name}.py").write_text("open('executed', 'a').write(__name__)")
    (tmp_path / "own_late.py").write_text("from own_later import CLASSES")
    (tmp_path / "own_later.py").write_text("CLASSES = 10")
    late = "def late(*, hidden: int = 3):\n    import own_late\n    return perceptron(hidden=own_late.CLASSES)"
    (tmp_path / "own_components.py").write_text(f"{LOCAL_COMPONENTS}\n{late}")
    path = list(sys.path)
    yield tmp_path
    assert sys.path == path
    assert not (tmp_path / "executed").exists()
    import_policy.local_modules.folders.clear()
    for name in ("own_components", "own_late", "own_later"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("words", [[], ["aggregate=mean"], ["model=own_components:late"]])
def test_other_modules_find_nothing_in_the_working_directory(planted, words):
    """Neither after a refused import path, nor after a path that the user passed."""
    file = write(planted / "sub" / "x.toml", {"workers": 2, "aggregate": "canary:rule"})
    if "aggregate=mean" in words:
        assert fedsim.load_experiment(file, words).workers == 2
    else:
        with pytest.raises(ExperimentError, match="--allow-imports"):
            fedsim.load_experiment(file, words)
    write(file, {"comparison": {"local.algorithm": ["canary:rule", "sgd"], "skip_invalid": True}})
    assert plan_comparison(file, None, words).left_out
    with pytest.raises(MissingPackageError):
        import_extra("optional_package", extra="wandb", purpose="this test")


@pytest.mark.slow
def test_a_local_module_imports_others_when_it_is_used(planted):
    """Also in a spawned process, in which `multiprocessing` is imported first."""
    program = "import sys; sys.path.remove(''); from fedsim.__main__ import main; main()"
    words = ["run", "model=own_components:late", "workers=2", "rounds=1", "engine=spawn", "processes=1", "-q"]
    done = run_python("-c", program, *words, cwd=planted)
    assert done.returncode == 0, done.stderr


RUN_FOLDERS = {
    "load_run": fedsim.load_run,
    "load_model": fedsim.load_model,
    "load_round": load_round,
    "file": lambda folder: fedsim.load_experiment("experiment.toml"),
    "resume": lambda folder: fedsim.run(LINES | {"model": "logistic"}, folder, resume=True),
    "comparison": fedsim.load_comparison,
}


@pytest.mark.parametrize("read", RUN_FOLDERS)
def test_a_run_folder_that_is_the_working_directory_imports_nothing(planted, read):
    point = {"id": "a", "point": {"seed": 0}, "folder": "runs/a"}
    stored = {"name": "x", "axes": {"seed": [0]}, "base": LINES | {"model": "canary:net"}, "runs": [point]}
    (planted / "comparison.json").write_text(json.dumps(stored))
    fedsim.run(LINES | {"model": "logistic", "engine": "serial", "records": {"updates": [1]}}, planted / "run")
    text = (planted / "run" / "experiment.toml").read_text()
    for path in (planted / "run").iterdir():
        path.rename(planted / path.name)
    (planted / "experiment.toml").write_text(text.replace('"logistic"', '"canary:net"'))
    with pytest.raises(ExperimentError, match="--allow-imports"):
        RUN_FOLDERS[read](".")


@pytest.mark.parametrize("place", ["sub/x.toml", "runs/one/experiment.toml", "../elsewhere/x.toml"])
def test_a_file_elsewhere_imports_no_local_module(here, place):
    with pytest.raises(ExperimentError, match="--allow-imports"):
        fedsim.load_experiment(write(here / place, NAMED["models"], "own_components:perceptron"))


def test_links_count_as_their_targets(here):
    write(here / "sub" / "x.toml", NAMED["models"], "own_components:perceptron")
    (here / "x.toml").symlink_to(here / "sub" / "x.toml")
    with pytest.raises(ExperimentError, match="--allow-imports"):
        fedsim.load_experiment("x.toml")
    (here / "sub" / "linked.py").write_text(LOCAL_COMPONENTS)
    (here / "linked.py").symlink_to(here / "sub" / "linked.py")
    with pytest.raises(ExperimentError, match="--allow-imports"):
        fedsim.load_experiment(write(here / "y.toml", NAMED["models"], "linked:perceptron"))


def test_import_paths_of_the_user_are_always_allowed(here):
    file = write(here / "sub" / "x.toml", {"rounds": 2})
    for experiment in (
        fedsim.load_experiment(file, ["model=own_components:perceptron"]),
        fedsim.load_experiment({"model": "own_components:perceptron"}),
        fedsim.Experiment(model="own_components:perceptron"),
        plan_comparison(file, words=["model=own_components:perceptron,net"]).runs[0].experiment,
        plan_comparison(file, words=["model=own_components:perceptron", "seed=0,1"]).runs[0].experiment,
        plan_comparison(file, {"model": ["own_components:perceptron", "net"]}).runs[0].experiment,
    ):
        assert experiment.model.name == "own_components:perceptron"


def test_an_import_path_of_the_user_allows_no_other(here):
    file = write(here / "sub" / "x.toml", {"aggregate": "canary:boom"})
    with pytest.raises(ExperimentError, match="canary:boom"):
        fedsim.load_experiment(file, ["model=own_components:perceptron"])


def test_allow_imports_allows_every_import(here):
    file = write(
        here / "sub" / "x.toml", {**NAMED["models"], "comparison": {"seed": [0, 1]}}, "own_components:perceptron"
    )
    assert plan_comparison(file, allow_imports=True).runs
    with pytest.raises(SystemExit, match="imported"):
        fedsim.load_experiment(write(file, NAMED["models"], "canary:boom"), allow_imports=True)


LINES = {
    "rounds": 1,
    "workers": 2,
    "model": "own_components:perceptron",
    "data": "tests.components:tiny",
    "local": {"steps": 1},
}


def test_allow_imports_reaches_the_processes(cli, here):
    write(here / "sub" / "x.toml", {**LINES, "engine": "processes", "processes": 1})
    words = ["run", "sub/x.toml", "--out", "run", "-q"]
    refused = cli(*words)
    assert refused.exit_code == 2
    assert refused.stderr.count("--allow-imports") == 2
    assert cli(*words, "--allow-imports").exit_code == 0
    assert cli("report", "run").exit_code == 0  # `report` imports nothing


def test_allow_imports_reaches_jobs_and_resumed_comparisons(cli, here):
    tables = {**LINES, "comparison": {"seed": [0, 1], "aggregate.rule": ["mean"]}}
    write(here / "sub" / "x.toml", tables)
    words = ["compare", "sub/x.toml", "--out", "comparison", "--jobs", "2", "-q"]
    assert cli(*words).exit_code == 2
    assert cli(*words, "--allow-imports").exit_code == 0
    (here / "comparison" / "runs" / "mean-seed1" / "metrics.jsonl").unlink()
    assert cli(*words).exit_code == 2
    assert cli(*words, "--allow-imports", "--jobs", "1").exit_code == 0
    assert cli("compare", "comparison", "-q").exit_code == 2
    assert cli("compare", "comparison", "-q", "--allow-imports").exit_code == 0


def test_a_run_folder_is_untrusted(cli, here):
    fedsim.run({**LINES, "engine": "serial", "records": {"updates": [1]}}, here / "run")
    with pytest.raises(ExperimentError, match="--allow-imports"):
        load_round(here / "run")
    assert cli("replay", "run").exit_code == 2
    assert cli("replay", "run", "--rules", "mean", "--allow-imports").exit_code == 0


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_repository_around_fedsim_executes_nothing(tmp_path, monkeypatch):
    """`git describe` would execute the command core.fsmonitor."""
    package = tmp_path / "fedsim"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(run_folder, "__file__", str(package / "run_folder.py"))
    hook = tmp_path / "hook"
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/executed\n")
    hook.chmod(0o755)
    for words in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"],
        ["config", "core.fsmonitor", str(hook)],
    ):
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    assert run_folder._git_commit() is None
    subprocess.run(["git", "-C", tmp_path, "-c", "core.fsmonitor=false", "add", "fedsim"], check=True)
    assert len(run_folder._git_commit()) >= 40
    assert not (tmp_path / "executed").exists()


def test_a_file_downloads_no_data_to_other_folders(here, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    file = write(here / "x.toml", {"data": {"name": "mnist", "root": str(elsewhere)}})
    with pytest.raises(
        ExperimentError,
        match="does not contain mnist, and an experiment file must not download data to a folder outside the",
    ):
        fedsim.load_experiment(file)
    assert fedsim.load_experiment(file, [f"data.root={elsewhere}"]).data.root == str(elsewhere)
    assert fedsim.load_experiment(write(here / "x.toml", {"data": {"name": "mnist", "root": "data"}}))
    (elsewhere / "MNIST" / "raw").mkdir(parents=True)
    for name in FILES:
        (elsewhere / "MNIST" / "raw" / name).touch()
    file = write(here / "x.toml", {"data": {"name": "mnist", "root": str(elsewhere)}})
    assert fedsim.load_experiment(file).data.root == str(elsewhere)


def test_a_file_downloads_no_data_when_workers_are_counted(here, tmp_path_factory, monkeypatch):
    """Without `workers`, the data set is loaded to count its owners, while the experiment is read."""
    monkeypatch.setattr("fedsim.config.experiment.load_dataset_once", lambda *arguments: pytest.fail("loads the data"))
    tables = {"data": {"name": "cifar10", "root": str(tmp_path_factory.mktemp("elsewhere"))}, "partition": "natural"}
    with pytest.raises(ExperimentError, match="an experiment file must not download data to a folder outside the"):
        fedsim.load_experiment(write(here / "x.toml", tables))


def test_a_file_sets_no_address_of_ranks(here):
    tables = {"engine": "distributed", "distributed": {"init_method": "tcp://example.org:80"}}
    with pytest.raises(ExperimentError, match="distributed.init_method = .*: must not be set in an experiment file"):
        fedsim.load_experiment(write(here / "x.toml", tables))
    there = fedsim.load_experiment(here / "x.toml", ["distributed.init_method=tcp://example.org:80"])
    assert there.distributed.init_method == "tcp://example.org:80"
