"""What one process does in a round. Every engine runs this code; they differ in how many processes run it, and where.

An executor works on its share: on the rows that its trainer trains, on a part of the columns, on a part of the test
batches. What it reads and writes lies in the engine's `SharedState`. The public methods of `Executor` are the lines of
a round; `fedsim.engines.engine.Engine` has one of the same name for each, which calls it in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
import torch

from fedsim.core.randomness import seed_everything
from fedsim.core.rows import index_of, new_rows, pull_down
from fedsim.core.training import test
from fedsim.engines.aggregator import Aggregator, meet
from fedsim.engines.evaluation import Evaluation
from fedsim.engines.out_of_memory import explain_oom
from fedsim.engines.pool.process_context import ProcessContext
from fedsim.engines.round_stats import AggregationContext, AggregationStats, GradientRoundStats, SentUpdates
from fedsim.engines.task import SharedState, TaskSpec, buffer_bytes, test_batch_size
from fedsim.engines.trainers.batches import BatchSource, WorkItem
from fedsim.engines.trainers.capture import can_capture
from fedsim.engines.trainers.row_module import RowModule
from fedsim.engines.trainers.sequential import Trainer
from fedsim.processing import apply_chain
from fedsim.system.allocator import keep_freed_memory
from fedsim.system.devices import synchronize
from fedsim.system.precision import full_precision

T = TypeVar("T")

MakeTrainer = Callable[[ProcessContext, TaskSpec, SharedState, BatchSource], Trainer]


class Executor:
    """One process's share of the work of an engine."""

    def __init__(self, process: ProcessContext, task: TaskSpec, shared: SharedState, make_trainer: MakeTrainer) -> None:
        if task.device.type == "cpu":
            keep_freed_memory()
        self.process, self.task, self.shared = process, task, shared
        self.module = RowModule(task.new_module)
        self.gradient = new_rows(1, self.module.layout.d, task.dtype, task.device)[0]
        self.batch_source = BatchSource(task, shared)
        self.aggregator = self._new_aggregator()
        # A captured step keeps the precision in which it was captured.
        with explain_oom(task, process.count), self.in_precision():
            self.trainer = make_trainer(process, task, shared, self.batch_source)
        captured = self.trainer.replays is not None and task.cuda_graphs is not False and can_capture(task.device)
        self._evaluation = Evaluation(task, shared, self.module, self._test_batches(), captured=captured)

    def _new_aggregator(self) -> Aggregator:
        root_row = None if self.batch_source.root is None else len(self.shared.rows) - 1
        return Aggregator(self.process, self.task, self.shared, root_row)

    def run(self, method: Callable[..., T], *arguments: object) -> T:
        """Call one of the methods below. Only training has a lower precision than the rows."""
        with explain_oom(self.task, self.process.count, self.trainer.width), full_precision(self.task.device):
            return method(self, *arguments)

    def pull_down(self, cohort: Sequence[int], round: int) -> int:
        """Give this process's members of the cohort the global model; return the bytes that the whole cohort is sent.

        Where gradients are averaged there are no rows to give, and the bytes are those of buffers. The engine has
        loaded what the workers keep.
        """
        task, shared = self.task, self.shared
        nbytes = buffer_bytes(task, shared)
        members = self._mine(cohort)
        index = index_of([member.slot for member in members], task.device)
        if task.sync_in(round) == "parameters":
            row = self.aggregator.sent_row()
            pull_down(row, shared.rows, index)
            nbytes += row.nbytes
        if task.buffers != "local":
            pull_down(shared.global_buffers, shared.buffers, index)
        synchronize(task.device)
        return len(cohort) * nbytes

    def train(self, cohort: Sequence[int], round: int) -> None:
        """Train this process's members of the cohort, each on its own row and shard; their rows become updates."""
        members = self._mine(cohort, round)
        if self.task.rule.accepts("losses"):
            for member in members:
                with self.process.working_on(member.worker, round):
                    self.shared.losses[member.slot] = self._loss_before_training(member)
        with self.in_precision():
            self.trainer.train(members)
        self.aggregator.begin(round, [member.slot for member in members])
        synchronize(self.task.device)

    def train_apart(self, members: Sequence[WorkItem]) -> None:
        """Train this process's share of members whose rounds differ; their rows hold what they begin with."""
        self.train_mine(self._share_of(members))

    def train_mine(self, members: Sequence[WorkItem]) -> None:
        """The same for members that are this process's alone."""
        with self.in_precision():
            self.trainer.train(members)
        synchronize(self.task.device)

    def remembered(self) -> tuple[dict[str, np.ndarray], bool]:
        """What rules keep from one aggregation to the next, beside the Memory: see `Aggregator`.

        By value: tensors would travel as shared memory, which a process that is killed on the way leaves behind.
        """
        state, has_last = self.aggregator.remembered()
        return {name: tensor.cpu().numpy() for name, tensor in state.items()}, has_last

    def remember(self, rule: dict[str, np.ndarray], has_last: bool) -> None:
        """Go on from there; what is in the Memory has been put back by then."""
        self.aggregator.remember({name: torch.from_numpy(array) for name, array in rule.items()}, has_last)

    def begin_with_parameters(self) -> None:
        """After the last round of gradients: what rule, attack and server keep begins here."""
        self.aggregator.begin_with_parameters()

    def replay_refusal(self) -> str | None:
        """Why this process does not replay captured steps."""
        replays = self.trainer.replays
        return "only steps of stacks are" if replays is None else replays.refusal

    def attack(self, cohort: Sequence[int], round: int) -> None:
        """Replace the updates of the Byzantine workers of the cohort."""
        self.aggregator.attack(self._whole_cohort(cohort, round))
        synchronize(self.task.device)

    def process_updates(self, cohort: Sequence[int], round: int) -> SentUpdates:
        """Apply the processors to the updates of this process's members of the cohort."""
        sent = SentUpdates()
        self._process(self._mine(cohort, round), self._whole_cohort(cohort, round), sent)
        synchronize(self.task.device)
        return self._total(sent.on_host())

    def aggregate(self, cohort: Sequence[int], round: int) -> AggregationStats:
        """Apply the rule to the cohort's updates. The result stays here for `server_step`."""
        return self.aggregator.aggregate(self._whole_cohort(cohort, round)).on_host()

    def server_step(self) -> None:
        """Move the global row along the aggregated update."""
        self.aggregator.server_step()
        synchronize(self.task.device)

    def combine_buffers(self, cohort: Sequence[int], round: int, excluded: Sequence[int]) -> int:
        """Update the global buffers from those of the cohort, without the excluded workers; the bytes that are sent."""
        if self.process.index == 0:
            self.aggregator.combine_buffers(self._whole_cohort(cohort, round), excluded)
            synchronize(self.task.device)
        return len(cohort) * buffer_bytes(self.task, self.shared)

    def train_on_averaged_gradients(self, cohort: Sequence[int], round: int) -> AggregationStats:
        """Synchronous SGD: at every step the cohort's gradients are aggregated and ONE optimizer step is taken.

        The rows hold gradients here, all of them at the global row. A worker whose data is used up is left out of
        the steps that remain.
        """
        stats = self._steps_checked_later(cohort, round) if self.aggregator.may_check_later else None
        if stats is None:
            stats = self._steps_together(cohort, round)
        if round == self.task.gradient_rounds < self.task.rounds:
            self.aggregator.begin_with_parameters()
        if self.task.processors:
            stats.sent = self._total(stats.sent)
        return stats

    def _steps_together(self, cohort: Sequence[int], round: int) -> AggregationStats:
        """The steps of a round of synchronous SGD."""
        of_round, members = GradientRoundStats(cohort), self._mine(cohort, round)
        self.trainer.begin_gradient_round(members)
        for step, context in enumerate(self._aggregations(cohort, round)):
            of_round.add(context, self._step_together(step, context, members, of_round.sent))
        self.trainer.part()
        return of_round.total()

    def _steps_checked_later(self, cohort: Sequence[int], round: int) -> AggregationStats | None:
        """The steps of a round, after which all rows are checked together.

        None, and the global row and the buffers as before, if a row is not finite. Such a row may also make a model or
        a rule fail: after any error the round is to be done again with a check at each step, which repeats an error
        that has another reason.
        """
        buffers = self.shared.buffers.clone()
        self.aggregator.check_later()
        try:
            stats = self._steps_together(cohort, round)
        except Exception:
            stats = None
        if not self.aggregator.check(undo=stats is None):
            self.shared.buffers.copy_(buffers)
            return None
        return stats

    def test(self, round: int) -> None:
        """Test the global model on this process's share of the test batches."""
        self._test(round)

    def _test(self, round: int) -> None:
        self._evaluation(round, self.process.heartbeat)

    def _test_batches(self) -> range:
        return range(self.process.index, len(self.shared.test_sums), self.process.count)

    def _loss_before_training(self, member: WorkItem) -> float:
        """Mean loss of a copy of a member's row on its worker's own samples, as the worker sees them."""
        task, shared = self.task, self.shared
        self.module.take(shared.rows[member.slot].clone(), self.gradient, shared.buffers[member.slot])
        seed_everything(task.device, task.seed, "losses", member.round, member.worker)
        batches = self.batch_source.samples_seen(member.worker, member.round, test_batch_size(task.device))
        return test(self.module.module, batches).loss

    def in_precision(self) -> AbstractContextManager[Any]:
        """A context in which training has its precision."""
        return self.task.precision.training(self.task.device)

    def _whole_cohort(self, cohort: Sequence[int], round: int) -> AggregationContext:
        weights = self.aggregator.weights(cohort, self._shard_sizes(cohort))
        return AggregationContext(range(len(cohort)), list(cohort), weights, (round,))

    def _mine(self, cohort: Sequence[int], round: int = 0) -> list[WorkItem]:
        """The members that this process trains: of the cohort, and the server where the rule compares with that."""
        everyone, steps = self._everyone(cohort)
        slots = [*range(len(cohort)), len(self.shared.rows) - 1]  # the server's is the last, however many there are
        assignment = balance_load(steps, self.process.count)[self.process.index]
        return [WorkItem(slots[place], everyone[place], round) for place in assignment]

    def _everyone(self, cohort: Sequence[int]) -> tuple[list[int], list[int]]:
        """The workers that train in a round, the server last, and the number of steps of each."""
        everyone = [*cohort] if self.batch_source.root is None else [*cohort, self.batch_source.root]
        return everyone, [self.task.schedule.steps_for(n) for n in self._shard_sizes(everyone)]

    def _share_of(self, members: Sequence[WorkItem]) -> list[WorkItem]:
        """A worker that goes step by step stays with one process, whose batch source is where its last step ended."""
        index, count = self.process.index, self.process.count
        by_step = [member for member in members if member.step is not None]
        rounds = [member for member in members if member.step is None]
        assignment = balance_load([self.batch_source.steps_of(member) for member in rounds], count)[index]
        return [rounds[place] for place in assignment] + [member for member in by_step if member.slot % count == index]

    def _shard_sizes(self, cohort: Sequence[int]) -> list[int]:
        return [self.batch_source.size(worker) for worker in cohort]

    def _aggregations(self, cohort: Sequence[int], round: int) -> Iterator[AggregationContext]:
        """The aggregations of a round of synchronous SGD: at each step those take part who still have data."""
        schedule, shard_sizes = self.task.schedule, self._shard_sizes(cohort)
        batch_sizes: list[int] = []
        for step in range(max(map(schedule.steps_for, shard_sizes))):
            if batch_sizes != (batch_sizes := [schedule.batch_size_at(step, n) for n in shard_sizes]):
                active = [slot for slot, size in enumerate(batch_sizes) if size]
                workers, samples = [cohort[slot] for slot in active], [batch_sizes[slot] for slot in active]
                weights = self.aggregator.weights(workers, samples)
                if weights is not None and not weights.any():
                    return  # the workers that still have data have weight 0
            yield AggregationContext(active, workers, weights, (round, step))

    def _process(self, members: Sequence[WorkItem], context: AggregationContext, sent: SentUpdates) -> None:
        """Apply the processors to the rows of those members that take part in an aggregation."""
        task, rows, active = self.task, self.shared.rows, set(context.workers)
        members = [member for member in members if member.worker in active]  # the server's own row is not sent
        for member in members:
            metrics: dict[str, Any] = {}
            with self.process.working_on(member.worker, context.moment[0]):
                coordinates = (*context.moment, member.worker)
                nbytes = apply_chain(task.processors, rows[member.slot], task.seed, coordinates, metrics)
            sent.add(1, nbytes, metrics)
        self.aggregator.rows_processed([member.slot for member in members])

    def _total(self, sent: SentUpdates) -> SentUpdates:
        """The updates that this process knows of: its own. A rank knows of those of all ranks."""
        return sent

    def _count_unprocessed(self, context: AggregationContext, sent: SentUpdates) -> None:
        """Count the rows of an aggregation that are sent as they are, in one process for all."""
        if self.process.index == 0:
            sent.add(len(context.slots), len(context.slots) * self.shared.global_row.nbytes)

    def _step_together(
        self, step: int, context: AggregationContext, members: Sequence[WorkItem], sent: SentUpdates
    ) -> AggregationStats:
        """A step of synchronous SGD: the same lines as a round of federated averaging, with gradients for updates.

        All processes wait for each other before one reads what another has written.
        """
        aggregator = self.aggregator
        with self.in_precision():
            self.trainer.gradients(step)
        aggregator.begin(context.moment[0], [member.slot for member in members])
        self._meet()
        if self.task.byzantine:
            aggregator.attack(context)
            self._meet()
        if self.task.processors:
            self._process(members, context, sent)
            self._meet()
        else:
            self._count_unprocessed(context, sent)
        stats = aggregator.aggregate(context)
        aggregator.server_step()
        self._meet()
        return stats

    def _meet(self) -> None:
        meet(self.process, self.task.device)


def balance_load(costs: Sequence[int], count: int, most: int | None = None) -> list[list[int]]:
    """Assign items to `count` processes, the costliest first and always to the process with the least load.

    The same for every caller with the same costs.

    Args:
        costs: of each item.
        most: how many items a process gets at most.

    Returns the numbers of each process's items, ascending.
    """
    assignments: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        process = min((p for p in range(count) if len(assignments[p]) != most), key=loads.__getitem__)
        assignments[process].append(item)
        loads[process] += costs[item]
    return [sorted(items) for items in assignments]
