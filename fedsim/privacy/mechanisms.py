"""Privacy mechanisms, which clip the workers' updates and add Gaussian noise, and their registry.

A mechanism is a frozen dataclass that derives from `Mechanism`. Its fields are its configuration. Noise is given as a
multiplier z of the maximum norm C, so privacy does not depend on C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedsim.core.numbers import Example, NonNegativeFloat, PositiveFloat, ProperFraction
from fedsim.core.randomness import numpy_generator
from fedsim.core.registry import Registry
from fedsim.errors import ExperimentError
from fedsim.system.devices import wide_dtype

Norm = Annotated[PositiveFloat, Example(1.0)]
Noise = Annotated[NonNegativeFloat, Example(1.0, " or privacy.target_epsilon = 3.0")]

MARGIN = 1e-5  # relative distance of a clipped norm from C, more than the rounding of float32
MOST_LOG = 60.0  # bound of |ln C| with adaptive clipping, so that C stays positive and finite in float32
DEFAULT_COUNT_NOISE = 20  # the expected cohort size is divided by this number (Andrew et al. 2021)


@dataclass(frozen=True)
class Mechanism:
    """Base class of privacy mechanisms. The base class itself adds no noise.

    Attributes:
        active: whether updates are clipped.
        at_server: whether the server adds noise to the sum of the clipped updates.
        at_workers: whether each worker adds noise to its clipped update.
        by_replacement: whether the guarantee compares two different updates of a worker (the sum changes by up to 2 C)
            instead of the presence and absence of the worker.
        adapts: whether the maximum norm changes from round to round.
        clip: maximum norm C of an update in the first round.
        noise: noise multiplier z, from which epsilon is computed.
    """

    active: ClassVar[bool] = True
    at_server: ClassVar[bool] = False
    at_workers: ClassVar[bool] = False
    by_replacement: ClassVar[bool] = False
    adapts: ClassVar[bool] = False

    clip: Norm
    noise: Noise

    def check(self, cohort: float) -> None:
        """Raise ExperimentError if the mechanism cannot be used with `cohort` expected updates in a round."""

    def noise_of_sum(self, cohort: float) -> float:
        """Return the standard deviation of the noise in a sum of `cohort` expected updates, divided by C."""
        return self.noise

    def next_clip(self, clip: float, clipped: int, updates: int, cohort: float, *key: int) -> float:
        """Return the maximum norm of the next round.

        Args:
            clip: maximum norm of this round.
            clipped: number of updates that have been clipped.
            updates: number of updates.
            cohort: expected number of updates.
            key: seed and round, on which random draws depend.
        """
        return clip


privacy_mechanism = Registry("privacy mechanism", base=Mechanism)


@privacy_mechanism("none")
@dataclass(frozen=True)
class NoMechanism(Mechanism):
    """No clipping and no noise.

    >>> fedsim.privacy.mechanisms.NoMechanism().active
    False
    """

    active: ClassVar[bool] = False

    clip: Norm = field(default=math.inf, init=False)
    noise: Noise = field(default=0.0, init=False)


@privacy_mechanism("central")
@dataclass(frozen=True)
class CentralPrivacy(Mechanism):
    """Central differential privacy: the server adds noise to the sum of the clipped updates (McMahan et al. 2018).

    With updates x_k of the cohort and the expected cohort size m, the aggregate is

        (sum_k x_k min(1, C / |x_k|) + N(0, (z C)^2 I)) / m

    C is reduced by 0.001 percent when updates are clipped, so that no rounded norm exceeds C. The divisor is m in every
    round, so the aggregate changes by at most C / m if one worker sends zeros or nothing.
    Workers must trust the server.

    Args:
        clip: maximum L2 norm C of an update, > 0.
        noise: noise multiplier z, >= 0. With 0, updates are only clipped.

    Cost: two passes over each update, and d random numbers per round.

    >>> fedsim.privacy.mechanisms.CentralPrivacy(clip=1.0, noise=1.1).noise_of_sum(cohort=100)
    1.1
    """

    at_server: ClassVar[bool] = True


@privacy_mechanism("adaptive")
@dataclass(frozen=True)
class AdaptiveCentralPrivacy(CentralPrivacy):
    """Central differential privacy whose maximum norm C follows a quantile of the norms (Andrew et al. 2021).

    In each round, b_k is 1 if the update of worker k is not clipped, otherwise 0. With the expected cohort size m:

        b = (sum_k (b_k - 1/2) + N(0, s^2)) / m + 1/2;  C = C exp(-lr (b - quantile))

    A worker that is left out, or that contributes zeros to both sums, changes sum_k (b_k - 1/2) by 1/2, and a worker
    that is replaced by another by up to 1. This noisy sum costs privacy too. The noise of the sum of updates is
    therefore multiplied by (1 - (z / (2 s))^2)^(-1/2), so that both sums together have the noise multiplier z.

    Args:
        clip: maximum L2 norm C of an update in the first round, > 0.
        noise: noise multiplier z, 0 <= z < 2 s.
        quantile: fraction of the updates that are not clipped, between 0 and 1.
        lr: learning rate of C, > 0.
        count_noise: standard deviation s of the noise of sum_k b_k, > 0. None: m / 20.

    Cost: that of `central`. Records `clip_norm`, the C of the round.

    >>> mechanism = fedsim.privacy.mechanisms.AdaptiveCentralPrivacy(clip=1.0, noise=1.0, count_noise=5.0)
    >>> round(mechanism.noise_of_sum(cohort=100), 4)
    1.005
    """

    adapts: ClassVar[bool] = True

    quantile: ProperFraction = 0.5
    lr: Norm = 0.2
    count_noise: Norm | None = None

    def check(self, cohort: float) -> None:
        if self.noise >= (bound := 2 * self._count_noise(cohort)):
            raise ExperimentError(
                f"privacy.noise = {self.noise:g}: must be less than {bound:g}, which is 2 * privacy.count_noise (by "
                "default, cohort / 10); reduce privacy.noise, or use a larger privacy.count_noise or cohort"
            )

    def noise_of_sum(self, cohort: float) -> float:
        return self.noise / math.sqrt(1 - (self.noise / (2 * self._count_noise(cohort))) ** 2)

    def next_clip(self, clip: float, clipped: int, updates: int, cohort: float, *key: int) -> float:
        noise = numpy_generator(key[0], "clip_count", *key[1:]).normal() * self._count_noise(cohort)
        share = (updates / 2 - clipped + noise) / cohort + 1 / 2  # each update counts as 1/2 or -1/2
        factor = math.exp(min(self.lr * (self.quantile - share), MOST_LOG))
        return min(max(clip * factor, math.exp(-MOST_LOG)), math.exp(MOST_LOG))

    def _count_noise(self, cohort: float) -> float:
        return cohort / DEFAULT_COUNT_NOISE if self.count_noise is None else self.count_noise


@privacy_mechanism("local")
@dataclass(frozen=True)
class LocalPrivacy(Mechanism):
    """Local differential privacy: each worker adds noise to its own clipped update (Duchi et al. 2013).

    Worker k sends x_k min(1, C / |x_k|) + N(0, (z C)^2 I), where clipping reduces C by 0.001 percent. Nobody needs to
    be trusted. The guarantee compares any two updates of a worker, and two clipped updates differ by up to 2 C. The
    mean of n updates has the noise z C / sqrt(n), which is sqrt(n) times the noise of `central`.

    Args:
        clip: maximum L2 norm C of an update, > 0.
        noise: noise multiplier z, >= 0. With 0, updates are only clipped.

    Cost: two passes over each update, and d random numbers per update.

    >>> fedsim.privacy.mechanisms.LocalPrivacy(clip=1.0, noise=2.0).by_replacement
    True
    """

    at_workers: ClassVar[bool] = True
    by_replacement: ClassVar[bool] = True


def row_norms(rows: Tensor) -> Tensor:
    """Return the L2 norms [k] of `rows` [k, d], in float64 if the device supports it.

    >>> fedsim.privacy.row_norms(torch.tensor([[3.0, 4.0]]))
    tensor([5.], dtype=torch.float64)
    """
    dtype = wide_dtype(rows.device)
    if rows.device.type != "cpu":
        return torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
    # On CPUs, converting while reducing is ten times slower along a dimension than over a whole tensor.
    return torch.stack([torch.linalg.vector_norm(row, dtype=dtype) for row in rows])


def clip_factors(norms: Tensor, max_norm: float) -> Tensor:
    """Return the factors, at most 1, that scale vectors with these L2 norms to norms of at most `max_norm`."""
    return (max_norm * (1 - MARGIN) / norms).clamp(max=1)


def clip_update(update: Tensor, max_norm: float) -> Tensor:
    """Scale an update to an L2 norm of at most `max_norm`, in place.

    The scaled norm is slightly less than `max_norm`, so that it does not exceed `max_norm` after rounding.

    Args:
        update: update of a worker, [d].
        max_norm: maximum norm, > 0.

    Returns whether the update has been scaled, as a tensor [].

    >>> update = torch.tensor([3.0, 4.0])
    >>> fedsim.privacy.clip_update(update, 1.0), update
    (tensor(True), tensor([0.6000, 0.8000]))
    """
    (factor,) = clip_factors(row_norms(update.unsqueeze(0)), max_norm)
    update.mul_(factor)
    return factor < 1
