"""The batches of a stack's members, step by step."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
import torch.nn.functional as F

from fedsim.core.randomness import Draws, draw_key
from fedsim.data.augmentation import flip
from fedsim.training import stack as stack_module
from fedsim.training.batches import BatchSource, WorkItem
from fedsim.training.forward_functions import Dropout, dropout_factors
from fedsim.training.stack import Stacks
from fedsim.training.stack_step import gather


@pytest.mark.parametrize("at_once", [2**17, 1])
@pytest.mark.parametrize("ahead", [256, 3, 1])
def test_step_batches_hold_each_member_s_own_batches_until_it_finishes(ahead, at_once, prepared, monkeypatch):
    """Two epochs of shards with 1, 5, 8, 17 and 20 samples, batch size 4; slot numbers differ from worker numbers."""
    monkeypatch.setattr(stack_module, "SAMPLES_AT_ONCE", at_once)
    monkeypatch.setattr(stack_module, "STEPS_AT_A_TIME", ahead)
    task, shared = prepared(local={"batch_size": 4, "epochs": 2})
    batch_source = BatchSource(task, shared)
    members = [WorkItem(10 + worker, worker, 3) for worker in range(5)]
    [made] = Stacks(batch_source.work(members), task, batch_source)
    assert [member.worker for member in made.members] == [3, 4, 1, 2, 0]
    assert made.slots.tolist() == made.index.tolist() == [13, 14, 11, 12, 10]
    step_batches = list(made.step_batches())
    assert [len(step_batch.in_stack) for step_batch in step_batches] == [5, 5, 4, 4, *[2] * 6]
    steps = {member.worker: list(islice(batch_source.positions(member.worker, 3), 10)) for member in made.members}
    for step, step_batch in enumerate(step_batches):
        assert step_batch.in_stack == range(len(step_batch.in_stack))
        for position in step_batch.in_stack:
            batch = steps[made.members[position].worker][step]
            size = len(batch)
            assert step_batch.sizes[position] == step_batch.counts[position] == size
            assert step_batch.positions[position].tolist() == [*batch, *[batch[0]] * (4 - size)]
            assert step_batch.weights[position].tolist() == [*[1 / size] * size, *[0] * (4 - size)]


def test_the_batches_of_256_steps_are_computed_at_a_time_if_all_take_too_much_memory(prepared, monkeypatch):
    monkeypatch.setattr(stack_module, "SAMPLES_AT_ONCE", 1)
    task, shared = prepared(local={"batch_size": 4, "steps": 600})
    source, counts, compute = BatchSource(task, shared), [], stack_module.block_of

    def block_of(*args):
        counts.append(len(args[-1]))
        return compute(*args)

    monkeypatch.setattr(stack_module, "block_of", block_of)
    [stack] = Stacks(source.work([WorkItem(worker, worker, 1) for worker in range(5)]), task, source)
    assert sum(1 for _ in stack.step_batches()) == 600
    assert counts == [256, 256, 88]


def test_members_that_train_single_steps_have_the_augmentation_and_the_dropout_of_these_steps(prepared):
    task, shared = prepared(seed=5, data={"name": "tests.engines.zoo:pictures", "augment": ["flip"]})
    batch_source, steps, dropout = BatchSource(task, shared), {3: 2, 4: 0, 2: 1}, Dropout(F.dropout, 0.5, (9,))
    members = [WorkItem(worker, worker, 7, step=step) for worker, step in steps.items()]
    [stack] = Stacks(batch_source.work(members), task, batch_source)
    [step_batch] = stack.step_batches()
    inputs, targets = gather(shared.data.train, step_batch.positions)
    stack.alter(step_batch, inputs, targets)
    [masks] = stack.dropout_factors([dropout]).of(0, 3)
    for place, (worker, step) in enumerate(steps.items()):
        [positions] = islice(batch_source.positions(worker, 7), step, step + 1)
        images = shared.data.train.inputs[positions].double()
        assert torch.equal(inputs[place], flip(images, Draws.of("augment", 7, worker, seed=5).steps()(step)))
        assert torch.equal(targets[place], shared.data.train.targets[positions])
        key = torch.tensor([draw_key(5, "layers", 7, worker)])
        [masks_of_worker] = dropout_factors(key, step, 1, 4, [dropout], torch.float64)
        assert torch.equal(masks[place], masks_of_worker[0, 0])
