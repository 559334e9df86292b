"""A round with several global models, of which each worker trains the one with the least loss on its samples (IFCA)."""

from __future__ import annotations

import numpy as np

from fedsim.errors import DivergedError
from fedsim.records.round_stats import AggregationStats, RoundTotals
from fedsim.rounds.cohorts import RoundPlan
from fedsim.rounds.parameter_round import ParameterRound


class ClusterRound(ParameterRound):
    """Round in which each global model is updated by the workers that have selected it (Ghosh et al. 2020)."""

    def pull_down(self, plan: RoundPlan) -> None:
        """Load the states that workers kept from earlier rounds. Each then gets the model with its least loss."""
        self.executor.load_states(plan.context.workers, plan.mine)
        self.executor.worker_tests.load(plan.mine)

    def begin_updates(self, plan: RoundPlan) -> None:
        """Do nothing: `aggregate` subtracts from each trained model the global model that the worker selected."""

    def aggregate(self, plan: RoundPlan) -> AggregationStats:
        """Update each global model. A model whose updates are all excluded does not change.

        Raises DivergedError if all updates of all models are excluded.
        """
        clusters = self.team.of_all(self.shared.cohort.clusters, plan.context.slots).tolist()
        of_round, finite, updates = RoundTotals(len(clusters), clusters), 0, self.level.aggregator.updates
        for context in plan.context.by_cluster(clusters):
            members = plan.mine[np.isin(plan.mine.workers, context.workers)]
            updates.begin(members.slots, self.shared.server.model(context.cluster)[0])
            self.team.barrier()
            sent = self.level.change_updates(context, members)
            n, bad = len(context.slots), len(updates.nonfinite(context))
            excluded = self.task.experiment.nonfinite == "exclude" and bad == n
            left_out = AggregationStats([0.0] * n, context.workers, sent=sent)
            of_round.add(context.slots, left_out if excluded else self.update_model(context, sent))
            finite += n - bad
        if not finite:
            raise DivergedError(f"all {len(clusters)} updates contain NaN or infinity", "reduce local.lr", plan.round)
        return of_round.total()

    def combine_buffers(self, plan: RoundPlan, stats: AggregationStats) -> None:
        for context in plan.context.by_cluster(stats.clusters):
            self.level.aggregator.combine_buffers(context, stats.excluded)
