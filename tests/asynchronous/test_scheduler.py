from __future__ import annotations

from fedsim.asynchronous.dispatch import Scheduler
from fedsim.core.randomness import numpy_generator
from fedsim.training.batches import WorkItem
from fedsim.training.task import Schedule

SIZES = [10, 4, 1, 7]  # 3, 1, 1 and 2 steps with batch size 4


def scheduler(work, *, slots=4, workers=4, seed=0):
    return Scheduler(seed, workers, slots, work, Schedule(4), lambda worker: SIZES[worker % 4])


def test_steps_and_samples_of_an_item():
    who = scheduler("model")
    assert [who.steps(who.next_item(slot)) for slot in range(4)] == [3, 1, 1, 2]
    assert [who.samples(WorkItem(slot, slot, 1)) for slot in range(4)] == [10, 4, 1, 7]
    assert [who.samples(WorkItem(0, 0, 1, steps)) for steps in (1, 2, 3, 4, 6)] == [4, 8, 10, 14, 20]
    assert [who.steps(WorkItem(0, 0, 1, steps)) for steps in (1, 4)] == [1, 4]
    who = scheduler("gradient")
    assert [who.samples(WorkItem(0, 0, 1, None, step)) for step in (0, 1, 2)] == [4, 4, 2]
    assert who.steps(WorkItem(0, 0, 1, None, 2)) == 1


def test_draws_are_as_documented():
    """A free worker is drawn uniformly from (seed, number of earlier draws), and each worker counts its own rounds."""
    who, busy, rounds = scheduler("model", slots=3, workers=7, seed=8), {}, [0] * 7
    for count in range(100):
        slot = count % 3
        if slot in busy:
            who.finish(busy.pop(slot))
        rng, at_work = numpy_generator(8, "dispatch", count), {item.worker for item in busy.values()}
        expected = next(worker for worker in iter(lambda rng=rng: int(rng.integers(7)), None) if worker not in at_work)
        rounds[expected] += 1
        busy[slot] = who.next_item(slot)
        assert busy[slot] == WorkItem(slot, expected, rounds[expected])
    assert min(rounds) > 5
