"""Privacy accounting: the epsilon of repeated noisy sums, computed by the library dp-accounting.

    releases = Releases(noise=1.0, workers=1000, cohort=100, sampling="poisson")
    releases.epsilon(rounds=50, delta=1e-5, accountant="rdp")

Every round releases one or several sums of clipped vectors with Gaussian noise. The sampling of the vectors lowers
epsilon (amplification) if nobody learns which vectors have been chosen.
"""

from __future__ import annotations

import decimal
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

from fedsim.errors import ExperimentError
from fedsim.system.packages import import_extra

Sampling = Literal["poisson", "without_replacement"] | None
FINEST, STEPS_OF_EPSILON = 1e-4, 1e5  # steps of privacy losses for PLD: at least 1e-4, and at most 1e5 up to epsilon
MOST_NOISE = 2.0**20  # upper end of the search for a noise multiplier
THREE_DIGITS = decimal.Context(prec=3, rounding=decimal.ROUND_FLOOR)


class UnsupportedSamplingError(ExperimentError):
    """Error for an accountant that does not support the sampling of an experiment."""


@dataclass(frozen=True)
class Releases:
    """Noisy sums that each round of an experiment releases.

    Two data sets are neighbours if they differ in one worker (or sample), as `relation` says. If a worker is replaced
    by another, the sum changes by up to twice the maximum norm, which halves the effective noise multiplier.

    Args:
        noise: noise multiplier, the standard deviation of the noise divided by the maximum norm of a vector. None until
            it is found for a target epsilon.
        workers: number of workers.
        cohort: number of workers that are chosen in a round (on average with Poisson sampling).
        sampling: random sampling whose result stays secret: "poisson", or "without_replacement" for a cohort of fixed
            size. None: every worker is assumed to take part in every round.
        per_round: number of sums per round in which a worker includes its update (or one of its samples).
        holders: number of workers in a round that may hold the same sample. Each of them has its own sums.
        by_replacement: whether neighbouring data sets replace a worker by another even without random sampling.

    >>> Releases(noise=2.0, workers=10, cohort=10).relation
    'REPLACE_SPECIAL'
    """

    noise: float | None
    workers: int
    cohort: int
    sampling: Sampling = None
    per_round: int = 1
    holders: int = 1
    by_replacement: bool = False

    @property
    def effective_sampling(self) -> Sampling:
        """Sampling that lowers epsilon: the attribute `sampling`, or None if all workers take part."""
        return self.sampling if self.cohort < self.workers else None

    @property
    def relation(self) -> str:
        """Name of the neighbouring relation in dp-accounting.

        ADD_OR_REMOVE_ONE: a worker is added or left out, with Poisson sampling. REPLACE_ONE: a worker is replaced by
        another. REPLACE_SPECIAL: a worker contributes zeros to every sum, if all workers count in every round.
        """
        if self.by_replacement or self.effective_sampling == "without_replacement":
            return "REPLACE_ONE"
        return "ADD_OR_REMOVE_ONE" if self.effective_sampling else "REPLACE_SPECIAL"

    def epsilon(self, rounds: int, delta: float, accountant: str = "rdp") -> float:
        """Return the epsilon of (epsilon, delta)-differential privacy after `rounds` rounds; infinity without noise.

        `accountant` is "rdp" (Renyi differential privacy, Mironov 2017) or "pld" (privacy loss distributions, Koskela
        et al. 2020), which is tighter and slower.

        Raises MissingPackageError without dp-accounting, and ExperimentError if the accountant does not support the
        sampling.

        Cost: up to a second.
        """
        return _epsilon(self, rounds, delta, accountant)

    def noise_for(self, epsilon: float, rounds: int, delta: float, accountant: str = "rdp") -> float:
        """Return the smallest three-digit noise multiplier with which `rounds` rounds cost at most `epsilon`.

        Raises the errors of the method `epsilon`, and ExperimentError if no noise is enough.

        Cost: that of about 20 calls of `epsilon`.
        """

        def is_enough(noise: float) -> bool:
            return replace(self, noise=noise).epsilon(rounds, delta, accountant) <= epsilon

        low, high = 0.0, 1.0 if accountant == "rdp" else self.noise_for(epsilon, rounds, delta)  # which is faster
        while not is_enough(high):
            low, high = high, 2 * high
            if high > MOST_NOISE:
                raise ExperimentError(f"privacy.target_epsilon = {epsilon:g}: no noise is enough; use a larger epsilon")
        while high - low > 1e-3 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if is_enough(middle) else (middle, high)
        noise = THREE_DIGITS.create_decimal_from_float(low).next_plus(THREE_DIGITS)
        while not is_enough(float(noise)):
            noise = noise.next_plus(THREE_DIGITS)
        return float(noise)


def _library(module: str = "") -> Any:
    return import_extra(f"dp_accounting{module}", extra="privacy", purpose="privacy accounting")


def _rdp(relation: Any, bound: Callable[[], float]) -> Any:
    return _library(".rdp").RdpAccountant(neighboring_relation=relation)


def _pld(relation: Any, bound: Callable[[], float]) -> Any:
    """Return the accountant "pld" for a neighbouring `relation` of dp-accounting.

    `bound` returns an upper bound of epsilon, which determines the discretization.
    """
    interval = max(FINEST, bound() / STEPS_OF_EPSILON)
    return _library(".pld").PLDAccountant(relation, value_discretization_interval=interval)


ACCOUNTANTS = {"rdp": _rdp, "pld": _pld}


@lru_cache(4096)  # repetitions of a run with other seeds have the same epsilon
def _epsilon(releases: Releases, rounds: int, delta: float, accountant: str) -> float:
    if not releases.noise:
        return math.inf
    library = _library()
    if not rounds:
        return 0.0
    sampling = releases.effective_sampling
    # RdpAccountant of dp-accounting 0.6 takes the noise multiplier as a ratio to the sensitivity, also for the relation
    # REPLACE_ONE, whose sensitivity is 2 C (https://github.com/google/differential-privacy/issues/378). PLDAccountant
    # doubles the sensitivity itself, so a sum without sampling is counted with ADD_OR_REMOVE_ONE.
    event = library.GaussianDpEvent(releases.noise / (2 if releases.relation == "REPLACE_ONE" else 1))
    if sampling == "poisson":
        event = library.PoissonSampledDpEvent(releases.cohort / releases.workers, event)
    elif sampling == "without_replacement":
        event = library.SampledWithoutReplacementDpEvent(releases.workers, releases.cohort, event)
    event = library.SelfComposedDpEvent(event, rounds * releases.per_round * releases.holders)
    relation = library.NeighboringRelation[releases.relation if sampling else "ADD_OR_REMOVE_ONE"]
    account = ACCOUNTANTS[accountant](relation, partial(_epsilon, releases, rounds, delta, "rdp"))
    if not account.supports(event):
        raise UnsupportedSamplingError(
            f'privacy.accountant = "{accountant}": does not support cohorts of fixed size that are drawn without '
            "replacement; use privacy.accountant=rdp, or sampling.name=poisson"
        )
    absl, level = logging.getLogger("absl"), logging.getLogger("absl").level
    absl.setLevel(logging.ERROR)  # warnings about orders of the Renyi divergence that do not converge and are left out
    try:
        return float(account.compose(event).get_epsilon(delta))
    finally:
        absl.setLevel(level)
