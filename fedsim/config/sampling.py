"""The table `sampling`, and combinations of its settings that an experiment cannot have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fedsim.asynchronous.policies import Policy
from fedsim.core.base_table import PlugTable
from fedsim.core.objects import Name
from fedsim.errors import ExperimentError, show
from fedsim.server import BoundCohortStrategy, bind_cohort_strategy, cohort_strategy

if TYPE_CHECKING:
    from fedsim.config.experiment import Experiment


class Sampling(PlugTable):
    """How the workers of a round are chosen."""

    place, named_by, registry = "sampling", "strategy", cohort_strategy

    strategy: Name = "uniform"

    def bind(self) -> BoundCohortStrategy:
        return bind_cohort_strategy(self.plug, self.params)


def check_sampling(experiment: Experiment, policy: Policy) -> Iterator[str]:
    """One error line for each setting that cannot be."""
    strategy = experiment.sampling.bind()
    if not policy.in_rounds:
        where = f"policy.name = {show(experiment.policy.name)} has no synchronous rounds"
        if experiment.sampling != Sampling():
            yield f"{strategy.place}: {where}, so it has no cohorts; omit [sampling]"
        if experiment.worker_dropout:
            yield f"worker_dropout = {experiment.worker_dropout}: {where}; omit it, or use clock.departures"
    if "losses" in strategy.accepts and experiment.buffers == "local":
        yield f"{strategy.place}: computes losses of the global model, whose buffers are not sent with buffers=local"
    if experiment.cohort_size <= experiment.workers:
        try:
            strategy.check(experiment.workers, experiment.cohort_size)
        except ExperimentError as error:
            yield from error.lines
