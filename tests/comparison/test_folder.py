from __future__ import annotations

import json
import shutil

import pytest

import fedsim
from fedsim.comparison.folder import ComparisonFolder
from fedsim.comparison.plan import plan_comparison
from fedsim.errors import RecordError
from fedsim.system.files import locked
from tests.comparison.conftest import quick_tables

AXES = {"aggregate.rule": ["mean", "weighted_mean"], "seed": [0, 1]}

FILES = {"experiment.toml", "environment.json", "metrics.jsonl", "partition.json"}


@pytest.fixture
def plan(serial):
    return plan_comparison(serial, AXES)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the folder of a finished comparison; the fixture `finished` copies it."""
    tables = {**quick_tables(), "engine": "serial", "records": {}}
    return fedsim.compare(tables, AXES, tmp_path_factory.mktemp("made") / "comparison").folder


@pytest.fixture
def finished(made, tmp_path):
    """Return a copy of the folder of a finished comparison."""
    return shutil.copytree(made, tmp_path / "comparison")


def test_comparison_json_holds_the_axes_and_the_folder_of_each_run(finished):
    held = json.loads((finished / "comparison.json").read_text())
    assert (held["name"], held["axes"]) == ("quick", AXES)
    assert list(held["axes"]) == list(AXES)
    assert held["base"]["rounds"] == 2
    assert "seed" not in held["base"]
    assert "rule" not in held["base"]["aggregate"]
    points = [{"aggregate.rule": rule, "seed": seed} for rule in AXES["aggregate.rule"] for seed in AXES["seed"]]
    assert [run["point"] for run in held["runs"]] == points
    for run in held["runs"]:
        assert run["folder"] == f"runs/{run['id']}"
        experiment = fedsim.load_experiment(finished / run["folder"] / "experiment.toml", allow_imports=True)
        assert (experiment.aggregate.rule, experiment.seed) == tuple(run["point"].values())
        assert {path.name for path in (finished / run["folder"]).iterdir()} == FILES
    texts = {"results.csv", "curves.csv", "summary.csv", "pairs.csv", "summary.txt"}
    assert {path.name for path in finished.iterdir()} == {"comparison.json", "runs", "accuracy.png"} | texts


@pytest.mark.usefixtures("pictures")
def test_figures_are_written_in_the_chosen_formats(serial, tmp_path):
    def names(experiment):
        fedsim.compare(experiment, {"aggregate.rule": ["mean"], "sync": ["parameters"]}, tmp_path / "x")
        return {path.name for path in (tmp_path / "x").iterdir() if path.stem in ("accuracy", "heatmap")}

    assert names({**serial, "records": {"figures": ["svg"]}}) == {"accuracy.svg", "heatmap.svg"}
    with_pdf = {f"{name}.{format}" for name in ("accuracy", "heatmap") for format in ("svg", "pdf")}
    assert names({**serial, "records": {"figures": ["pdf"]}}) == with_pdf


def test_a_run_is_finished_when_all_its_rounds_are_recorded(finished, plan):
    with ComparisonFolder(finished, plan) as folder:
        run = plan.runs[0]
        metrics = folder.run_folder(run) / "metrics.jsonl"
        whole = metrics.read_text()
        assert folder.is_finished(run)
        for part in ("", whole[: whole.index("\n") + 1], whole[:-1], whole[:-9]):
            metrics.write_text(part)
            assert not folder.is_finished(run)
        metrics.write_text(whole)
        folder.note_failure(run, "something\nwent wrong")
        assert not folder.is_finished(run)
        assert folder.result(run).error == "something"
        folder.clear(run)
        assert not folder.run_folder(run).exists()


def test_a_run_without_its_model_file_is_not_finished(serial, tmp_path):
    plan = plan_comparison({**serial, "records": {"model": True}}, {"seed": [0]})
    fedsim.compare({**serial, "records": {"model": True}}, {"seed": [0]}, tmp_path / "x")
    with ComparisonFolder(tmp_path / "x", plan) as folder:
        assert folder.is_finished(plan.runs[0])
        (folder.run_folder(plan.runs[0]) / "model.safetensors").unlink()
        assert not folder.is_finished(plan.runs[0])


@pytest.mark.parametrize(
    ("change", "axes", "lines"),
    [
        ({"rounds": 3}, {}, ["rounds: 2 there, 3 here"]),
        ({"local": {"batch_size": 16, "lr": 0.1}}, {}, ["local.lr: 0.05 there, 0.1 here"]),
        ({"records": {"model": True}}, {}, ["records.model: false there, true here"]),
        ({}, {"seed": [1, 2]}, ["seed = 0: is in the stored comparison, but not in the new comparison"]),
        ({}, {"workers": [3, 4]}, ["workers: is an axis of the new comparison, but not of the stored comparison"]),
        ({"cohort": 2}, {}, ["cohort: not set there, 2 here"]),
        ({"aggregate": {"weights": "samples"}}, {}, ['aggregate.weights: not set there, "samples" here']),
    ],
)
def test_the_folder_of_another_comparison_is_refused_with_the_differences(serial, finished, change, axes, lines):
    before = (finished / "comparison.json").read_bytes()
    with pytest.raises(RecordError) as caught:
        fedsim.compare({**serial, **change}, {**AXES, **axes}, finished)
    assert str(caught.value).splitlines() == [f"{finished}: holds another comparison; choose a new folder", *lines]
    assert (finished / "comparison.json").read_bytes() == before


@pytest.mark.filterwarnings("ignore:.* not apply to")
def test_a_parameter_of_one_value_of_an_axis_is_a_difference_too(serial, tmp_path):
    def compare(c):
        rules = ["mean", "tests.components:clipped_mean"]
        tables = {**serial, "rounds": 1, "aggregate": {"rule": "tests.components:clipped_mean", "c": c}}
        return fedsim.compare(tables, {"aggregate.rule": rules}, tmp_path / "x")

    compare(1.0)
    with pytest.raises(RecordError, match=r"tests.components_clipped_mean: aggregate.c: 1.0 there, 2.0 here$"):
        compare(2.0)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"name": "other"},
        {"engine": "processes", "processes": 2, "process_timeout": 9.0},
        {"engine": "batched", "batched": {"stack_size": 2}},
    ],
)
def test_another_engine_is_not_a_difference(how, finished, quick, plan):
    with ComparisonFolder(finished, plan_comparison({**quick, **how}, AXES)) as folder:
        assert all(folder.is_finished(run) for run in plan.runs)


def test_values_can_be_added_in_any_order(serial, finished):
    more = {"aggregate.rule": ["weighted_mean", "mean", "tests.components:clipped_mean"], "seed": [5, 1, 0]}
    before = {path.name: path.stat().st_mtime_ns for path in (finished / "runs").glob("*/metrics.jsonl")}
    comparison = fedsim.compare(serial, more, finished)
    assert len(comparison.runs) == 9
    assert not comparison.failed
    after = {path.name: path.stat().st_mtime_ns for path in (finished / "runs").glob("*/metrics.jsonl")}
    assert before.items() <= after.items()
    assert json.loads((finished / "comparison.json").read_text())["axes"] == more


def test_a_run_keeps_its_id_if_a_value_with_the_same_letters_is_added(serial, tmp_path):
    ids = []
    for names in (["a_b"], ["A_b", "a_b"]):  # in a new folder, both IDs of the second comparison have a suffix
        with ComparisonFolder(tmp_path / "comparison", plan_comparison(serial, {"name": names})) as folder:
            ids.append({run.point["name"]: run.id for run in folder.plan.runs})
    assert ids[0]["a_b"] == ids[1]["a_b"] == "a_b"


def test_a_comparison_that_was_killed_before_its_first_file_starts_again(plan, tmp_path):
    (tmp_path / ".comparison.json.part").write_text("half")
    with ComparisonFolder(tmp_path, plan):
        assert [path.name for path in tmp_path.iterdir()] == ["comparison.json"]


def test_a_folder_with_other_files_is_refused_and_not_changed(serial, tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(RecordError, match="is not empty and has no comparison.json"):
        fedsim.compare(serial, AXES, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_folder_is_locked(plan, tmp_path):
    (tmp_path / "y").mkdir()
    with locked(tmp_path / "y", "another comparison"):
        (tmp_path / "y" / "first").touch()  # as left by another comparison that has not written comparison.json yet
        with pytest.raises(RecordError, match="another comparison is using this folder"):
            ComparisonFolder(tmp_path / "y", plan)
    with (
        ComparisonFolder(tmp_path / "x", plan),
        pytest.raises(RecordError, match="another comparison is using this folder"),
    ):
        ComparisonFolder(tmp_path / "x", plan)
    with ComparisonFolder(tmp_path / "x", plan):
        pass


def test_a_file_in_place_of_the_folder_is_an_error(serial, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "x"):
        with pytest.raises(RecordError, match=f"{out}: cannot be the folder of a comparison"):
            fedsim.compare(serial, AXES, out)


def test_another_target_is_the_same_comparison(serial, tmp_path):
    path = tmp_path / "comparison"
    first = fedsim.compare(serial, AXES, path)
    before = {run.id: (run.folder / "metrics.jsonl").stat().st_mtime_ns for run in first.runs}
    again = fedsim.compare(serial, AXES, path, target=0.2)
    assert {run.id: (run.folder / "metrics.jsonl").stat().st_mtime_ns for run in again.runs} == before
    assert "rounds to 20 percent" in again.table
    assert json.loads((path / "comparison.json").read_text())["target"] == 0.2
    assert fedsim.compare(serial, {**AXES, "target": 0.3}, path).settings.target == 0.3
