"""The batches of each worker: draws by (seed, round, worker), and the order of the alterations."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

import fedsim
from fedsim.core.randomness import Draws, batch_order, numpy_generator, torch_generator
from fedsim.data.augmentation import flip, shift
from fedsim.training.batches import BatchSource, WorkItem
from fedsim.training.stack import Stacks

SIZES = [1, 5, 8, 17, 20]
BATCH = 4
ROOT = {"aggregate": {"rule": "fltrust", "root_samples": 7}}
NOISE = {"name": "feature_noise", "sigma": 1.0}
BACKDOOR = {"name": "backdoor", "workers": [2, 4], "value": 9.0, "size": 2, "target": 1}
AUGMENT = {"name": "tests.engines.zoo:pictures", "augment": ["flip", {"name": "shift", "pixels": 1}]}


def expected_positions(shared, seed, round, worker, epochs):
    """Return the positions of each batch: the shard in a new order for each epoch, cut into batches."""
    shard = shared.data.shards.of(worker).tolist()
    batches = []
    for epoch in range(epochs):
        order = [shard[place] for place in batch_order(seed, round, worker, epoch, len(shard)).tolist()]
        batches += [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    return batches


def seen_with_positions(batch_source, worker, round, steps):
    return islice(zip(batch_source.batches(worker, round), batch_source.positions(worker, round), strict=True), steps)


@pytest.mark.parametrize("worker", range(len(SIZES)))
def test_positions_are_the_shard_in_a_new_order_for_each_epoch(worker, prepared):
    task, shared = prepared(seed=3)
    expected = expected_positions(shared, 3, 7, worker, epochs=3)
    positions = [batch.tolist() for batch in islice(BatchSource(task, shared).positions(worker, 7), len(expected))]
    assert positions == expected
    steps = len(expected) // 3
    for epoch in range(3):
        seen = [position for batch in positions[epoch * steps : (epoch + 1) * steps] for position in batch]
        assert sorted(seen) == sorted(shared.data.shards.of(worker).tolist()), "each sample is used exactly once"


def test_orders_drawn_for_several_workers_at_once_are_those_drawn_alone(prepared, monkeypatch):
    """The orders depend neither on how many are drawn ahead nor on the order of the requests."""
    task, shared = prepared(local={"batch_size": BATCH, "epochs": 3}, **ROOT)
    alone, batch_source = (BatchSource(task, shared) for _ in range(2))
    for samples in (2**17, 30, 1):
        monkeypatch.setattr("fedsim.training.batches.SAMPLES_AT_ONCE", samples)
        batch_source.announce([WorkItem(worker, worker, 2) for worker in (4, 5, 0, 2, 1, 3)])
        rounds = [(worker, batch_source.epochs(worker, 2)) for worker in (4, 5, 2, 1, 0, 3)]
        for epoch in range(4):
            for worker, epochs in rounds:
                assert torch.equal(next(epochs), next(islice(alone.epochs(worker, 2), epoch, None)))


@pytest.mark.parametrize("use", ["worker by worker", "in stacks"])
def test_at_most_131072_samples_are_shuffled_at_once(use, prepared, monkeypatch):
    """The number limits memory: 6,000 workers with 50 samples each are shuffled in three parts."""
    partition = {"name": "virtual", "samples": 50}
    task, shared = prepared(workers=6000, partition=partition, local={"batch_size": 25})
    source, shuffled, shuffle = BatchSource(task, shared), [], BatchSource.orders

    def orders(self, work, begin, end):
        shuffled.append(int(((end - begin) * work.sizes).sum()))
        return shuffle(self, work, begin, end)

    monkeypatch.setattr(BatchSource, "orders", orders)
    members = source.work([WorkItem(worker, worker, 1, stack=worker // 100) for worker in range(6000)])
    if use == "in stacks":
        assert sum(len(list(stack.step_batches())) for stack in Stacks(members, task, source)) == 60 * 2
    else:
        source.announce(members)
        assert sum(len(next(source.epochs(worker, 1))) for worker in range(6000)) == 300_000
    assert shuffled == ([130_000, 130_000, 40_000] if use == "in stacks" else [131_050, 131_050, 37_900])


@pytest.mark.parametrize("sync", ["parameters", "gradients"])
def test_the_server_trains_on_its_own_samples_as_one_more_worker(sync, prepared):
    """In synchronous SGD the server trains as long as any worker does."""
    task, shared = prepared(sync=sync, **ROOT)
    batch_source = BatchSource(task, shared)
    assert batch_source.root == 5
    assert batch_source.size(5) == 7
    assert batch_source.shard(5).indices.tolist() == shared.data.root.tolist()
    assert batch_source.steps(5, 1) == 2 if sync == "parameters" else batch_source.steps(5, 1) > 10**9
    first_epoch = np.concatenate(list(islice(batch_source.positions(5, 1), 2)))
    assert sorted(first_epoch) == shared.data.root.tolist()


def test_the_server_is_one_more_worker_again_after_rounds_of_gradients(prepared):
    task, shared = prepared(**{"sync": "post_local", "switch_after_round": 2, "rounds": 4, **ROOT})
    assert [BatchSource(task, shared).steps(5, round) > 10**9 for round in range(1, 5)] == [True, True, False, False]


def test_a_worker_s_view_comes_before_augmentation_and_that_before_poison(prepared):
    """View and augmentations draw in turn from the stream of this worker, round and step."""
    task, shared = prepared(seed=5, partition=NOISE, data=AUGMENT, attack=BACKDOOR)
    batch_source = BatchSource(task, shared)
    for worker in (1, 2):
        draws, poisoning = (Draws.of(purpose, 3, worker, seed=5).steps() for purpose in ("augment", "poison"))
        for step, (batch, positions) in enumerate(seen_with_positions(batch_source, worker, 3, 6)):
            of_step = draws(step)
            inputs, targets = shared.data.train.inputs[positions].double(), shared.data.train.targets[positions]
            inputs = task.transforms[worker](images=inputs, draws=of_step)
            inputs = shift(flip(inputs, of_step), of_step, pixels=1)
            if worker == 2:
                inputs, targets = task.experiment.attack.component.poison(inputs, targets, 3, poisoning(step))
            assert torch.equal(batch[0], inputs)
            assert torch.equal(batch[1], targets)
            assert (batch[0] == 9.0).any() == (worker == 2)


def test_components_of_users_may_draw_from_generators_of_the_step(prepared):
    attack = {"name": "tests.components:Relabelled", "workers": [2]}
    data = {**AUGMENT, "augment": ["tests.components:brightened", "tests.components:negated"]}
    task, shared = prepared(seed=5, data=data, attack=attack)
    for step, (batch, positions) in enumerate(seen_with_positions(BatchSource(task, shared), 2, 3, 6)):
        inputs = shared.data.train.inputs[positions].double()
        factor = torch.rand((), generator=torch_generator(5, "augment", 3, 2, step))
        assert torch.equal(batch[0], -(inputs * factor))
        assert batch[1].tolist() == [numpy_generator(5, "poison", 3, 2, step).integers(3)] * len(positions)


@pytest.mark.parametrize("purpose", ["losses", "local_test_fraction"])
def test_samples_outside_of_training_are_seen_through_their_view_with_draws_of_their_own(purpose, prepared):
    """Such samples are poisoned too, but not augmented."""
    data = {"name": "tests.engines.zoo:pictures", "augment": ["flip"], "local_test_fraction": 0.5}
    task, shared = prepared(partition=NOISE, data=data, attack=BACKDOOR)
    batch_source, train, tested = BatchSource(task, shared), shared.data.train, purpose != "losses"
    positions = shared.data.worker_tests.of(4) if tested else batch_source.shard(4).indices
    seen = list((batch_source.test_samples if tested else batch_source.samples_seen)(4, 3, 2))
    view, poison = (Draws.of(f"{purpose}_{kind}", 3, 4, seed=0).steps() for kind in ("view", "poison"))
    assert len(seen) == len(positions.split(2)) > 1
    for number, ((inputs, targets), batch) in enumerate(zip(seen, positions.split(2), strict=True)):
        expected = task.transforms[4](images=train.inputs[batch].double(), draws=view(number))
        expected, labels = task.experiment.attack.component.poison(expected, train.targets[batch], 3, poison(number))
        assert torch.equal(inputs, expected)
        assert torch.equal(targets, labels)


def test_altered_images_lie_in_memory_as_the_others_do(prepared):
    plain, altered = (BatchSource(*prepared(**change)) for change in ({}, {"data": AUGMENT}))
    strides = {next(batch_source.batches(3, 1))[0].stride() for batch_source in (plain, altered)}
    assert strides == {(128, 1, 16, 2)}, "the inputs are not in channels_last order"


def test_the_server_sees_its_samples_augmented_but_through_no_worker_s_view(prepared):
    batch_source = BatchSource(*prepared(partition=NOISE, **ROOT))
    assert batch_source.alteration(4, 1) is not None
    assert batch_source.alteration(5, 1) is None
    assert BatchSource(*prepared(data=AUGMENT, **ROOT)).alteration(5, 1) is not None


# Step by step


def step_of(worker, round, step):
    return WorkItem(worker, worker, round, None, step)


def assert_same_batch(actual, expected):
    (inputs, targets), (other_inputs, other_targets) = actual, expected
    assert torch.equal(inputs, other_inputs)
    assert torch.equal(targets, other_targets)
    assert inputs.stride() == other_inputs.stride()


ALTERED = {"partition": NOISE, "data": AUGMENT, "attack": BACKDOOR}


@pytest.mark.parametrize("changes", [{}, ALTERED], ids=["plain", "altered"])
@pytest.mark.parametrize("worker", [0, 2, 4])
def test_going_step_by_step_is_going_through_the_round_at_once(worker, changes, prepared):
    """Epochs and rounds follow each other while other workers take their own steps."""
    task, shared = prepared(**changes, local={"batch_size": BATCH, "epochs": 2})
    batch_source, reference = BatchSource(task, shared), BatchSource(task, shared)
    for round in (1, 2):
        whole = list(reference.batches_of(WorkItem(worker, worker, round)))
        assert len(whole) == batch_source.steps(worker, round)
        for step, expected in enumerate(whole):
            (batch,) = batch_source.batches_of(step_of(worker, round, step))
            assert_same_batch(batch, expected)
            list(batch_source.batches_of(step_of(1, 1 + step // 2, step % 2)))  # batches of another worker


@pytest.mark.parametrize("changes", [{}, ALTERED], ids=["plain", "altered"])
@pytest.mark.parametrize("moments", [[(1, 0), (1, 4)], [(2, 3), (1, 3), (1, 1), (1, 1)]])
def test_jumping_to_a_step_is_going_there(moments, changes, prepared):
    """Jumps ahead, back, to another round, and to the same step again."""
    task, shared = prepared(**changes)
    batch_source = BatchSource(task, shared)
    for round, step in moments:
        expected = list(islice(BatchSource(task, shared).batches(4, round), step + 1))[step]
        (batch,) = batch_source.batches_of(step_of(4, round, step))
        assert_same_batch(batch, expected)


def test_a_worker_that_goes_step_by_step_goes_through_nothing_twice(prepared):
    batch_source = BatchSource(*prepared())
    iterator = batch_source.iterator_of(step_of(4, 1, 2))
    assert iterator.steps_done == 2
    next(iterator)
    assert batch_source.iterator_of(step_of(4, 1, 3)) is iterator


def test_a_member_may_have_fewer_or_more_steps_than_the_schedule(prepared):
    task, shared = prepared()
    batch_source = BatchSource(task, shared)
    expected = expected_positions(shared, 0, 3, 4, epochs=2)
    for steps in (1, 3, 7):
        member = WorkItem(4, 4, 3, steps)
        assert batch_source.steps_of(member) == steps
        batches = list(batch_source.batches_of(member))
        assert len(batches) == steps
        for (inputs, targets), positions in zip(batches, expected, strict=False):
            assert torch.equal(inputs, shared.data.train.inputs[positions].double())
            assert torch.equal(targets, shared.data.train.targets[positions])
    assert batch_source.steps_of(WorkItem(4, 4, 3)) == batch_source.steps(4, 3)
    assert batch_source.steps_of(step_of(4, 3, 1)) == 1
    assert [WorkItem(0, 0, 7).moment, WorkItem(0, 0, 7, 3).moment, step_of(0, 7, 2).moment] == [(7,), (7,), (7, 2)]


def test_an_augmentation_that_does_not_work_on_the_inputs_is_one_error_before_the_run(tiny_experiment):
    line = r'^data.augment = "cutout": does not work on inputs of shape \(8, 4\): ValueError: not enough values'
    with pytest.raises(fedsim.ExperimentError, match=line):
        fedsim.run({**tiny_experiment, "data": {"name": "tests.components:few", "augment": ["cutout"]}})
