from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedsim
from fedsim.data import partition_shards
from fedsim.errors import RecordError
from fedsim.records.run_folder import RunFolder, new_folder
from tests.components import tiny

ALWAYS = {"experiment.toml", "environment.json", "metrics.jsonl", "partition.json"}


@pytest.fixture
def finished(tiny_experiment, tmp_path):
    return fedsim.run({**tiny_experiment, "cohort": 2}, tmp_path / "a" / "run")


@pytest.fixture
def drawn(tiny_experiment, tmp_path):
    """Return the folder of a run with everything that a run stores by default."""
    return fedsim.run({**tiny_experiment, "records": {}}, tmp_path / "run").folder


def test_the_files_of_a_run_folder(drawn):
    names = {path.name for path in drawn.iterdir()}
    assert names == {*ALWAYS, "model.safetensors", "curve.png"}


def test_the_experiment_can_be_run_again_from_its_folder(finished):
    again = fedsim.run(finished.folder / "experiment.toml", allow_imports=True)
    assert again.experiment == finished.experiment
    assert torch.equal(again.global_row, finished.global_row)


def test_events_are_written_to_their_own_file(finished, tmp_path):
    assert not (finished.folder / "events.jsonl").exists()
    with RunFolder(tmp_path / "b") as folder:
        folder.begin(finished.experiment)
        folder.event("worker replaced", round=3, process=1, worker=None, why="was killed", attempt=1)
        folder.event("worker replaced", round=4, process=0)
        written = [json.loads(line) for line in (tmp_path / "b" / "events.jsonl").read_text().splitlines()]
    assert written == [
        {"event": "worker replaced", "round": 3, "process": 1, "worker": None, "why": "was killed", "attempt": 1},
        {"event": "worker replaced", "round": 4, "process": 0},
    ]
    assert not (tmp_path / "b").exists(), "no round is recorded"


