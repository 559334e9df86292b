"""The time that a work item takes on the virtual clock: slowdowns of workers, noise, and communication.

    seconds = gradients * step_seconds * slowdown[worker] * noise(worker, unit) + latency + bytes / bandwidth

`gradients` counts the gradients of a batch that the client algorithm computes: with `sgd` one for each local step, see
`ClientAlgorithm.gradients`. Work items that send nothing have no latency and no bytes. `unit` counts the work items of
a worker from 0.

A component of the registry `slowdown` is a function `(n_workers, rng, *, parameters) -> [n_workers]` that returns
positive factors, drawn once for a run. A worker with factor 2 takes twice as long as one with factor 1.

A component of the registry `noise` is a function that returns factors of at least 0, [size], for the work items
start, ..., start + size - 1 of one worker. It takes by name any of these:

    rng        a NumPy generator for these units of this worker
    size       number of factors
    worker     number of the worker
    start      number of the first unit
    n_workers  number of workers
"""

from __future__ import annotations

import functools
import math
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, PositiveFloat

from fedsim.core.randomness import numpy_generator, sample_workers
from fedsim.core.registry import Component, Registry
from fedsim.errors import ExperimentError, plural, show
from fedsim.system.files import read_bounded


def check_factors(place: str, values: Any, size: int, unit: str, first: int = 0) -> np.ndarray:
    """Return the factors that a component returned, as float64 [size].

    Raises ExperimentError for another shape, or a factor that is negative or not finite. `place` names the component,
    and `unit` the position of a factor, with {} for its number, from `first`.
    """
    factors = np.asarray(values, dtype=np.float64)
    if factors.shape != (size,):
        raise ExperimentError(f"{place}: must return factors of shape [{size}], not {list(factors.shape)}")
    for wrong in np.flatnonzero(~((factors >= 0) & (factors < math.inf))):
        where = unit.format(first + wrong)
        raise ExperimentError(
            f"{place}: returned factor {factors[wrong]} for {where}; it must be finite and at least 0"
        )
    return factors


@dataclass(frozen=True)
class SlowdownDistribution(Component):
    """Distribution of the workers' slowdowns, with its parameters."""

    def __call__(self, n_workers: int, seed: int) -> np.ndarray:
        """Each worker's factor, float64 [n_workers]; draws are of numpy_generator(seed, "speed").

        Raises ExperimentError unless the component returns one positive, finite factor for each worker.
        """
        place = f"clock.slowdown.name = {show(self.name)}"
        returned = self.on({"n_workers": n_workers, "rng": numpy_generator(seed, "speed")})
        slowdowns = check_factors(place, returned, n_workers, "worker {}")
        if not slowdowns.all():
            raise ExperimentError(f"{place}: returned a factor of 0; factors must be positive")
        return slowdowns


