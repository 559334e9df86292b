"""A server with its aggregation rule, and the steps that change updates between training and aggregation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fedsim.processes.team import Team
from fedsim.records.round_stats import SentUpdates
from fedsim.rounds.aggregator import Aggregator, ReportCheck
from fedsim.rounds.parameter_server import ParameterServer
from fedsim.rounds.private_rounds import PrivateRounds
from fedsim.rounds.update_steps import AttackStep, ProcessingStep, UpdateStep
from fedsim.training.batches import WorkItems
from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask
from fedsim.training.weights import AggregationContext


class Level:
    """Server of a run, with its aggregation rule and its attackers.

    In a hierarchy, each group of workers has a level, and the top level is above the groups.

    Args:
        team: processes that compute together.
        task: task of the server, which has its own rule, seed and attackers in a hierarchy.
        shared: tensors of the run, with the model of this server.
        privacy: privacy mechanism, which all levels of a run share.
        processing: step that applies the processors of the run.
        new_aggregator: function that returns the aggregator.

    Attributes:
        latest: context of the latest aggregation, and the result [d] of the aggregation before it. This result is None
            if no rule or attack uses it, or unless `records.updates` contains the round.
    """

    def __init__(
        self,
        team: Team,
        task: RunTask,
        shared: SharedState,
        privacy: PrivateRounds,
        processing: ProcessingStep,
        new_aggregator: Callable[..., Aggregator] = Aggregator.of,
    ) -> None:
        self.team, self.task, self.privacy, self.workers = team, task, privacy, len(shared.data.shards)
        self.model, self.server = shared.server, ParameterServer(team, task, shared)
        self.aggregator = new_aggregator(team, task, shared, self.server)
        self.attack, self.check_reports = AttackStep(team, task, shared, self.aggregator), ReportCheck(task.experiment)
        self.latest: tuple[AggregationContext, np.ndarray | None] | None = None
        attacks: list[UpdateStep] = [self.attack] if task.byzantine else []
        # An attack that skips the processors comes after them, and reads the processed updates of honest workers.
        changes: list[UpdateStep] = [processing, *attacks] if task.attackers_skip_chain else [*attacks, processing]
        self.steps: list[UpdateStep] = [privacy.at_workers, *changes, privacy.as_received]

    def change_updates(
        self, context: AggregationContext, mine: WorkItems, sent: SentUpdates | None = None
    ) -> SentUpdates:
        """Apply the steps between training and aggregation to the updates, in place. Return the sizes of the updates.

        Args:
            context: workers whose updates are aggregated.
            mine: workers that this process trains.
            sent: receives the sizes; None for a new object.
        """
        sent = SentUpdates() if sent is None else sent
        is_recorded = context.moment[0] in self.task.experiment.records.updates
        last = self.server.last if is_recorded else None
        self.latest = replace(context, weights=None), None if last is None else last.cpu().numpy().copy()
        senders = mine[mine.workers < self.workers]  # without the server's own row
        for step in self.steps:
            if step(context, senders, sent):
                self.aggregator.updates.changed(senders.slots)
                self.team.barrier()
        return sent

    def begin_with_parameters(self) -> None:
        """Reset the rule, the attack and the server optimizer when a run changes from gradients to parameters."""
        self.aggregator.state, self.attack.state = {}, {}
        self.server.begin_with_parameters()
