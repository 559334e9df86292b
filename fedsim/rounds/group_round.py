"""A round in groups, as in Hier-FAVG (Liu et al. 2020, "Client-Edge-Cloud Hierarchical Federated Learning").

Each group has a model and a server, which aggregates the updates of the group's workers in every round. Every
`group_rounds` rounds, the top level aggregates the differences between these models and the global model. The groups
then continue from the new global model. Each group's server is a `Level` with a row of `GlobalModel.groups`. The top
level treats the groups like the workers of a cohort.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from fedsim.processes.process_context import ProcessContext
from fedsim.processes.team import Team
from fedsim.records.record import RoundRecord
from fedsim.records.round_stats import AggregationStats, RoundTotals, SentUpdates
from fedsim.rounds.cohorts import Cohorts, RoundPlan
from fedsim.rounds.executor import Executor
from fedsim.rounds.level import Level
from fedsim.rounds.parameter_round import ParameterRound
from fedsim.rounds.private_rounds import PrivateRounds
from fedsim.training.batches import WorkItems
from fedsim.training.memory import buffer_bytes, personal_bytes
from fedsim.training.weights import AggregationContext, weights_of


class GroupRound(ParameterRound):
    """Round in groups of workers. The attributes `level` and `server` are those of the top level.

    Attributes:
        models: models of the groups, see `GlobalModel.groups`.
        edges: server of each group, with its aggregation rule.
        reporting: number of groups that have sent their models to the top level in this round.
    """

    def __init__(self, executor: Executor, cohorts: Cohorts, level: Level) -> None:
        super().__init__(executor, cohorts, level)
        team, task, shared, self.reporting = self.team, self.task, self.shared, 0
        self.models: Any = shared.server.groups
        models = [replace(shared, server=shared.server.of_group(number)) for number in range(len(self.models["rows"]))]
        self.edges = [
            Level(team, task.of_group(number), model, level.privacy, executor.processing)
            for number, model in enumerate(models)
        ]
        self.levels = {f"{number}/": level for number, level in enumerate([*self.edges, level])}

    @staticmethod
    def new_level(executor: Executor, privacy: PrivateRounds) -> Level:
        team, task, shared, models = executor.team, executor.task, executor.shared, executor.shared.server.groups
        rows: Any = {name: models[name] for name in ("rows", "buffers", "unfit", "losses")}
        # Every rank has the models of all groups, and computes the whole result.
        at_top = Team(ProcessContext.alone(), task.device) if team.divided else team
        of_groups = replace(shared, cohort=replace(shared.cohort, messages={}, **rows))
        return Level(at_top, task.top, of_groups, privacy, executor.processing)

    def groups_of(self, mine: WorkItems) -> Iterator[tuple[Level, WorkItems]]:
        """Yield (level of the group, the group's workers among `mine`) for each group."""
        groups = self.task.experiment.groups_of(mine.workers)
        for number, edge in enumerate(self.edges):
            yield edge, mine[groups == number]

    def groups_in(self, context: AggregationContext) -> Iterator[tuple[int, Level, AggregationContext]]:
        """Yield (number of the group, its level, its workers in `context`) for each group with workers in `context`."""
        for part in context.by_cluster(self.task.experiment.groups_of(context.workers).tolist()):
            yield part.cluster, self.edges[part.cluster], replace(part, cluster=0)

    def check(self, plan: RoundPlan) -> None:
        workers, dropped = (np.array(ids, dtype=np.int64) for ids in (plan.cohort.workers, plan.cohort.dropped))
        of_workers, of_dropped = map(self.task.experiment.groups_of, (workers, dropped))
        for number in np.unique(of_workers).tolist():
            left, lost = workers[of_workers == number].tolist(), dropped[of_dropped == number].tolist()
            cohort = replace(plan.cohort, workers=left, dropped=lost)
            self.edges[number].check_reports(plan.round, cohort, f", group {number}")

    def pull_down(self, plan: RoundPlan) -> None:
        """Give each worker of this process the model of its group, and load the state it kept from earlier rounds."""
        self.executor.load_states(plan.context.workers, plan.mine)
        for edge, members in self.groups_of(plan.mine):
            self.copy_model(edge.model.row, edge.model.buffers, members)

    def begin_updates(self, plan: RoundPlan) -> None:
        for edge, members in self.groups_of(plan.mine):  # all processes count the aggregations of all groups
            edge.aggregator.updates.begin(members.slots, edge.model.row)

    def aggregate(self, plan: RoundPlan) -> AggregationStats:
        """Update the model of each group with the updates of its workers."""
        of_round, sent = RoundTotals(len(plan.context.slots), [0]), SentUpdates()
        members = [part for _, part in self.groups_of(plan.mine)]
        for number, edge, context in self.groups_in(plan.context):
            edge.change_updates(context, members[number], sent)
        self.level.privacy.finish(plan.round)
        for number, edge, context in self.groups_in(plan.context):
            update, stats = edge.aggregator.aggregate(context)
            edge.server.step(update, context.moment)
            edge.server.combine_buffers(context, stats.excluded)
            if self.team.computes:
                used = ~np.isin(context.workers, stats.excluded)
                self.models["samples"][number] += int(np.array(context.samples)[used].sum())
            of_round.add(context.slots, stats)
        return replace(of_round.total(), sent=sent, clusters=[])

    def aggregate_at_top(self, plan: RoundPlan, stats: AggregationStats) -> AggregationStats:
        """Aggregate the models of the groups into the global model, if the round is a multiple of `group_rounds`.

        Groups that have received no update since they received the global model are left out. The numbers that the rule
        records get the prefix `top_`.
        """
        with self.phase("aggregate"):
            self.team.barrier()  # all processes have updated the groups
            samples, self.reporting = self.models["samples"].tolist(), 0
            present = [number for number, count in enumerate(samples) if count]
            if plan.round % self.task.experiment.group_rounds or not present:
                return stats
            self.reporting = len(present)
            of_top = self.aggregate_models(plan.round, present, [samples[number] for number in present])
        stats.metrics.extend({f"top_{name}": values for name, values in of_top.metrics.items()})
        return stats

    def aggregate_models(self, round: int, groups: list[int], samples: list[int]) -> AggregationStats:
        """Aggregate the models of some groups into the global model, and copy it to all groups. Return statistics.

        Args:
            round: number of the round.
            groups: numbers of the groups.
            samples: number of samples of each group's updates since the group received the global model.
        """
        top, task = self.level, self.level.task
        sent = top.server.send(round)
        top.aggregator.updates.begin(range(top.team.index, len(self.edges), top.team.count), sent)
        top.team.barrier()
        context = AggregationContext(groups, groups, samples, weights_of(task, self.shared, groups, samples), (round,))
        if task.byzantine:
            top.attack(context, None, SentUpdates())
        update, stats = top.aggregator.aggregate(context)
        top.server.step(update, context.moment)
        top.server.combine_buffers(context, stats.excluded)
        self.team.barrier()
        sent = top.server.send(round)
        if self.team.computes:
            self.models["rows"].copy_(sent)
            self.models["buffers"].copy_(self.shared.server.buffers)
            self.models["samples"].zero_()
        self.team.barrier()
        return stats

    def combine_buffers(self, plan: RoundPlan, stats: AggregationStats) -> None:
        """Do nothing. `aggregate` has averaged the buffers in each group."""

    def complete(self, record: RoundRecord) -> RoundRecord:
        begins = (record.round - 1) % self.task.experiment.group_rounds == 0
        nbytes = self.shared.server.row.nbytes - personal_bytes(self.task) + buffer_bytes(self.task, self.shared)
        return replace(record, top_bytes=nbytes * (self.reporting + begins * len(self.edges)))
