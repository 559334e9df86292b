"""Worker speeds: how many times as long each worker takes for its work, drawn once for a run.

A plug of the registry `speed` is a function `(n_workers, rng, *, parameters) -> [n_workers]` of positive factors of
time: a worker with factor 2 takes twice as long as one with factor 1.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import numpy as np
from pydantic import Field, PositiveFloat

from fedsim.core.randomness import numpy_generator, sample_workers
from fedsim.core.registry import Plug, Registry
from fedsim.errors import ExperimentError, plural, show

speed = Registry("speed", given=("n_workers", "rng"))

Ratio = Annotated[float, Field(ge=1)]
Sigma = Annotated[float, Field(gt=0, le=10)]  # larger ones only overflow: 10 draws factors of e^80
ParetoShape = Annotated[float, Field(gt=1)]  # at 1 and below, a Pareto distribution has no mean


@speed("equal")
def equal(n_workers: int) -> np.ndarray:
    """All workers have factor 1.

    >>> equal(3)
    array([1., 1., 1.])
    """
    return np.ones(n_workers)


@speed("list")
def listed(n_workers: int, *, values: Annotated[list[PositiveFloat], Field(examples=[[1.0, 2.0]])]) -> np.ndarray:
    """One given factor for each worker.

    Raises ExperimentError unless there are as many values as workers.

    >>> listed(3, values=[1, 2.5, 0.5])
    array([1. , 2.5, 0.5])
    """
    if len(values) != n_workers:
        raise ExperimentError(
            f"clock.speed.values: {plural(len(values), 'value')} for {plural(n_workers, 'worker')}; "
            "give one for each worker"
        )
    return np.array(values, dtype=np.float64)


@speed("linear")
def linear(n_workers: int, rng: np.random.Generator, *, ratio: Ratio = 8.0, shuffle: bool = False) -> np.ndarray:
    """Evenly spaced factors: worker i of n has 1 + (ratio - 1) i / (n - 1).

    Args:
        ratio: factor of the slowest worker, at least 1.
        shuffle: permute the factors with one `rng.permutation`, so that speed does not depend on the worker's number.

    >>> linear(4, None, ratio=7.0)
    array([1., 3., 5., 7.])
    """
    factors = np.linspace(1, ratio, n_workers)
    return rng.permutation(factors) if shuffle else factors


@speed("geometric")
def geometric(n_workers: int, rng: np.random.Generator, *, ratio: Ratio = 8.0, shuffle: bool = False) -> np.ndarray:
    """Geometrically spaced factors: worker i of n has ratio^(i / (n - 1)).

    The arguments are those of `linear`.

    >>> geometric(4, None, ratio=8.0)
    array([1., 2., 4., 8.])
    """
    factors = np.geomspace(1, ratio, n_workers)
    return rng.permutation(factors) if shuffle else factors


@speed("stragglers")
def stragglers(
    n_workers: int,
    rng: np.random.Generator,
    *,
    fraction: Annotated[float, Field(ge=0, le=1)] = 0.1,
    factor: PositiveFloat = 10.0,
) -> np.ndarray:
    """Randomly drawn stragglers take `factor` times as long as the other workers.

    Args:
        fraction: round(fraction n_workers) workers are stragglers, drawn without replacement.

    >>> np.sort(stragglers(4, np.random.default_rng(0), fraction=0.25))
    array([ 1.,  1.,  1., 10.])
    """
    factors = np.ones(n_workers)
    factors[sample_workers(rng, n_workers, round(fraction * n_workers))] = factor
    return factors


@speed("lognormal")
def lognormal_speeds(n_workers: int, rng: np.random.Generator, *, sigma: Sigma = 0.5) -> np.ndarray:
    """Lognormal factors with median 1 and mean e^(sigma^2 / 2): e^(sigma z), z = `rng.standard_normal(n_workers)`.

    >>> lognormal_speeds(3, np.random.default_rng(0)).round(2)
    array([1.06, 0.94, 1.38])
    """
    return np.exp(sigma * rng.standard_normal(n_workers))


@speed("pareto")
def pareto_speeds(n_workers: int, rng: np.random.Generator, *, alpha: ParetoShape = 2.0) -> np.ndarray:
    """Pareto factors with mean 1: P(X > x) = (m / x)^alpha for x >= m, m = (alpha - 1) / alpha.

    Args:
        alpha: above 1; at 2 and below the variance is infinite. Draws: one `rng.pareto(alpha, n_workers)`.

    >>> pareto_speeds(3, np.random.default_rng(0)).round(2)
    array([0.7 , 0.83, 0.5 ])
    """
    return pareto(rng, alpha, n_workers)


def pareto(rng: np.random.Generator, alpha: float, size: int) -> np.ndarray:
    """`size` numbers of the Pareto distribution with mean 1."""
    return (1 + rng.pareto(alpha, size)) * ((alpha - 1) / alpha)  # NumPy's distribution begins at 0 (Lomax)


def draw_speeds(plug: Plug, params: dict[str, Any], n_workers: int, seed: int) -> np.ndarray:
    """Each worker's factor, float64 [n_workers], of a plug of `speed`; draws are of numpy_generator(seed, "speed").

    Raises ExperimentError unless the plug returns one positive, finite factor for each worker.
    """
    given = {"n_workers": n_workers, "rng": numpy_generator(seed, "speed")}
    speeds = check_factors(plug, plug.bind(params)(**plug.given(**given)), n_workers, "worker {}")
    if not speeds.all():
        raise ExperimentError(f"clock.speed.name = {show(plug.name)}: returned a factor of 0; factors must be positive")
    return speeds


def check_factors(plug: Plug, values: Any, size: int, place: str, first: int = 0) -> np.ndarray:
    """The factors that a plug returned, as float64 [size].

    Raises ExperimentError for another shape, or a factor that is negative or not finite; `place` names its
    position, with {} for its number, from `first`.
    """
    factors = np.asarray(values, dtype=np.float64)
    where = f"clock.{plug.kind}.name = {show(plug.name)}"
    if factors.shape != (size,):
        raise ExperimentError(f"{where}: must return factors of shape [{size}], not {list(factors.shape)}")
    for wrong in np.flatnonzero(~((factors >= 0) & (factors < math.inf))):
        unit = place.format(first + wrong)
        raise ExperimentError(f"{where}: returned factor {factors[wrong]} for {unit}; it must be finite and at least 0")
    return factors
