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
from torch import Tensor

from fedsim.core.rows import require_finite
from fedsim.core.snapshot import CheckpointModel, Seconds
from fedsim.processes.group import Group
from fedsim.processes.process_context import ProcessContext
from fedsim.records.round_stats import AggregationStats, SentUpdates
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


class GroupsState(CheckpointModel):
    """State of a `Hierarchy` in a checkpoint, in addition to that of a `Simulation`."""

    has_last: list[bool]
    seconds: list[Seconds]


class Level:
    """Server of a group, or of the top level, with its rule and its attack. For the arguments, see `Aggregator`."""

    def __init__(self, group: Group, task: RunTask, shared: SharedState) -> None:
        self.server = ParameterServer(group, task, shared)
        self.aggregator = Aggregator.of(group, task, shared, self.server)
        self.attack = AttackStep(group, task, shared, self.aggregator)


class Edge(Level):
    """Server of a group. `group` to `shared` are those of the run, and `number` is that of the group of workers."""

    def __init__(self, group: Group, task: RunTask, shared: SharedState, simulation: Simulation, number: int) -> None:
        self.row, self.buffers, last = (shared.server.groups[name][number] for name in ("rows", "buffers", "last"))
        own: dict[str, Any] = {"row": self.row, "buffers": self.buffers, "last": last, "states": {"parameters": {}}}
        model = replace(shared.server, **own)
        task = task.of_group(number)
        super().__init__(group, task, replace(shared, server=model))
        self.check_reports, self.steps = ReportCheck(task.experiment), simulation.steps_on_updates(self.attack)


