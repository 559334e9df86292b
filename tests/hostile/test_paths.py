"""Only regular files inside a folder are read, and nothing is written outside it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import fedsim
from fedsim.asynchronous.race.log import read_log
from fedsim.cli.program import run_program
from fedsim.cli.rule_replay import load_round
from fedsim.comparison import plan_comparison
from fedsim.comparison.folder import ComparisonFolder
from fedsim.comparison.results import read_records
from fedsim.comparison.runner import merge
from fedsim.config.components import list_module
from fedsim.core.plotting import save
from fedsim.errors import ExperimentError, FedsimError, RecordError
from fedsim.records.history import read_history
from fedsim.records.run_folder import new_folder
from fedsim.report.page import render
from fedsim.system.files import read_bounded, write_atomically
from tests.report.folders import invent_run, write_points

PACKAGE = Path(fedsim.__file__).parent
DATA_FILES = "x.csv", "x.csv.gz", "x.parquet", "x.npz", "x.safetensors", "x.txt"
READERS = {
    "x.toml": lambda folder: fedsim.load_experiment(folder / "x.toml"),
    "race.csv": lambda folder: read_log(str(folder / "race.csv"), {}),
    "trace": lambda folder: fedsim.run(
        {"mode": "clock", "engine": "serial", "clock": {"noise": {"name": "trace", "path": str(folder / "trace")}}}
    ),
    "updates-00001.safetensors": load_round,
    "x.py": lambda folder: list_module(folder / "x.py"),
    "train/x.json": lambda folder: fedsim.load_dataset("leaf", path=str(folder)),
    "state.json": lambda folder: fedsim.load_dataset("huggingface", path=str(folder)),
    **{name: lambda folder, name=name: fedsim.load_dataset(str(folder / name)) for name in DATA_FILES},
}


def in_time(function, *arguments):
    """Return the exception of a function that must end soon, where a pipe without a writer would block it."""
    raised = []

    def work():
        try:
            function(*arguments)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return raised[0] if raised else None


@pytest.mark.parametrize("name", READERS)
def test_pipes_and_devices_are_not_read(tmp_path, name):
    (tmp_path / "experiment.toml").write_text("")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    assert isinstance(in_time(READERS[name], tmp_path), FedsimError)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    error = in_time(READERS[name], tmp_path)
    assert isinstance(error, FedsimError)
    assert len(str(error).splitlines()) == 1


def test_a_data_file_larger_than_the_free_memory_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "x.csv").write_text("x,y\n1,2\n")
    monkeypatch.setattr("fedsim.data.columns.free_memory", lambda: 7.0)
    with pytest.raises(FedsimError, match=r"x\.csv: cannot be read: it is larger than 7 bytes$"):
        fedsim.load_dataset(str(tmp_path / "x.csv"))


def test_the_home_folder_is_found_in_every_path(tmp_path, monkeypatch):
    for name in ("home", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    small = {
        "model": "logistic",
        "workers": 2,
        "rounds": 1,
        "engine": "serial",
        "records": {"updates": [1], "figures": []},
    }
    fedsim.run(small, "~/run")
    fedsim.run("~/run/experiment.toml", model={"weights": "~/run/model.safetensors"})
    assert fedsim.load_run("~/run").folder == tmp_path / "home" / "run"
    assert fedsim.load_model("~/run")
    assert load_round("~/run").round == 1
    save(Figure(), "~/figure.svg")
    monkeypatch.setattr("fedsim.comparison.runner.run_comparison", lambda plan, folder, *_, **options: folder)
    assert fedsim.compare(small, {"seed": [0, 1]}, "~/comparison") == tmp_path / "home" / "comparison"
    write_points(tmp_path / "home" / "comparison", {"seed": [0, 1]}, lambda path, point: invent_run(path, [0.5]))
    assert len(fedsim.load_comparison("~/comparison").runs) == 2
    fedsim.report.write_report("~/run", "~/page.html")
    monkeypatch.setattr("sys.argv", ["fedsim", "report", "~/run", "--out=~/page.html", "data.path=~/x"])
    run_program(lambda: None)
    assert sys.argv[2:] == [f"{tmp_path}/home/run", f"--out={tmp_path}/home/page.html", "data.path=~/x"]
    (tmp_path / "home" / "lists.json").write_text("[[0, 1], [2, 3]]")
    assert fedsim.load_experiment({"partition": {"name": "given", "path": "~/lists.json"}}).workers == 2
    assert not list((tmp_path / "here").iterdir())
    assert {"run", "figure.svg", "page.html"} <= {path.name for path in (tmp_path / "home").iterdir()}


def test_a_link_to_nowhere_in_place_of_runs_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to(tmp_path / "nothing" / "x")
    error = in_time(contextlib.ExitStack().enter_context, new_folder("x"))
    assert isinstance(error, RecordError)
    assert "cannot be a run folder" in str(error)


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/", "a\0b", "a" * 5000, "\x1b[2J", "/proc/self/mem"])
def test_a_path_that_is_not_an_experiment_gives_a_one_line_error(path):
    with pytest.raises(ExperimentError) as caught:
        fedsim.load_experiment(path)
    (line,) = caught.value.lines
    assert len(line) < 500
    assert line.isprintable()


@pytest.mark.parametrize("name", ["x" * 300, "/".join(["y" * 200] * 30)])
@pytest.mark.parametrize(
    "words",
    [
        *(
            ["run", "NAME"],
            ["run", "--out", "NAME"],
            ["run", "--resume", "NAME"],
            ["compare", "seed=0,1", "--out", "NAME"],
        ),
        *(["plot", "NAME"], ["report", "NAME"], ["replay", "NAME"], ["list", "NAME.py"], ["new", "NAME"]),
    ],
    ids=lambda words: " ".join(words),
)
def test_a_name_that_no_file_can_have_gives_a_one_line_error(cli, name, words):
    done = cli(*(word.replace("NAME", name) for word in words))
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert len(line) < 1_100
    assert "name too long" in line or "no such" in line or "is not a run folder" in line


def test_the_metrics_of_a_run_are_not_read_from_pipes_or_links(tmp_path):
    folder = invent_run(tmp_path / "run", [0.5])
    (folder / "metrics.jsonl").rename(tmp_path / "metrics.jsonl")
    os.mkfifo(folder / "metrics.jsonl")
    assert in_time(read_history, folder) is None
    assert isinstance(in_time(read_records, folder), RecordError)
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").symlink_to(tmp_path / "metrics.jsonl")
    assert read_history(folder) == []
    with pytest.raises(RecordError, match="metrics.jsonl: cannot be read: the path leads out of"):
        read_records(folder)


@pytest.mark.parametrize("name", ["environment.json", "experiment.toml", "partition.json", "updates-00001.safetensors"])
def test_no_file_is_read_that_a_link_in_the_folder_leads_to(tmp_path, name):
    folder = invent_run(tmp_path / "run", [0.5])
    (folder / "experiment.toml").write_text("")
    (tmp_path / "secrets").write_text('{"password": "1234"}')
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "secrets")
    with pytest.raises(FedsimError, match="the path leads out of"):
        load_round(folder) if name.startswith("updates") else render(folder)


def test_a_report_shows_no_run_outside_of_the_comparison(tmp_path):
    invent_run(tmp_path / "private", [0.5])
    axes = {"seed": [0, 1]}
    plan = write_points(tmp_path / "comparison", axes, lambda path, point: invent_run(path, [0.5]))
    (plan / "linked").symlink_to(tmp_path / "private")
    held = json.loads((plan / "comparison.json").read_text())
    for folder in ("../private", str(tmp_path / "private"), "linked", "runs/../../private", "a\0b"):
        held["runs"][0]["folder"] = folder
        (plan / "comparison.json").write_text(json.dumps(held))
        with pytest.raises(RecordError):
            read_records(plan)
    held["runs"][0]["folder"] = held["runs"][1]["folder"]
    (plan / "comparison.json").write_text(json.dumps(held))
    # A file must not list one folder as a million runs.
    with pytest.raises(RecordError, match="folder = .*: is also the folder of another run"):
        read_records(plan)


@pytest.fixture
def compared(tmp_path):
    """Return a comparison of two runs that have not started, and its folder."""
    plan = plan_comparison({"workers": 2, "rounds": 1}, {"seed": [0, 1]})
    with ComparisonFolder(tmp_path / "comparison", plan):
        pass
    return plan, tmp_path / "comparison"


def test_nothing_is_removed_or_written_where_links_in_a_comparisons_folder_lead(compared, tmp_path):
    plan, folder = compared
    (tmp_path / "private" / plan.runs[0].id).mkdir(parents=True)
    precious = tmp_path / "private" / plan.runs[0].id / "thesis.tex"
    precious.write_text("all of it")
    with ComparisonFolder(folder, plan) as held:
        (folder / "runs").symlink_to(tmp_path / "private")
        for act in (held.clear, held.run_folder, held.result, lambda run: held.note_failure(run, "x")):
            with pytest.raises(RecordError, match="the path leads out of"):
                act(plan.runs[0])
    with pytest.raises(RecordError, match="the path leads out of"):
        ComparisonFolder(folder, plan)
    assert [path.name for path in precious.parent.iterdir()] == ["thesis.tex"]


def test_nothing_is_copied_from_where_a_comparisons_folder_points(compared, tmp_path):
    plan, folder = compared
    invent_run(tmp_path / "private", [0.5])
    held = json.loads((folder / "comparison.json").read_text())
    for run in held["runs"]:
        run["folder"] = "../private"
    (folder / "comparison.json").write_text(json.dumps(held))
    assert all(run.error for run in merge([folder], tmp_path / "out").runs)
    (folder / "runs" / plan.runs[0].id).mkdir(parents=True)
    (folder / "runs" / plan.runs[0].id / "error.txt").write_text("it failed")
    (folder / "runs" / plan.runs[0].id / "key").symlink_to(tmp_path / "private")
    with pytest.raises(RecordError, match="key: is not a regular file or folder, so it cannot be copied"):
        merge([folder], tmp_path / "other")


@pytest.mark.parametrize("id", ["x" * 256, "../x", "/etc", "..", "", ".x", "a/b", "a\0b", 5, None, ["a"]])
def test_names_of_runs_with_paths_are_refused(compared, tmp_path, id):
    _, folder = compared
    held = json.loads((folder / "comparison.json").read_text())
    held["runs"][0]["id"] = id
    (folder / "comparison.json").write_text(json.dumps(held))
    with pytest.raises(RecordError, match=r"comparison\.json: is damaged: runs\.0\.id: "):
        merge([folder], tmp_path / "out")


def test_a_link_in_the_way_of_a_file_is_not_followed(tmp_path):
    (tmp_path / "private").write_text("mine")
    (tmp_path / ".report.html.part").symlink_to(tmp_path / "private")
    (tmp_path / "report.html").symlink_to(tmp_path / "private")
    write_atomically(tmp_path / "report.html", b"page")
    assert (tmp_path / "private").read_text() == "mine"
    assert (tmp_path / "report.html").read_bytes() == b"page"
    assert not (tmp_path / "report.html").is_symlink()


def test_a_file_is_read_if_it_lies_where_it_should_and_is_no_larger(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x").write_bytes(b"12345")
    (tmp_path / "in" / "y").symlink_to("x")
    assert read_bounded(tmp_path / "in" / "x", 5) == b"12345"
    assert read_bounded(tmp_path / "in" / "y", 5, tmp_path / "in") == b"12345"
    for path, most, inside in (("x", 4, None), ("x", 5, "other"), ("missing", 5, None), ("", 5, None), ("z", 5, None)):
        with pytest.raises(OSError, match=r"\[Errno"):
            read_bounded(tmp_path / "in" / path, most, tmp_path / inside if inside else None)


def test_no_module_of_fedsim_unpickles_or_evaluates_what_files_hold():
    """Messages between the processes of a run (pipes, ranks) are not files."""
    suspicious = re.compile(r"(?<![.\w])(eval|exec)\(|[Pp]ickle[r]?\.loads?\(|torch\.load\(|np\.load\(|shelve|marshal")
    between_processes = {("processes", "messages.py"), ("core", "objects.py"), ("processes", "team.py")}
    between_processes |= {("processes", "process_group.py")}
    safe = {  # NumPy does not unpickle by default
        "with np.load(MNIST5K_FILE) as file:",
        'with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:',
    }
    suspects = [
        (path.relative_to(PACKAGE).parts, line.strip())
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text().splitlines()
        if suspicious.search(line)
    ]
    assert [line for parts, line in suspects if parts not in between_processes and line not in safe] == []
