"""Which batches the members of a stack have, step by step, and what is drawn for them."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from fedsim.engines.trainers import stack as stack_module
from fedsim.engines.trainers.batches import BatchSource, WorkItem
from fedsim.engines.trainers.stack import Stack, StepBatch

STEPS = [1, 2, 2, 5, 5]  # of shards of 1, 5, 8, 17 and 20 samples, in batches of 4


def members(*workers):
    """Slots are other numbers than workers."""
    return [WorkItem(10 + place, worker, 3) for place, worker in enumerate(workers)]


@pytest.fixture
def stack(prepared):
    """The stack of these workers in round 3, with the source of their batches."""

    def make(*workers, **changes):
        task, shared = prepared(**changes)
        batch_source = BatchSource(task, shared)
        return Stack(members(*workers), task, batch_source), batch_source

    return make


def batch_of(sizes, members=None):
    """A step batch with batches of these sizes, padded, as `Stack.step_batches` makes them."""
    counts, widest = torch.tensor(sizes), max(sizes)
    inside = torch.arange(widest + 1) < counts.unsqueeze(1)
    positions = torch.arange(1, len(sizes) * (widest + 1) + 1).view(len(sizes), -1) * inside
    weights = inside / counts.unsqueeze(1)
    return StepBatch(0, members or range(len(sizes)), np.array(sizes), counts.double(), positions, weights)


def test_members_with_most_steps_stand_first_and_else_in_their_order(stack):
    made, _ = stack(0, 1, 2, 3, 4)
    assert len(made) == 5
    assert [member.worker for member in made.members] == [3, 4, 1, 2, 0]
    assert made.slots.tolist() == made.index.tolist() == [13, 14, 11, 12, 10]


@pytest.mark.parametrize("at_once", [2**17, 1])
@pytest.mark.parametrize("ahead", [256, 3, 1])
def test_step_batches_hold_each_member_s_own_batches_until_it_finishes(ahead, at_once, stack, monkeypatch):
    monkeypatch.setattr(stack_module, "SAMPLES_AT_ONCE", at_once)
    monkeypatch.setattr(stack_module, "STEPS_AT_A_TIME", ahead)
    made, batch_source = stack(0, 1, 2, 3, 4)
    step_batches = list(made.step_batches())
    assert [len(step_batch.members) for step_batch in step_batches] == [5, 4, 2, 2, 2]
    steps = {member.worker: list(islice(batch_source.positions(member.worker, 3), 5)) for member in made.members}
    for step, step_batch in enumerate(step_batches):
        assert step_batch.members == range(len(step_batch.members))
        for place in step_batch.members:
            batch = steps[made.members[place].worker][step]
            size = len(batch)
            assert step_batch.sizes[place] == step_batch.counts[place] == size
            assert step_batch.positions[place].tolist() == [*batch, *[batch[0]] * (4 - size)]
            assert step_batch.weights[place].tolist() == [*[1 / size] * size, *[0] * (4 - size)]


def test_several_epochs_and_steps_beyond_them_are_counted(stack):
    twice, _ = stack(1, 3, local={"batch_size": 4, "epochs": 2})
    assert [len(step_batch.members) for step_batch in twice.step_batches()] == [2, 2, 2, 2, *[1] * 6]
    three, _ = stack(0, 3, local={"batch_size": 4, "steps": 3})
    assert [step_batch.sizes.tolist() for step_batch in three.step_batches()] == [[1, 4]] * 3


def test_batches_of_one_size_lose_their_padding():
    (step_batch,) = batch_of([3, 3]).by_size()
    assert step_batch.members == range(2)
    assert step_batch.positions.tolist() == [[1, 2, 3], [5, 6, 7]]
    assert torch.allclose(step_batch.weights, torch.full((2, 3), 1 / 3))


def test_batches_of_several_sizes_are_split_by_size():
    whole = batch_of([4, 2, 4, 1, 2])
    step_batches = list(whole.by_size())
    assert [step_batch.members for step_batch in step_batches] == [[3], [1, 4], [0, 2]]
    for step_batch, size in zip(step_batches, (1, 2, 4), strict=True):
        assert step_batch.sizes.tolist() == step_batch.counts.tolist() == [size] * len(step_batch.members)
        assert torch.equal(step_batch.positions, whole.positions[step_batch.members, :size])
        assert (step_batch.positions > 0).all()
        assert torch.equal(step_batch.weights, whole.weights[step_batch.members, :size])
        assert torch.allclose(step_batch.weights.sum(1), torch.ones(len(step_batch.members)))


def test_mean_losses_are_per_sample(stack):
    made, _ = stack(0, 1, 2)
    made.count(batch_of([4, 4, 1]), torch.tensor([1.0, 2.0, 3.0]))
    made.count(batch_of([4, 1]), torch.tensor([5.0, 6.0]))
    made.count(batch_of([2, 3], [2, 0]), torch.tensor([7.0, 8.0]))
    expected = [(4 * 1 + 4 * 5 + 3 * 8) / 11, (4 * 2 + 1 * 6) / 5, (1 * 3 + 2 * 7) / 3]
    assert made.mean_losses().tolist() == pytest.approx(expected, abs=1e-6)
    assert made.mean_losses().dtype == torch.double
