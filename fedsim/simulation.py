"""The simulation itself. Read this first: everything else is a plug that takes rows and gives rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from fedsim.asynchronous.pace import RoundClock
from fedsim.asynchronous.racing import RaceLoop
from fedsim.asynchronous.simulation import ClockLoop
from fedsim.engines import Engine
from fedsim.engines.job import FiniteCheck
from fedsim.engines.spawn import SpawnEngine
from fedsim.errors import FedsimWarning, show
from fedsim.preparation import Setting
from fedsim.randomness import sample_cohort
from fedsim.records import RoundRecord
from fedsim.snapshot import Snapshot
from fedsim.stopwatch import Stopwatch


class Loop(Protocol):
    """The rounds of a run on an engine that has begun, in whatever mode.

    What a round comes to depends on what the rounds before have left, and on nothing else: `state` is that, and a loop
    that resumes from it goes on as the first would have, to the bit.
    """

    def play(self, round: int) -> RoundRecord:
        """One round, counted from 1; they are played in order."""

    def state(self) -> Snapshot:
        """What the next round depends on."""

    def resume(self, state: Snapshot) -> None:
        """Go back, or on, to where a loop of the same experiment was."""

    def finish(self) -> None:
        """What is to be done after the last round."""


class SynchronousLoop:
    """Rounds in which a cohort trains, and its rows are averaged."""

    def __init__(self, setting: Setting, engine: Engine) -> None:
        self._setting, self._engine = setting, engine
        self._check_finite = FiniteCheck(setting.task, engine.memory)
        self._virtual = RoundClock.of(setting) if setting.experiment.mode == "clock" else None
        self._warned = False

    def cohort(self, round: int) -> list[int]:
        """The workers who are to take part in a round."""
        experiment = self._setting.experiment
        return sample_cohort(experiment.seed, round, experiment.workers, experiment.cohort_size).tolist()

    def play(self, round: int, lost: Collection[int] = ()) -> RoundRecord:
        """One round, counted from 1, of its cohort without those who are `lost`."""
        setting, engine, virtual, schedule = self._setting, self._engine, self._virtual, self._setting.schedule
        cohort = [worker for worker in self.cohort(round) if worker not in lost]
        sync, clock = setting.task.sync_in(round), Stopwatch()
        with clock("pull_down"):
            engine.pull_down(cohort, round)
        if sync == "parameters":
            with clock("train"):
                engine.train(cohort, round)
            with clock("aggregate"):
                account = engine.aggregate(cohort, round)
        else:  # every step is a synchronisation, so the two cannot be told apart
            with clock("train"):
                account = engine.train_on_averaged_gradients(cohort, round)
        self._check_finite(round)
        with clock("test"):
            test_loss, test_accuracy, attack_success = engine.test(round)
        sizes = [engine.memory.shards.size(worker) for worker in cohort]
        self._warn_of_attack_without_honest_rows(round, cohort, sizes)
        rows_sent = len(cohort) if sync == "parameters" else sum(map(schedule.steps_for, sizes))
        sent = rows_sent * setting.row_bytes + len(cohort) * setting.buffer_bytes
        samples = [schedule.samples_for(size) for size in sizes]
        excluded = account.excluded or []
        counted = [0 if worker in excluded else count for worker, count in zip(cohort, samples, strict=True)]
        if virtual:
            virtual.pass_round(cohort, sizes, in_step=sync == "gradients")
        return RoundRecord(
            round=round,
            test_loss=test_loss,
            test_accuracy=test_accuracy,
            train_loss=engine.train_loss(counted),
            seconds=clock.seconds,
            cohort=cohort,
            coefficients=account.shares,
            excluded=excluded,
            lost=sorted(lost),
            attack_success=attack_success,
            bytes_up=sent,
            bytes_down=sent,
            samples=samples,
            virtual_seconds=virtual.now if virtual else None,
            asynchronous=None,
            race=None,
        )

    def _warn_of_attack_without_honest_rows(self, round: int, cohort: Sequence[int], sizes: Sequence[int]) -> None:
        """Warn, once in a run, where only Byzantine workers were in an aggregation, and their attack needs others."""
        task = self._setting.task
        if self._warned or not task.byzantine or not task.attack.needs_honest:
            return
        in_steps = task.sync_in(round) == "gradients"
        counts = [task.schedule.steps_for(size) if in_steps else 1 for size in sizes]  # of aggregations
        honest = [count for worker, count in zip(cohort, counts, strict=True) if worker not in task.byzantine]
        if max(counts) > max(honest, default=0):
            self._warned = True
            where = "worker has data left in the last steps" if honest else "worker is in the cohort"
            warnings.warn(
                f"round {round}: no honest {where}, and attack.name = {show(task.attack.name)} is computed from honest "
                "rows; there, and wherever this happens again, the Byzantine workers send what they have trained",
                FedsimWarning,
                stacklevel=3,
            )

    def state(self) -> Snapshot:
        state = self._engine.state()
        if self._virtual:
            state.facts["clock"] = self._virtual.state()
        return state

    def resume(self, state: Snapshot) -> None:
        self._engine.resume(state)
        if self._virtual:
            self._virtual.resume(state.facts["clock"])

    def finish(self) -> None:
        """Nothing is left to do."""


def loop_of(setting: Setting, engine: Engine, keep_log: Callable[[bytes], object] | None = None) -> Loop:
    """The loop of a run, in whatever mode it is; the log of a race is given to `keep_log`."""
    if isinstance(engine, SpawnEngine) and setting.experiment.mode == "race":
        return RaceLoop(setting, engine, keep_log)
    in_rounds = setting.experiment.policy.bind().in_rounds
    return SynchronousLoop(setting, engine) if in_rounds else ClockLoop(setting, engine)
