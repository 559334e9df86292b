"""Durations of work items on the virtual clock: slowdown factors, noise, and communication time.

    seconds = gradients * step_seconds * slowdown[worker] * noise(worker, unit) + latency + bytes / bandwidth

`gradients` is the number of mini-batch gradients that the client algorithm computes, which is one per local step for
`sgd` (see `ClientAlgorithm.gradients`). For a work item without communication, the terms latency and bytes / bandwidth
are omitted. `unit` is the number of the work item, counted from 0 for each worker.

A component of the registry `slowdown` is a function `(n_workers, rng, *, parameters) -> [n_workers]` that returns
positive factors, drawn once per run. A worker with factor 2 takes twice as long as a worker with factor 1.

A component of the registry `noise` is a function that returns factors >= 0, [size], one for each of the work items
start, ..., start + size - 1 of one worker. Its positional parameters may have these names:

    rng        a NumPy generator for these work items of this worker
    size       number of factors
    worker     ID of the worker
    start      number of the first work item
    n_workers  number of workers
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any

import numpy as np

from fedsim.core.numbers import Example, Fraction, Limits, PositiveFloat
from fedsim.core.randomness import numpy_generator, sample_workers
from fedsim.core.registry import Component, Registry
from fedsim.errors import ExperimentError, plural, show
from fedsim.system.files import read_bounded, user_path


def check_factors(place: str, values: Any, size: int, unit: str, first: int = 0) -> np.ndarray:
    """Check the factors that a slowdown or noise component returned, and return them as float64 [size].

    Raises ExperimentError if the shape is not [size], or if a factor is negative or not finite.

    Args:
        place: name of the component, for error messages.
        values: factors that the component returned.
        size: expected number of factors.
        unit: format string that describes a factor in error messages, such as "worker {}". {} is the factor's number.
        first: number of the first factor.
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
    """Slowdown factors of the workers (setting `clock.slowdown`). Call the object to draw them.

    A worker with slowdown factor 2 takes twice as long as a worker with factor 1.
    """

    def __call__(self, n_workers: int, seed: int) -> np.ndarray:
        """Draw a slowdown factor for each worker, float64 [n_workers].

        Raises ExperimentError if a factor is not positive and finite.
        """
        place = f"clock.slowdown.name = {show(self.name)}"
        returned = self.on({"n_workers": n_workers, "rng": numpy_generator(seed, "speed")})
        slowdowns = check_factors(place, returned, n_workers, "worker {}")
        if not slowdowns.all():
            raise ExperimentError(f"{place}: returned a factor of 0; factors must be positive")
        return slowdowns


