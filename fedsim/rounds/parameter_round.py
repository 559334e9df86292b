"""One round of federated averaging (FedAvg), as every process of a run executes it.

`fedsim/reference.py` computes the same numbers in plain PyTorch.
"""

from __future__ import annotations

from dataclasses import replace

from fedsim.records.round_stats import AggregationStats, SentUpdates
from fedsim.rounds.cohorts import RoundPlan
from fedsim.rounds.round_kind import RoundKind
from fedsim.training.weights import AggregationContext


class ParameterRound(RoundKind):
    """Round in which workers train the global model, and the server aggregates their updates (McMahan et al. 2017).

    `SynchronousRounds.run_round` draws the cohort before `run`. After `run`, it averages the buffers, stores the states
    of the workers, and tests the global model. The other kinds of rounds override the methods in which they differ.
    """

    def run(self, plan: RoundPlan) -> AggregationStats:
        with self.phase("broadcast"):
            self.server.send(plan.round)
            self.pull_down(plan)
        with self.phase("train"):
            self.training.train(plan)
            self.begin_updates(plan)
            self.team.barrier()
        with self.phase("aggregate"):
            return self.aggregate(plan)

    def pull_down(self, plan: RoundPlan) -> None:
        """Give each worker of this process the global model, and load the state it kept from earlier rounds."""
        self.executor.load_states(plan.context.workers, plan.mine)
        self.copy_model(self.server.sent, self.shared.server.buffers, plan.mine)

    def begin_updates(self, plan: RoundPlan) -> None:
        """Replace the trained parameters by updates: subtract the parameters that the workers received."""
        self.level.aggregator.updates.begin(plan.mine.slots, self.server.sent)

    def aggregate(self, plan: RoundPlan) -> AggregationStats:
        """Update the global model with the workers' updates, which attacks and compressors may have changed."""
        sent = self.level.change_updates(plan.context, plan.mine)
        return self.update_model(plan.context, sent)

    def update_model(self, context: AggregationContext, sent: SentUpdates) -> AggregationStats:
        """Apply the aggregation rule, and let the server optimizer update the global model.

        Args:
            context: workers whose updates are aggregated, and their weights.
            sent: sizes of the updates.
        """
        update, stats = self.level.aggregator.aggregate(context)
        self.receive_messages(context, stats.excluded)
        noise = self.level.privacy.finish(context.moment[0])
        sent_columns = self.task.fragment_sent(context.moment[0]).columns
        self.server.step(update.plus(noise).within(sent_columns), context.moment, context.cluster)
        self.team.barrier()
        return replace(stats, sent=sent)
