"""The scheduler: which worker works in which slot, and on what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from fedsim.asynchronous.policy import Work
from fedsim.clients import ClientAlgorithm
from fedsim.core.randomness import numpy_generator
from fedsim.engines.task import Schedule
from fedsim.engines.trainers.batches import WorkItem

# Types of checkpoints
Number = Annotated[int, Field(ge=0, lt=2**53)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Counts = list[tuple[Number, Number]]  # (worker, count)


class CheckpointModel(BaseModel):
    """Base of the states that checkpoints hold: frozen, without unknown keys, with checked types."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class SchedulerState(CheckpointModel):
    """State of a `Scheduler`."""

    done: Counts
    drawn: Number


class Scheduler:
    """Assigns workers to slots and numbers their work items.

    With as many slots as workers, each worker has its own slot. With fewer slots, a free worker is drawn uniformly for
    a free slot, by (seed, number of earlier draws).

    Args:
        slots: number of workers at a time.
        work: what a work item is: one step ("gradient") or a round of local training ("model").
        sizes: number of samples of a worker, by its number.
    """

    def __init__(
        self, seed: int, n_workers: int, slots: int, work: Work, schedule: Schedule, sizes: Callable[[int], int]
    ) -> None:
        self._seed, self.n_workers, self._schedule, self._sizes = seed, n_workers, schedule, sizes
        self._slots, self._by_step = slots, work == "gradient"
        self._done: defaultdict[int, int] = defaultdict(int)  # finished work items, by worker
        self._busy: set[int] = set()
        self._drawn = 0

    def next_item(self, slot: int, steps: int | None = None) -> WorkItem:
        """The next work item of a slot; with this many local steps, if `steps` is given."""
        worker = slot if self._slots == self.n_workers else self._draw()
        self._busy.add(worker)
        done = self._done[worker]
        if not self._by_step:
            return WorkItem(slot, worker, done + 1, steps)
        rounds, step = divmod(done, self.items_per_round(worker))
        return WorkItem(slot, worker, rounds + 1, None, step)

    def finish(self, item: WorkItem) -> None:
        """Count a work item as done, and free its worker."""
        self._done[item.worker] += 1
        self._busy.discard(item.worker)

    def release(self, item: WorkItem) -> None:
        """Free the worker of a cancelled work item; its next work item is the same one."""
        self._busy.discard(item.worker)

    def steps(self, item: WorkItem) -> int:
        """Number of local steps of a work item."""
        if item.step is not None:
            return 1
        if item.steps is not None:
            return item.steps
        return self._schedule.of(item.worker, item.round).steps_for(self._sizes(item.worker))

    def gradients(self, item: WorkItem, algorithm: ClientAlgorithm) -> int:
        """Number of gradients of a batch that a work item computes."""
        if item.step is not None:
            return 1
        return algorithm.gradients(self.steps(item), self._schedule.batches_of_all(self._sizes(item.worker)))

    def samples(self, item: WorkItem) -> int:
        """Number of samples of a work item, with repetitions."""
        size, schedule = self._sizes(item.worker), self._schedule.of(item.worker, item.round)
        if item.step is not None:
            return schedule.batch_size_at(item.step, size)
        return schedule.samples_in(self.steps(item), size)

    def items_per_round(self, worker: int) -> int:
        """Number of work items of a worker that make one of its rounds: one, or as many as the round has steps."""
        return self._schedule.of(worker, 1).steps_for(self._sizes(worker)) if self._by_step else 1

    def total_items_per_round(self) -> int:
        """Number of work items that are as much work as a synchronous round."""
        return sum(map(self.items_per_round, range(self.n_workers))) if self._by_step else self._slots

    def items_done(self, worker: int) -> int:
        """Number of a worker's finished work items."""
        return self._done[worker]

    def state(self) -> dict[str, Any]:
        """The state, in JSON types."""
        return {"done": list(self._done.items()), "drawn": self._drawn}

    def resume(self, state: SchedulerState, busy: Iterable[int]) -> None:
        """Continue from such a state, while these workers are busy."""
        self._done, self._drawn, self._busy = defaultdict(int, dict(state.done)), state.drawn, set(busy)

    def _draw(self) -> int:
        rng = numpy_generator(self._seed, "dispatch", self._drawn)
        self._drawn += 1
        while (worker := int(rng.integers(self.n_workers))) in self._busy:
            pass
        return worker
