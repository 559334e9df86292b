"""Asynchronous training on the virtual clock, told in rounds: as much work each time as a synchronous round has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from fedsim.asynchronous.clock import Train, VirtualClock
from fedsim.asynchronous.pace import delays_of
from fedsim.asynchronous.racelog import read_log
from fedsim.asynchronous.replaying import LoggedOrder
from fedsim.asynchronous.roster import Roster
from fedsim.asynchronous.server import Server
from fedsim.engines import Engine
from fedsim.engines.feed import Member
from fedsim.engines.job import FiniteCheck
from fedsim.preparation import Setting
from fedsim.records import AsyncRecord, RoundRecord
from fedsim.snapshot import Snapshot
from fedsim.stopwatch import Stopwatch
from fedsim.system.precision import full_precision


class ClockLoop:
    """The rounds of a policy on the virtual clock, on an engine that has begun."""

    def __init__(self, setting: Setting, engine: Engine) -> None:
        experiment, memory = setting.experiment, engine.memory
        self._setting, self._engine = setting, engine
        self._policy = experiment.policy.bind()
        self._server = Server.of(self._policy, experiment.local.bind(), setting.task, memory)
        self._check_finite = FiniteCheck(setting.task, memory)
        self._stopwatch = Stopwatch()
        roster = Roster(
            experiment.seed,
            experiment.workers,
            experiment.cohort_size,
            self._policy.work,
            setting.schedule,
            memory.shards.size,
        )
        self._model_bytes = setting.row_bytes + setting.buffer_bytes
        train = partial(_train, engine, self._stopwatch)  # not a method of this loop: the cycle would keep the rows
        self._source = _order_of(setting, self._server, roster, train, self._model_bytes)

    def play(self, round: int) -> RoundRecord:
        stopwatch, source, policy = self._stopwatch, self._source, self._policy
        stopwatch.start_again()
        source.desk.begin_round(round)
        journal = source.desk.journal
        with stopwatch("aggregate"), full_precision(self._setting.task.device):
            source.play(round)
            policy.publish(self._server)
        stopwatch.seconds["aggregate"] -= stopwatch.seconds["train"]
        self._check_finite(round)
        with stopwatch("test"):
            test_loss, test_accuracy, attack_success = self._engine.test(round)
        cohort = sorted(journal.samples)
        samples = [journal.samples[worker] for worker in cohort]
        return RoundRecord(
            round=round,
            test_loss=test_loss,
            test_accuracy=test_accuracy,
            train_loss=journal.train_loss,
            seconds=stopwatch.seconds,
            cohort=cohort,
            coefficients=None,
            excluded=sorted(journal.excluded),
            lost=[],
            attack_success=attack_success,
            bytes_up=journal.up * self._model_bytes,
            bytes_down=journal.down * self._model_bytes,
            samples=samples,
            virtual_seconds=source.now,
            asynchronous=AsyncRecord(
                updates=self._server.version,
                trips=source.taken,
                staleness={str(tau): count for tau, count in sorted(journal.staleness.items())},
                held=policy.held(self._server),
                wasted=journal.wasted,
            ),
            race=None,
        )

    def state(self) -> Snapshot:
        state = self._engine.state()
        state.keep(self._server.tensors)
        state.facts["clock"] = self._source.state()
        return state

    def resume(self, state: Snapshot) -> None:
        self._engine.resume(state)
        state.put_back(self._server.tensors)
        self._source.resume(state.facts["clock"])

    def finish(self) -> None:
        """Nothing is left to do."""


def _train(engine: Engine, stopwatch: Stopwatch, members: Sequence[Member]) -> None:
    with stopwatch("train"):
        engine.train_apart(members)


def _order_of(
    setting: Setting, server: Server, roster: Roster, train: Train, model_bytes: int
) -> VirtualClock | LoggedOrder:
    """What says who begins when and who arrives when: delays, or the log of a race."""
    experiment, clock = setting.experiment, setting.experiment.clock
    if clock.log is not None:
        return LoggedOrder(read_log(clock.log, experiment.resolved()), clock.log, server, roster, train)
    delays, departures = delays_of(experiment), {int(worker): at for worker, at in clock.departures.items()}
    if experiment.cohort_size == experiment.workers:
        server.step_seconds.copy_(torch.from_numpy(delays.base * delays.speeds))

    def pace(member: Member, unit: int, models: int) -> float:
        return delays.seconds(member.worker, unit, roster.steps(member), models * model_bytes)

    return VirtualClock(server, roster, pace, train, departures, experiment.rounds * roster.pieces_of_a_round())
