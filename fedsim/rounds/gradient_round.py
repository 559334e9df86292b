"""A round of synchronous SGD, in which the server aggregates the gradients of every local step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from fedsim.records.round_stats import AggregationStats, RoundTotals, SentUpdates
from fedsim.rounds.cohorts import RoundPlan
from fedsim.rounds.parameter_round import ParameterRound
from fedsim.rounds.round_clock import Clock
from fedsim.training.weights import AggregationContext, weights_of


class GradientRound(ParameterRound):
    """Round in which all workers receive the new model after each step.

    All rounds with `sync = "gradients"` and the first rounds with `sync = "post_local"` are of this kind.
    """

    def run(self, plan: RoundPlan) -> AggregationStats:
        with self.phase("broadcast"):
            self.pull_down(plan)
        with self.phase("train"):
            return self.steps_checked_later(plan) or self.steps(plan)

    def pull_down(self, plan: RoundPlan) -> None:
        """Copy the global buffers to the workers, and load the states that the workers kept from earlier rounds.

        Parameters are not copied, because the trainer reads the global parameters at each step.
        """
        self.executor.load_states(plan.context.workers, plan.mine)
        self.copy_buffers(self.shared.server.buffers, plan.mine)

    def steps(self, plan: RoundPlan) -> AggregationStats:
        """Run all steps: compute gradients, aggregate them, and update the global model."""
        of_round, trainer = RoundTotals(len(plan.work)), cast("Any", self.executor.trainer)
        trainer.begin_gradient_round(plan.mine)
        for step, context in enumerate(self.contexts_of_steps(plan)):
            if trainer.averages:  # stores no per-worker gradients
                sent = SentUpdates([(context.workers, self.shared.server.row.nbytes)])
                of_round.add(context.slots, AggregationStats(trainer.step_along_mean(step, context), sent=sent))
                continue
            with self.executor.in_precision():
                trainer.gradients(step)
            self.level.aggregator.updates.begin(plan.mine.slots)
            self.team.barrier()
            sent = self.level.change_updates(context, plan.mine)
            of_round.add(context.slots, self.update_model(context, sent))
        trainer.end_gradient_round()
        return of_round.total()

    def steps_checked_later(self, plan: RoundPlan) -> AggregationStats | None:
        """Run all steps, and check for NaN and infinity only at the end of the round.

        If the check fails, or after any error, the state before the round is restored, and the result is None. The
        result is also None if each step must be checked.
        """
        check, had_last = self.level.aggregator.updates.deferred_check, self.server.has_last
        if check is None or not check.usable:
            return None
        before = {name: rows.clone() for name, rows in self.shared.cohort.worker_rows.items()}
        check.begin()
        try:
            stats = self.steps(plan)
        except Exception:
            stats = None
        if check.end(failed=stats is None):
            return stats
        self.server.has_last = had_last
        for name, rows in before.items():
            self.shared.cohort.worker_rows[name].copy_(rows)
        return None

    def contexts_of_steps(self, plan: RoundPlan) -> Iterator[AggregationContext]:
        """Yield an AggregationContext for each step: the workers that still have data, with their weights."""
        work, schedule = plan.work, self.task.schedule.of(plan.work.workers, plan.work.rounds)
        batch_sizes = np.zeros(0)
        for step in range(int(work.steps.max())):
            if not np.array_equal(batch_sizes, batch_sizes := schedule.batch_size_at(step, work.sizes)):
                active = np.flatnonzero(batch_sizes)
                workers, samples = work.workers[active].tolist(), batch_sizes[active].tolist()
                weights = weights_of(self.task, self.shared, workers, samples)
                if weights is not None and not weights.any():
                    return  # all workers that still have data have weight 0
            yield AggregationContext(active.tolist(), workers, samples, weights, (plan.round, step))

    def pass_time(self, clock: Clock, plan: RoundPlan, sent: SentUpdates) -> None:
        clock.finish_steps(sent)

    def bytes_down(self, plan: RoundPlan, sent: SentUpdates) -> int:
        at_steps = sent.count * self.shared.server.row.nbytes  # the workers receive parameters before each step
        return at_steps + self.bytes_for_losses(plan) + len(plan.reached) * self.bytes_at_start()
