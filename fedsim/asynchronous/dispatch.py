"""Scheduling of asynchronous work, on the virtual clock and in races.

A work item is one local step or one round of local training by one worker. At most `cohort` workers train at the same
time. Each occupies a slot, and the slot number is the index of the worker's row. The scheduler decides which worker
gets a free slot, and which work item is next. The dispatcher starts work items and passes their results to the policy.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from fedsim.asynchronous.policies.policy import Work
from fedsim.asynchronous.policies.server import Arrival
from fedsim.asynchronous.round_stats import RoundStats, Train
from fedsim.asynchronous.server_state import ServerState, nonfinite_error
from fedsim.clients import ClientAlgorithm
from fedsim.clients.schedule import Schedule
from fedsim.core.randomness import numpy_generator
from fedsim.core.snapshot import CheckpointModel, Counts, Number
from fedsim.errors import called
from fedsim.training.batches import WorkItem
from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask


class SchedulerState(CheckpointModel):
    """State of a `Scheduler`, as stored in a checkpoint.

    Attributes:
        done: number of finished work items (steps or rounds) of each worker.
        drawn: number of times that a worker was drawn at random so far.
    """

    done: Counts
    drawn: Number


class Scheduler:
    """Decides which worker trains next, and for how many steps.

    A work item is what a worker computes before it sends a result: one step or one round. If not all workers train at
    the same time, the next worker is drawn at random from the idle workers.

    Args:
        seed: seed for the draws.
        n_workers: number of workers.
        slots: number of workers that train at the same time.
        work: what a work item is: one step ("gradient") or one round of local training ("model").
        schedule: determines each worker's batch size and number of local steps.
        sizes: function that maps a worker's ID to its number of samples.
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
        """Create the scheduler of a new run."""
        experiment = task.experiment
        work, sizes = experiment.policy.component.work, shared.data.shards.size
        return cls(experiment.seed, experiment.workers, experiment.cohort_size, work, task.schedule, sizes)

    def next_item(self, slot: int, steps: int | None = None) -> WorkItem:
        """Choose a worker for a free slot, mark it as busy, and return its next work item.

        Args:
            slot: position of the worker among the workers that train at the same time.
            steps: number of local steps. None: the scheduled number.
        """
        worker = slot if self._slots == self.n_workers else self._draw()
        self._busy.add(worker)
        finished = self._done[worker]
        if not self._by_step:
            return WorkItem(slot, worker, finished + 1, steps)
        rounds, step = divmod(finished, self.items_per_round(worker))
        return WorkItem(slot, worker, rounds + 1, None, step)

    def finish(self, item: WorkItem) -> None:
        """Count the step or round `item` as done, and mark its worker as idle."""
        self._done[item.worker] += 1
        self._busy.discard(item.worker)

    def release(self, item: WorkItem) -> None:
        """Mark the worker of a cancelled work item as idle. The worker will repeat this work item."""
        self._busy.discard(item.worker)

    def steps(self, item: WorkItem) -> int:
        """Return the number of local steps of a work item."""
        return item.steps_for(self._schedule, self._sizes(item.worker))

    def gradients(self, item: WorkItem, algorithm: ClientAlgorithm) -> int:
        """Return the number of mini-batch gradients that a client algorithm computes in a work item."""
        if item.step is not None:
            return 1
        schedule = self._schedule.of(item.worker, item.round)
        return algorithm.gradients(self.steps(item), schedule.batches_of_all(self._sizes(item.worker)))

    def samples(self, item: WorkItem) -> int:
        """Return the number of samples in all mini-batches of a work item. Repeated samples count each time."""
        size, schedule = self._sizes(item.worker), self._schedule.of(item.worker, item.round)
        if item.step is not None:
            return schedule.batch_size_at(item.step, size)
        return schedule.samples_in(self.steps(item), size)

    def items_per_round(self, worker: int) -> int:
        """Return how many results a worker sends per round: one, or one per local step if workers send gradients."""
        return self._schedule.of(worker, 1).steps_for(self._sizes(worker)) if self._by_step else 1

    def total_items_per_round(self) -> int:
        """Return how many results all workers together send in one synchronous round."""
        return sum(map(self.items_per_round, range(self.n_workers))) if self._by_step else self._slots

    def items_done(self, worker: int) -> int:
        """Return the number of results that a worker has sent so far."""
        return self._done[worker]

    def state(self) -> dict[str, Any]:
        """Return the scheduler's state as a JSON-serializable dict."""
        return {"done": list(self._done.items()), "drawn": self._drawn}

    def resume(self, state: SchedulerState, busy: Iterable[int]) -> None:
        """Restore a saved state. `busy` contains the IDs of the workers that are training."""
        self._done, self._drawn, self._busy = defaultdict(int, dict(state.done)), state.drawn, set(busy)

    def _draw(self) -> int:
        rng = numpy_generator(self._seed, "dispatch", self._drawn)
        self._drawn += 1
        while (worker := int(rng.integers(self.n_workers))) in self._busy:
            pass
        return worker