@dataclass(frozen=True)
class DurationNoise(Component):
    """Random factors by which durations on the virtual clock vary (setting `clock.noise`).

    Call the object to draw factors.
    """

    def __call__(self, seed: int, worker: int, start: int, size: int, n_workers: int) -> np.ndarray:
        """Draw random factors for the durations of a worker's next `size` steps or rounds, float64 [size].

        Args:
            seed: random seed.
            worker: ID of the worker.
            start: number of steps or rounds that the worker has started before. Must be a multiple of `size`.
            size: number of factors.
            n_workers: number of workers.

        Raises ExperimentError if a factor is negative or not finite.
        """
        rng = numpy_generator(seed, "delay", worker, start // size)
        inputs = {"rng": rng, "size": size, "worker": worker, "start": start, "n_workers": n_workers}
        place = f"clock.noise.name = {show(self.name)}"
        return check_factors(place, self.on(inputs), size, f"work item {{}} of worker {worker}", start)


slowdown = Registry("slowdown", inputs=("n_workers", "rng"), component=SlowdownDistribution)
noise = Registry("noise", inputs=("rng", "size", "worker", "start", "n_workers"), component=DurationNoise)

Ratio = Annotated[float, Limits(ge=1)]
Sigma = Annotated[float, Limits(gt=0, le=10)]  # 10 already gives factors up to about e^80
ParetoShape = Annotated[float, Limits(gt=1)]  # for shapes up to 1 the mean is infinite


@slowdown("equal")
def equal(n_workers: int) -> np.ndarray:
    """Return slowdown factor 1 for all workers.

    >>> equal(3)
    array([1., 1., 1.])
    """
    return np.ones(n_workers)


@slowdown("list")
def listed(n_workers: int, *, values: Annotated[list[PositiveFloat], Example([1.0, 2.0])]) -> np.ndarray:
    """Return the configured slowdown factor of each worker.

    Args:
        values: the factor of each worker, > 0.

    Raises ExperimentError if the number of values is not the number of workers.

    >>> listed(3, values=[1, 2.5, 0.5])
    array([1. , 2.5, 0.5])
    """
    if len(values) != n_workers:
        raise ExperimentError(
            f"clock.slowdown.values: contains {plural(len(values), 'value')} for {plural(n_workers, 'worker')}; "
            "must contain one value for each worker"
        )
    return np.array(values, dtype=np.float64)


@slowdown("linear")
def linear(n_workers: int, rng: np.random.Generator, *, ratio: Ratio = 8.0, shuffle: bool = False) -> np.ndarray:
    """Return evenly spaced slowdown factors: worker i of n has factor 1 + (ratio - 1) i / (n - 1).

    Args:
        ratio: slowdown factor of the slowest worker, at least 1.
        shuffle: whether to permute the factors with one `rng.permutation`, so that they do not depend on worker IDs.

    >>> linear(4, None, ratio=7.0)
    array([1., 3., 5., 7.])
    """
    factors = np.linspace(1, ratio, n_workers)
    return rng.permutation(factors) if shuffle else factors


@slowdown("geometric")
def geometric(n_workers: int, rng: np.random.Generator, *, ratio: Ratio = 8.0, shuffle: bool = False) -> np.ndarray:
    """Return geometrically spaced slowdown factors: worker i of n has factor ratio^(i / (n - 1)).

    Args:
        ratio: slowdown factor of the slowest worker, at least 1.
        shuffle: whether to permute the factors with one `rng.permutation`, so that they do not depend on worker IDs.

    >>> geometric(4, None, ratio=8.0)
    array([1., 2., 4., 8.])
    """
    factors = np.geomspace(1, ratio, n_workers)
    return rng.permutation(factors) if shuffle else factors


@slowdown("stragglers")
def stragglers(
    n_workers: int, rng: np.random.Generator, *, fraction: Fraction = 0.1, factor: PositiveFloat = 10.0
) -> np.ndarray:
    """Return slowdown factor `factor` for randomly drawn workers (stragglers), and 1 for all other workers.

    Args:
        fraction: fraction of stragglers; round(fraction n_workers) workers are drawn without replacement.
        factor: slowdown factor of the stragglers, > 0.

    >>> np.sort(stragglers(4, np.random.default_rng(0), fraction=0.25))
    array([ 1.,  1.,  1., 10.])
    """
    factors = np.ones(n_workers)
    factors[sample_workers(rng, n_workers, round(fraction * n_workers))] = factor
    return factors


@slowdown("lognormal")
def lognormal_slowdowns(n_workers: int, rng: np.random.Generator, *, sigma: Sigma = 0.5) -> np.ndarray:
    """Draw lognormal slowdown factors e^(sigma z), with median 1 and mean e^(sigma^2 / 2).

    Args:
        sigma: standard deviation of the factors' logarithms, > 0.

    Draws: z = `rng.standard_normal(n_workers)`.

    >>> lognormal_slowdowns(3, np.random.default_rng(0)).round(2)
    array([1.06, 0.94, 1.38])
    """
    return np.exp(sigma * rng.standard_normal(n_workers))


@slowdown("pareto")
def pareto_slowdowns(n_workers: int, rng: np.random.Generator, *, alpha: ParetoShape = 2.0) -> np.ndarray:
    """Draw Pareto slowdown factors with mean 1: P(X > x) = (m / x)^alpha for x >= m, m = (alpha - 1) / alpha.

    Args:
        alpha: shape parameter, > 1; the variance is infinite for alpha <= 2.

    Draws: one `rng.pareto(alpha, n_workers)`.

    >>> pareto_slowdowns(3, np.random.default_rng(0)).round(2)
    array([0.7 , 0.83, 0.5 ])
    """
    return pareto(rng, alpha, n_workers)


def pareto(rng: np.random.Generator, alpha: float, size: int) -> np.ndarray:
    """Draw `size` numbers from the Pareto distribution with shape `alpha` and mean 1."""
    return (1 + rng.pareto(alpha, size)) * ((alpha - 1) / alpha)  # NumPy's distribution starts at 0 (Lomax)


MOST_TRACE_BYTES = 256 * 2**20


@noise("constant")
def constant(size: int) -> np.ndarray:
    """Return noise factor 1 for every work item, so that durations have no noise.

    >>> constant(3)
    array([1., 1., 1.])
    """
    return np.ones(size)


@noise("shifted_exponential")
def shifted_exponential(rng: np.random.Generator, size: int, *, shift: Fraction = 0.0) -> np.ndarray:
    """Draw shifted exponential noise factors with mean 1: shift + (1 - shift) E with E ~ Exp(1).

    This is the straggler model of Lee et al. 2018 and Dutta et al. 2018. With shift 0, durations are exponential. The
    k-th fastest of n workers then finishes after (H_n - H_(n-k)) / mu on average, where mu is the rate and
    H_n = 1 + 1/2 + ... + 1/n.

    Args:
        shift: smallest factor, from 0 (exponential distribution) to 1 (no noise: every factor is 1).

    Draws: E = `rng.standard_exponential(size)`.

    >>> shifted_exponential(np.random.default_rng(0), 3, shift=0.5).round(2)
    array([0.84, 1.01, 0.51])
    """
    return shift + (1 - shift) * rng.standard_exponential(size)


@noise("lognormal")
def lognormal_noise(rng: np.random.Generator, size: int, *, sigma: Sigma = 0.5) -> np.ndarray:
    """Draw lognormal noise factors e^(sigma z - sigma^2 / 2), with mean 1.

    Args:
        sigma: standard deviation of the factors' logarithms, > 0.

    Draws: z = `rng.standard_normal(size)`.

    >>> lognormal_noise(np.random.default_rng(0), 3).round(2)
    array([0.94, 0.83, 1.22])
    """
    return np.exp(sigma * rng.standard_normal(size) - sigma**2 / 2)


@noise("pareto")
def pareto_noise(rng: np.random.Generator, size: int, *, alpha: ParetoShape = 2.0) -> np.ndarray:
    """Draw Pareto noise factors with mean 1: P(X > x) = (m / x)^alpha for x >= m, m = (alpha - 1) / alpha.

    Args:
        alpha: shape parameter, > 1; the variance is infinite for alpha <= 2.

    Draws: one `rng.pareto(alpha, size)`.

    >>> pareto_noise(np.random.default_rng(0), 3).round(2)
    array([0.7 , 0.83, 0.5 ])
    """
    return pareto(rng, alpha, size)


@noise("trace")
@dataclass(frozen=True)
class Trace:
    """Noise factors from a text file: a worker's k-th work item has the factor in row k mod (number of rows).

    Args:
        path: text file with one column of numbers for all workers, or one column per worker, separated by commas or
            blanks. Numbers must be finite and at least 0. Empty lines and text after a # are ignored. Each run reads
            the file once.

    Raises ExperimentError if the file cannot be read, or does not have this format.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w") as file:
    ...     _ = file.write("1, 2 # two workers\\n3, 4\\n")
    ...     file.flush()
    ...     Trace(file.name)(size=3, worker=1, start=0, n_workers=2)
    array([2., 4., 2.])
    """

    path: Annotated[str, Example("factors.csv")]

    def __call__(self, size: int, worker: int, start: int, n_workers: int) -> np.ndarray:
        columns = self._columns
        if len(columns) not in (1, n_workers):
            raise ExperimentError(
                f"{self._place}: has {len(columns)} columns for {plural(n_workers, 'worker')}; "
                "must have one column for all workers, or one column for each worker"
            )
        column = columns[worker if len(columns) > 1 else 0]
        return column[np.arange(start, start + size) % len(column)]

    @property
    def _place(self) -> str:
        return f"clock.noise.path = {show(self.path)}"

    @cached_property
    def _columns(self) -> np.ndarray:
        """The transposed table of the file, an array [columns, table rows]."""
        contents = "must be a text file with one column of noise factors for all workers, or one column for each worker"
        rows = read_numbers(self._place, self.path, contents)
        if not rows.size or not (rows.min() >= 0 and rows.max() < math.inf):
            raise ExperimentError(
                f"{self._place}: must contain at least one number, and all numbers must be finite and at least 0"
            )
        return np.ascontiguousarray(rows.T)


def read_numbers(place: str, path: str, contents: str) -> np.ndarray:
    """Return the numbers in a text file, float64 [lines, columns]. Columns are separated by commas or blanks.

    Args:
        place: setting that contains the path, for error messages.
        path: path of the file. Empty lines and text after a # are ignored.
        contents: what the file must contain, for the error message about a missing file.

    Raises ExperimentError if the file cannot be read.
    """
    try:
        text = read_bounded(user_path(path), MOST_TRACE_BYTES).decode("utf-8-sig")
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy warns about a file without numbers
            return np.loadtxt(lines, delimiter="," if any("," in line for line in lines) else None, ndmin=2)
    except FileNotFoundError:
        raise ExperimentError(f"{place}: no such file; {contents}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise ExperimentError(f"{place}: cannot be read: {reason}") from None


BLOCK = 256  # number of a worker's work items whose noise is drawn together; changing it changes the draws
CACHED_BLOCKS = 2**15  # less than 100 MB


class Delays:
    """Simulated durations of the workers' steps or rounds, in virtual seconds.

    The noise factors depend only on the seed, the worker, and how many steps or rounds the worker has started. All
    asynchronous policies are therefore compared under the same delays.

    Args:
        slowdowns: slowdown factor of each worker, [n_workers], positive.
        noise: draws the noise factors.
        seed: random seed.
        base: seconds per mini-batch gradient if slowdown and noise factor are 1.
        latency: seconds added to each step or round that communicates with the server.
        bandwidth: bytes per second between worker and server. None: infinite.
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
        # A memoryview, since reading Python floats from it is faster than from an array.
        self._seconds_per_gradient = (base * np.asarray(slowdowns, dtype=np.float64)).data
        self._block = lru_cache(CACHED_BLOCKS)(self._draw_block)
        self._block(0, 0)  # so that an invalid noise raises its error before the run

    def seconds(self, worker: int, unit: int, gradients: float, bytes: float = 0, overlapped: float = 0) -> float:
        """Return how many virtual seconds a worker's step or round takes.

        Args:
            worker: ID of the worker.
            unit: number of steps or rounds that the worker started before this one.
            gradients: number of mini-batch gradients that the worker computes.
            bytes: number of bytes that the worker sends and receives in total; 0: no communication.
            overlapped: number of gradients that the worker computes while it communicates.
        """
        block, offset = divmod(unit, BLOCK)
        per_gradient = self._seconds_per_gradient[worker] * self._block(worker, block)[offset]
        computing = gradients * per_gradient
        if not overlapped:
            return computing + self.latency + bytes / self._bandwidth if bytes else computing
        return computing + max(0.0, self.latency + bytes / self._bandwidth - overlapped * per_gradient)

    def _draw_block(self, worker: int, block: int) -> memoryview:
        return np.ascontiguousarray(self.noise(self.seed, worker, block * BLOCK, BLOCK, len(self.slowdowns))).data
