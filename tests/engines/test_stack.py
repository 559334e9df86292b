"""Which batches the members of a stack have, step by step, what is drawn for them, and what they hold."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from fedsim.engines import stack as stack_module
from fedsim.engines.feed import Feed, Member
from fedsim.engines.stack import Holdings, Lot, Stack, starting_states
from fedsim.engines.stacked_module import StackedModule
from fedsim.local import SGD
from fedsim.randomness import random_state_kept, seed_everything

CPU = torch.device("cpu")
STEPS = [1, 2, 2, 5, 5]  # of shards of 1, 5, 8, 17 and 20 samples, in batches of 4


def members(*workers):
    """Slots are other numbers than workers."""
    return [Member(10 + place, worker, 3) for place, worker in enumerate(workers)]


@pytest.fixture
def stack(prepared):
    """The stack of these workers in round 3, with the feed of their batches."""

    def make(*workers, **changes):
        task, memory = prepared(**changes)
        feed = Feed(task, memory)
        return Stack(members(*workers), task, feed), feed

    return make


def lot_of(sizes, members=None):
    """A lot with batches of these sizes, filled up, as `Stack.lots` makes them."""
    counts, widest = torch.tensor(sizes), max(sizes)
    inside = torch.arange(widest + 1) < counts.unsqueeze(1)
    positions = torch.arange(1, len(sizes) * (widest + 1) + 1).view(len(sizes), -1) * inside
    weights = inside / counts.unsqueeze(1)
    return Lot(members or range(len(sizes)), np.array(sizes), counts.double(), positions, weights)


def test_members_with_most_steps_stand_first_and_else_in_their_order(stack):
    made, _ = stack(0, 1, 2, 3, 4)
    assert len(made) == 5
    assert [member.worker for member in made.members] == [3, 4, 1, 2, 0]
    assert made.slots.tolist() == [13, 14, 11, 12, 10]


@pytest.mark.parametrize("ahead", [256, 3, 1])
def test_lots_are_each_member_s_own_batches_and_those_who_finish_fall_off_the_end(ahead, stack, monkeypatch):
    monkeypatch.setattr(stack_module, "STEPS_AT_A_TIME", ahead)
    made, feed = stack(0, 1, 2, 3, 4)
    lots = list(made.lots())
    assert [len(lot.members) for lot in lots] == [5, 4, 2, 2, 2]
    steps = {member.worker: list(islice(feed.positions(member.worker, 3), 5)) for member in made.members}
    for step, lot in enumerate(lots):
        assert lot.members == range(len(lot.members))
        for place in lot.members:
            batch = steps[made.members[place].worker][step]
            size = len(batch)
            assert lot.sizes[place] == lot.counts[place] == size
            assert lot.positions[place].tolist() == [*batch, *[batch[0]] * (4 - size)]
            assert lot.weights[place].tolist() == [*[1 / size] * size, *[0] * (4 - size)]


def test_several_epochs_and_steps_beyond_them_are_counted(stack):
    twice, _ = stack(1, 3, local={"batch_size": 4, "epochs": 2})
    assert [len(lot.members) for lot in twice.lots()] == [2, 2, 2, 2, *[1] * 6]
    three, _ = stack(0, 3, local={"batch_size": 4, "steps": 3})
    assert [lot.sizes.tolist() for lot in three.lots()] == [[1, 4]] * 3


def test_places_select_views_where_members_stand_side_by_side():
    tensor = torch.arange(10.0)
    assert tensor[lot_of([1, 1, 1])._replace(members=range(2, 5)).places].data_ptr() == tensor[2:].data_ptr()
    assert tensor[lot_of([1, 1], [4, 1]).places].tolist() == [4, 1]


def test_batches_of_one_size_lose_their_filling():
    (lot,) = lot_of([3, 3]).by_size()
    assert lot.members == range(2)
    assert lot.positions.tolist() == [[1, 2, 3], [5, 6, 7]]
    assert torch.allclose(lot.weights, torch.full((2, 3), 1 / 3))


def test_batches_of_several_sizes_go_apart_each_with_what_belongs_to_it():
    whole = lot_of([4, 2, 4, 1, 2])
    lots = whole.by_size()
    assert [lot.members for lot in lots] == [[3], [1, 4], [0, 2]]
    for lot, size in zip(lots, (1, 2, 4), strict=True):
        assert lot.sizes.tolist() == lot.counts.tolist() == [size] * len(lot.members)
        assert torch.equal(lot.positions, whole.positions[lot.members, :size])
        assert (lot.positions > 0).all()
        assert torch.equal(lot.weights, whole.weights[lot.members, :size])
        assert torch.allclose(lot.weights.sum(1), torch.ones(len(lot.members)))


def test_mean_losses_are_per_sample_whoever_takes_part_in_a_lot(stack):
    made, _ = stack(0, 1, 2)
    made.count(lot_of([4, 4, 1]), torch.tensor([1.0, 2.0, 3.0]))
    made.count(lot_of([4, 1]), torch.tensor([5.0, 6.0]))
    made.count(lot_of([2, 3], [2, 0]), torch.tensor([7.0, 8.0]))
    expected = [(4 * 1 + 4 * 5 + 3 * 8) / 11, (4 * 2 + 1 * 6) / 5, (1 * 3 + 2 * 7) / 3]
    assert made.mean_losses().tolist() == pytest.approx(expected, abs=1e-6)
    assert made.mean_losses().dtype == torch.double


@pytest.mark.parametrize("step", [(), (4,)])
def test_members_draw_what_they_would_draw_alone(step, stack):
    made, _ = stack(1, 3, 4, seed=8)
    streams = made.streams(*step)
    assert len(streams) == 3
    drawn = []
    for stream in streams:
        with stream:
            drawn.append(torch.rand(5))
    for member, found in zip(made.members, drawn, strict=True):
        with random_state_kept(CPU):
            seed_everything(CPU, 8, "layers", 3, member.worker, *step)
            assert torch.equal(found, torch.rand(5))


def test_alterations_stand_with_their_members(stack):
    made, _ = stack(0, 3, 4, attack={"name": "label_flipping", "workers": [4, 0]})
    altered = [alteration is not None for alteration in made.alterations]
    assert altered == [member.worker in (0, 4) for member in made.members] == [False, True, True]


def holdings(k):
    return Holdings(
        [torch.arange(k * 6.0).view(k, 2, 3), torch.arange(float(k))],
        [{"momentum": torch.ones(k, 2, 3)}, {"momentum": torch.ones(k)}],
        [torch.zeros(k, 2), torch.zeros(k, dtype=torch.long)],
    )


def step(of_some):
    """Moves parameters and state in place, and replaces buffers, as a stacked module does."""
    for parameter, state in zip(of_some.parameters, of_some.states, strict=True):
        parameter += 100
        state["momentum"] *= 7
    of_some.buffers = [buffer + 1 for buffer in of_some.buffers]


@pytest.mark.parametrize("chosen", [range(2), [3, 1]], ids=["side by side", "picked out"])
def test_what_a_lot_s_members_hold_is_changed_and_nobody_else_s(chosen):
    ours, before = holdings(4), holdings(4)
    lot = lot_of([1, 1], chosen)
    theirs = ours.of(lot)
    assert [len(tensor) for tensor in (*theirs.parameters, *theirs.buffers)] == [2] * 4
    step(theirs)
    ours.take_back(lot, theirs)
    step(before)
    untouched = holdings(4)
    for place in range(4):
        expected = before if place in chosen else untouched
        assert all(torch.equal(a[place], b[place]) for a, b in zip(ours.parameters, expected.parameters, strict=True))
        assert all(torch.equal(a[place], b[place]) for a, b in zip(ours.buffers, expected.buffers, strict=True))
        for found, state in zip(ours.states, expected.states, strict=True):
            assert torch.equal(found["momentum"][place], state["momentum"][place])


def test_members_that_stand_side_by_side_are_held_by_views():
    ours = holdings(4)
    theirs = ours.of(lot_of([1, 1]))
    assert theirs.parameters[0].data_ptr() == ours.parameters[0].data_ptr()
    assert theirs.states[0]["momentum"].data_ptr() == ours.states[0]["momentum"].data_ptr()


@pytest.mark.parametrize("chosen", [range(2), [3, 1]], ids=["side by side", "picked out"])
def test_state_that_a_solver_replaces_or_begins_with_its_first_step_is_kept(chosen):
    ours, lot = holdings(4), lot_of([1, 1], chosen)
    theirs = ours.of(lot)
    for parameter, state in zip(theirs.parameters, theirs.states, strict=True):
        state["momentum"] = parameter + 5
        state["new"] = parameter + 6
    ours.take_back(lot, theirs)
    others = [place for place in range(4) if place not in chosen]
    for parameter, state in zip(ours.parameters, ours.states, strict=True):
        assert torch.equal(state["momentum"][list(chosen)], parameter[list(chosen)] + 5)
        assert torch.equal(state["momentum"][others], torch.ones_like(parameter[others]))
        assert torch.equal(state["new"][list(chosen)], parameter[list(chosen)] + 6)
        assert not state["new"][others].any()


def test_the_state_of_a_solver_is_cut_as_the_parameters_are(prepared):
    task, memory = prepared()
    module = StackedModule(task.new_module)
    states = starting_states(SGD(momentum=0.5), memory.rows, module)
    assert [state["momentum"].shape for state in states] == [view.shape for view in module.views(memory.rows)]
    assert not any(state["momentum"].any() for state in states)
    assert starting_states(SGD(), memory.rows, module) == [{} for _ in states]