def test_the_environment_names_versions_device_and_commit(finished):
    environment = json.loads((finished.folder / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["fedsim"] == fedsim.__version__
    assert environment["device"] == "cpu"
    assert environment["processes"] == 1
    assert environment["parameters"] == 16_330
    assert (environment["train_samples"], environment["test_samples"]) == (203, 90)
    assert sum(map(sum, json.loads((finished.folder / "partition.json").read_text())["counts"])) == 203
    assert environment["git_commit"] is None or re.match(r"[0-9a-f]{40}(\+dirty)?$", environment["git_commit"])


@pytest.mark.usefixtures("pictures")
def test_the_curve_is_a_picture(tiny_experiment, tmp_path):
    drawn = fedsim.run({**tiny_experiment, "records": {}}, tmp_path / "run").folder
    with Image.open(drawn / "curve.png") as picture:
        assert picture.size > (600, 300)
        assert len(picture.convert("L").getcolors()) > 10


@pytest.mark.usefixtures("pictures")
def test_the_curve_comes_in_the_formats_asked_for(tiny_experiment, tmp_path):
    result = fedsim.run({**tiny_experiment, "records": {"figures": ["svg", "pdf"]}}, tmp_path / "run")
    assert {path.name for path in result.folder.glob("curve.*")} == {"curve.svg", "curve.pdf"}
    with pytest.raises(fedsim.ExperimentError, match=r"records\.figures.*jpg"):
        fedsim.load_experiment({"records": {"figures": ["jpg"]}})


def test_a_virtual_population_is_described_by_sampled_workers(tiny_experiment, tmp_path, capsys):
    attack = {"name": "sign_flipping", "fraction": 1e-5}
    population = {"workers": 10**6, "cohort": 3, "partition": "tests.components:some", "attack": attack}
    fedsim.run({**tiny_experiment, **population}, tmp_path / "run", progress=True)
    partition = json.loads((tmp_path / "run" / "partition.json").read_text())
    assert partition["population"] == 10**6
    assert len(partition["byzantine"]) == 10
    assert len(partition["counts"]) == len(set(partition["workers"])) == 1000
    sizes = [sum(row) for row in partition["counts"]]
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert (environment["smallest_shard"], environment["largest_shard"]) == (min(sizes), max(sizes)) == (1, 30)
    assert environment["workers_looked_at"] == 1000
    assert "1 to 30 samples each (tests.components:some, estimated from 1,000 workers)" in capsys.readouterr().out
    shards = partition_shards(
        tiny(None)[0].targets, "tests.components:some", 10**6, seed=tiny_experiment.get("seed", 0)
    )
    assert sizes == [shards.size(worker) for worker in partition["workers"]]


def test_a_folder_with_a_run_is_refused(finished, tiny_experiment):
    before = {path.name: path.read_bytes() for path in finished.folder.iterdir()}
    with pytest.raises(RecordError, match="holds a run; name another folder"):
        fedsim.run(tiny_experiment, finished.folder)
    assert {path.name: path.read_bytes() for path in finished.folder.iterdir()} == before


def test_two_runs_cannot_write_to_one_folder(tmp_path):
    with RunFolder(tmp_path) as first:
        first.begin(fedsim.Experiment(seed=1))
        with pytest.raises(RecordError, match="another run is using this folder"):
            RunFolder(tmp_path)
        assert fedsim.load_experiment(tmp_path / "experiment.toml").seed == 1


@pytest.mark.parametrize("out", ["runs/new", "."], ids=["new", "empty"])
def test_a_run_that_ends_before_its_first_round_leaves_nothing(tiny_experiment, tmp_path, out):
    def interrupt(metadata):
        assert (tmp_path / out / "partition.json").is_file()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedsim.run(tiny_experiment, tmp_path / out, on_start=interrupt)
    failing = {**tiny_experiment, "model": "tests.models:Fails"}
    with pytest.raises(fedsim.WorkerError):
        fedsim.run(failing, tmp_path / out)
    assert list(tmp_path.iterdir()) == []


def test_the_experiment_file_is_removed_last(tiny_experiment, tmp_path, monkeypatch):
    """A run that is killed while it removes its files can be started again with resume."""
    unlinked, unlink = [], Path.unlink

    def noted(path, **options):
        unlinked.append(path.name)
        unlink(path, **options)

    with RunFolder(tmp_path / "run") as folder:
        folder.begin(fedsim.Experiment(**tiny_experiment))
        folder.partition(np.zeros((1, 1), dtype=int), [])
        monkeypatch.setattr(Path, "unlink", noted)
    assert unlinked[-1] == "experiment.toml"


def test_events_before_begin_are_written_by_begin(tiny_experiment, tmp_path):
    """A folder with events but no experiment could not be resumed."""
    with RunFolder(tmp_path / "run") as folder:
        folder.event("worker replaced", round=0)
        assert list((tmp_path / "run").iterdir()) == []
        folder.begin(fedsim.Experiment(**tiny_experiment))
        folder.event("worker replaced", round=1)
        lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [0, 1]


def test_a_file_in_place_of_the_folder_is_an_error(tiny_experiment, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RecordError, match=f"{out}: cannot be a run folder") as caught:
            fedsim.run(tiny_experiment, out)
        assert "\n" not in str(caught.value)


def test_each_record_is_on_disk_after_its_round(tiny_experiment, tmp_path):
    seen = []
    fedsim.run(
        tiny_experiment,
        tmp_path,
        on_round=lambda _: seen.append(len((tmp_path / "metrics.jsonl").read_text().split("\n"))),
    )
    assert seen == [2, 3]


def _replace(path):
    path.with_name("other").write_bytes(path.read_bytes())
    path.with_name("other").replace(path)


@pytest.mark.parametrize("last", [2, 3], ids=["in the middle", "after the last round"])
@pytest.mark.parametrize(
    "harm", [lambda path: path.unlink(), _replace, lambda path: path.write_text("")], ids=["removed", "replaced", "cut"]
)
def test_metrics_changed_by_another_program_end_the_run(harm, last, tiny_experiment, tmp_path):
    def on_round(record):
        if record["round"] == last:
            harm(tmp_path / "run" / "metrics.jsonl")

    with pytest.raises(RecordError, match=rf"metrics\.jsonl: was removed or changed .* after round {last}"):
        fedsim.run({**tiny_experiment, "rounds": 3}, tmp_path / "run", on_round=on_round)
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_numbers_that_are_not_finite_become_null(tiny_experiment, tmp_path):
    fedsim.run({**tiny_experiment, "local": {"lr": 1e30}, "rounds": 2, "aggregate": {"nonfinite": "keep"}}, tmp_path)
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["test_loss"] is None


def test_an_interrupted_run_keeps_the_rounds_it_finished(tiny_experiment, tmp_path):
    def interrupt(record):
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedsim.run({**tiny_experiment, "rounds": 9}, tmp_path, on_round=interrupt)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert not (tmp_path / "model.safetensors").exists()


def test_new_folder_names_are_unique(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with contextlib.ExitStack() as stack:
        names = [stack.enter_context(new_folder("x")) for _ in range(4)]
        assert all(name.is_dir() for name in names)
        (names[0] / "file").touch()
    assert len(set(names)) == 4
    assert list(Path("runs").iterdir()) == names[:1]  # empty folders are removed
    assert all(re.match(r"x-\d{8}-\d{6}(-\d+)?$", name.name) for name in names)
