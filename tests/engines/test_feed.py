"""What each worker sees: the draws by (seed, round, worker), the alterations in their order."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from fedsim.augmentation import flip, shift
from fedsim.engines.feed import Feed, Member
from fedsim.randomness import Draws, batch_order, numpy_generator, torch_generator

SIZES = [1, 5, 8, 17, 20]
BATCH = 4
ROOT = {"aggregate": {"rule": "fltrust", "root_samples": 7}}
NOISE = {"strategy": "feature_noise", "sigma": 1.0}
BACKDOOR = {"name": "backdoor", "workers": [2, 4], "value": 9.0, "size": 2, "target": 1}
FLIPPING = {"name": "label_flipping", "workers": [2, 4]}
AUGMENT = {"dataset": "tests.engines.zoo:pictures", "augment": ["flip", {"name": "shift", "pixels": 1}]}


def expected_positions(memory, seed, round, worker, epochs):
    """The shard in a new order for each epoch, cut into batches."""
    shard = memory.shards.of(worker).tolist()
    batches = []
    for epoch in range(epochs):
        order = [shard[place] for place in batch_order(seed, round, worker, epoch, len(shard)).tolist()]
        batches += [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    return batches


def seen_with_positions(feed, worker, round, steps):
    return islice(zip(feed.batches(worker, round), feed.positions(worker, round), strict=True), steps)


@pytest.mark.parametrize("worker", range(len(SIZES)))
def test_positions_are_the_shard_in_a_new_order_for_each_epoch(worker, prepared):
    task, memory = prepared(seed=3)
    expected = expected_positions(memory, 3, 7, worker, epochs=3)
    found = [batch.tolist() for batch in islice(Feed(task, memory).positions(worker, 7), len(expected))]
    assert found == expected
    steps = len(expected) // 3
    for epoch in range(3):
        seen = [position for batch in found[epoch * steps : (epoch + 1) * steps] for position in batch]
        assert sorted(seen) == sorted(memory.shards.of(worker).tolist()), "each sample once"


def test_orders_differ_by_epoch_round_worker_and_seed(prepared):
    feed, other = (Feed(*prepared(seed=seed, partition="contiguous", workers=3)) for seed in (0, 1))
    first, second = islice(feed.epochs(1, 1), 2)
    orders = [first, second, *(next(feed.epochs(*of)) for of in ((1, 2), (2, 1))), next(other.epochs(1, 1))]
    places = [order - order.min() for order in orders]
    assert len({tuple(order.tolist()) for order in places}) == len(orders)
    assert torch.equal(first, next(feed.epochs(1, 1)))


def test_orders_drawn_for_several_workers_at_once_are_those_drawn_alone(prepared, monkeypatch):
    """Whatever is drawn ahead, and in whichever order it is asked for."""
    task, memory = prepared(local={"batch_size": BATCH, "epochs": 3}, **ROOT)
    alone, feed = (Feed(task, memory) for _ in range(2))
    for samples in (2**17, 30, 1):
        monkeypatch.setattr("fedsim.engines.feed.SAMPLES_AT_ONCE", samples)
        feed.announce([Member(worker, worker, 2) for worker in (4, 5, 0, 2, 1, 3)])
        rounds = [(worker, feed.epochs(worker, 2)) for worker in (4, 5, 2, 1, 0, 3)]
        for epoch in range(4):
            for worker, epochs in rounds:
                assert torch.equal(next(epochs), next(islice(alone.epochs(worker, 2), epoch, None)))


def test_the_orders_of_a_cohort_are_drawn_by_one_call(prepared, monkeypatch):
    feed, calls = Feed(*prepared(local={"batch_size": BATCH, "epochs": 3})), []
    draw = feed._draw
    monkeypatch.setattr(feed, "_draw", lambda wanted: calls.append(len(wanted)) or draw(wanted))
    members = [Member(worker, worker, 1) for worker in range(5)]
    feed.announce(members)
    for member in members:
        list(feed.batches_of(member))
    assert calls == [15]


@pytest.mark.parametrize("worker", range(len(SIZES)))
def test_batches_are_the_samples_at_those_positions(worker, prepared):
    task, memory = prepared()
    feed = Feed(task, memory)
    for (inputs, targets), positions in seen_with_positions(feed, worker, 2, 12):
        assert torch.equal(inputs, memory.train.inputs[positions].double())
        assert torch.equal(targets, memory.train.targets[positions])


def test_sizes_and_steps_are_those_of_the_shards(prepared):
    task, memory = prepared()
    feed = Feed(task, memory)
    assert feed.root is None
    assert [feed.size(worker) for worker in range(5)] == SIZES
    assert [feed.steps(worker, 1) for worker in range(5)] == [1, 2, 2, 5, 5]
    for worker in range(5):
        assert torch.equal(feed.shard(worker).indices, memory.shards.of(worker))


@pytest.mark.parametrize("sync", ["parameters", "gradients"])
def test_the_server_trains_on_its_own_samples_as_one_more_worker(sync, prepared):
    """In synchronous SGD for as long as anybody else."""
    task, memory = prepared(sync=sync, **ROOT)
    feed = Feed(task, memory)
    assert feed.root == 5
    assert feed.size(5) == 7
    assert feed.shard(5).indices.tolist() == memory.root.tolist()
    assert feed.steps(5, 1) == 2 if sync == "parameters" else feed.steps(5, 1) > 10**9
    first_epoch = np.concatenate(list(islice(feed.positions(5, 1), 2)))
    assert sorted(first_epoch) == memory.root.tolist()


def test_the_server_is_one_more_worker_again_after_rounds_of_gradients(prepared):
    task, memory = prepared(**{"sync": "post_local", "gradient_rounds": 2, "rounds": 4, **ROOT})
    assert [Feed(task, memory).steps(5, round) > 10**9 for round in range(1, 5)] == [True, True, False, False]


def test_nothing_becomes_of_batches_where_nothing_is_asked_for(prepared):
    task, memory = prepared(attack=FLIPPING)
    feed = Feed(task, memory)
    assert [feed.alteration(worker, 1) is None for worker in range(5)] == [True, True, False, True, False]


def test_only_byzantine_workers_see_poison(prepared):
    task, memory = prepared(attack=FLIPPING)
    feed = Feed(task, memory)
    for worker in range(5):
        (inputs, targets), positions = next(feed.batches(worker, 1)), next(feed.positions(worker, 1))
        right = memory.train.targets[positions]
        assert torch.equal(targets, 2 - right if worker in (2, 4) else right)
        assert torch.equal(inputs, memory.train.inputs[positions].double())


def test_a_worker_s_view_comes_before_augmentation_and_that_before_poison(prepared):
    """View and augmentations draw one after the other from the stream of this worker, round and step."""
    task, memory = prepared(seed=5, partition=NOISE, data=AUGMENT, attack=BACKDOOR)
    feed = Feed(task, memory)
    for worker in (1, 2):
        draws, poisoning = (Draws.of(5, purpose, 3, worker).steps() for purpose in ("augment", "poison"))
        for step, (found, positions) in enumerate(seen_with_positions(feed, worker, 3, 6)):
            of_step = draws(step)
            inputs, targets = memory.train.inputs[positions].double(), memory.train.targets[positions]
            inputs = task.transforms[worker](images=inputs, draws=of_step)
            inputs = shift(flip(inputs, of_step), of_step, pixels=1)
            if worker == 2:
                inputs, targets = task.attack.poison(inputs, targets, 3, poisoning(step))
            assert torch.equal(found[0], inputs)
            assert torch.equal(found[1], targets)
            assert (found[0] == 9.0).any() == (worker == 2)


def test_plugs_of_users_may_draw_from_generators_of_the_step(prepared):
    attack = {"name": "tests.plugs:Relabelled", "workers": [2]}
    data = {**AUGMENT, "augment": ["tests.plugs:brightened", "tests.plugs:negated"]}
    task, memory = prepared(seed=5, data=data, attack=attack)
    for step, (found, positions) in enumerate(seen_with_positions(Feed(task, memory), 2, 3, 6)):
        inputs = memory.train.inputs[positions].double()
        factor = torch.rand((), generator=torch_generator(5, "augment", 3, 2, step))
        assert torch.equal(found[0], -(inputs * factor))
        assert found[1].tolist() == [numpy_generator(5, "poison", 3, 2, step).integers(3)] * len(positions)


def test_samples_as_they_are_looked_at_before_training_draw_for_themselves(prepared):
    """Not what the same batch draws in training."""
    task, memory = prepared(partition=NOISE, attack=BACKDOOR)
    feed = Feed(task, memory)
    seen = list(feed.samples_seen(4, 3, 7))
    view, poison = (Draws.of(0, purpose, 3, 4).steps() for purpose in ("losses_view", "losses_poison"))
    for number, ((inputs, targets), plain) in enumerate(zip(seen, feed.shard(4).batches(7), strict=True)):
        expected = task.transforms[4](images=plain[0], draws=view(number))
        expected, labels = task.attack.poison(expected, plain[1], 3, poison(number))
        assert torch.equal(inputs, expected)
        assert torch.equal(targets, labels)


def test_altered_images_lie_in_memory_as_the_others_do(prepared):
    plain, altered = (Feed(*prepared(**change)) for change in ({}, {"data": AUGMENT}))
    strides = {next(feed.batches(3, 1))[0].stride() for feed in (plain, altered)}
    assert strides == {(128, 1, 16, 2)}, "channels_last"


def test_the_server_sees_its_samples_augmented_but_through_no_worker_s_view(prepared):
    feed = Feed(*prepared(partition=NOISE, **ROOT))
    assert feed.alteration(4, 1) is not None
    assert feed.alteration(5, 1) is None
    assert Feed(*prepared(data=AUGMENT, **ROOT)).alteration(5, 1) is not None


# Step by step


def step_of(worker, round, step):
    return Member(worker, worker, round, None, step)


def assert_same_batch(found, expected):
    (inputs, targets), (other_inputs, other_targets) = found, expected
    assert torch.equal(inputs, other_inputs)
    assert torch.equal(targets, other_targets)
    assert inputs.stride() == other_inputs.stride()


ALTERED = {"partition": NOISE, "data": AUGMENT, "attack": BACKDOOR}


@pytest.mark.parametrize("changes", [{}, ALTERED], ids=["plain", "altered"])
@pytest.mark.parametrize("worker", [0, 2, 4])
def test_going_step_by_step_is_going_through_the_round_at_once(worker, changes, prepared):
    """Epoch after epoch and round after round, while others go their own way."""
    task, memory = prepared(**changes, local={"batch_size": BATCH, "epochs": 2})
    feed, reference = Feed(task, memory), Feed(task, memory)
    for round in (1, 2):
        whole = list(reference.batches_of(Member(worker, worker, round)))
        assert len(whole) == feed.steps(worker, round)
        for step, expected in enumerate(whole):
            (found,) = feed.batches_of(step_of(worker, round, step))
            assert_same_batch(found, expected)
            list(feed.batches_of(step_of(1, 1 + step // 2, step % 2)))  # another worker


@pytest.mark.parametrize("changes", [{}, ALTERED], ids=["plain", "altered"])
@pytest.mark.parametrize("moments", [[(1, 3)], [(1, 0), (1, 4)], [(2, 3), (1, 3)], [(1, 3), (1, 1)], [(1, 2), (1, 2)]])
def test_jumping_to_a_step_is_going_there(moments, changes, prepared):
    """Ahead, back, to another round, or to the same again."""
    task, memory = prepared(**changes)
    feed = Feed(task, memory)
    for round, step in moments:
        expected = list(islice(Feed(task, memory).batches(4, round), step + 1))[step]
        (found,) = feed.batches_of(step_of(4, round, step))
        assert_same_batch(found, expected)


def test_a_lap_is_where_its_work_begins(prepared):
    feed = Feed(*prepared())
    lap = feed.lap(step_of(4, 1, 2))
    assert (lap.round, lap.steps_done, lap.alter) == (1, 2, None)
    assert feed.lap(step_of(4, 1, 2)) is lap
    positions = next(lap)
    assert positions.tolist() == list(islice(feed.positions(4, 1), 3))[2].tolist()
    assert feed.lap(step_of(4, 1, 3)) is lap, "nothing is gone through twice"
    assert feed.lap(step_of(4, 1, 2)) is not lap
    assert feed.lap(Member(4, 4, 1)).steps_done == 0
    assert feed.lap(Member(4, 4, 1)) is not feed.lap(Member(4, 4, 1)), "a round as a whole is begun anew"


def test_a_member_may_have_fewer_or_more_steps_than_the_schedule(prepared):
    task, memory = prepared()
    feed = Feed(task, memory)
    expected = expected_positions(memory, 0, 3, 4, epochs=2)
    for steps in (1, 3, 7):
        member = Member(4, 4, 3, steps)
        assert feed.steps_of(member) == steps
        found = list(feed.batches_of(member))
        assert len(found) == steps
        for (inputs, targets), positions in zip(found, expected, strict=False):
            assert torch.equal(inputs, memory.train.inputs[positions].double())
            assert torch.equal(targets, memory.train.targets[positions])
    assert feed.steps_of(Member(4, 4, 3)) == feed.steps(4, 3)
    assert feed.steps_of(step_of(4, 3, 1)) == 1
    assert [Member(0, 0, 7).moment, Member(0, 0, 7, 3).moment, step_of(0, 7, 2).moment] == [(7,), (7,), (7, 2)]
