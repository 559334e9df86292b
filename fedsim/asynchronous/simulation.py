"""Asynchronous training on the virtual clock, told in rounds: as much work each time as a synchronous round has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fedsim.asynchronous.clock import Train, VirtualClock
from fedsim.asynchronous.desk import Journal
from fedsim.asynchronous.pace import delays_of
from fedsim.asynchronous.racelog import read_log
from fedsim.asynchronous.replaying import LoggedOrder
from fedsim.asynchronous.roster import Roster
from fedsim.asynchronous.server import Server
from fedsim.engines import Engine
from fedsim.engines.feed import Member
from fedsim.errors import ExperimentError
from fedsim.preparation import Setting
from fedsim.records import AsyncRecord, RoundRecord
from fedsim.stopwatch import Stopwatch


def simulate_on_clock(setting: Setting, engine: Engine) -> Iterator[RoundRecord]:
    """The history of a policy on the virtual clock, on an engine that has begun."""
    experiment, policy = setting.experiment, setting.experiment.policy.bind()
    memory = engine.memory
    server = Server.of(policy, experiment.local.bind(), setting.task, memory)
    roster = Roster(
        experiment.seed,
        experiment.workers,
        experiment.cohort_size,
        policy.work,
        setting.schedule,
        memory.shards.size,
    )
    stopwatch, model_bytes = Stopwatch(), setting.row_bytes + setting.buffer_bytes

    def train(members: Sequence[Member]) -> None:
        with stopwatch("train"):
            engine.train_apart(members)

    source = _order_of(setting, server, roster, train, model_bytes)
    for round in range(1, experiment.rounds + 1):
        stopwatch.seconds = dict.fromkeys(stopwatch.seconds, 0.0)
        source.desk.journal = journal = Journal()
        with stopwatch("aggregate"):
            source.play(round)
            policy.publish(server)
        stopwatch.seconds["aggregate"] -= stopwatch.seconds["train"]
        if not bool(memory.global_row.isfinite().all()):
            raise ExperimentError(f"round {round}: the global row is no longer finite; a smaller local.lr may help")
        with stopwatch("test"):
            test_loss, test_accuracy, attack_success = engine.test()
        cohort = sorted(journal.samples)
        samples = [journal.samples[worker] for worker in cohort]
        yield RoundRecord(
            round=round,
            test_loss=test_loss,
            test_accuracy=test_accuracy,
            train_loss=journal.loss_sum / sum(samples),
            seconds=dict(stopwatch.seconds),
            cohort=cohort,
            coefficients=None,
            excluded=[],
            attack_success=attack_success,
            bytes_up=journal.up * model_bytes,
            bytes_down=journal.down * model_bytes,
            samples=samples,
            virtual_seconds=source.now,
            asynchronous=AsyncRecord(
                updates=server.version,
                trips=source.taken,
                staleness={str(tau): count for tau, count in sorted(journal.staleness.items())},
                held=policy.held(server),
                wasted=journal.wasted,
            ),
            race=None,
        )


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