class DispatcherState(CheckpointModel):
    """State of a `Dispatcher`, as stored in a checkpoint.

    A slot is the position of a worker among the workers that train at the same time.

    Attributes:
        scheduler: state of the scheduler.
        in_flight: work items that have started, but whose results have not arrived at the server.
        untrained: slots of the work items in flight whose results have not been computed yet.
        nonfinite: slots of the work items in flight whose results contain NaN or infinity.
        arrivals: number of results that have arrived since the start of the run.
    """

    scheduler: SchedulerState
    in_flight: list[WorkItem]
    untrained: list[Number]
    nonfinite: list[Number]
    arrivals: Number


class Dispatcher:
    """Starts the workers' training, and passes each result to the asynchronous policy.

    A slot is the position of a worker among the workers that train at the same time.

    Args:
        server: state of the server, with the policy.
        scheduler: decides which worker trains next.
        train: function that trains the workers in the given slots. It replaces each worker's start model by the result.

    Attributes:
        in_flight: work items that have started but not arrived, by slot, in the order of the starts.
        untrained: slots in flight whose results have not been computed yet.
        arrivals: number of results that have arrived since the start of the run.
        stats: statistics of the current round.
    """

    def __init__(self, server: ServerState, scheduler: Scheduler, train: Train) -> None:
        self.server, self.policy, self.scheduler, self._train = server, server.policy, scheduler, train
        self.in_flight: dict[int, WorkItem] = {}
        self.arrivals = 0
        self.untrained: set[int] = set()
        self._nonfinite: set[int] = set()  # slots in flight whose result contains NaN or infinity
        self._losses = server.shared.cohort.train_loss.numpy()  # faster to read than the tensor
        self._attacks, self._filters = server.combination.attacks, server.combination.filters
        server.train = train
        self.start_round(1)

    def start_round(self, round: int) -> None:
        """Start a new round with empty statistics."""
        self.round, self.stats = round, RoundStats()
        self.server.start_round(round, self.stats)

    def dispatch(self, slot: int, steps: int | None = None) -> WorkItem:
        """Let a worker start its next step or round. Returns the work item, which describes this step or round.

        Args:
            slot: position of the worker among the workers that train at the same time.
            steps: number of local steps. None: the number that the policy or the schedule defines.
        """
        server, policy = self.server, self.policy
        item = self.scheduler.next_item(slot, steps)
        if item.step is None and steps is None:
            item = item._replace(steps=policy.local_steps(server, slot, self.scheduler.steps(item)))
        policy.pull(server, slot)
        server.begin(slot, item.worker)
        self.stats.down += policy.moved(server, slot, int(server.units[slot]))[1]
        server.units[slot] += 1
        self.in_flight[slot] = item
        self.untrained.add(slot)
        return item

    def train(self, slots: Iterable[int]) -> None:
        """Train several workers together. Workers whose results have already been computed are skipped.

        `slots` are the positions of the workers among the workers that train at the same time.
        """
        slots = [slot for slot in slots if slot in self.untrained]
        self._train([self.in_flight[slot] for slot in slots])
        self.untrained.difference_update(slots)
        self._find_nonfinite(slots)

    def is_stale(self, slot: int) -> bool:
        """Whether an update of the global model has cancelled the current work of the worker in `slot`."""
        return self.policy.cancels and self.server.staleness(slot) > 0

    def receive(self, slot: int, staleness: int | None = None) -> None:
        """Pass a worker's result to the policy, and add it to the statistics.

        Args:
            slot: position of the worker among the workers that train at the same time.
            staleness: staleness of the result. None: the number of updates since the worker read the global model.
        """
        server, policy, stats, item = self.server, self.policy, self.stats, self.in_flight.pop(slot)
        unit = int(server.units[slot]) - 1
        staleness = server.staleness(slot) if staleness is None else staleness
        samples = self.scheduler.samples(item)
        up, _ = policy.moved(server, slot, unit)
        self.scheduler.finish(item)
        self.arrivals += 1
        stats.up += up
        stats.samples[item.worker] += samples
        arrival = Arrival(slot, item.worker, unit, staleness)
        if self._attacks and policy.sends_results and not policy.uses_topology and slot not in self._nonfinite:
            server.arrive(arrival)
            self._find_nonfinite([slot])
        if slot in self._nonfinite:
            self._exclude(item)
            return
        stats.loss_sum += float(self._losses[slot]) * samples
        stats.loss_samples += samples
        if up:
            stats.results[item.worker, staleness] += 1
        server.end(slot, item.worker)
        if self._filters and policy.sends_results and not server.admits(arrival):
            policy.on_exclusion(server, slot)
        else:
            policy.take(server, arrival)

    def cancel(self, slot: int) -> None:
        """Cancel the current work of the worker in `slot`. The worker will start the same work again."""
        item = self.in_flight.pop(slot)
        self.scheduler.release(item)
        self.untrained.discard(slot)
        self._nonfinite.discard(slot)
        self.stats.cancelled[item.worker] += 1

    def state(self) -> dict[str, Any]:
        """Return the state after a round as a JSON-serializable dict. Tensors are not included."""
        return {
            "scheduler": self.scheduler.state(),
            "in_flight": list(self.in_flight.values()),
            "untrained": sorted(self.untrained),
            "nonfinite": sorted(self._nonfinite),
            "arrivals": self.arrivals,
        }

    def resume(self, state: DispatcherState) -> None:
        """Restore a saved state."""
        self.in_flight = {item.slot: item for item in state.in_flight}
        if idle := sorted({*state.untrained, *state.nonfinite} - self.in_flight.keys()):
            raise ValueError(
                f"corrupt checkpoint: it describes the training in slot {idle[0]} (the position of a worker in the "
                "cohort), but no worker trains there"
            )
        self.scheduler.resume(state.scheduler, [item.worker for item in state.in_flight])
        self.untrained, self._nonfinite = set(state.untrained), set(state.nonfinite)
        self.arrivals = state.arrivals

    def _exclude(self, item: WorkItem) -> None:
        self._nonfinite.discard(item.slot)
        if self.server.nonfinite == "error":
            raise nonfinite_error(
                self.round, f"the result of worker {called(item.worker)} (the worker's round {item.round})"
            )
        self.stats.excluded.append(item.worker)
        self.policy.on_exclusion(self.server, item.slot)

    def _find_nonfinite(self, slots: list[int]) -> None:
        """Note which of the results in `slots` contain NaN or infinity."""
        self._nonfinite.difference_update(slots)
        if self.server.nonfinite == "keep":
            return
        rows = self.server.shared.cohort.rows
        total = (rows if slots == list(range(len(rows))) else rows[slots]).sum()
        if not math.isfinite(total):  # the sum of finite rows may also overflow
            self._nonfinite.update(slot for slot in slots if not bool(rows[slot].isfinite().all()))