@dataclass(frozen=True)
class DurationNoise(Component):
    """A distribution of the duration of work with its parameters."""

    def __call__(self, seed: int, worker: int, start: int, size: int, n_workers: int) -> np.ndarray:
        """Return the factors of the units start, ..., start + size - 1 of a worker, float64 [size].

        `start` is a multiple of `size`: draws are of numpy_generator(seed, "delay", worker, start // size).

        Raises ExperimentError unless the component returns `size` finite factors of at least 0.
        """
        rng = numpy_generator(seed, "delay", worker, start // size)
        inputs = {"rng": rng, "size": size, "worker": worker, "start": start, "n_workers": n_workers}
        place = f"clock.noise.name = {show(self.name)}"
        return check_factors(place, self.on(inputs), size, f"unit {{}} of worker {worker}", start)


slowdown = Registry("slowdown", inputs=("n_workers", "rng"), component=SlowdownDistribution)
noise = Registry("noise", inputs=("rng", "size", "worker", "start", "n_workers"), component=DurationNoise)

Ratio = Annotated[float, Field(ge=1)]
Sigma = Annotated[float, Field(gt=0, le=10)]  # larger ones only overflow: 10 draws factors of e^80
ParetoShape = Annotated[float, Field(gt=1)]  # at 1 and below, a Pareto distribution has no mean


@slowdown("equal")
def equal(n_workers: int) -> np.ndarray:
    """All workers have factor 1.

    >>> equal(3)
    array([1., 1., 1.])
    """
    return np.ones(n_workers)


@slowdown("list")
def listed(n_workers: int, *, values: Annotated[list[PositiveFloat], Field(examples=[[1.0, 2.0]])]) -> np.ndarray:
    """One given factor for each worker.

    Raises ExperimentError unless there are as many values as workers.

    >>> listed(3, values=[1, 2.5, 0.5])
    array([1. , 2.5, 0.5])
    """
    if len(values) != n_workers:
        raise ExperimentError(
            f"clock.slowdown.values: {plural(len(values), 'value')} for {plural(n_workers, 'worker')}; "
            "give one for each worker"
        )
    return np.array(values, dtype=np.float64)


@slowdown("linear")
def linear(n_workers: int, rng: np.random.Generator, *, ratio: Ratio = 8.0, shuffle: bool = False) -> np.ndarray:
    """Evenly spaced factors: worker i of n has 1 + (ratio - 1) i / (n - 1).

    Args:
        ratio: factor of the slowest worker, at least 1.
        shuffle: permute the factors with one `rng.permutation`, so that the slowdown does not depend on the worker's
            number.

    >>> linear(4, None, ratio=7.0)
    array([1., 3., 5., 7.])
    """
    factors = np.linspace(1, ratio, n_workers)
    return rng.permutation(factors) if shuffle else factors


@slowdown("geometric")
def geometric(n_workers: int, rng: np.random.Generator, *, ratio: Ratio = 8.0, shuffle: bool = False) -> np.ndarray:
    """Geometrically spaced factors: worker i of n has ratio^(i / (n - 1)).

    The arguments are those of `linear`.

    >>> geometric(4, None, ratio=8.0)
    array([1., 2., 4., 8.])
    """
    factors = np.geomspace(1, ratio, n_workers)
    return rng.permutation(factors) if shuffle else factors


@slowdown("stragglers")
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


@slowdown("lognormal")
def lognormal_slowdowns(n_workers: int, rng: np.random.Generator, *, sigma: Sigma = 0.5) -> np.ndarray:
    """Lognormal factors with median 1 and mean e^(sigma^2 / 2): e^(sigma z), z = `rng.standard_normal(n_workers)`.

    >>> lognormal_slowdowns(3, np.random.default_rng(0)).round(2)
    array([1.06, 0.94, 1.38])
    """
    return np.exp(sigma * rng.standard_normal(n_workers))


@slowdown("pareto")
def pareto_slowdowns(n_workers: int, rng: np.random.Generator, *, alpha: ParetoShape = 2.0) -> np.ndarray:
    """Pareto factors with mean 1: P(X > x) = (m / x)^alpha for x >= m, m = (alpha - 1) / alpha.

    Args:
        alpha: above 1; at 2 and below the variance is infinite. Draws: one `rng.pareto(alpha, n_workers)`.

    >>> pareto_slowdowns(3, np.random.default_rng(0)).round(2)
    array([0.7 , 0.83, 0.5 ])
    """
    return pareto(rng, alpha, n_workers)


def pareto(rng: np.random.Generator, alpha: float, size: int) -> np.ndarray:
    """`size` numbers of the Pareto distribution with mean 1."""
    return (1 + rng.pareto(alpha, size)) * ((alpha - 1) / alpha)  # NumPy's distribution begins at 0 (Lomax)


MOST_TRACE_BYTES = 256 * 2**20


@noise("constant")
def constant(size: int) -> np.ndarray:
    """No noise: factor 1.

    >>> constant(3)
    array([1., 1., 1.])
    """
    return np.ones(size)


@noise("shifted_exponential")
def shifted_exponential(
    rng: np.random.Generator, size: int, *, shift: Annotated[float, Field(ge=0, le=1)] = 0.0
) -> np.ndarray:
    """Shifted exponential factors with mean 1: shift + (1 - shift) E, E = `rng.standard_exponential(size)`.

    The model of stragglers of Lee et al. 2018 and Dutta et al. 2018. With shift 0, the k-th of n workers of rate mu
    arrives at (H_n - H_(n-k)) / mu on average, H_n = 1 + 1/2 + ... + 1/n.

    Args:
        shift: from 0, the plain exponential, to 1, where every factor is 1.

    >>> shifted_exponential(np.random.default_rng(0), 3, shift=0.5).round(2)
    array([0.84, 1.01, 0.51])
    """
    return shift + (1 - shift) * rng.standard_exponential(size)


@noise("lognormal")
def lognormal_noise(rng: np.random.Generator, size: int, *, sigma: Sigma = 0.5) -> np.ndarray:
    """Lognormal factors with mean 1: e^(sigma z - sigma^2 / 2), z = `rng.standard_normal(size)`.

    >>> lognormal_noise(np.random.default_rng(0), 3).round(2)
    array([0.94, 0.83, 1.22])
    """
    return np.exp(sigma * rng.standard_normal(size) - sigma**2 / 2)


@noise("pareto")
def pareto_noise(rng: np.random.Generator, size: int, *, alpha: ParetoShape = 2.0) -> np.ndarray:
    """Pareto factors with mean 1: P(X > x) = (m / x)^alpha for x >= m, m = (alpha - 1) / alpha.

    Args:
        alpha: above 1; at 2 and below the variance is infinite. Draws: one `rng.pareto(alpha, size)`.

    >>> pareto_noise(np.random.default_rng(0), 3).round(2)
    array([0.7 , 0.83, 0.5 ])
    """
    return pareto(rng, alpha, size)


@noise("trace")
def trace(
    size: int, worker: int, start: int, n_workers: int, *, path: Annotated[str, Field(examples=["factors.csv"])]
) -> np.ndarray:
    """Factors from a text file: unit k has the factor in row k mod rows.

    Args:
        path: a file of finite numbers of at least 0, in one column for all workers or one column for each, separated
            by commas or blanks. Empty lines and text after a # are ignored. A process reads the file once.

    Raises ExperimentError if the file cannot be read, or is not such a file.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w") as file:
    ...     _ = file.write("1, 2 # two workers\\n3, 4\\n")
    ...     file.flush()
    ...     trace(size=3, worker=1, start=0, n_workers=2, path=file.name)
    array([2., 4., 2.])
    """
    columns = _read_trace(path, os.getcwd())  # a relative path names another file in another folder
    if len(columns) not in (1, n_workers):
        raise ExperimentError(
            f"clock.noise.path = {show(path)}: has {len(columns)} columns for {plural(n_workers, 'worker')}; "
            "give one for all workers, or one for each"
        )
    column = columns[worker if len(columns) > 1 else 0]
    return column[np.arange(start, start + size) % len(column)]


@functools.cache
def _read_trace(path: str, folder: str) -> np.ndarray:
    """Read a trace file. Returns its factors, [columns, rows]."""
    where = f"clock.noise.path = {show(path)}"
    try:
        text = read_bounded(Path(folder, os.path.expanduser(path)), MOST_TRACE_BYTES).decode("utf-8-sig")
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy warns of a file without numbers
            rows = np.loadtxt(lines, delimiter="," if any("," in line for line in lines) else None, ndmin=2)
    except FileNotFoundError:
        raise ExperimentError(f"{where}: no such file; expected a text file of factors of time") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise ExperimentError(f"{where}: cannot be read: {reason}") from None
    if not rows.size or not (rows.min() >= 0 and rows.max() < math.inf):
        raise ExperimentError(f"{where}: must hold finite numbers of at least 0")
    return np.ascontiguousarray(rows.T)


BLOCK = 256  # units of a worker whose noise is drawn together; another number gives other draws
CACHED_BLOCKS = 2**15  # less than 100 MB


class Delays:
    """Durations of work items in virtual seconds.

    The noise is a pure function of (seed, worker, unit), so all policies see the same delays.

    Args:
        slowdowns: each worker's factor of time, [n_workers], positive.
        noise: the factor of each unit's time.
        base: seconds of one gradient of a batch with both factors 1.
        latency: seconds of communication for each work item that sends anything.
        bandwidth: bytes per second between worker and server; None: infinite.

    Raises ExperimentError if the noise cannot be drawn (for example, its trace file does not exist).
    """

    def __init__(
        self,
        slowdowns: np.ndarray,
        noise: DurationNoise,
        seed: int = 0,
        base: float = 1.0,
        latency: float = 0.0,
        bandwidth: float | None = None,
    ) -> None:
        self.slowdowns, self.noise, self.seed = slowdowns, noise, seed
        self.base, self.latency = base, latency
        self._bandwidth = math.inf if bandwidth is None else bandwidth
        # As a memoryview, whose items are Python floats, which are fast.
        self._seconds_per_gradient = (base * np.asarray(slowdowns, dtype=np.float64)).data
        self._block = functools.lru_cache(CACHED_BLOCKS)(self._draw_block)
        self._block(0, 0)  # so that a wrong noise raises its error before the run

    def seconds(self, worker: int, unit: int, gradients: float, bytes: float = 0) -> float:
        """Seconds of a work item with `gradients` gradients that sends and receives `bytes` bytes in total."""
        block, place = divmod(unit, BLOCK)
        computing = gradients * self._seconds_per_gradient[worker] * self._block(worker, block)[place]
        return computing + self.latency + bytes / self._bandwidth if bytes else computing

    def _draw_block(self, worker: int, block: int) -> memoryview:
        return np.ascontiguousarray(self.noise(self.seed, worker, block * BLOCK, BLOCK, len(self.slowdowns))).data
