"""The virtual clock: a discrete-event simulation of asynchronous workers, reproducible to the bit.

A result depends only on the model that its worker started from. So the clock computes work only when the first result
of it arrives, and then computes all work in flight together, which engines do in parallel or as one stack.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush, nsmallest
from typing import Any

from fedsim.asynchronous.dispatch import (
    CheckpointModel,
    Counts,
    Dispatcher,
    DispatcherState,
    Number,
    Scheduler,
    Seconds,
    Train,
)
from fedsim.asynchronous.server_state import ServerState
from fedsim.engines.trainers.batches import WorkItem
from fedsim.errors import ExperimentError

Duration = Callable[[WorkItem, int, tuple[int, int]], float]


class ClockState(CheckpointModel):
    """State of a `VirtualClock`."""

    dispatcher: DispatcherState
    now: Seconds
    pending: list[tuple[Seconds, Number]]
    idle: list[Number]
    waiting: list[Number]
    asked_at: Number | None
    leaving: list[Number]
    started: Counts


class VirtualClock:
    """Runs a policy in virtual time.

    All results that arrive at the same time are taken, in the order of their slots, before a worker starts again.

    Args:
        duration: seconds of a work item, given the item, the number of items that its worker started before, and the
            numbers of models or gradients that it sends and receives.
        train: computes work items, see `Dispatcher`.
        departures: virtual seconds at which workers leave, by slot; work that has not arrived by then never does.
        total_items: number of work items after which the run ends; the clock computes none that arrives later.
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
        self._idle = list(range(server.n))  # slots to ask whether they may start
        self._waiting: list[int] = []  # slots that may not start,
        self._asked_at: int | None = None  # when asked at this version
        self._leaving: set[int] = set()  # slots whose pending event is their departure
        self._started: Counter[int] = Counter()  # work items, by worker

    def run_round(self, round: int) -> None:
        """Advance until the policy has taken as much work as `round` synchronous rounds have."""
        enough = round * self.dispatcher.scheduler.total_items_per_round()
        while self.dispatcher.arrivals < enough:
            self.advance()

    def advance(self) -> int:
        """Simulate the next point in time at which something arrives; return the number of arrivals."""
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

    def state(self) -> dict[str, Any]:
        """Return the state between two rounds, in JSON types; the tensors are the server's and the engine's."""
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
        """Continue from a state that `state` returned. The server's tensors must have the values of that moment.

        Raises ValueError if the state is not one of this clock.
        """
        saved = ClockState.model_validate(state)
        self.dispatcher.resume(saved.dispatcher)
        in_flight, alive = sorted(self.dispatcher.in_flight), set(self._server.alive.tolist())
        pending = sorted(slot for _, slot in saved.pending)
        if pending != in_flight or {*in_flight, *saved.idle, *saved.waiting} != alive:
            raise ValueError("the slots of the checkpoint are not those of this run")
        if any(time < saved.now for time, _ in saved.pending):
            raise ValueError("a pending event of the checkpoint is in the past")
        self.now, self._events = saved.now, sorted(saved.pending)
        self._idle, self._waiting, self._asked_at = saved.idle, saved.waiting, saved.asked_at
        self._leaving, self._started = set(saved.leaving), Counter(dict(saved.started))

    def _start_idle(self) -> None:
        """Start all idle workers that may start. Ask a waiting one again only after an update or a departure."""
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

    def _start(self, slot: int) -> None:
        item = self.dispatcher.dispatch(slot)
        moved = self._policy.traffic(int(self._server.units[slot]) - 1)
        seconds = self._duration(item, self._started[item.worker], moved)
        self._started[item.worker] += 1
        if self._departures and (remaining := self._departures.get(slot, math.inf) - self.now) < seconds:
            self._leaving.add(slot)
            seconds = max(0.0, remaining)
        heappush(self._events, (self.now + seconds, slot))

    def _next_slots(self) -> list[int]:
        """Advance to the earliest event; return the slots of all events at exactly that time, ascending."""
        self.now, slot = heappop(self._events)
        slots = [slot]
        while self._events and self._events[0][0] == self.now:
            slots.append(heappop(self._events)[1])
        return slots

    def _arrive(self, slot: int, arriving: Sequence[int]) -> None:
        """Process the arrival of one of the slots in `arriving`: its worker leaves, or the policy takes its result."""
        dispatcher = self.dispatcher
        if slot in self._leaving:
            self._leave(slot)
            return
        self._idle.append(slot)
        if dispatcher.is_stale(slot):  # an update at this very time has cancelled it
            dispatcher.cancel(slot)
            return
        if slot in dispatcher.untrained:
            dispatcher.train(self._certain_arrivals(arriving))
        dispatcher.receive(slot)

    def _certain_arrivals(self, arriving: Sequence[int]) -> list[int]:
        """Return the slots whose work neither an update nor the end of the run can make useless, the earliest first."""
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
        """After an update, cancel all work that started before it."""
        stale = {slot for slot in self.dispatcher.in_flight if self._server.staleness(slot)}
        self._events = [event for event in self._events if event[1] not in stale]
        heapify(self._events)
        self._leaving -= stale
        self._idle += stale
        for slot in stale:
            self.dispatcher.cancel(slot)

    def _leave(self, slot: int) -> None:
        self._leaving.discard(slot)
        self.dispatcher.cancel(slot)
        self._server.alive_mask[slot] = 0
        self._asked_at = None
        self._policy.on_departure(self._server)

    def _deadlock(self) -> str:
        n, left = self._server.n, self._server.n - len(self._server.alive)
        departed = f"; {left} of {n} workers have left (clock.departures)" if left else ""
        return f"policy: at {self.now:g} virtual seconds no worker is busy and none may start{departed}"