class Hierarchy(Simulation):
    """Synchronous rounds in groups of workers.

    Attributes:
        groups: division of the workers into groups.
        edges: server of each group.
        top: server of the top level.
        seconds: virtual time of each group.
        reporting: number of groups that have sent their models to the top level in this round.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        group, shared = self.group, self.shared
        groups, self.models = self.task.experiment.grouping, shared.server.groups
        assert groups is not None
        self.groups, self.seconds, self.reporting = groups, [0.0] * groups.count, 0
        self.edges = [Edge(group, self.task, shared, self, number) for number in range(groups.count)]
        of_groups: Any = {name: self.models[name] for name in ("rows", "buffers", "unfit", "losses")}
        cohort = replace(shared.cohort, messages={}, **of_groups)
        # Every rank has the models of all groups, and computes the whole result.
        self.at_top = Group(ProcessContext.alone(), self.task.device) if group.divided else group
        self.top = Level(self.at_top, self.task.top, replace(shared, cohort=cohort))

    def members(self, workers: Sequence[int] | np.ndarray) -> Iterator[tuple[int, Edge, np.ndarray]]:
        """Yield (number, server, positions of its members in `workers`) for each group that has members there."""
        of_workers = self.groups.of_workers(workers)
        for number in np.unique(of_workers).tolist():
            yield number, self.edges[number], np.flatnonzero(of_workers == number)

    def begin_round(self, round: int) -> None:
        if (round - 1) % self.task.experiment.group_rounds == 0:
            row = self.top.server.send(round)
            if self.group.computes:
                self.models["rows"].copy_(row)
                self.models["buffers"].copy_(self.shared.server.buffers)
                self.models["samples"].zero_()
            self.group.barrier()

    def require_reports(self, round: int, drawn: Cohort) -> None:
        dropped = self.groups.of_workers(drawn.dropped)
        for number, edge, places in self.members(drawn.workers):
            lost = [drawn.dropped[place] for place in np.flatnonzero(dropped == number)]
            of_group = replace(drawn, workers=[drawn.workers[place] for place in places], dropped=lost)
            edge.check_reports(round, of_group, f", group {number}")

    def pull_down(self, cohort: Sequence[int], mine: WorkItems, round: int) -> None:
        self.load_states(cohort, mine)
        self.present = [number for number, _, _ in self.members(cohort)]
        for _, edge, places in self.members(mine.workers):
            self.copy_down(edge.row, edge.buffers, mine[places], round)

    def begin_updates(self, mine: WorkItems) -> None:
        of_mine = self.groups.of_workers(mine.workers)
        for number in self.present:
            edge = self.edges[number]
            edge.aggregator.updates.begin(mine[of_mine == number].slots, edge.row)

    def change_updates(
        self, context: AggregationContext, mine: WorkItems, sent: SentUpdates, level: Any = None
    ) -> None:
        of_mine = self.groups.of_workers(mine.workers)
        for number, edge, places in self.members(context.workers):
            super().change_updates(part_of(context, places), mine[of_mine == number], sent, edge)

    def step(self, context: AggregationContext, sent: SentUpdates) -> AggregationStats:
        round, shares = context.moment[0], np.zeros(len(context.slots))
        stats, linear = AggregationStats(sent=sent), True
        self.privacy.count(round)
        for number, edge, places in self.members(context.workers):
            part = part_of(context, places)
            aggregate, of_group = edge.aggregator.aggregate(part)
            edge.server.step(aggregate, part.moment)
            edge.server.combine_buffers(part, of_group.excluded)
            if self.group.computes:
                counted = zip(part.workers, part.samples, strict=True)
                self.models["samples"][number] += sum(n for worker, n in counted if worker not in of_group.excluded)
            stats.excluded += of_group.excluded
            stats.metrics.extend(of_group.metrics)
            linear = linear and of_group.shares is not None
            shares[places] = of_group.shares or 0
        stats.shares, stats.excluded = shares.tolist() if linear else None, sorted(stats.excluded)
        self.aggregate_groups(round, stats)
        return stats

    def combine_buffers(self, context: AggregationContext, excluded: Sequence[int]) -> None:
        """Do nothing, because the method `step` has averaged the buffers in each group."""

    def aggregate_groups(self, round: int, stats: AggregationStats) -> None:
        """Every `group_rounds` rounds, aggregate the models of the groups that have changed into the global model.

        `stats` receives the numbers that the rule records, with the prefix `top_`.
        """
        self.group.barrier()  # all processes have updated the groups
        rounds, models, group, top = self.task.experiment.group_rounds, self.models, self.at_top, self.top
        samples, self.reporting = models["samples"].tolist(), 0
        present = [number for number, count in enumerate(samples) if count]
        if round % rounds or not present:
            return
        top.server.send(round - rounds + 1)  # after a resumption, finds the model that the groups received
        top.aggregator.updates.begin(range(group.index, len(samples), group.count), top.server.sent)
        group.barrier()
        counts, task = [samples[number] for number in present], self.task.top
        context = AggregationContext(present, present, counts, weights_of(task, self.shared, present, counts), (round,))
        if task.byzantine:
            top.attack(context, None, SentUpdates())
        aggregate, of_top = top.aggregator.aggregate(context)
        top.server.step(aggregate, context.moment)
        top.server.combine_buffers(context, of_top.excluded)
        stats.metrics.extend({f"top_{name}": values for name, values in of_top.metrics.items()})
        self.reporting = len(present)
        self.group.barrier()

    def end_round(self, round: int) -> None:
        self.aggregate_groups(round, AggregationStats())
        self.join_times(round)

    def require_finite(self, round: int) -> None:
        super().require_finite(round)
        if self.group.computes and self.task.experiment.nonfinite != "keep":
            for row in self.models["rows"]:
                require_finite(row, round)

    def pass_time(self, work: WorkItems, sent: SentUpdates) -> None:
        for number, _, places in self.members(work.workers) if self.clock else ():
            assert self.clock is not None
            self.clock.now = self.seconds[number]
            super().pass_time(work[places], sent)
            self.seconds[number] = self.clock.now
        self.join_times(work.round)

    def join_times(self, round: int) -> None:
        """Set the virtual clock to the time of the slowest group, for which all groups wait at the top level."""
        if self.clock is None:
            return
        self.clock.now = max(self.seconds)
        if round % self.task.experiment.group_rounds == 0:
            self.clock.pass_link(2 * self.top_bytes)
            self.seconds = [self.clock.now] * len(self.seconds)

    @property
    def top_bytes(self) -> int:
        """Bytes that a group sends to the top level, or receives from it, each time."""
        return self.shared.server.row.nbytes - personal_bytes(self.task) + buffer_bytes(self.task, self.shared)

    def record(self, round: int, *arguments: Any) -> Round:
        record, of_workers = super().record(round, *arguments)
        received = self.groups.count if (round - 1) % self.task.experiment.group_rounds == 0 else 0
        up, down = self.reporting * self.top_bytes, received * self.top_bytes
        return replace(record, top_bytes_up=up, top_bytes_down=down), of_workers

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Tensor]]:
        facts, rule, columns = super().state()
        for number, level in enumerate(self.levels):
            rule |= {f"{number}/{name}": array for name, array in self.states_of(level).items()}
        has_last = [level.server.has_last for level in self.levels]
        return facts | {"groups": {"has_last": has_last, "seconds": self.seconds}}, rule, columns

    def resume(
        self, facts: dict[str, Any], rule: dict[str, np.ndarray], columns: dict[str, Tensor], workers: Sequence[int]
    ) -> None:
        super().resume(facts, {}, columns, workers)
        saved, parts = GroupsState.model_validate(facts["groups"]), dict[str, dict[str, np.ndarray]]()
        for name, array in rule.items():
            place, _, own_name = name.partition("/")
            parts.setdefault(place, {})[own_name] = array
        for number, (level, has_last) in enumerate(zip(self.levels, saved.has_last, strict=True)):
            self.restore(level, parts.get(str(number), {}))
            level.server.has_last = has_last
        self.seconds = saved.seconds

    @property
    def levels(self) -> list[Level]:
        """The servers of all groups, and then that of the top level."""
        return [*self.edges, self.top]


def part_of(context: AggregationContext, places: np.ndarray) -> AggregationContext:
    """Return the workers of `context` at the positions `places`."""
    return replace(context.of_wave(places.tolist()), slots=[context.slots[place] for place in places])
