"""The scheduler says which worker works in which slot, and on what. The dispatcher starts these work items and hands
their results to the policy, on the clock and in races.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from fedsim.asynchronous.policy import Arrival, Work
from fedsim.asynchronous.server_state import ServerState
from fedsim.clients import ClientAlgorithm
from fedsim.core.randomness import numpy_generator
from fedsim.engines.schedule import Schedule
from fedsim.engines.shared_state import SharedState
from fedsim.engines.task import RunTask
from fedsim.engines.trainers.batches import WorkItem
from fedsim.errors import DivergedError

# Types of checkpoints
Number = Annotated[int, Field(ge=0, lt=2**53)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Counts = list[tuple[Number, Number]]  # (worker, count)


class CheckpointModel(BaseModel):
    """Base class of the states in checkpoints: frozen, with checked types, and without unknown keys."""

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

    @classmethod
    def of(cls, task: RunTask, shared: SharedState) -> Scheduler:
        """Return the scheduler of a run at its start."""
        experiment = task.experiment
        work, sizes = experiment.policy.component.work, shared.data.shards.size
        return cls(experiment.seed, experiment.workers, experiment.cohort_size, work, task.schedule, sizes)

    def next_item(self, slot: int, steps: int | None = None) -> WorkItem:
        """Return the next work item of a slot; with this many local steps, if `steps` is given."""
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
        """Number of mini-batch gradients that a work item computes."""
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
        """Number of work items that amount to one synchronous round."""
        return sum(map(self.items_per_round, range(self.n_workers))) if self._by_step else self._slots

    def items_done(self, worker: int) -> int:
        """Number of a worker's finished work items."""
        return self._done[worker]

    def state(self) -> dict[str, Any]:
        """Return the state, in JSON types."""
        return {"done": list(self._done.items()), "drawn": self._drawn}

    def resume(self, state: SchedulerState, busy: Iterable[int]) -> None:
        """Continue from a state that `state` returned, with these busy workers."""
        self._done, self._drawn, self._busy = defaultdict(int, dict(state.done)), state.drawn, set(busy)

    def _draw(self) -> int:
        rng = numpy_generator(self._seed, "dispatch", self._drawn)
        self._drawn += 1
        while (worker := int(rng.integers(self.n_workers))) in self._busy:
            pass
        return worker


Train = Callable[[Sequence[WorkItem]], object]


@dataclass
class RoundStats:
    """Counts of one round.

    Attributes:
        samples: training samples of the work that arrived, by worker.
        staleness: number of arrivals by staleness.
        loss_sum: sum of the training loss over `loss_samples` samples, without excluded work.
        up, down: number of models or gradients that workers sent and received.
        discarded: number of work items that were cancelled, or were stale on arrival.
        excluded: the worker of each result that held NaN or infinity.
    """

    samples: Counter[int] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    loss_sum: float = 0.0
    loss_samples: int = 0
    up: int = 0
    down: int = 0
    discarded: int = 0
    excluded: list[int] = field(default_factory=list)

    @property
    def train_loss(self) -> float:
        """Mean training loss per sample; NaN if all work was excluded."""
        return self.loss_sum / self.loss_samples if self.loss_samples else math.nan

    def add(self, stats: RoundStats) -> None:
        """Add the counts of another process."""
        for count in fields(self):
            setattr(self, count.name, getattr(self, count.name) + getattr(stats, count.name))


class DispatcherState(CheckpointModel):
    """State of a `Dispatcher`."""

    scheduler: SchedulerState
    in_flight: list[WorkItem]
    untrained: list[Number]
    nonfinite: list[Number]
    arrivals: Number


