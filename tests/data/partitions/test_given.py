"""Partitions by owner and by given lists, from the experiment and from files."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import fedsim
from fedsim.core.randomness import numpy_generator
from fedsim.errors import ExperimentError
from fedsim.runs.session import Session
from fedsim.runs.setup import begun
from tests import components

OWNERS = {"writer": np.repeat(["ann", "bob", "cy"], 50), "session": np.arange(150) // 25}


@pytest.fixture
def data():
    train, test = components.tiny(None)
    return fedsim.TensorData(train.inputs[:150], train.targets[:150], ids=OWNERS), test


@pytest.fixture
def tables(tiny_experiment):
    """Return a small experiment that does not set the number of workers."""
    del tiny_experiment["workers"]
    return tiny_experiment


@pytest.mark.parametrize(("by", "workers"), [(None, 3), ("writer", 3), ("session", 6)])
def test_without_workers_there_is_one_for_each_owner(by, workers, data, tables):
    partition = {"name": "natural", **({"by": by} if by else {})}
    result = fedsim.run({**tables, "data": data, "partition": partition, "rounds": 1, "cohort": 2})
    assert result.experiment.workers == workers
    assert result.experiment.resolved()["workers"] == workers


def test_held_out_samples_have_no_worker(data, tables):
    """An owner whose only sample is held out for validation is no worker."""
    train, test = data
    owners = np.array(["most"] * 149 + ["last"])
    train = fedsim.TensorData(train.inputs, train.targets, ids={"writer": owners})
    counts = set()
    for seed in range(6):
        tables |= {"data": {"name": (train, test), "validation_fraction": 0.3}, "seed": seed}
        counts.add(fedsim.run({**tables, "partition": "natural", "rounds": 1}).experiment.workers)
    assert counts == {1, 2}


def test_each_run_reads_its_data_again(tmp_path, tables):
    file = tmp_path / "data.npz"
    tables |= {"data": {"name": "npz", "path": str(file)}, "partition": "natural", "rounds": 1}
    for owners in (3, 2):
        users = np.arange(60) % owners
        np.savez(file, inputs=np.ones((60, 1, 28, 28), np.float32), targets=np.arange(60) % 10, user=users)
        assert fedsim.run(fedsim.Experiment(**tables)).experiment.workers == owners
        np.savez(file, inputs=np.ones((40, 1, 28, 28), np.float32), targets=np.arange(40) % 10, user=users[:40])
        assert sum(fedsim.run(fedsim.Experiment(**tables)).history[0].samples) == 32


def test_a_list_of_arrays_is_a_partition(tables):
    result = fedsim.run({**tables, "rounds": 1, "partition": [np.arange(40), np.array([60, 50])]})
    assert result.experiment.workers == 2
    assert result.history[0].samples == [40, 2]


def trained_on(tables, lists, fraction, train):
    """The positions in `train` of each worker's samples in a run whose partition is `lists`, in order."""
    experiment = fedsim.Experiment(
        **{**tables, "partition": lists, "data": {"name": (train, train), "validation_fraction": fraction}}
    )
    with Session() as session, begun(experiment, session) as (_, engine):
        shared = engine.shared.data
        inputs = [shared.train.gather(shared.shards.of(k))[0] for k in range(experiment.workers)]
        assert len(shared.validation) == round(fraction * len(train))
    return [rows.flatten(1)[:, 0].long().tolist() for rows in inputs]


@pytest.fixture
def numbered():
    """Samples whose first pixel is their position in the data set."""
    images = torch.zeros(100, 1, 28, 28)
    images[:, 0, 0, 0] = torch.arange(100)
    return fedsim.TensorData(images, torch.arange(100) % 10)


@pytest.mark.parametrize("lists", [[[0, 1, 2, 5], [60, 99, 61, 62]], np.arange(100).reshape(4, 25)[::-1].tolist()])
def test_lists_are_positions_in_the_data_set_before_validation(lists, numbered, tables):
    """Samples held out for validation are dropped, and the others are those that the lists name."""
    assert trained_on(tables, lists, 0.0, numbered) == lists
    order = numpy_generator(tables.get("seed", 0), "validation_split").permutation(100)
    held_out = set(order[:20].tolist())
    remaining = [[position for position in shard if position not in held_out] for shard in lists]
    assert remaining != lists
    assert trained_on(tables, lists, 0.2, numbered) == remaining


@pytest.mark.parametrize(
    ("lists", "line"),
    [
        ([[0, 100], [1]], "returned index 100; valid indices are 0 to 99"),
        ([[0, 1], [1, 2]], "must assign each of the 100 samples to at most one worker"),
        ([[-1], [1]], "returned index -1; valid indices are 0 to 99"),
        ("held out", "all samples of worker 1 are held out for validation; use a smaller data.validation_fraction"),
    ],
)
def test_lists_are_checked_against_the_whole_data_set(lists, line, numbered, tables):
    order = numpy_generator(tables.get("seed", 0), "validation_split").permutation(100)
    lists = [order[20:].tolist(), order[3:5].tolist()] if lists == "held out" else lists
    with pytest.raises(ExperimentError, match=line) as caught:
        trained_on(tables, lists, 0.2, numbered)
    assert len(caught.value.lines) == 1


