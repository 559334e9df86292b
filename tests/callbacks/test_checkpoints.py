"""Checkpoint files: when they are written, that they are complete, and how many are kept."""

from __future__ import annotations

import json

import pytest
import torch

from fedsim.core.snapshot import Snapshot
from fedsim.errors import RecordError
from fedsim.records import checkpoints
from fedsim.records.checkpoints import FIRST_COST, SHARE, CheckpointFolder


def state(value=1.0):
    snapshot = Snapshot(metadata={"text": "naïve", "number": 0.1, "nested": [1, {"a": None}]})
    snapshot.keep({"row": torch.full((5,), value), "none": torch.zeros(0), "half": torch.ones(4, 4)[:, ::2]})
    return snapshot


def test_a_checkpoint_is_read_as_it_was_written(tmp_path):
    folder = CheckpointFolder(tmp_path, every=1, keep=2)
    folder.write(7, state, way={"engine": "serial"})
    read = folder.read(7)
    assert read.metadata == {**state().metadata, "way": {"engine": "serial"}}
    assert read.tensors.keys() == state().tensors.keys()
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in state().tensors.items())


def test_a_snapshot_is_a_copy():
    row = torch.ones(3)
    snapshot = Snapshot()
    snapshot.keep({"row": row}, "my.")
    row.zero_()
    assert snapshot.under("my.")["row"].tolist() == [1.0, 1.0, 1.0]
    snapshot.put_back({"row": row}, "my.")
    assert row.tolist() == [1.0, 1.0, 1.0]


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    folder = CheckpointFolder(tmp_path, every=1, keep=3)
    for round in range(1, 8):
        folder.write(round, state)
    assert folder.rounds() == [7, 6, 5]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 6
    for name in ("round-1.json", "round-000a1.json", "notes.txt"):
        (tmp_path / "checkpoints" / name).write_text("{}")
    folder.write(100_000, state)
    assert folder.rounds() == [100_000, 7, 6], "sorted by number"
    folder.forget_after(6)
    assert folder.rounds() == [6]


def test_checkpoints_are_due_every_few_rounds_and_after_the_last(tmp_path):
    folder = CheckpointFolder(tmp_path, every=3, keep=1)
    assert [round for round in range(1, 9) if folder.due(round, 8)] == [3, 6, 8]
    assert not any(CheckpointFolder(tmp_path, every=0, keep=1).due(round, 8) for round in range(1, 9))
    assert not any(CheckpointFolder(None, every=1, keep=1).due(round, 8) for round in range(1, 9))
    by_time = CheckpointFolder(tmp_path, every=None, keep=1)
    assert [by_time.due(1, 8, paused=paused) for paused in (True, False)] == [True, False]


def test_checkpoints_take_at_most_one_percent_of_the_time_by_default(tmp_path, monkeypatch):
    clock = [100.0]  # seconds; advances only where the test says so
    monkeypatch.setattr(checkpoints.time, "perf_counter", lambda: clock[0])
    folder = CheckpointFolder(tmp_path, every=None, keep=1)

    def slow():
        clock[0] += 2.0  # seconds that writing takes
        return state()

    spent, begun = 0.0, clock[0]
    for round in range(1, 2_000):
        clock[0] += 1.0
        if folder.due(round, 2_000):
            folder.write(round, slow)
            spent += 2.0
            if round > FIRST_COST / SHARE + 1:  # the cost of the first checkpoint is unknown before
                assert spent - 2.0 <= SHARE * (clock[0] - begun)
    assert spent == 2.0 * (1 + 1_994 // 200)


def test_a_checkpoint_without_its_json_file_is_ignored(tmp_path, monkeypatch):
    """The JSON file is written last, so a checkpoint that was interrupted by a crash has none."""
    folder = CheckpointFolder(tmp_path, every=1, keep=2)
    folder.write(1, state)
    written = checkpoints.write_atomically

    def dies(path, content):
        if path.suffix == ".json":
            raise RecordError("dead")
        written(path, content)

    monkeypatch.setattr(checkpoints, "write_atomically", dies)
    with pytest.raises(RecordError, match="dead"):
        folder.write(2, state)
    assert folder.rounds() == [1]
    assert (tmp_path / "checkpoints" / "round-00002.safetensors").exists()


def test_a_checkpoint_larger_than_memory_is_not_read(tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path, every=1, keep=1)
    folder.write(1, state)
    monkeypatch.setattr(checkpoints, "free_memory", lambda: 100)
    with pytest.raises(RecordError, match="cannot be read: it is larger than 50 bytes"):
        folder.read(1)


def test_a_checkpoint_under_the_name_of_another_round_is_damaged(tmp_path):
    folder = CheckpointFolder(tmp_path, every=1, keep=9)
    folder.write(1, state)
    for path in list((tmp_path / "checkpoints").iterdir()):
        path.with_name(path.name.replace("1", "2")).write_bytes(path.read_bytes())
    with pytest.raises(RecordError, match="is damaged"):
        folder.read(2)
    assert json.loads((tmp_path / "checkpoints/round-00001.json").read_text())["format"] == checkpoints.FORMAT


def test_a_checkpoint_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(RecordError, match="checkpoints: cannot be written"):
        CheckpointFolder(tmp_path, every=1, keep=1).write(1, state)
