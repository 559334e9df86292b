"""Recovery from lost processes (`process_retries`).

A round depends only on the state after the previous round. If a process is lost, this state is restored, new processes
are started, and the round is repeated. The result is bit-identical to a run without the loss, except in races.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fedsim.config.experiment import Experiment
from fedsim.core.snapshot import Snapshot
from fedsim.engines import Engine
from fedsim.processes.retry import Note, announce, retried
from fedsim.records.record import RoundRecord
from fedsim.runs.loops.loop import Loop

T = TypeVar("T")

STARTED = "its processes have been started"


def recovering(loop: Loop, experiment: Experiment, engine: Engine, note: Note | None = None) -> Loop:
    """Return an object that runs the same rounds as `loop`, and repeats a round if a process dies. It is prepared.

    Args:
        loop: object that runs the rounds.
        experiment: experiment of the run.
        engine: engine that is ready for the first round.
        note: function that records each lost process; None to record nothing.
    """
    if experiment.process_retries and engine.can_lose_processes:
        loop = RecoveringLoop(loop, experiment, engine, note)
    loop.prepare()
    return loop


def repeated(
    call: Callable[[], T], experiment: Experiment, engine: Engine, note: Note | None, action: str, round: int = 0
) -> T:
    """Return the result of a function that calls the engine's processes. If a process dies, replace it and call again.

    Args:
        call: function that needs nothing from the processes except the task that they have begun.
        experiment: experiment of the run.
        engine: engine that has begun the task.
        note: function that records each lost process; None to record nothing.
        action: beginning of the error message, such as "tests have been tried".
        round: current round; 0 before the first round.
    """

    def attempt(number: int) -> T:
        if not engine.at_work:  # also after an error in one of its processes, which has closed the pool
            engine.replace_processes()
        return call()

    retries = experiment.process_retries
    return retried(attempt, retries, lambda loss, number: announce(loss, number, retries, note, round=round), action)


class RecoveringLoop:
    """Runs rounds, and repeats a round if a process dies, at most `process_retries` times.

    It keeps a copy of the state before the current round.
    """

    def __init__(self, loop: Loop, experiment: Experiment, engine: Engine, note: Note | None = None) -> None:
        self._loop, self._engine, self._note = loop, engine, note
        self._retries, self._rounds = experiment.process_retries, experiment.rounds
        self._before: Snapshot | None = None

    def prepare(self) -> None:
        self._repeated(self._loop.prepare, STARTED, 0)

    def run_round(self, round: int) -> RoundRecord:
        """Run one round, and return its record.

        Raises WorkerError if a process dies more than `process_retries` times.
        """
        self.state()

        def call() -> tuple[RoundRecord, Snapshot]:
            return self._loop.run_round(round), self._loop.state()  # reading the state may also lose a process

        then = f", and round {round} is repeated"
        record, self._before = self._repeated(call, f"round {round} has been tried", round, then)
        return record

    def state(self) -> Snapshot:
        if self._before is None:  # before the first round
            self._before = self._repeated(self._loop.state, STARTED, 0)
        return self._before

    def resume(self, state: Snapshot) -> None:
        self._before = None
        self._repeated(lambda: self._loop.resume(state), STARTED, 0)
        self._before = state

    def test_workers(self, round: int) -> dict[str, float]:
        self.state()
        return self._repeated(lambda: self._loop.test_workers(round), "tests have been tried", round)

    def finish(self) -> None:
        self.state()
        self._repeated(self._loop.finish, "ending the run has been tried", self._rounds)

    def _repeated(self, call: Callable[[], T], action: str, round: int, then: str = "") -> T:
        """Return the result of `call`. If a process dies, start new processes, restore the state and call again.

        Args:
            call: function to call.
            action: beginning of the error message, such as "round 3 has been tried".
            round: current round, for the warning about the lost process.
            then: end of this warning, such as ", and round 3 is repeated".
        """

        def attempt(number: int) -> T:
            if number > 1:
                self._engine.replace_processes()
                self._loop.prepare()
                if self._before is not None:
                    self._loop.resume(self._before)
            return call()

        return retried(
            attempt,
            self._retries,
            lambda loss, number: announce(loss, number, self._retries, self._note, round=round, then=then),
            action,
        )
