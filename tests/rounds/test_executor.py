from __future__ import annotations

import pytest

from fedsim.processes.process_context import HeartbeatTable, ProcessContext
from fedsim.processes.team import Team, balance_load, divide_into_stacks
from fedsim.rounds.executor import Executor
from fedsim.rounds.worker_states import WorkerStates
from fedsim.training.batches import WorkItem
from fedsim.training.sequential import RowTrainer
from fedsim.training.task import Schedule


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("costs", [[], [5], [1, 1, 1, 1], [9, 1, 8, 2, 7, 3], list(range(20))])
def test_every_item_is_assigned_once_and_no_process_gets_more_than_the_maximum(costs, count):
    for most in (None, -(-len(costs) // count)):
        assignments = balance_load(costs, count, most)
        assert len(assignments) == count
        assert sorted(item for items in assignments for item in items) == list(range(len(costs)))
        assert all(items == sorted(items) and len(items) <= (most or len(costs)) for items in assignments)
        assert assignments == balance_load(costs, count, most)


def test_loads_are_even_if_possible():
    assert [sum([9, 1, 8, 2, 7, 3][item] for item in items) for items in balance_load([9, 1, 8, 2, 7, 3], 2)] == [
        15,
        15,
    ]
    assert balance_load([5, 5, 5, 5], 2) == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("width", "stacks"),
    [
        (None, [[0], [1], [2], [3], [4], [5]]),
        (1, [[4], [1], [3], [5], [0], [2]]),
        (2, [[4, 1], [3, 5], [0, 2]]),
        (3, [[4, 1, 3], [5, 0, 2]]),
        (4, [[4, 1, 3], [5, 0, 2]]),
        (6, [[4, 1, 3, 5, 0, 2]]),
    ],
)
def test_workers_form_as_few_stacks_as_possible_by_their_numbers_of_steps(width, stacks):
    assert divide_into_stacks([1, 3, 1, 2, 9, 2], width) == stacks


@pytest.mark.parametrize("n", [1, 9, 10, 11, 25])
@pytest.mark.parametrize(
    "measure", [{"epochs": 1}, {"epochs": 3}, {"epochs": None, "steps": 1}, {"epochs": None, "steps": 7}]
)
def test_a_schedule_counts_the_batches_that_are_really_drawn(n, measure):
    schedule = Schedule(batch_size=10, **measure)
    epoch = [min(10, n - start) for start in range(0, n, 10)]
    drawn = (epoch * 50)[: schedule.steps_for(n)]
    if measure["epochs"]:
        assert drawn == epoch * measure["epochs"]
    assert [schedule.batch_size_at(step, n) for step in range(len(drawn) + 2)] == [*drawn, 0, 0]
    assert schedule.samples_in(schedule.steps_for(n), n) == sum(drawn)


def test_with_a_maximum_the_process_with_the_least_load_is_next():
    assert balance_load([9, 1, 1, 1, 1, 1], 2, 3) == [[0, 4, 5], [1, 2, 3]]
    assert balance_load([9, 1, 1, 1, 1, 1], 2) == [[0], [1, 2, 3, 4, 5]]


@pytest.fixture
def executors(prepared):
    """Return the executors of two processes, and the lists of members that they train."""
    task, shared = prepared()
    table = HeartbeatTable(2)
    executors = [
        Executor(Team(ProcessContext(k, table), task.device), task, shared, RowTrainer, WorkerStates.of(task, shared))
        for k in range(2)
    ]
    trained = [[], []]
    for executor, theirs in zip(executors, trained, strict=True):
        executor.trainer.train = theirs.extend
    return executors, trained


def test_members_whose_rounds_differ_are_assigned_by_their_steps(executors):
    """Shards of 1, 5, 8, 17 and 20 samples take 1, 2, 2, 5 and 5 steps; the fourth member takes only one step."""
    executors, trained = executors
    members = [WorkItem(0, 0, 3), WorkItem(1, 1, 1), WorkItem(2, 2, 2), WorkItem(3, 3, 7, 1), WorkItem(4, 4, 1)]
    for executor in executors:
        executor.train_apart(members)
    assert [[member.slot for member in theirs] for theirs in trained] == [[3, 4], [0, 1, 2]]


def test_a_worker_that_trains_step_by_step_stays_with_one_process(executors):
    executors, trained = executors
    for slots in ([0, 1, 2, 3, 4], [1, 2], [2, 1], [4], [3, 4, 0]):
        for executor in executors:
            executor.train_apart([WorkItem(slot, slot, 1, None, 0) for slot in slots])
    assert {member.slot for member in trained[0]} == {0, 2, 4}
    assert {member.slot for member in trained[1]} == {1, 3}
    assert sum(map(len, trained)) == 13
