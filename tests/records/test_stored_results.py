"""Results as data: pandas frames, and results, models and comparisons that are loaded from folders."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fedsim
from fedsim.errors import ExperimentError, MissingPackageError, RecordError
from fedsim.records.numbers import round_rows
from fedsim.records.record import RoundRecord

COMPARISON = {"aggregate.rule": ["mean", ["nnm", "median"]], "seed": [0, 1]}


def normalised():
    """Return a model with buffers."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.BatchNorm1d(10))


@pytest.fixture
def run_folder(tiny_experiment, tmp_path):
    fedsim.run(tiny_experiment, tmp_path / "run")
    return tmp_path / "run"


def load_run(folder):
    """Load a run whose data set is named by an import path."""
    return fedsim.load_run(folder, allow_imports=True)


def load_model(folder):
    return fedsim.load_model(folder, allow_imports=True)


def assert_same_result(first, second):
    assert first.history == second.history
    assert first.experiment.resolved() == second.experiment.resolved()
    assert (first.folder, first.stopped) == (second.folder, second.stopped)
    assert torch.equal(first.global_row, second.global_row)
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name])
    assert repr(first) == repr(second)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "float64"},
        {"mode": "clock", "policy": "fedbuff"},
        {"model": "tests.records.test_stored_results:normalised"},
        {"stop": {"metric": "test_loss", "target": 100.0}},
    ],
    ids=["default", "float64", "clock", "buffers", "stopped"],
)
def test_a_run_that_is_loaded_is_the_result_that_it_returned(tiny_experiment, tmp_path, changes):
    result = fedsim.run({**tiny_experiment, **changes}, tmp_path / "run")
    loaded = load_run(tmp_path / "run")
    assert_same_result(result, loaded)
    assert round_rows(loaded.history) == round_rows(result.history)
    assert not fedsim.load_model(str(tmp_path / "run"), allow_imports=True).training


def test_a_run_that_on_round_ended_is_loaded_with_its_reason(tiny_experiment, tmp_path):
    def on_round(record):
        raise fedsim.StopRun("enough")

    result = fedsim.run(tiny_experiment, tmp_path / "run", on_round=on_round)
    assert_same_result(result, load_run(tmp_path / "run"))
    assert load_run(tmp_path / "run").stopped == "enough"


def test_the_row_of_a_loaded_run_stays_if_its_model_is_trained_further(run_folder):
    result = load_run(run_folder)
    with torch.no_grad():
        for parameter in result.model.parameters():
            parameter.zero_()
    assert result.global_row.abs().max() > 0


def test_a_run_without_a_model_is_loaded_and_its_model_gives_a_one_line_error(tiny_experiment, tmp_path):
    result = fedsim.run({**tiny_experiment, "records.model": False}, tmp_path / "run")
    loaded = load_run(tmp_path / "run")
    assert loaded.test_accuracy == result.test_accuracy
    with pytest.raises(RecordError, match=r"model\.safetensors: does not exist, .* records\.model is false$"):
        loaded.model  # noqa: B018


def test_import_paths_in_a_folder_need_to_be_allowed(tiny_experiment, tmp_path):
    fedsim.run(tiny_experiment, tmp_path / "run")
    for load in (fedsim.load_run, fedsim.load_model):
        with pytest.raises(ExperimentError, match="allow_imports=True"):
            load(tmp_path / "run")
        load(tmp_path / "run", allow_imports=True)


@pytest.mark.parametrize("load", [fedsim.load_run, fedsim.load_model, fedsim.load_comparison])
def test_a_folder_that_holds_nothing_gives_a_one_line_error(tmp_path, load):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(RecordError, match=r"^\S+: is not (a run folder|the folder of a comparison) \(no \S+\)$"):
            load(folder)


def test_a_model_that_does_not_fit_or_leads_elsewhere_is_refused(run_folder, tmp_path):
    path = run_folder / "model.safetensors"
    tensors = load_file(path)
    name = next(iter(tensors))
    save_file({**tensors, name: torch.zeros(3)}, path)
    with pytest.raises(RecordError, match=rf'"{name}" is \[3\] in the file, but \[20\] in the model'):
        load_model(run_folder)
    save_file({**tensors, "more": torch.zeros(3)}, path)
    with pytest.raises(RecordError, match='"more" is .3. in the file, but missing in the model'):
        load_model(run_folder)
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(RecordError, match="model.safetensors: is damaged: "):
        load_model(run_folder)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RecordError, match="leads out of"):
        load_model(run_folder)


