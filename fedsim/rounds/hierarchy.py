"""Rounds in groups: Hier-FAVG (Liu, Zhang, Song and Letaief 2020, "Client-Edge-Cloud Hierarchical Federated Learning").

Each group has a model and a server, which aggregates the updates of the group's members in every round. Every
`group_rounds` rounds, the top level aggregates the differences of these models to the global model, from which the
groups then continue. Each server is an instance of the classes that a run without groups uses once, on a row of
`GlobalModel.groups`. For the top level, the groups are the workers of a cohort.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedsim.processes.group import Group
from fedsim.processes.process_context import ProcessContext
from fedsim.records.round_stats import AggregationStats, GradientRoundStats, SentUpdates
from fedsim.rounds.aggregator import Aggregator, ReportCheck
from fedsim.rounds.parameter_server import ParameterServer
from fedsim.rounds.simulation import Round, Simulation
from fedsim.rounds.update_steps import AttackStep
from fedsim.server import Cohort
from fedsim.training.batches import WorkItems
from fedsim.training.memory import buffer_bytes, personal_bytes
from fedsim.training.shared_state import SharedState
from fedsim.training.task import RunTask
from fedsim.training.weights import AggregationContext, weights_of


class Level:
    """Server of a group or of the top level, whose `task` and `shared` have the attackers, the model and the rows."""

    def __init__(self, simulation: Simulation, group: Group, task: RunTask, shared: SharedState) -> None:
        self.model, self.server = shared.server, ParameterServer(group, task, shared)
        self.aggregator = Aggregator.of(group, task, shared, self.server)
        self.attack, self.check_reports = AttackStep(group, task, shared, self.aggregator), ReportCheck(task.experiment)
        self.steps = simulation.steps_on_updates(self.attack)


class Hierarchy(Simulation):
    """Synchronous rounds in groups of workers. The attribute `server` is that of the top level.

    Attributes:
        models: models of the groups, see `GlobalModel.groups`.
        edges: server of each group.
        top: server of the top level.
        reporting: number of groups that have sent their models to the top level in this round.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        group, task, shared, self.reporting = self.group, self.task, self.shared, 0
        self.models: Any = shared.server.groups
        rows: Any = {name: self.models[name] for name in ("rows", "buffers", "unfit", "losses")}
        # Every rank has the models of all groups, and computes the whole result.
        self.at_top = Group(ProcessContext.alone(), task.device) if group.divided else group
        at_top = replace(shared, cohort=replace(shared.cohort, messages={}, **rows))
        self.top, numbers = Level(self, self.at_top, task.top, at_top), range(len(rows["rows"]))
        models = [replace(shared, server=shared.server.of_group(number)) for number in numbers]
        self.edges = [Level(self, group, task.of_group(number), models[number]) for number in numbers]
        self.server = self.top.server

    @property
    def levels(self) -> dict[str, Any]:
        return {f"{number}/": level for number, level in enumerate([*self.edges, self.top])}

    def parts(self, context: AggregationContext) -> Iterator[tuple[int, Level, AggregationContext]]:
        """Yield (number, server, its members in `context`) for each group that has members there."""
        for part in context.by_cluster(self.task.experiment.groups_of(context.workers).tolist()):
            yield part.cluster, self.edges[part.cluster], replace(part, cluster=0)

    def require_reports(self, round: int, drawn: Cohort) -> None:
        workers, dropped = (np.array(each, dtype=np.int64) for each in (drawn.workers, drawn.dropped))
        of_workers, of_dropped = map(self.task.experiment.groups_of, (workers, dropped))
        for number in np.unique(of_workers).tolist():
            left, lost = workers[of_workers == number].tolist(), dropped[of_dropped == number].tolist()
            self.edges[number].check_reports(round, replace(drawn, workers=left, dropped=lost), f", group {number}")

    def pull_down(self, cohort: Sequence[int], mine: WorkItems, round: int) -> None:
        self.load_states(cohort, mine)
        groups = self.task.experiment.groups_of(mine.workers)
        for number in np.unique(groups):
            model = self.edges[number].model
            self.copy_down(model.row, model.buffers, mine[groups == number], round)

    def begin_updates(self, mine: WorkItems) -> None:
        groups = self.task.experiment.groups_of(mine.workers)
        for number, edge in enumerate(self.edges):  # all processes count the aggregations of all groups
            edge.aggregator.updates.begin(mine[groups == number].slots, edge.model.row)

    def change_updates(
        self, context: AggregationContext, mine: WorkItems, sent: SentUpdates, level: Any = None
    ) -> None:
        groups = self.task.experiment.groups_of(mine.workers)
        for number, edge, part in self.parts(context):
            super().change_updates(part, mine[groups == number], sent, edge)

    def step(self, context: AggregationContext, sent: SentUpdates) -> AggregationStats:
        of_round = GradientRoundStats(len(context.slots), [0])
        self.privacy.count(context.moment[0])
        for number, edge, part in self.parts(context):
            aggregate, of_group = edge.aggregator.aggregate(part)
            edge.server.step(aggregate, part.moment)
            edge.server.combine_buffers(part, of_group.excluded)
            if self.group.computes:
                used = ~np.isin(part.workers, of_group.excluded)
                self.models["samples"][number] += int(np.array(part.samples)[used].sum())
            of_round.add(part.slots, of_group)
        stats = replace(of_round.total(), sent=sent, clusters=[])
        self.end_round(context.moment[0], stats)
        return stats

    def combine_buffers(self, context: AggregationContext, excluded: Sequence[int]) -> None:
        """Do nothing, because the method `step` has averaged the buffers in each group."""

    def end_round(self, round: int, stats: AggregationStats | None = None) -> None:
        """Aggregate the models of the groups into the global model, if `round` is a multiple of `group_rounds`.

        Groups that have received no update since the last time are left out.

        `stats` receives the numbers that the rule records, with the prefix `top_`.
        """
        self.group.barrier()  # all processes have updated the groups
        group, top, task, samples = self.at_top, self.top, self.task.top, self.models["samples"].tolist()
        present, self.reporting = [number for number, count in enumerate(samples) if count], 0
        if round % self.task.experiment.group_rounds or not present:
            return
        sent, self.reporting = top.server.send(round), len(present)
        top.aggregator.updates.begin(range(group.index, len(samples), group.count), sent)
        group.barrier()
        counts = [samples[number] for number in present]
        context = AggregationContext(present, present, counts, weights_of(task, self.shared, present, counts), (round,))
        if task.byzantine:
            top.attack(context, None, SentUpdates())
        aggregate, of_top = top.aggregator.aggregate(context)
        top.server.step(aggregate, context.moment)
        top.server.combine_buffers(context, of_top.excluded)
        if stats is not None:
            stats.metrics.extend({f"top_{name}": values for name, values in of_top.metrics.items()})
        self.group.barrier()
        sent = top.server.send(round)
        if self.group.computes:
            self.models["rows"].copy_(sent)
            self.models["buffers"].copy_(self.shared.server.buffers)
            self.models["samples"].zero_()
        self.group.barrier()

    def record(self, round: int, *arguments: Any) -> Round:
        record, of_workers = super().record(round, *arguments)
        task, shared, begins = self.task, self.shared, (round - 1) % self.task.experiment.group_rounds == 0
        nbytes = shared.server.row.nbytes - personal_bytes(task) + buffer_bytes(task, shared)
        return replace(record, top_bytes=nbytes * (self.reporting + begins * len(self.edges))), of_workers
