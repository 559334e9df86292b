"""Worker state that persists between rounds, and the messages sent to the server."""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fedsim
from fedsim.clients import SGD, OuterProductGrad, as_algorithm
from fedsim.errors import RecordError
from fedsim.rounds.worker_states import WorkerStates
from fedsim.runs.loops.synchronous import SynchronousLoop
from fedsim.runs.setup import begun
from fedsim.training.batches import WorkItems
from tests.lethal import order

COUNTING = {"algorithm": "tests.components:Counting", "batch_size": 16}


def states(workers=(), **rows):
    """Return worker states in which `workers` have these rows of the named tensors, and all others start with 7."""
    made = WorkerStates({"x": torch.full((2,), 7.0)})
    if workers:
        made.save(workers, {name: torch.tensor(values) for name, values in rows.items()}, range(len(workers)))
    return made


def received(original):
    """Return the worker states as another process receives them."""
    files = {name: SimpleNamespace(detach=partial(os.dup, file)) for name, file in original._files.items()}
    copy = WorkerStates.__new__(WorkerStates)
    copy.__setstate__({**original.__getstate__(), "_files": files})
    return copy


def work_of(workers, slots):
    """Return a round of `workers`, whose rows have the numbers `slots`."""
    ones = np.ones(len(workers), dtype=np.int64)
    return WorkItems(np.array(slots), np.array(workers), ones, ones, ones, ones, -ones)


def test_a_process_loads_and_saves_its_own_members_only_and_the_server_s_own_row_begins_again():
    """A worker has the initial state until its state is saved."""
    rows, server = {"x": torch.zeros(4, 2)}, 10
    worker_states, mine = states([4], x=[[1.0, 2.0]]), work_of([9, 4, server], slots=[0, 1, 3])
    worker_states.load_cohort([9, 4, 5], mine, rows)
    assert rows["x"].tolist() == [[7, 7], [1, 2], [0, 0], [7, 7]]
    assert len(worker_states) == 1  # an unsaved worker takes no memory
    rows["x"][:] = torch.arange(8.0).view(4, 2)
    worker_states.save_cohort([9, 4, 5], mine, [4], rows)  # worker 4 is excluded, worker 5 belongs to another process
    assert worker_states.workers == [4, 9, 5]
    assert worker_states.tensors()["rows.x"][[0, 2]].tolist() == [[1, 2], [0, 1]]


@pytest.mark.parametrize("limit", [None, 8])
def test_processes_share_what_they_keep_in_memory_or_in_a_file(limit, tmp_path):
    ours = WorkerStates({"x": torch.zeros(2)}, limit, str(tmp_path)).share(workers=100)
    ours.save([3], {"x": torch.tensor([[1.0, 2.0]])}, [0])
    theirs = received(ours)
    theirs.save(range(50), {"x": torch.full((50, 2), 5.0)}, range(50))  # the file grows
    ours.add(range(50))
    assert ours.workers == theirs.workers == [3, *range(3), *range(4, 50)]
    assert torch.equal(ours.tensors()["rows.x"], torch.full((50, 2), 5.0))
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_trains_nobody_knows_which_states_the_others_have_stored():
    ours = WorkerStates({"x": torch.zeros(2)}).share(workers=10)
    theirs = received(ours)
    theirs.save_cohort(
        [5, 2, 7], work_of([5, 2, 7], slots=[0, 1, 2]), [2], {"x": torch.tensor([[5.0, 5.0], [2.0, 2.0], [7.0, 7.0]])}
    )
    ours.saved_elsewhere([5, 2, 7], [2])
    assert ours.tensors()["workers"].tolist() == [5, 7]
    assert ours.tensors()["rows.x"].tolist() == [[5, 5], [7, 7]]


def test_saved_tensors_ascend_and_resume():
    saved = states([8, 2], x=[[1.0, 1.0], [3.0, 3.0]]).tensors()
    assert saved["workers"].tolist() == [2, 8]
    assert saved["rows.x"].tolist() == [[3, 3], [1, 1]]
    resumed = states([2, 3], x=[[0.0, 0.0], [0.0, 0.0]])
    resumed.resume(saved)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in resumed.tensors().items())


def test_above_the_limit_the_rows_lie_in_a_file_without_a_name(tmp_path):
    worker_states, rows = WorkerStates({"x": torch.zeros(2), "n": torch.zeros(1)}, 24, str(tmp_path)), torch.rand(9, 2)
    for count in (1, 2, 5, 9):
        workers = list(range(count))
        worker_states.save(workers, {"x": rows, "n": rows[:, :1]}, workers)
        assert bool(worker_states._files) == (count > 2)
        assert torch.equal(worker_states.tensors()["rows.x"], rows[:count])
        assert torch.equal(worker_states.tensors()["rows.n"], rows[:count, :1])
    assert list(tmp_path.iterdir()) == []
    worker_states.resume({name: tensor[:3] for name, tensor in worker_states.tensors().items()})
    assert torch.equal(worker_states.tensors()["rows.x"], rows[:3])


def test_a_file_that_cannot_grow_gives_a_one_line_error(tmp_path):
    with pytest.raises(fedsim.ExperimentError, match=r"^worker_state_memory = 8: .* cannot grow to 48 B: "):
        WorkerStates({"x": torch.zeros(4)}, 8, str(tmp_path / "none")).reserve([1, 2, 3])


