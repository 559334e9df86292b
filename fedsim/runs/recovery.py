"""Rounds that outlive the processes in which workers train.

What a round comes to depends on what the round before has left, and on nothing else. So when a process is lost in the
middle of a round, however little is known of what it has left half done, all of that is put back as it was before the
round, new processes are started, and the round is done again: to the bit as if nothing had happened.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from fedsim.engines import Engine
from fedsim.engines.retrying import Note, announce, retried
from fedsim.engines.station import deal
from fedsim.errors import ProcessLostError, WorkerError
from fedsim.preparation import Setting
from fedsim.records import RoundRecord
from fedsim.simulation import Loop, SynchronousLoop
from fedsim.snapshot import Snapshot

T = TypeVar("T")


def recovering(loop: Loop, setting: Setting, engine: Engine, note: Note | None = None) -> Loop:
    """The loop as `on_worker_failure` has it; the same one where its engine has no processes to lose.

    note: is told of every process that was lost and replaced.
    """
    policy = setting.experiment.on_worker_failure
    if policy == "abort" or not engine.can_lose_processes:
        return loop
    if policy == "drop":
        assert isinstance(loop, SynchronousLoop)
        return DroppingLoop(loop, setting, engine, note)
    return RecoveringLoop(loop, setting, engine, note)


class RecoveringLoop:
    """A loop whose rounds are done again if they lose a process, `worker_retries` times each at most.

    The same holds for what it does between rounds. It keeps the state before the current round: a copy of what one
    round leaves to the next, on a GPU with enough memory there, where copying takes a thousandth of the time.
    """

    def __init__(self, loop: Loop, setting: Setting, engine: Engine, note: Note | None = None) -> None:
        self._loop, self._engine, self._note = loop, engine, note
        self._retries, self._rounds = setting.experiment.worker_retries, setting.experiment.rounds
        self._before: Snapshot | None = None

    def play(self, round: int) -> RoundRecord:
        """One round; raises WorkerError if it has lost a process once more than it may be done again."""
        before = self.state()

        def attempt(number: int) -> RoundRecord:
            if number > 1:
                self._engine.replace_processes()
                self._loop.resume(before)
            record = self._attempt(round)
            self._before = self._loop.state()  # now, since processes may be lost between two rounds too
            return record

        report = functools.partial(self._report, round)
        return retried(attempt, self._retries, report, f"round {round} has been tried")

    def state(self) -> Snapshot:
        if self._before is None:  # before the first round
            self._before = self._between_rounds(self._loop.state)
        return self._before

    def resume(self, state: Snapshot) -> None:
        self._between_rounds(lambda: self._loop.resume(state))
        self._before = state

    def finish(self) -> None:
        before = self.state()
        restore = functools.partial(self._loop.resume, before)
        self._between_rounds(self._loop.finish, restore, self._rounds, "ending the run has been tried")

    def _between_rounds(
        self,
        call: Callable[[], T],
        restore: Callable[[], object] = lambda: None,
        round: int = 0,
        what: str = "its processes have been started",
    ) -> T:
        """What `call` gives; after a loss it is called again on new processes, to which `restore` gives the state.

        `round` is the last round before the call, for the record of a loss; `what` is as in `retried`.
        """

        def attempt(number: int) -> T:
            if number > 1:
                self._engine.replace_processes()
                restore()
            return call()

        return retried(attempt, self._retries, functools.partial(self._report_between, round), what)

    def _attempt(self, round: int) -> RoundRecord:
        return self._loop.play(round)

    def _report(self, round: int, loss: ProcessLostError, attempt: int) -> None:
        """Say that the round is done again."""
        then = f", and round {round} is done again"
        announce(loss, attempt, self._retries, self._note, round=round, then=then)

    def _report_between(self, round: int, loss: ProcessLostError, attempt: int) -> None:
        announce(loss, attempt, self._retries, self._note, round=round)


class DroppingLoop(RecoveringLoop):
    """The same, but a round is done again without those whose process was lost; they take part again in the next.

    That is the worker it was working on or, where that was none or several, all who had been dealt to it.
    """

    _loop: SynchronousLoop

    def __init__(self, loop: SynchronousLoop, setting: Setting, engine: Engine, note: Note | None = None) -> None:
        super().__init__(loop, setting, engine, note)
        self._schedule, self._has_root = setting.schedule, setting.task.rule.takes("root")
        self._lost: list[int] = []

    def play(self, round: int) -> RoundRecord:
        """See `RecoveringLoop`; raises WorkerError too where nobody of the cohort is left."""
        self._lost = []
        return super().play(round)

    def _attempt(self, round: int) -> RoundRecord:
        return self._loop.play(round, self._lost)

    def _report(self, round: int, loss: ProcessLostError, attempt: int) -> None:
        lost = self._in_hand(loss, round)
        if not lost:  # as where it was still starting, or the server's own row was in hand
            super()._report(round, loss, attempt)
            return
        self._lost += lost
        named = f"{'worker' if len(lost) == 1 else 'workers'} {', '.join(map(str, lost))}"
        if len(self._lost) == len(self._loop.cohort(round)):
            raise WorkerError(f"{loss}; without {named}, nobody is left of the cohort of round {round}") from loss
        then = f", and round {round} is done again without {named}"
        announce(loss, attempt, self._retries, self._note, round=round, kind="worker dropped", then=then)

    def _in_hand(self, loss: ProcessLostError, round: int) -> list[int]:
        """The workers of the cohort who are lost with a process; see `Station`."""
        cohort = [worker for worker in self._loop.cohort(round) if worker not in self._lost]
        if loss.worker is not None:
            return [worker for worker in cohort if worker == loss.worker]
        memory = self._engine.memory
        sizes = [memory.shards.size(worker) for worker in cohort] + [len(memory.root)] * self._has_root
        hands = deal([self._schedule.steps_for(size) for size in sizes], loss.processes)
        return [cohort[place] for place in hands[loss.process] if place < len(cohort)]
