"""The cohorts of an experiment."""

from __future__ import annotations

from fedsim.config.experiment import Experiment
from fedsim.data import Shards
from fedsim.server import CohortSampler


def cohorts_of(experiment: Experiment, shards: Shards) -> CohortSampler:
    """The sampler of cohorts. Raises ExperimentError if it needs sizes of shards that are not known."""
    return CohortSampler(
        strategy=experiment.sampling.bind(),
        seed=experiment.seed,
        size=experiment.cohort_size,
        shards=shards,
        dropout=experiment.worker_dropout,
        weighted=experiment.aggregate.weights == "inverse_probability",
    )
