"""Recovery from lost worker processes (`on_worker_failure`).

A round depends only on the state after the round before. If a process is lost, that state is restored, new processes
are started, and the round is repeated, with bitwise the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from fedsim.core.snapshot import Snapshot
from fedsim.engines import Engine
from fedsim.engines.executor import balance_load
from fedsim.engines.pool.retry import Note, announce, retried
from fedsim.errors import ProcessLostError, WorkerError
from fedsim.records.record import RoundRecord
from fedsim.runs.loops.loop import Loop
from fedsim.runs.loops.synchronous import SynchronousLoop
from fedsim.runs.setup import PreparedRun

T = TypeVar("T")

STARTED = "its processes have been started"


def recovering(loop: Loop, prepared: PreparedRun, engine: Engine, note: Note | None = None) -> Loop:
    """The loop with the recovery that `on_worker_failure` asks for; the loop itself if its engine has no processes.

    `note` is called for every process that was lost and replaced.
    """
    policy = prepared.experiment.on_worker_failure
    if policy == "abort" or not engine.can_lose_processes:
        return loop
    if policy == "drop":
        assert isinstance(loop, SynchronousLoop)
        return DroppingLoop(loop, prepared, engine, note)
    return RecoveringLoop(loop, prepared, engine, note)


class RecoveringLoop:
    """A loop that repeats a round that loses a process, at most `worker_retries` times.

    The same holds for calls between rounds. It keeps a copy of the state before the current round, on the GPU if that
    has enough memory, since copies there are fast.
    """

    def __init__(self, loop: Loop, prepared: PreparedRun, engine: Engine, note: Note | None = None) -> None:
        self._loop, self._engine, self._note = loop, engine, note
        self._retries, self._rounds = prepared.experiment.worker_retries, prepared.experiment.rounds
        self._before: Snapshot | None = None

    def run_round(self, round: int) -> RoundRecord:
        """Run one round. Raises WorkerError if it loses more processes than it may be repeated."""
        self.state()

        def call() -> RoundRecord:
            record = self._run_once(round)
            self._before = self._loop.state()  # repeated too, since processes may be lost between rounds
            return record

        return self._repeated(call, partial(self._report, round), f"round {round} has been tried")

    def state(self) -> Snapshot:
        if self._before is None:  # before the first round
            self._before = self._repeated(self._loop.state, partial(self._announce, 0), STARTED)
        return self._before

    def resume(self, state: Snapshot) -> None:
        self._before = None
        self._repeated(lambda: self._loop.resume(state), partial(self._announce, 0), STARTED)
        self._before = state

    def test_workers(self, round: int) -> dict[str, float]:
        self.state()
        return self._repeated(
            lambda: self._loop.test_workers(round), partial(self._announce, round), "tests have been tried"
        )

    def finish(self) -> None:
        self.state()
        self._repeated(self._loop.finish, partial(self._announce, self._rounds), "ending the run has been tried")

    def _repeated(self, call: Callable[[], T], report: Callable[[ProcessLostError, int], object], what: str) -> T:
        """The result of `call`, repeated after a loss on new processes and from the state before; see `retried`."""

        def attempt(number: int) -> T:
            if number > 1:
                self._engine.replace_processes()
                if self._before is not None:
                    self._loop.resume(self._before)
            return call()

        return retried(attempt, self._retries, report, what)

    def _run_once(self, round: int) -> RoundRecord:
        return self._loop.run_round(round)

    def _report(self, round: int, loss: ProcessLostError, attempt: int) -> None:
        """Announce that the round is repeated."""
        self._announce(round, loss, attempt, then=f", and round {round} is done again")

    def _announce(self, round: int, loss: ProcessLostError, attempt: int, **more: str) -> None:
        announce(loss, attempt, self._retries, self._note, round=round, **more)


class DroppingLoop(RecoveringLoop):
    """A loop that repeats a round without the workers whose process was lost; they take part again in the next round.

    These are the worker that the process was training or, if that is not known, all workers assigned to it.
    """

    _loop: SynchronousLoop

    def __init__(self, loop: SynchronousLoop, prepared: PreparedRun, engine: Engine, note: Note | None = None) -> None:
        super().__init__(loop, prepared, engine, note)
        self._schedule, self._has_root = prepared.task.schedule, prepared.task.rule.accepts("root")
        self._lost: list[int] = []

    def run_round(self, round: int) -> RoundRecord:
        """See `RecoveringLoop`. Raises WorkerError too if no worker of the cohort is left."""
        self._lost = []
        return super().run_round(round)

    def _run_once(self, round: int) -> RoundRecord:
        return self._loop.run_round(round, self._lost)

    def _report(self, round: int, loss: ProcessLostError, attempt: int) -> None:
        lost = self._workers_of(loss, round)
        if not lost:  # it was starting, or training the server's own row
            super()._report(round, loss, attempt)
            return
        self._lost += lost
        named = f"{'worker' if len(lost) == 1 else 'workers'} {', '.join(map(str, lost))}"
        if len(self._lost) == len(self._loop.cohort):
            raise WorkerError(f"{loss}; without {named}, no worker is left in the cohort of round {round}") from loss
        then = f", and round {round} is done again without {named}"
        self._announce(round, loss, attempt, kind="worker dropped", then=then)

    def _workers_of(self, loss: ProcessLostError, round: int) -> list[int]:
        """The workers of the cohort that were lost with a process; see `Executor`."""
        cohort = [worker for worker in self._loop.cohort if worker not in self._lost]
        if loss.worker is not None:
            return [worker for worker in cohort if worker == loss.worker]
        shared = self._engine.shared
        sizes = {worker: shared.shards.size(worker) for worker in cohort}
        if self._has_root:
            sizes[len(shared.shards)] = len(shared.root)
        steps = [self._schedule.of(worker, round).steps_for(size) for worker, size in sizes.items()]
        assigned = balance_load(steps, loss.processes)[loss.process]
        return [cohort[place] for place in assigned if place < len(cohort)]
