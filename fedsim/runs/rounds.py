"""Rounds of a prepared run, for any mode and engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from fedsim.config.experiment import Experiment
from fedsim.core.rows import Layout
from fedsim.engines import Engine, RunTask
from fedsim.errors import DivergedError
from fedsim.processes.retry import Note
from fedsim.records.record import RoundRecord
from fedsim.rounds.aggregator import weights_by_probability
from fedsim.rounds.evaluation import EvaluationResult
from fedsim.rounds.executor import Executor
from fedsim.rounds.simulation import Simulation
from fedsim.rounds.worker_evaluation import WorkerResults
from fedsim.runs.facts import RunFacts
from fedsim.runs.loops.loop import Loop, loop_of
from fedsim.runs.recovery import STARTED, recovering, repeated
from fedsim.runs.session import Session
from fedsim.runs.setup import prepare


class Rounds:
    """A run that is ready for its first round.

    Attributes:
        loop: object that runs the rounds.
        engine: engine that computes the run.
        run_round: function that runs one round (counted from 1) and returns its record.
        facts: facts about the run that are known before the first round.
        tests: latest results of tests of individual workers; None if there are none.
    """

    def __init__(
        self,
        experiment: Experiment,
        task: RunTask,
        engine: Engine,
        note: Note | None,
        keep_log: Callable[[bytes], object] | None,
    ) -> None:
        self._task, self.engine = task, engine
        self._repeated = partial(repeated, experiment=experiment, engine=engine, note=note)
        self.facts = self._repeated(lambda: RunFacts.of(experiment, task, engine), action=STARTED)
        self.tests: WorkerResults | None = None
        loop = loop_of(experiment, task, engine, keep_log, self._keep_tests)
        self.loop: Loop = recovering(loop, experiment, engine, note)
        ends = experiment.aggregate.nonfinite == "stop"
        self.run_round: Callable[[int], RoundRecord] = self._run_or_end if ends else self.loop.run_round

    def _run_or_end(self, round: int) -> RoundRecord:
        """Run one round, and return its record.

        If the training diverges, the global model from before the round is restored and tested.
        """
        engine, shared = self.engine, self.engine.shared
        before = shared.server.row.clone(), shared.server.buffers.clone()
        try:
            return self.loop.run_round(round)
        except DivergedError as error:
            shared.server.row.copy_(before[0])
            shared.server.buffers.copy_(before[1])
            self._repeated(lambda: engine.run(Executor.test, round), action="tests have been tried", round=round)
            tested = EvaluationResult.of(self._task, shared)
            return RoundRecord(round=round, diverged=error.problem, **tested.fields())

    def tests_after(self, round: int) -> WorkerResults | None:
        """Return the results of tests of individual workers after `round`; None if there were none."""
        return self.tests if self.tests and self.tests.round == round else None

    def model(self) -> nn.Module:
        """Return a copy of the global model, on the CPU and in evaluation mode."""
        module, shared = self._task.new_module(), self.engine.shared
        layout = Layout.of(module)
        layout.write(shared.server.row, module)
        layout.write_buffers(shared.server.buffers, module)
        return module.cpu().eval()

    @property
    def global_row(self) -> Tensor:
        """Copy of the global model's parameters as one flat vector [d], on the CPU."""
        return self.engine.shared.server.row.cpu().clone()

    def kept_updates(self, record: RoundRecord) -> dict[str, Tensor]:
        """Return the inputs of the aggregation rule in the latest round by name, such as the workers' updates [n, d].

        If the round aggregates gradients, the inputs are those of its last step, in which the workers with fewer
        samples may no longer take part.

        Args:
            record: record of the latest round.
        """
        shared, task, cohort = self.engine.shared, self._task, record.cohort
        gathered = self.engine.round_rows(cohort)
        if gathered is None:
            return {}
        (rows, losses), (context, last) = gathered, self.engine.run(Simulation.latest_aggregation)[0]
        byzantine, slots = task.byzantine.in_round(record.round), list(context.slots)
        updates = {
            "updates": rows[slots],
            "workers": torch.tensor(context.workers),
            "samples": torch.tensor(context.samples),
            "byzantine": torch.tensor([worker in byzantine for worker in context.workers]),
        }
        if len(context.moment) > 1:
            updates["step"] = torch.tensor(context.moment[1:])
        if last is not None:
            updates["last"] = torch.from_numpy(last)
        if task.experiment.rule.accepts("root"):
            updates["root"] = rows[-1]
        if task.experiment.rule.accepts("losses"):
            updates["losses"] = losses[slots]
        if task.experiment.weights == "inverse_probability":
            updates["cohort_weights"] = weights_by_probability(shared, context.workers)
        return {name: tensor.cpu().clone() for name, tensor in updates.items()}

    def release(self) -> None:
        """Free the memory of the run."""
        del self.run_round, self.loop, self.engine, self._repeated

    def _keep_tests(self, tests: WorkerResults) -> None:
        self.tests = tests


@contextlib.contextmanager
def prepared_rounds(
    experiment: Experiment,
    session: Session,
    note: Note | None = None,
    on_setup: Callable[[str], object] = lambda step: None,
    *,
    scratch: str | None = None,
    keep_log: Callable[[bytes], object] | None = None,
) -> Iterator[Rounds]:
    """Return a context that prepares a run, provides it as `Rounds`, and frees its memory at the end.

    Args:
        experiment: experiment to run.
        session: session with the engine and the data.
        note: function that records each lost process; None to record nothing.
        on_setup: function that is called with the name of each step of the preparation.
        scratch: folder for temporary files; None for the system's folder.
        keep_log: function that receives the contents of a race's log file; None to keep no log.
    """
    with prepare(experiment, session, note, on_setup, scratch=scratch) as (task, engine):
        rounds = Rounds(experiment, task, engine, note, keep_log)
        try:
            yield rounds
        finally:
            rounds.release()
