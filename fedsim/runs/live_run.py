"""A run in progress, as its callbacks see it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import TypeVar

from torch import Tensor, nn

from fedsim.config.experiment import Experiment
from fedsim.core.snapshot import Snapshot
from fedsim.data.digests import digest, digests_of
from fedsim.engines import Engine, RunTask
from fedsim.errors import DivergedError
from fedsim.processes.retry import STARTED, retried
from fedsim.records.record import RoundRecord
from fedsim.records.run_folder import RunFolder
from fedsim.records.worker_results import WorkerResults
from fedsim.rounds.evaluation import EvaluationResult
from fedsim.rounds.executor import Executor
from fedsim.runs.loops.clock_loop import ClockLoop
from fedsim.runs.loops.loop import Loop
from fedsim.runs.loops.race_loop import RaceLoop
from fedsim.runs.loops.synchronous import SynchronousLoop
from fedsim.runs.metadata import RunMetadata
from fedsim.runs.personal_models import module_of
from fedsim.runs.result import Result

T = TypeVar("T")

TESTED = "tests have been tried"
MOST_HASHED = 2**28  # bytes of each tensor of the data, which take about half a second


def loop_of(experiment: Experiment, task: RunTask, engine: Engine, folder: RunFolder | None = None) -> Loop:
    """Return the object that runs the rounds of an experiment.

    Args:
        experiment: the experiment, with its data set, which the copy in `task` does not name.
        task: description of the run.
        engine: engine that is ready for the first round.
        folder: writer of the run's records, which receives the log of a race; None to keep no log.
    """
    if experiment.mode == "race":
        return RaceLoop(experiment, task, engine, folder.race_log if folder else None)
    return SynchronousLoop(task, engine) if experiment.in_rounds else ClockLoop(experiment, task, engine)


class LiveRun:
    """A run in progress, as passed to `Callback.on_start`.

    A round depends only on the state after the previous round. If a process is lost and `max_restarts` allows it,
    this state is restored, new processes are started, and the round is repeated. The result is bit-identical to a run
    without the loss, except in races.

    Args:
        experiment: the experiment, with all defaults.
        task: description of the run.
        engine: engine that is ready for the first round.
        folder: writer of the run's records. None without records, and in processes other than rank 0.
        recorded: whether the run writes records.

    Attributes:
        experiment, task, engine, folder, recorded: the arguments.
        loop: object that runs the rounds.
        metadata: what is known about the run before the first round, such as the number of samples per worker.
        run_round: function that runs one round (counted from 1) and returns its record.
        history: one record per finished round.
        stopped: reason why the run ends after the current round, or None if it continues.
        ended: if the run is a continuation of a run that ended early, the reason why it ended. None otherwise.
        on_request: whether a user-defined callback has ended the run.
    """

    def __init__(
        self,
        experiment: Experiment,
        task: RunTask,
        engine: Engine,
        folder: RunFolder | None = None,
        *,
        recorded: bool = False,
    ) -> None:
        self.experiment, self.task, self.engine = experiment, task, engine
        self.folder, self.recorded = folder, recorded
        self.history: list[RoundRecord] = []
        self.stopped: str | None = None
        self.ended: str | None = None
        self.on_request = False
        self._repeats = experiment.max_restarts > 0 and engine.can_lose_processes
        self._before: Snapshot | None = None  # state before the current round, if rounds may have to be repeated
        self.loop = loop_of(experiment, task, engine, folder)
        self._repeated(self.loop.prepare, STARTED)
        self.metadata = self._repeated(lambda: RunMetadata.of(experiment, task, engine), STARTED)
        run_round = self._run_or_repeat if self._repeats else self.loop.run_round
        ends = experiment.aggregate.nonfinite == "stop"
        self.run_round: Callable[[int], RoundRecord] = partial(self._run_or_end, run_round) if ends else run_round

    def _run_or_repeat(self, round: int) -> RoundRecord:
        """Run one round, and return its record. If a process dies, repeat the round.

        Raises WorkerError if a process dies more than `max_restarts` times.
        """
        self.state()

        def call() -> tuple[RoundRecord, Snapshot]:
            return self.loop.run_round(round), self.loop.state()  # reading the state may also lose a process

        then = f", and round {round} is repeated"
        record, self._before = self._repeated(call, f"round {round} has been tried", round, then)
        return record

    def _run_or_end(self, run_round: Callable[[int], RoundRecord], round: int) -> RoundRecord:
        """Run one round, and return its record.

        If the training diverges, the global model from before the round is restored and tested.
        """
        server = self.engine.shared.server
        before = server.row.clone(), server.buffers.clone()
        try:
            return run_round(round)
        except DivergedError as error:
            server.row.copy_(before[0])
            server.buffers.copy_(before[1])
            self._repeated(lambda: self.engine.run(Executor.test, round), TESTED, round, restores=False)
            tested = EvaluationResult.of(self.task, self.engine.shared)
            return RoundRecord(round=round, diverged=error.problem, **tested.fields())

    @property
    def tests(self) -> WorkerResults | None:
        """Latest results of tests of individual workers; None if there are none."""
        return self.loop.tests

    def tests_after(self, round: int) -> WorkerResults | None:
        """Return the results of tests of individual workers after `round`; None if there were none."""
        return self.tests if self.tests and self.tests.round == round else None

    def test_workers(self, round: int) -> WorkerResults | None:
        """Test the models of individual workers after `round`. Returns None if the experiment has no such tests."""
        return self._repeated(lambda: self.loop.test_workers(round), TESTED, round)

    def model(self) -> nn.Module:
        """Return a copy of the global model, on the CPU and in evaluation mode."""
        server = self.engine.shared.server
        return module_of(self.task, server.row, server.buffers)

    @property
    def global_row(self) -> Tensor:
        """Copy of the global model's parameters as one flat vector [d], on the CPU."""
        return self.engine.shared.server.row.cpu().clone()

    @cached_property
    def data_digests(self) -> dict[str, str]:
        """Hashes of the samples and of their assignment to workers, by name, which checkpoints store.

        Of a tensor with more than `MOST_HASHED` bytes, only every k-th sample is hashed, so a change of the other
        samples stays unnoticed. So does a change of the code that draws shards on demand.
        """
        data = self.engine.shared.data
        parts = {"training": data.train, "test": data.test, "validation": data.validation}
        if data.own_tests is not data.test:
            parts["worker test"] = data.own_tests
        digests = digests_of({name: part for name, part in parts.items() if len(part)}, MOST_HASHED)
        shards = {"shard": data.shards, "local test shard": data.worker_tests}
        for name, of_workers in shards.items():
            tensors = [tensor for tensor in of_workers.tensors if len(tensor)]
            digests |= {f"{name} {i}": digest(tensor, MOST_HASHED) for i, tensor in enumerate(tensors)}
        return digests

    def state(self) -> Snapshot:
        """Return a snapshot of everything that the next round needs."""
        state = self._repeated(self.loop.state, STARTED) if self._before is None else self._before
        self._before = state if self._repeats else None
        return state

    def resume(self, state: Snapshot) -> None:
        """Restore a snapshot that the method `state` returned for the same experiment."""
        self._repeated(lambda: self.loop.resume(state), STARTED)
        self._before = state if self._repeats else None

    def result(self) -> Result:
        """Return the result of the run after its last round."""
        self._repeated(self.loop.finish, "ending the run has been tried", self.experiment.rounds)
        folder = self.folder.path if self.folder else None
        names = self.task.worker_names
        result = Result(self.experiment, self.history, folder, self.stopped, names, self.tests)
        vars(result).update(model=self.model(), global_row=self.global_row)  # not from files, as in a loaded result
        return result

    def release(self) -> None:
        """Free the memory of the run."""
        del self.run_round, self.loop, self.engine, self._before

    def _repeated(
        self, call: Callable[[], T], action: str, round: int = 0, then: str = "", *, restores: bool = True
    ) -> T:
        """Return the result of `call`. If a process dies, start new processes, restore the state and call again.

        Args:
            call: function that calls the engine's processes.
            action: beginning of the error message, such as "round 3 has been tried".
            round: current round, for the warning about the lost process; 0 before the first round.
            then: end of the warning, such as ", and round 3 is repeated".
            restores: whether new processes restore the state after the last finished round before they repeat the call.
                False for a call that needs only the global model, which is in shared memory.
        """
        engine, retries = self.engine, self.experiment.max_restarts

        def attempt() -> T:
            if not engine.at_work:  # also after an error in one of its processes, which has closed the pool
                engine.replace_processes()
                if restores:
                    self.loop.prepare()
                    if self._before is not None:
                        self.loop.resume(self._before)
            return call()

        return retried(attempt, retries, action, self.folder.event if self.folder else None, round=round, then=then)