def test_owners_keep_their_samples_when_others_are_held_out(numbered, tables):
    owners = np.arange(100) // 10
    train = fedsim.TensorData(numbered.inputs, numbered.targets, ids={"user": owners})
    shards = trained_on(tables, "natural", 0.2, train)
    order = numpy_generator(tables.get("seed", 0), "validation_split").permutation(100)
    remaining = sorted(order[20:].tolist())
    assert shards == [[position for position in remaining if owners[position] == owner] for owner in range(10)]


def test_owners_of_another_number_of_samples_are_an_error():
    with pytest.raises(ValueError, match=r"ids: user must contain one owner per sample, \[3\], not \[4\]"):
        fedsim.TensorData(torch.zeros(3, 1), torch.arange(3), ids={"user": np.arange(4)})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lists.json", "[[3, 0], [1]]"),
        ("names.json", json.dumps({"bob": [3, 0], "ann": [1]})),
        ("table.csv", "worker,sample\nbob,3\nann,1\nbob,0\n"),
        ("numbers.csv", "worker,sample\n10,1\n9,3\n9,0\n"),  # workers are sorted by number
    ],
)
def test_files_hold_one_list_for_each_worker(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    shards = fedsim.partition(np.zeros(4), "given", 2, path=str(tmp_path / name))
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
        fedsim.partition(np.zeros(4), "given", 2, path=str(tmp_path / name))
    assert len(caught.value.lines) == 1


@pytest.mark.parametrize("owners", [["ann", None, "bob"], ["ann", 1, "bob"], [1.0, np.nan, 2.0]])
def test_samples_without_owner_are_one_line(owners, data, tiny_experiment):
    ids = np.array(owners * 50, dtype=object if isinstance(owners[0], str) else float)
    train = fedsim.TensorData(data[0].inputs, data[0].targets, ids={"writer": ids})
    with pytest.raises(ExperimentError, match='data.ids = "writer": sample 1 has no owner') as caught:
        fedsim.run({**tiny_experiment, "data": (train, data[1]), "partition": "natural"})
    assert len(caught.value.lines) == 1


def test_the_number_of_lists_is_the_number_of_workers():
    with pytest.raises(ExperimentError, match="workers = 3: the partition has 2 lists, one per worker; omit `workers`"):
        fedsim.partition(np.zeros(4), "given", 3, shards=[[0], [1]])
    with pytest.raises(ExperimentError, match="needs either partition.shards or partition.path"):
        fedsim.partition(np.zeros(4), "given", 3)


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


def test_masks_are_one_line_that_asks_for_indices(data, tables):
    mask = np.arange(150) < 50
    tables |= {"data": data}
    line = (
        "partition.shards[0][0] = true: must be a valid integer (as must 299 other values); instead of a Boolean mask, "
        "pass indices: np.flatnonzero(mask)"
    )
    for shards in ([mask, ~mask], [torch.from_numpy(mask), (~mask).tolist()]):
        for partition in (shards, {"name": "given", "shards": shards}):
            with pytest.raises(ExperimentError) as caught:
                fedsim.run({**tables, "partition": partition})
            assert caught.value.lines == (line,)
    result = fedsim.run({**tables, "partition": [np.flatnonzero(mask), np.flatnonzero(~mask)], "rounds": 1})
    assert result.experiment.workers == 2


def test_problems_of_one_kind_in_lists_are_one_line():
    with pytest.raises(ExperimentError) as caught:
        fedsim.Experiment(partition=[[0.5, 1], ["a"] * 200, 7, [2.5]], attack={"workers": [True, False]})
    assert [line for line in caught.value.lines if line.startswith("partition")] == [
        "partition.shards[0][0] = 0.5: must be a valid integer (as must 201 other values); write a whole number, not a "
        "fraction",
        "partition.shards[2] = 7: must be a list; write [7] (in single quotes in a shell)",
    ]


def masks(n_workers, labels):
    return [labels % n_workers == worker for worker in range(n_workers)]


def halves(n_workers):
    return [np.arange(5) + 0.5] * n_workers


def mask_of_worker(worker, labels):
    return labels == worker


@pytest.mark.parametrize(
    ("strategy", "values"), [("masks", "bool"), ("halves", "float64"), ("mask_of_worker", "bool")], ids=str
)
def test_shards_of_an_own_strategy_must_be_indices(strategy, values):
    line = f"returned {values} values for worker 0; must return indices, for example np.flatnonzero"
    with pytest.raises(ExperimentError, match=line):
        fedsim.data.partition_shards(np.arange(10), f"tests.data.partitions.test_given:{strategy}", 2).of(0)