def test_an_experiment_that_leads_elsewhere_is_refused(run_folder, tmp_path):
    (run_folder / "experiment.toml").rename(tmp_path / "elsewhere.toml")
    (run_folder / "experiment.toml").symlink_to(tmp_path / "elsewhere.toml")
    with pytest.raises(ExperimentError, match="leads out of"):
        load_model(run_folder)


@pytest.mark.parametrize("line", ["[" * 100_000, "1", '{"event": "stopped", "round": "2"}', "\0"])
def test_damaged_events_are_ignored(run_folder, line):
    (run_folder / "events.jsonl").write_text(f"{line}\n")
    assert load_run(run_folder).stopped is None


def test_a_comparison_that_is_loaded_is_the_one_that_was_returned(tiny_experiment, tmp_path):
    variant = [{"label": "small", "model.hidden": 5}, {"label": "large", "model.hidden": 9}]
    for number, axes in enumerate([COMPARISON, {"variant": variant, "seed": [0, 1]}]):
        folder = tmp_path / str(number)
        comparison = fedsim.compare(tiny_experiment, axes, folder, 1, target=0.1, metric="test_loss")
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        loaded = fedsim.load_comparison(folder, allow_imports=True)
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
        assert loaded.table == comparison.table
        assert (loaded.axes, loaded.settings) == (comparison.axes, comparison.settings)
        assert loaded.runs == comparison.runs
        assert repr(loaded) == repr(comparison)


def test_a_comparison_with_a_failed_run_and_one_with_shards_only(tiny_experiment, tmp_path):
    comparison = fedsim.compare(tiny_experiment, {"local.lr": [0.1, 1e30]}, tmp_path / "comparison", 1)
    assert len(comparison.failed) == 1
    assert fedsim.load_comparison(tmp_path / "comparison", allow_imports=True).table == comparison.table
    (tmp_path / "sharded" / "shards").mkdir(parents=True)
    with pytest.raises(RecordError, match="to combine its shards, run: fedsim compare"):
        fedsim.load_comparison(tmp_path / "sharded")


def test_frames_have_a_row_for_each_round_and_for_each_run(tiny_experiment, tmp_path):
    pytest.importorskip("pandas", exc_type=ImportError)
    metrics = ["macro_f1", {"name": "top_k", "k": 3}]
    result = fedsim.run({**tiny_experiment, "metrics": metrics}, tmp_path / "run")
    frame = result.to_dataframe()
    assert list(frame["round"]) == [1, 2]
    assert list(frame["test_accuracy"]) == [record.test_accuracy for record in result.history]
    assert list(frame["metrics.top_k"]) == [record.metrics["top_k"] for record in result.history]
    assert frame.equals(load_run(tmp_path / "run").to_dataframe())

    comparison = fedsim.compare(tiny_experiment, COMPARISON, jobs=1)
    rounds, runs = comparison.to_dataframe(), comparison.to_dataframe("run")
    assert list(rounds.columns[:4]) == ["id", "aggregate.rule", "seed", "round"]
    assert (len(rounds), len(runs)) == (8, 4)
    assert list(runs["seed"]) == [0, 1, 0, 1]
    assert list(runs["aggregate.rule"]) == ["mean", "mean", "nnm+median", "nnm+median"]
    assert list(runs["test_accuracy"]) == [run.test_accuracy for run in comparison.runs]
    last = rounds[rounds["round"] == 2]["test_loss"]
    assert list(last) == list(runs["test_loss"])
    with pytest.raises(ExperimentError, match='^per = "runs": must be "round" or "run"$'):
        comparison.to_dataframe("runs")


def test_frames_always_have_the_losses():
    (row,) = round_rows([RoundRecord(round=1, test_loss=float("nan"))])
    assert json.dumps(row) == '{"round": 1, "test_accuracy": NaN, "test_loss": NaN, "train_loss": NaN}'


def test_a_frame_without_pandas_gives_a_one_line_error(tiny_experiment, monkeypatch):
    result = fedsim.run(tiny_experiment)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(
        MissingPackageError, match=r"^Result\.to_dataframe needs the package pandas, .*: pip install pandas$"
    ):
        result.to_dataframe()


def test_a_changed_copy_of_a_result_without_a_folder_has_no_model(tiny_experiment):
    copied = replace(fedsim.run(tiny_experiment), stopped="copied")
    for name in ("model", "global_row"):
        with pytest.raises(fedsim.RecordError, match="this copy of a result has no model"):
            getattr(copied, name)
