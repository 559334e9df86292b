"""The dispatcher: it starts work items and hands their results to the policy, on the clock and in races."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from fedsim.asynchronous.policy import Arrival
from fedsim.asynchronous.scheduler import CheckpointModel, Number, Scheduler, SchedulerState
from fedsim.asynchronous.server_state import ServerState
from fedsim.engines.trainers.batches import WorkItem
from fedsim.errors import DivergedError

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

    def add(self, other: RoundStats) -> None:
        """Add the counts of another process."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


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
        """The state between two rounds, in JSON types; the tensors are the server's and the engine's."""
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


def nonfinite_error(round: int, what: str) -> DivergedError:
    """The error for a result that holds NaN or infinity."""
    remedy = "reduce local.lr, or exclude such work with aggregate.nonfinite=exclude"
    return DivergedError(f"{what} holds NaN or infinity", remedy, round)
