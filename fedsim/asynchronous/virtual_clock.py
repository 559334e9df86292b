"""The virtual clock: a discrete-event simulation of asynchronous workers, with bit-identical results when repeated.

The result of a work item depends only on the worker's start model, not on when it is computed. So the clock delays
training until the first started work item arrives. Then it trains in one call, in parallel or stacked, all started
work items whose results are certain to be used.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush, nsmallest
from typing import Any

from fedsim.asynchronous.dispatch import Dispatcher, DispatcherState, Scheduler
from fedsim.asynchronous.round_stats import Train
from fedsim.asynchronous.server_state import ServerState
from fedsim.core.snapshot import CheckpointModel, Counts, Number, Seconds
from fedsim.errors import ExperimentError
from fedsim.records.record import TimelineRecord
from fedsim.training.batches import WorkItem

Duration = Callable[[WorkItem, int, tuple[int, int]], float]


class ClockState(CheckpointModel):
    """State of a `VirtualClock`, as stored in a checkpoint.

    A slot is the position of a worker among the workers that train at the same time.

    Attributes:
        dispatcher: state of the dispatcher.
        now: virtual seconds since the start.
        pending: (time, slot) of each future event. An event is the arrival of a result or the departure of a worker.
        idle: slots of idle workers for which the policy has not been asked yet whether they may start.
        waiting: slots of idle workers that the policy did not allow to start.
        asked_at: number of updates of the global model when the policy was last asked about the waiting workers.
        leaving: slots of the workers whose next event is their departure.
        started: number of started steps or rounds of each worker.
    """

    dispatcher: DispatcherState
    now: Seconds
    pending: list[tuple[Seconds, Number]]
    idle: list[Number]
    waiting: list[Number]
    asked_at: Number | None
    leaving: list[Number]
    started: Counts


class VirtualClock:
    """Simulates an asynchronous policy in virtual time.

    A slot is the position of a worker among the workers that train at the same time.

    Args:
        server: state of the server, with the policy.
        scheduler: decides which worker trains next.
        duration: function that returns how many virtual seconds a work item (a step or round) takes. Its arguments are
            the work item, the number of work items that the worker started before, and the numbers of models or
            gradients (sent, received).
        train: function that trains the workers in the given slots.
        departures: maps slots to the virtual seconds at which their workers leave. Unfinished work is lost.
        total_items: number of results after whose arrival the run ends.
    """

    def __init__(
        self,
        server: ServerState,
        scheduler: Scheduler,
        duration: Duration,
        train: Train,
        departures: Mapping[int, float] | None = None,
        total_items: float = math.inf,
    ) -> None:
        self.dispatcher = Dispatcher(server, scheduler, train)
        self._server, self._policy = server, server.policy
        self._duration, self._departures, self._total_items = duration, departures or {}, total_items
        self.now = 0.0  # virtual seconds since the start
        self._events: list[tuple[float, int]] = []  # a heap: the time and the slot of each pending event
        self._idle = list(range(server.n))  # idle slots that have not been asked yet whether they may start
        self._waiting: list[int] = []  # idle slots that were not allowed to start
        self._asked_at: int | None = None  # version of the global row at which the waiting slots were asked
        self._leaving: set[int] = set()  # slots whose pending event is their departure
        self._started: Counter[int] = Counter()  # work items, by worker
        self._start_timeline()

    def run_round(self, round: int) -> None:
        """Simulate until the server has received as many results as in `round` synchronous rounds."""
        enough = round * self.dispatcher.scheduler.total_items_per_round()
        self._start_timeline()
        while self.dispatcher.arrivals < enough:
            self.advance()

    def advance(self) -> int:
        """Advance the clock to the next arrival or departure of a worker, and return how many results arrived."""
        self._start_idle()
        if not self._events:
            raise ExperimentError(self._deadlock())
        version, arrivals = self._server.version, self.dispatcher.arrivals
        slots = self._next_slots()
        for slot in slots:
            self._arrive(slot, slots)
        if self._policy.cancels and self._server.version != version:
            self._cancel_stale()
        return self.dispatcher.arrivals - arrivals

    @property
    def timeline(self) -> TimelineRecord:
        """What each worker has done since the start of the round, until now."""
        dispatcher, training, waiting = self.dispatcher, self._trained.copy(), self._waited.copy()
        for slot, item in dispatcher.in_flight.items():
            training[item.worker] += self.now - self._since[slot]
        for slot in [*self._idle, *self._waiting]:
            waiting[slot] += self.now - self._since[slot]
        if self._server.n < dispatcher.scheduler.n_workers:  # idle slots belong to no worker
            waiting.clear()
        stats = dispatcher.stats
        return TimelineRecord.of(training, waiting, stats.results, stats.dropped, stats.rejected)

    def state(self) -> dict[str, Any]:
        """Return the state after a round as a JSON-serializable dict. Tensors are not included."""
        return {
            "dispatcher": self.dispatcher.state(),
            "now": self.now,
            "pending": sorted(self._events),
            "idle": list(self._idle),
            "waiting": list(self._waiting),
            "asked_at": self._asked_at,
            "leaving": sorted(self._leaving),
            "started": list(self._started.items()),
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state, except for tensors. Raises ValueError if the state is invalid for this run."""
        saved = ClockState.model_validate(state)
        self.dispatcher.resume(saved.dispatcher)
        in_flight, alive = sorted(self.dispatcher.in_flight), set(self._server.alive.tolist())
        pending = sorted(slot for _, slot in saved.pending)
        if pending != in_flight or {*in_flight, *saved.idle, *saved.waiting} != alive:
            raise ValueError("corrupt checkpoint: its workers differ from the workers of this run")
        if any(time < saved.now for time, _ in saved.pending):
            raise ValueError("corrupt checkpoint: the time of a future event is before the current time")
        self.now, self._events = saved.now, sorted(saved.pending)
        self._idle, self._waiting, self._asked_at = saved.idle, saved.waiting, saved.asked_at
        self._leaving, self._started = set(saved.leaving), Counter(dict(saved.started))

    def _start_timeline(self) -> None:
        """Start to measure how long each worker trains and waits."""
        self._since = [self.now] * self._server.n  # time up to which the seconds of each slot are counted
        self._trained: defaultdict[int, float] = defaultdict(float)  # seconds, by worker
        self._waited: defaultdict[int, float] = defaultdict(float)

    def _start_idle(self) -> None:
        """Start all idle workers that may start now."""
        server, policy = self._server, self._policy
        if server.version != self._asked_at:
            self._idle += self._waiting
            self._waiting, self._asked_at = [], server.version
        for slot in sorted(self._idle):
            if policy.may_start(server, slot):
                self._start(slot)
            else:
                self._waiting.append(slot)
        self._idle = []
        if server.version != self._asked_at:  # the start of a worker has updated the global model, as with `ssp`
            self._start_idle()

    def _start(self, slot: int) -> None:
        item = self.dispatcher.dispatch(slot)
        moved = self._policy.moved(self._server, slot, int(self._server.units[slot]) - 1)
        seconds = self._duration(item, self._started[item.worker], moved)
        self._started[item.worker] += 1
        if waited := self.now - self._since[slot]:
            self._waited[item.worker] += waited
            self._since[slot] = self.now
        if self._departures and (remaining := self._departures.get(slot, math.inf) - self.now) < seconds:
            self._leaving.add(slot)
            seconds = max(0.0, remaining)
        heappush(self._events, (self.now + seconds, slot))

    def _next_slots(self) -> list[int]:
        """Advance to the time of the next event. Returns the slots of all events at this time, in ascending order."""
        self.now, slot = heappop(self._events)
        slots = [slot]
        while self._events and self._events[0][0] == self.now:
            slots.append(heappop(self._events)[1])
        return slots

    def _arrive(self, slot: int, arriving: Sequence[int]) -> None:
        """Process an event: the worker in `slot` leaves, or its result arrives.

        `arriving` contains the slots of all events at the current time.
        """
        dispatcher, item = self.dispatcher, self.dispatcher.in_flight[slot]
        self._trained[item.worker] += self.now - self._since[slot]
        self._since[slot] = self.now
        if slot in self._leaving:
            self._leave(slot)
            return
        self._idle.append(slot)
        if dispatcher.is_stale(slot):  # cancelled by an update at this same time
            dispatcher.cancel(slot)
            return
        if slot in dispatcher.untrained:
            dispatcher.train(self._certain_arrivals(arriving))
        dispatcher.receive(slot)

    def _certain_arrivals(self, arriving: Sequence[int]) -> list[int]:
        """Return the slots of the work in flight whose results are certain to be used.

        If not all results are certain to be used, the slots are in the order of arrival. `arriving` contains the slots
        of all events at the current time.
        """
        in_flight, count = self.dispatcher.in_flight, self._policy.arrivals_needed(self._server)
        remaining = self._total_items - self.dispatcher.arrivals
        if count is None and remaining < len(in_flight):
            count = int(remaining)
        if count is None:
            return [slot for slot in in_flight if slot not in self._leaving]
        count = max(1, count)
        coming = [slot for slot in arriving if slot in in_flight]
        coming += [slot for _, slot in nsmallest(count, self._events)]
        return [slot for slot in coming if slot not in self._leaving][:count]

    def _cancel_stale(self) -> None:
        """Cancel all unfinished work that started before the latest update of the global model."""
        stale = {slot for slot in self.dispatcher.in_flight if self._server.staleness(slot)}
        self._events = [event for event in self._events if event[1] not in stale]
        heapify(self._events)
        self._leaving -= stale
        self._idle += stale
        for slot in stale:
            self._trained[self.dispatcher.in_flight[slot].worker] += self.now - self._since[slot]
            self._since[slot] = self.now
            self.dispatcher.cancel(slot)

    def _leave(self, slot: int) -> None:
        self._leaving.discard(slot)
        self.dispatcher.cancel(slot)
        self._server.alive_mask[slot] = 0
        self._asked_at = None
        self._policy.on_departure(self._server)

    def _deadlock(self) -> str:
        n, left = self._server.n, self._server.n - len(self._server.alive)
        departed = f": {left} of {n} workers have left; let fewer leave (clock.departures)" if left else ""
        return (
            f"policy: deadlock at {self.now:g} virtual seconds, because no worker is busy and the policy lets no "
            f"worker start{departed}"
        )
