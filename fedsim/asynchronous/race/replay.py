"""Repeat a race from its log: work items start and arrive in the logged order, so the results are bit-identical."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedsim.asynchronous.dispatch import Dispatcher, DispatcherState, Scheduler
from fedsim.asynchronous.race.log import CANCELLED, LEFT, LogEntry
from fedsim.asynchronous.round_stats import Train
from fedsim.asynchronous.server_state import ServerState
from fedsim.errors import ExperimentError, show

MOST_STEPS = 1_000  # maximum number of steps in a work item, as a multiple of its scheduled steps


class Event(NamedTuple):
    """The start or the arrival of a worker's step or round in a logged race (asynchronous training in real time).

    Attributes:
        number: event number, which determines the order of the events.
        starts: whether the event is a start (true) or an arrival (false).
        entry: log entry of the step or round.
    """

    number: int
    starts: bool
    entry: LogEntry


class LoggedOrder:
    """Repeats a logged race exactly, with the same interface as `VirtualClock`.

    Args:
        log: log entries by round.
        path: path of the log, for error messages.
        server: state of the server, with the policy.
        scheduler: decides which worker trains next.
        train: function that trains the workers in the given slots.

    Raises ExperimentError as soon as an event differs from the log.
    """

    now = timeline = None  # a replay has no virtual time

    def __init__(
        self, log: Mapping[int, Sequence[LogEntry]], path: str, server: ServerState, scheduler: Scheduler, train: Train
    ) -> None:
        self._log, self._path, self._server = log, path, server
        self.dispatcher = Dispatcher(server, scheduler, train)

    def run_round(self, round: int) -> None:
        """Repeat one round of the logged race."""
        if round not in self._log:
            raise ExperimentError(
                f"clock.replay_log = {show(self._path)}: round {round} is not in the log, which has {len(self._log)} "
                f"rounds; lower `rounds`"
            )
        starts = [Event(entry.begun, True, entry) for entry in self._log[round] if entry.kind != LEFT]
        for event in sorted([*starts, *(Event(entry.taken, False, entry) for entry in self._log[round])]):
            slot = event.entry.worker
            self._require(slot < self._server.n, event, f"there is no worker {slot}")
            if event.entry.kind == LEFT:
                self._server.alive_mask[slot] = 0
                self._server.policy.on_departure(self._server)
            elif event.starts:
                self._start(event)
            else:
                self._arrive(event)
        self._server.revive_all()

    def state(self) -> dict[str, Any]:
        """Return the state after a round as a JSON-serializable dict. Tensors are not included."""
        return self.dispatcher.state()

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state, except for tensors."""
        self.dispatcher.resume(DispatcherState.model_validate(state))

    def _start(self, event: Event) -> None:
        slot, entry, dispatcher = event.entry.worker, event.entry, self.dispatcher
        self._require(slot not in dispatcher.in_flight, event, f"worker {slot} starts while it is busy")
        item = dispatcher.dispatch(slot, entry.steps or None)
        most = MOST_STEPS * dispatcher.scheduler.steps(item._replace(steps=None))
        self._require(entry.steps <= most, event, f"worker {slot} takes {entry.steps} steps, more than {most}")
        self._compare(event, f"worker {slot} reads", entry.read, int(self._server.read[slot]))

    def _arrive(self, event: Event) -> None:
        slot, entry, dispatcher = event.entry.worker, event.entry, self.dispatcher
        self._require(slot in dispatcher.in_flight, event, f"worker {slot} has not started the work that arrives")
        if slot in dispatcher.untrained:
            dispatcher.train(dispatcher.in_flight)
        self._compare(event, f"the result of worker {slot} arrives at", entry.applied, self._server.version)
        cancelled = entry.kind == CANCELLED
        now, then = ("used", "cancelled") if cancelled else ("cancelled", "used")
        problem = f"the result of worker {slot} is {then} in the log, but {now} now"
        self._require(dispatcher.is_stale(slot) == cancelled, event, problem)
        if cancelled:
            dispatcher.cancel(slot)
        else:
            dispatcher.receive(slot)

    def _compare(self, event: Event, action: str, version: int, here: int) -> None:
        self._require(version == here, event, f"{action} version {version} in the log, but version {here} now")

    def _require(self, holds: bool, event: Event, problem: str) -> None:
        if not holds:
            raise ExperimentError(
                f"clock.replay_log = {show(self._path)}: the log does not match this experiment: "
                f"at event {event.number}, {problem}"
            )
