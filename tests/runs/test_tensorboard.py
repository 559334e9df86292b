from __future__ import annotations

import sys

import pytest

import fedsim
from fedsim.callbacks.loggers import scalars
from fedsim.errors import MissingPackageError
from fedsim.records.record import AsyncRecord, RoundRecord

LOGGED = {"tensorboard": True, "curve": False}


def read_back(folder):
    """Every scalar of the event file in a folder: tag to [(step, value)]."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_the_event_file_holds_the_history(tiny_experiment, tmp_path):
    result = fedsim.run({**tiny_experiment, "records": LOGGED}, tmp_path / "run")
    found = read_back(tmp_path / "run")
    tags = ["test/accuracy", "test/loss", "train/loss", "bytes/up", "bytes/down"]
    assert set(found) == {*tags, *(f"seconds/{phase}" for phase in ("pull_down", "train", "aggregate", "test"))}
    for tag, key in {"test/accuracy": "test_accuracy", "train/loss": "train_loss", "bytes/up": "bytes_up"}.items():
        assert [step for step, _ in found[tag]] == [1, 2]
        assert [value for _, value in found[tag]] == pytest.approx([r[key] for r in result.history], rel=1e-6)
    assert [value for _, value in found["seconds/train"]] == pytest.approx(
        [record["seconds"]["train"] for record in result.history], rel=1e-6
    )


def test_the_settings_of_a_run_are_hyperparameters(tiny_experiment, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG, parse_session_start_info_plugin_data

    rule = ["nnm", "median"]
    fedsim.run({**tiny_experiment, "aggregate": {"rule": rule}, "records": LOGGED}, tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    content = events.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content
    found = parse_session_start_info_plugin_data(content).hparams
    assert (found["workers"].number_value, found["engine"].string_value) == (3, "serial")
    assert found["aggregate.rule"].string_value == "nnm + median"
    assert "device" in found
    assert "cohort" not in found, "it is not set"


def test_a_run_that_starts_again_hides_its_earlier_rounds(tiny_experiment, tmp_path):
    tables = {**tiny_experiment, "records": LOGGED, "checkpoint": {"every": 0}}
    for resume in (False, True):
        fedsim.run(tables, tmp_path / "run", resume=resume)
    assert len(list((tmp_path / "run").glob("events.out*"))) == 2
    assert [step for step, _ in read_back(tmp_path / "run")["test/loss"]] == [1, 2]


def test_a_run_that_is_resumed_in_the_same_second_has_a_file_of_its_own(tiny_experiment, tmp_path, monkeypatch):
    def stop(record):
        raise fedsim.StopRun

    tables = {**tiny_experiment, "records": LOGGED}
    monkeypatch.setattr("time.time", lambda: 1_000_000_000.0)
    fedsim.run(tables, tmp_path / "run", on_round=stop)
    fedsim.run(tables, tmp_path / "run", resume=True)
    assert [step for step, _ in read_back(tmp_path / "run")["test/loss"]] == [1, 2]


def test_each_round_is_flushed(tiny_experiment, tmp_path):
    seen = []
    fedsim.run(
        {**tiny_experiment, "records": LOGGED},
        tmp_path / "run",
        on_round=lambda _: seen.append(len(read_back(tmp_path / "run")["test/loss"])),
    )
    assert seen == [1, 2]


def test_tensorboard_is_off_by_default_and_needs_a_folder(tiny_experiment, tmp_path):
    fedsim.run(tiny_experiment, tmp_path / "run")
    assert not list((tmp_path / "run").glob("events*"))
    fedsim.run({**tiny_experiment, "records": LOGGED})


def test_scalars_has_the_numbers_of_a_record():
    record = RoundRecord(round=1, test_loss=0.5, seconds={"train": 1.0}, metrics={"update_norm": 2.0})
    assert scalars(record) == {"test/loss": 0.5, "seconds/train": 1.0, "metrics/update_norm": 2.0}
    work = AsyncRecord(updates=3, arrivals=5, staleness={"1": 1, "2": 3})
    timed = scalars(RoundRecord(round=1, virtual_seconds=9.0, asynchronous=work))
    assert timed == {
        "clock/virtual_seconds": 9.0,
        "asynchronous/updates": 3,
        "asynchronous/arrivals": 5,
        "asynchronous/staleness": 1.75,
    }


def test_a_missing_package_ends_the_run_at_once(tiny_experiment, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingPackageError, match=r"the logger .tensorboard. needs .*\[tensorboard\]'$"):
        fedsim.run({**tiny_experiment, "records": LOGGED}, tmp_path / "run")
    assert not (tmp_path / "run").exists()
