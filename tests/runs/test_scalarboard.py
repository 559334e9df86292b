from __future__ import annotations

import sys

import pytest

import fedsim
from fedsim.errors import MissingPackageError
from fedsim.runs.scalarboard import scalars


def read_back(folder):
    """Every scalar of the event file in a folder: tag to [(step, value)]."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_the_event_file_holds_the_history(tiny_experiment, tmp_path):
    result = fedsim.run({**tiny_experiment, "records": {"tensorboard": True}}, tmp_path / "run")
    found = read_back(tmp_path / "run")
    tags = ["test/accuracy", "test/loss", "train/loss", "bytes/up", "bytes/down"]
    assert set(found) == {*tags, *(f"seconds/{phase}" for phase in ("pull_down", "train", "aggregate", "test"))}
    for tag, key in {"test/accuracy": "test_accuracy", "train/loss": "train_loss", "bytes/up": "bytes_up"}.items():
        assert [step for step, _ in found[tag]] == [1, 2]
        assert [value for _, value in found[tag]] == pytest.approx([r[key] for r in result.history], rel=1e-6)
    assert [value for _, value in found["seconds/train"]] == pytest.approx(
        [record["seconds"]["train"] for record in result.history], rel=1e-6
    )


def test_of_a_run_on_the_clock_it_holds_virtual_seconds_updates_and_staleness(tiny_experiment, tmp_path):
    clock = {"mode": "clock", "policy": "asgd", "clock": {"noise": "shifted_exponential"}}
    result = fedsim.run({**tiny_experiment, **clock, "records": {"tensorboard": True}}, tmp_path / "run")
    found = read_back(tmp_path / "run")
    for tag, values in {
        "clock/virtual_seconds": [record["virtual_seconds"] for record in result.history],
        "asynchronous/updates": [record["asynchronous"]["updates"] for record in result.history],
        "asynchronous/trips": [record["asynchronous"]["trips"] for record in result.history],
    }.items():
        assert [value for _, value in found[tag]] == pytest.approx(values, rel=1e-6)
    assert 0 < found["asynchronous/staleness"][0][1] < 3


def test_the_settings_of_a_run_are_hyperparameters(tiny_experiment, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG, parse_session_start_info_plugin_data

    rule = ["nnm", "median"]
    fedsim.run({**tiny_experiment, "aggregate": {"rule": rule}, "records": {"tensorboard": True}}, tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    content = events.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content
    found = parse_session_start_info_plugin_data(content).hparams
    assert (found["workers"].number_value, found["engine"].string_value) == (3, "serial")
    assert found["aggregate.rule"].string_value == "nnm + median"
    assert "device" in found
    assert "cohort" not in found, "it is not set"


def test_every_round_can_be_seen_as_soon_as_it_is_over(tiny_experiment, tmp_path):
    seen = []
    fedsim.run(
        {**tiny_experiment, "records": {"tensorboard": True}},
        tmp_path / "run",
        on_round=lambda _: seen.append(len(read_back(tmp_path / "run")["test/loss"])),
    )
    assert seen == [1, 2]


def test_it_is_off_unless_asked_for_and_needs_a_folder(tiny_experiment, tmp_path):
    fedsim.run(tiny_experiment, tmp_path / "run")
    assert not list((tmp_path / "run").glob("events*"))
    fedsim.run({**tiny_experiment, "records": {"tensorboard": True}})


def test_numbers_that_a_record_does_not_have_are_left_out():
    record = {"round": 1, "test_loss": 0.5, "attack_success": None, "seconds": {"train": 1.0}, "cohort": [0]}
    assert list(scalars(record)) == [("test/loss", 0.5), ("seconds/train", 1.0)]
    assert ("attack/success", 0.25) in list(scalars({**record, "attack_success": 0.25}))


def test_a_missing_package_ends_the_run_before_it_begins(tiny_experiment, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingPackageError, match=r"records\.tensorboard = true needs .*\[tensorboard\]'$"):
        fedsim.run({**tiny_experiment, "records": {"tensorboard": True}}, tmp_path / "run")
    assert not (tmp_path / "run").exists()
