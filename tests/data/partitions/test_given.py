"""Partitions by owner and by given lists, from the experiment and from files."""

from __future__ import annotations

import json

import numpy as np
import pytest

import fedsim
from fedsim.errors import ExperimentError
from tests import components

OWNERS = {"writer": np.repeat(["ann", "bob", "cy"], 50), "session": np.arange(150) // 25}


@pytest.fixture
def data():
    train, test = components.tiny(None)
    return fedsim.TensorData(train.inputs[:150], train.targets[:150], ids=OWNERS), test


@pytest.mark.parametrize(("by", "workers"), [(None, 3), ("writer", 3), ("session", 6)])
def test_without_workers_there_is_one_for_each_owner(by, workers, data, tiny_experiment):
    tables = {**tiny_experiment, "data": data, "partition": {"name": "natural", **({"by": by} if by else {})}}
    del tables["workers"]
    result = fedsim.run({**tables, "rounds": 1, "cohort": 2})
    assert result.experiment.workers == workers
    assert result.experiment.resolved()["workers"] == workers


def test_held_out_samples_have_no_worker(data, tiny_experiment):
    """An owner whose only sample is held out for validation is no worker."""
    train, test = data
    owners = np.array(["most"] * 149 + ["last"])
    train = fedsim.TensorData(train.inputs, train.targets, ids={"writer": owners})
    counts = set()
    for seed in range(12):
        tables = {**tiny_experiment, "data": {"name": (train, test), "validation_fraction": 0.3}, "seed": seed}
        del tables["workers"]
        counts.add(fedsim.run({**tables, "partition": "natural", "rounds": 1}).experiment.workers)
    assert counts == {1, 2}


def test_each_run_reads_its_data_again(tmp_path, tiny_experiment):
    file = tmp_path / "data.npz"
    tables = {**tiny_experiment, "data": {"name": "npz", "path": str(file)}, "partition": "natural", "rounds": 1}
    del tables["workers"]
    for owners in (3, 2):
        users = np.arange(60) % owners
        np.savez(file, inputs=np.ones((60, 1, 28, 28), np.float32), targets=np.arange(60) % 10, user=users)
        assert fedsim.run(fedsim.Experiment(**tables)).experiment.workers == owners
        np.savez(file, inputs=np.ones((40, 1, 28, 28), np.float32), targets=np.arange(40) % 10, user=users[:40])
        assert sum(fedsim.run(fedsim.Experiment(**tables)).history[0].samples) == 32


def test_a_list_of_arrays_is_a_partition(tiny_experiment):
    tables = {key: value for key, value in tiny_experiment.items() if key != "workers"}
    result = fedsim.run({**tables, "rounds": 1, "partition": [np.arange(40), np.array([60, 50])]})
    assert result.experiment.workers == 2
    assert result.history[0].samples == [40, 2]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lists.json", "[[3, 0], [1]]"),
        ("names.json", json.dumps({"bob": [3, 0], "ann": [1]})),
        ("table.csv", "worker,sample\nbob,3\nann,1\nbob,0\n"),
    ],
)
def test_files_hold_one_list_for_each_worker(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    shards = fedsim.partition(np.zeros(4), 2, "given", path=str(tmp_path / name))
    assert [shard.tolist() for shard in shards] == [[3, 0], [1]]


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.json", "[[1], [", "Expecting value: line 1 column 8"),
        ("a.json", "[1, 2]", "must contain a list .* of lists of integers"),
        ("a.json", "[[0.5]]", "must contain a list .* of lists of integers"),
        ("a.json", "[[0], [4]]", "returned index 4; valid indices are 0 to 3"),
        ("a.json", "[[0], [0]]", "must assign each of the 4 samples to at most one worker"),
        ("a.csv", "", "must have the columns sample and worker, not none"),
        ("a.csv", "sample,user\n0,a", "must have the columns sample and worker, not sample, user"),
        ("a.csv", "sample,worker\n0,a\nx,b", 'line 3: "x" is not the index of a sample'),
        ("a.csv", "sample,worker\n0,a\n1", "line 3: has no worker"),
        ("a.csv", None, "cannot be read: No such file"),
        ("a.csv", "sample,worker\n0," + "a" * 200_000, "field larger than field limit"),
        ("a.json", "[]", "contains no list"),
        ("a.json", f"[[{10**30}]]", "int too big|too large"),
        ("a.json", "[" * 100_000, "RecursionError|recursion"),
    ],
)
def test_a_bad_file_is_one_line(name, text, line, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ExperimentError, match=line) as caught:
        fedsim.partition(np.zeros(4), 2, "given", path=str(tmp_path / name))
    assert len(caught.value.lines) == 1


def test_numbered_workers_of_a_csv_file_are_sorted(tmp_path):
    (tmp_path / "a.csv").write_text("worker,sample\n10,0\n2,1\n9,2\n")
    shards = fedsim.partition(np.zeros(4), 3, "given", path=str(tmp_path / "a.csv"))
    assert [shard.tolist() for shard in shards] == [[1], [2], [0]]


@pytest.mark.parametrize("owners", [["ann", None, "bob"], ["ann", 1, "bob"], [1.0, np.nan, 2.0]])
def test_samples_without_owner_are_one_line(owners, data, tiny_experiment):
    ids = np.array(owners * 50, dtype=object if isinstance(owners[0], str) else float)
    train = fedsim.TensorData(data[0].inputs, data[0].targets, ids={"writer": ids})
    with pytest.raises(ExperimentError, match='partition.by = "writer": sample 1 has no owner') as caught:
        fedsim.run({**tiny_experiment, "data": (train, data[1]), "partition": "natural"})
    assert len(caught.value.lines) == 1


def test_the_number_of_lists_is_the_number_of_workers():
    with pytest.raises(ExperimentError, match="workers = 3: the partition has 2 lists, one per worker; omit `workers`"):
        fedsim.partition(np.zeros(4), 3, "given", shards=[[0], [1]])
    with pytest.raises(ExperimentError, match="needs either `shards` or `path`"):
        fedsim.partition(np.zeros(4), 3, "given")


def test_owners_that_do_not_exist_are_one_line(tiny_experiment, data):
    tables = {**tiny_experiment, "data": data}
    with pytest.raises(ExperimentError, match='partition.by = "writter": no such column of ids; did you mean "writer"'):
        fedsim.run({**tables, "partition": {"name": "natural", "by": "writter"}})
    with pytest.raises(ExperimentError, match="workers = 4: must be at most 3, the number of owners"):
        fedsim.run({**tables, "partition": "natural", "workers": 4})
    del tables["workers"]
    with pytest.raises(ExperimentError, match="does not say who owns each sample"):
        fedsim.run({**tables, "partition": "natural", "data": components.tiny(None)})


@pytest.mark.parametrize(
    "tables", [{"partition": "irdd"}, {"partition": {"name": "given"}}, {"partition": "natural", "data": "nosuch"}]
)
def test_a_wrong_table_is_reported_together_with_other_errors(tables):
    with pytest.raises(ExperimentError) as caught:
        fedsim.Experiment(**tables, rounds=-3)
    assert len(caught.value.lines) == 2