class Dispatcher:
    """Starts work items, trains them, and hands their results to the policy.

    Args:
        train: computes work items, each from the model that its row holds, and writes the results into the rows.

    Attributes:
        in_flight: the started work items by slot, in the order in which they started.
        untrained: the slots in flight whose work has not been computed.
        arrivals: number of results that the policy has taken since the start of the run.
        stats: counts since `start_round`.
    """

    def __init__(self, server: ServerState, scheduler: Scheduler, train: Train) -> None:
        self.server, self.policy, self.scheduler, self._train = server, server.policy, scheduler, train
        self.in_flight: dict[int, WorkItem] = {}
        self.arrivals = 0
        self.untrained: set[int] = set()
        self._nonfinite: set[int] = set()  # slots in flight whose result holds NaN or infinity
        self._losses = server.shared.cohort.train_loss.numpy()  # faster to read than the tensor
        self.start_round(1)

    def start_round(self, round: int) -> None:
        """Reset the counts."""
        self.round, self.stats = round, RoundStats()

    def dispatch(self, slot: int, steps: int | None = None) -> WorkItem:
        """Start the next work item of a slot; with this many local steps, if `steps` is given."""
        server, policy = self.server, self.policy
        item = self.scheduler.next_item(slot, steps)
        if item.step is None and steps is None:
            item = item._replace(steps=policy.local_steps(server, slot, self.scheduler.steps(item)))
        policy.pull(server, slot)
        server.begin(slot, item.worker)
        self.stats.down += policy.traffic(int(server.units[slot]))[1]
        server.units[slot] += 1
        self.in_flight[slot] = item
        self.untrained.add(slot)
        return item

    def train(self, slots: Iterable[int]) -> None:
        """Compute the work of these slots together, if it has not been computed."""
        slots = [slot for slot in slots if slot in self.untrained]
        self._train([self.in_flight[slot] for slot in slots])
        self.untrained.difference_update(slots)
        if self.server.nonfinite == "keep":
            return
        rows = self.server.shared.cohort.rows
        total = (rows if slots == list(range(len(rows))) else rows[slots]).sum()
        if not math.isfinite(total):  # the sum of finite rows may overflow too
            self._nonfinite.update(slot for slot in slots if not bool(rows[slot].isfinite().all()))

    def is_stale(self, slot: int) -> bool:
        """Whether an update has cancelled the work item that arrives now."""
        return self.policy.cancels and self.server.staleness(slot) > 0

    def receive(self, slot: int, staleness: int | None = None) -> None:
        """Hand the result of a slot to the policy; `staleness` replaces that of the server's version."""
        server, stats, item = self.server, self.stats, self.in_flight.pop(slot)
        unit = int(server.units[slot]) - 1
        staleness = server.staleness(slot) if staleness is None else staleness
        samples = self.scheduler.samples(item)
        up, _ = self.policy.traffic(unit)
        self.scheduler.finish(item)
        self.arrivals += 1
        stats.up += up
        stats.samples[item.worker] += samples
        if slot in self._nonfinite:
            self._exclude(item)
            return
        stats.loss_sum += float(self._losses[slot]) * samples
        stats.loss_samples += samples
        if up:
            stats.staleness[staleness] += 1
        server.end(slot, item.worker)
        self.policy.take(server, Arrival(slot, item.worker, unit, staleness))

    def cancel(self, slot: int) -> None:
        """Cancel the work item of a slot; its worker starts the same work again."""
        self.scheduler.release(self.in_flight.pop(slot))
        self.untrained.discard(slot)
        self._nonfinite.discard(slot)
        self.stats.discarded += 1

    def state(self) -> dict[str, Any]:
        """Return the state between two rounds, in JSON types; the tensors are the server's and the engine's."""
        return {
            "scheduler": self.scheduler.state(),
            "in_flight": list(self.in_flight.values()),
            "untrained": sorted(self.untrained),
            "nonfinite": sorted(self._nonfinite),
            "arrivals": self.arrivals,
        }

    def resume(self, state: DispatcherState) -> None:
        """Continue from such a state."""
        self.in_flight = {item.slot: item for item in state.in_flight}
        if not self.in_flight.keys() >= {*state.untrained, *state.nonfinite}:
            raise ValueError("a trained or excluded slot is not in flight")
        self.scheduler.resume(state.scheduler, [item.worker for item in state.in_flight])
        self.untrained, self._nonfinite = set(state.untrained), set(state.nonfinite)
        self.arrivals = state.arrivals

    def _exclude(self, item: WorkItem) -> None:
        self._nonfinite.discard(item.slot)
        if self.server.nonfinite == "error":
            raise nonfinite_error(self.round, f"the work of worker {item.worker} from its round {item.round}")
        self.stats.excluded.append(item.worker)


def nonfinite_error(round: int, place: str) -> DivergedError:
    """Return the error for a result that holds NaN or infinity."""
    remedy = "reduce local.lr, or exclude such work with aggregate.nonfinite=exclude"
    return DivergedError(f"{place} holds NaN or infinity", remedy, round)