@pytest.mark.parametrize("engine", ["serial", "processes", "batched"])
def test_a_run_with_its_worker_state_in_a_file_is_bit_identical(engine, tmp_path, tiny_experiment):
    tables = {**tiny_experiment, "engine": engine, "local": COUNTING, "workers": 9, "cohort": 3, "rounds": 5}
    tables |= {"model": "tests.models:Normalised", "buffers": "local", "checkpoint": {"every": 1}}
    tables |= {"processes": 2 if engine == "processes" else 1}
    whole = fedsim.run(tables)
    for rounds in (3, 5):
        limited = {**tables, "worker_state_memory": 1, "rounds": rounds}
        result = fedsim.run(limited, tmp_path / "run", resume=rounds == 5)
    assert torch.equal(result.global_row, whole.global_row)
    assert not [path for path in (tmp_path / "run").iterdir() if "tmp" in path.name]


@pytest.mark.parametrize(
    "change",
    [
        {"workers": torch.tensor([2, 2])},
        {"workers": torch.tensor([2.0, 8.0])},
        {"rows.x": torch.zeros(1, 2)},
        {"rows.x": torch.zeros(2, 2, dtype=torch.double)},
    ],
)
def test_tensors_that_do_not_fit_are_refused(change):
    saved = states([8, 2], x=[[1.0, 1.0], [3.0, 3.0]]).tensors()
    with pytest.raises(RecordError):
        states().resume({**saved, **change})


def run_rounds(tables):
    """Run an experiment and return its records, the worker states and the server state."""
    experiment = fedsim.Experiment(**tables)
    with fedsim.Session() as session, begun(experiment, session) as (task, engine):
        loop = SynchronousLoop(task, engine)
        records = [loop.run_round(round) for round in range(1, experiment.rounds + 1)]
        return (records, engine.states.tensors(), {n: t.clone() for n, t in engine.shared.server.algorithm.items()})


@pytest.mark.parametrize("engine", [{"engine": "serial"}, {"engine": "batched", "processes": 1}])
def test_workers_count_their_rounds_and_the_server_all_of_them(engine, tiny_experiment):
    tables = {**tiny_experiment, **engine, "local": COUNTING, "workers": 5, "cohort": 2, "rounds": 6}
    records, worker_states, server = run_rounds(tables)
    expected = Counter(worker for record in records for worker in record.cohort)
    assert (
        dict(zip(worker_states["workers"].tolist(), worker_states["rows.rounds"].flatten().tolist(), strict=True))
        == expected
    )
    assert server["rounds"].item() == 12
    d = worker_states["rows.change"].shape[1]
    assert torch.allclose(server["mean"], worker_states["rows.change"].sum(0) / 5, atol=1e-6)
    assert {(r.bytes_down, r.bytes_up) for r in records} == {(2 * 4 * (2 * d + 1), 2 * 4 * (2 * d + 1))}


def test_memory_follows_the_workers_that_have_taken_part(tiny_experiment):
    tables = {**tiny_experiment, "workers": 10**6, "cohort": 100, "rounds": 2, "model": "logistic"}
    tables |= {"partition": {"name": "virtual", "samples": 20}, "local": {**COUNTING, "steps": 1}}
    with fedsim.Session() as session, begun(fedsim.Experiment(**tables), session) as (task, engine):
        loop = SynchronousLoop(task, engine)
        cohorts = [loop.run_round(round).cohort for round in (1, 2)]
        worker_states = engine.states
        assert worker_states.tensors()["workers"].tolist() == sorted(
            {worker for cohort in cohorts for worker in cohort}
        )
        assert sum(rows.untyped_storage().nbytes() for rows in worker_states.rows.values()) < 1.1 * 200 * 4 * 7850


BUFFERS = {"model": "tests.lethal:MortalNormalised", "buffers": "local", "local": {"batch_size": 16}}


@pytest.mark.parametrize(
    "changes", [{"local": COUNTING}, pytest.param(BUFFERS, marks=pytest.mark.slow)], ids=["", "buffers"]
)
def test_a_lost_process_leaves_no_trace_in_what_workers_keep(changes, tmp_path, tiny_experiment):
    """A repeated round starts with the state from before that round."""
    model = {"name": changes.get("model", "tests.lethal:Mortal"), "folder": str(tmp_path)}
    tables = {**tiny_experiment, **changes, "model": model, "rounds": 3}
    pooled = {**tables, "engine": "processes", "processes": 2}

    def kill_in_round_2(record):
        order(str(tmp_path), *(["train"] if record["round"] == 1 else []))

    with pytest.warns(fedsim.errors.FedsimWarning, match="killed"):
        result = fedsim.run(pooled, on_round=kill_in_round_2)
    whole = fedsim.run({**tables, "engine": "serial"})
    assert torch.equal(result.global_row, whole.global_row)
    assert all(map(torch.equal, result.model.buffers(), whole.model.buffers()))


def test_an_algorithm_with_start_and_step_is_a_client_algorithm():
    class Plain:
        def start(self, rows):
            return {}

        def step(self, rows, gradients, state):
            rows -= gradients

    algorithm, row, weights = as_algorithm(Plain()), torch.ones(2), torch.zeros(1, 1, 3)
    algorithm.step(row, torch.ones(2), algorithm.start(row))
    algorithm.step_fused(weights, OuterProductGrad(torch.ones(1, 2, 1), torch.ones(1, 2, 3)), {})
    assert row.tolist() == [0, 0]
    assert weights.tolist() == [[[-2, -2, -2]]]
    assert algorithm.numbers_sent(5) == (0, 0)
    algorithm = SGD()
    assert as_algorithm(algorithm) is algorithm
