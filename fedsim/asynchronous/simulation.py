"""Asynchronous training on the virtual clock, told in rounds: as much work each time as a synchronous round has."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fedsim.asynchronous.clock import Journal, VirtualClock
from fedsim.asynchronous.pace import delays_of
from fedsim.asynchronous.roster import Roster
from fedsim.asynchronous.server import Server
from fedsim.engines import Engine
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
    pieces = roster.pieces_of_a_round()
    delays, model_bytes = delays_of(experiment), setting.row_bytes + setting.buffer_bytes
    if experiment.cohort_size == experiment.workers:
        server.step_seconds.copy_(torch.from_numpy(delays.base * delays.speeds))
    departures = {int(worker): seconds for worker, seconds in experiment.clock.departures.items()}
    stopwatch = Stopwatch()

    def train(members: list) -> None:
        with stopwatch("train"):
            engine.train_apart(members)

    clock = VirtualClock(
        server,
        roster,
        lambda member, unit, models: delays.seconds(member.worker, unit, roster.steps(member), models * model_bytes),
        train,
        departures,
        experiment.rounds * pieces,
    )
    taken = 0
    for round in range(1, experiment.rounds + 1):
        stopwatch.seconds = dict.fromkeys(stopwatch.seconds, 0.0)
        clock.journal = journal = Journal()
        with stopwatch("aggregate"):
            while taken < round * pieces:
                taken += clock.advance()
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
            virtual_seconds=clock.now,
            asynchronous=AsyncRecord(
                updates=server.version,
                trips=taken,
                staleness={str(tau): count for tau, count in sorted(journal.staleness.items())},
                held=policy.held(server),
                wasted=journal.wasted,
            ),
        )
