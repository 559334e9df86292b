from __future__ import annotations

import gc
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch

import fedsim
from fedsim.core.objects import name_of
from fedsim.data.brought import holds_columns
from fedsim.runs import session
from fedsim.runs.session import MOST_DATA_SETS, Session
from tests.leftovers import SHARED

CPU = torch.device("cpu")


@pytest.fixture
def spawned(tiny_experiment):
    return {**tiny_experiment, "engine": "processes", "processes": 2, "rounds": 1, "model": "logistic"}


@pytest.fixture
def loads(monkeypatch):
    """Return a list that collects the names of the loaded data sets."""
    names = []
    load = session.load_dataset_once

    def counted(name, root, params, *, take):
        names.append((name, *params.values()))
        return load(name, root, params, take=take)

    monkeypatch.setattr(session, "load_dataset_once", counted)
    return names


def processes():
    return {process.pid for process in multiprocessing.active_children()}


def shared_bytes():
    """Return how many bytes of shared memory this process and its children have mapped."""
    gc.collect()
    total = 0
    for pid in ("self", *processes()):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if any(name in line for name in SHARED):
                start, end = line.split()[0].split("-")
                total += int(end, 16) - int(start, 16)
    return total


def test_runs_in_one_session_give_the_results_of_single_runs_and_free_their_memory(spawned):
    variants = [
        spawned,
        {**spawned, "model": "2nn", "workers": 5, "cohort": 4, "seed": 1},
        {**spawned, "sync": "gradients", "precision": "float64"},
        {**spawned, "model": "tests.models:Normalised", "buffers": "local"},
        spawned,
    ]
    with Session() as session:
        together, shared = [], []
        for tables in variants:
            together.append(fedsim.run(tables, session=session).global_row)
            shared.append(shared_bytes())
    assert shared == shared[:1] * len(variants)
    assert shared[0] > 0
    for row, tables in zip(together, variants, strict=True):
        assert torch.equal(row, fedsim.run({**tables, "engine": "serial", "processes": None}).global_row)


def test_the_processes_are_the_same_from_run_to_run(spawned):
    with Session() as session:
        seen = []
        for change in ({}, {"seed": 1}, {"model": "2nn"}, {"processes": 1}):
            fedsim.run({**spawned, **change}, session=session)
            seen.append(processes())
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) == 2
    assert len(seen[3]) == 1
    assert not seen[3] & seen[0]
    assert processes() == set()


def test_data_are_loaded_once_and_moved_to_shared_memory_once(spawned, loads):
    spawned = {**spawned, "processes": 1}
    with Session() as session:
        fedsim.run(spawned, session=session)
        source = "tests.components:tiny", None, {"train": 203, "test": 90}
        train, test = session.data(*source, CPU)
        tensors = [*train.tensors.values(), *test.tensors.values()]
        assert all(tensor.is_shared() for tensor in tensors)
        for change in ({"seed": 1}, {"precision": "float64"}, {"engine": "serial", "processes": None}):
            fedsim.run({**spawned, **change}, session=session)
        again = session.data(*source, CPU)
        places = [tensor.data_ptr() for part in again for tensor in part.tensors.values()]
        assert places == [tensor.data_ptr() for tensor in tensors]
    assert loads == [("tests.components:tiny", 203, 90)]


def as_frame(inputs, targets):
    return (
        pytest.importorskip("pandas", exc_type=ImportError).DataFrame(inputs, columns=["a", "b"]).assign(target=targets)
    )


def as_samples(inputs, targets):
    return list(zip(torch.from_numpy(inputs), targets.tolist(), strict=True))


@pytest.mark.parametrize(
    ("brought", "is_kept"),
    [
        (lambda inputs, targets: ((inputs, targets), (inputs, targets)), False),
        (lambda inputs, targets: [(inputs, targets)] * 3, False),
        (lambda inputs, targets: (({"x": inputs}, targets), None), False),
        (lambda inputs, targets: fedsim.TensorData(torch.from_numpy(inputs), torch.from_numpy(targets)), False),
        (as_frame, False),
        (as_samples, True),
    ],
)
def test_arrays_that_change_between_runs_are_read_again(brought, is_kept, loads):
    inputs, targets = np.random.default_rng(0).random((30, 2), dtype=np.float32), np.arange(30) % 3
    data = brought(inputs, targets)
    name = name_of(data)
    assert holds_columns(name.target) is not is_kept
    with Session() as session:
        for _ in range(2):
            session.data(name, None, {}, CPU)
    assert len(loads) == 1 + (not is_kept)


def test_results_in_a_session_follow_changes_in_place(tiny_experiment):
    inputs, targets = np.random.default_rng(0).random((60, 2), dtype=np.float32), np.arange(60, dtype=np.int32) % 3
    tables = {**tiny_experiment, "model": "mlp", "rounds": 1, "data": (inputs, targets)}
    with Session() as session:
        fedsim.run(tables, session=session)
        targets[:] = targets[::-1].copy()
        assert torch.equal(fedsim.run(tables, session=session).global_row, fedsim.run(tables).global_row)


def test_the_least_recently_used_data_set_is_dropped(loads):
    sizes = range(10, 10 + MOST_DATA_SETS)
    with Session() as session:
        for size in (*sizes, sizes[0], 99, sizes[0], sizes[1]):
            assert len(session.data("tests.components:tiny", None, {"train": size}, CPU)[0]) == size
    assert [size for _, size in loads] == [*sizes, 99, sizes[1]]


def test_a_failed_run_does_not_change_later_runs(spawned):
    spawned = {**spawned, "processes": 1, "max_restarts": 0}
    with Session() as session:
        for how in ("raise", "kill"):
            with pytest.raises(fedsim.WorkerError):
                fedsim.run({**spawned, "model": {"name": "tests.models:Fails", "how": how}}, session=session)
            assert processes() == set()
            assert fedsim.run(spawned, session=session).history
        before = processes()
        for change in ({"workers": 1000}, {"model": "tests.models:Lazy"}):
            with pytest.raises(fedsim.ExperimentError):
                fedsim.run({**spawned, **change}, session=session)
            assert processes() == before, "an invalid experiment does not restart the processes"
        with pytest.raises(ZeroDivisionError):
            fedsim.run(spawned, session=session, on_round=lambda _: 1 / 0)
        assert fedsim.run(spawned, session=session).history
