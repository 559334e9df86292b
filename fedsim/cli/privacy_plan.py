"""The privacy cost of an experiment, computed before it runs."""

from __future__ import annotations

from fedsim.config.experiment import Experiment
from fedsim.config.validation import large_delta
from fedsim.errors import ExperimentError
from fedsim.privacy import ACCOUNTANTS, UnsupportedSamplingError
from fedsim.runs.setup import releases_before

NEIGHBOURS = {
    "ADD_OR_REMOVE_ONE": "each {unit}, which may be added or left out",
    "REPLACE_ONE": "each {unit}, which may be replaced by another",
    "REPLACE_SPECIAL": "each {unit}, whose contributions may be replaced by zeros",
}
SAMPLED = {
    "poisson": "{cohort:,} of {workers:,} workers on average, each drawn independently",
    "without_replacement": "{cohort:,} of {workers:,} workers, drawn without replacement",
    None: "not counted: as if each of {workers:,} workers took part in every round",
}
HELD = "up to {holders:,} workers of a round hold the same sample, and each of them counts"


def privacy_plan(experiment: Experiment, target: float | None = None) -> list[tuple[str, str]]:
    """Return the privacy of an experiment as pairs (topic, text).

    Args:
        experiment: experiment with a privacy mechanism, or with a client algorithm that protects samples.
        target: epsilon for which to compute the noise. None: compute only the epsilon of the experiment.

    Raises ExperimentError if the experiment has neither, and MissingPackageError without dp-accounting.

    Cost: a few seconds per accountant.

    >>> experiment = fedsim.Experiment(workers=100, privacy={"mechanism": "central", "clip": 1.0, "noise": 4.0})
    >>> dict(privacy_plan(experiment))["epsilon (pld)"]
    '3.34'
    """
    if (releases := releases_before(experiment)) is None:
        raise ExperimentError(
            f"{experiment.privacy.setting}: the experiment has no differential privacy; set "
            "privacy.mechanism=central, or local.algorithm=dp_sgd"
        )
    target = experiment.privacy.target_epsilon if target is None else target
    releases = experiment.with_noise(releases).releases(releases.holders)
    assert releases is not None
    delta, rounds = experiment.privacy.delta, experiment.rounds
    table = experiment.privacy if experiment.protects == "worker" else experiment.local
    neighbours = NEIGHBOURS[releases.relation].format(unit=experiment.protects)
    sampled = SAMPLED[releases.effective_sampling]
    per_round = f", {releases.per_round} sums in each" if releases.per_round > 1 else ""
    lines = [
        ("protects", f"{neighbours} ({table.setting}, noise = {releases.noise:g})"),
        ("sampling", sampled.format(cohort=releases.cohort, workers=releases.workers)),
        *([("overlap", HELD.format(holders=releases.holders))] if releases.holders > 1 else []),
        ("rounds", f"{rounds:,}{per_round}"),
        ("delta", f"{delta:g}"),
        *([("warning", warning)] if (warning := large_delta(experiment)) else []),
    ]
    for accountant in ACCOUNTANTS:
        try:
            lines.append((f"epsilon ({accountant})", f"{releases.epsilon(rounds, delta, accountant):.3g}"))
            if target is not None:
                noise = releases.noise_for(target, experiment.schedule_rounds, delta, accountant)
                lines.append((f"noise ({accountant})", f"{table.place}.noise={noise:.4g} for epsilon = {target:g}"))
        except UnsupportedSamplingError as error:
            lines.append((f"epsilon ({accountant})", error.lines[0].partition(": ")[2]))
    return lines
