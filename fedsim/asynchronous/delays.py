"""How long a worker's unit of work takes on the virtual clock.

    seconds = steps * base * speed[worker] * noise(worker, unit) + latency + bytes / bandwidth

where the last two are of a unit that sends anything at all.

A speed is drawn once for each worker, a noise for each unit of work. Both are factors of TIME: 2 takes twice as long.

A plug of the registry `speed` is a function `(n_workers, rng, *, parameters) -> [n_workers]` of positive factors, one
of the registry `noise` a function that gives factors of at least 0, [size], for the units start, ..., start + size - 1
of one worker. It takes what it names among these:

    rng        a NumPy generator, for these units of this worker alone
    size       how many factors
    worker     whose they are
    start      the number of the first unit
    n_workers  how many workers there are
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, PositiveFloat

from fedsim.errors import ExperimentError, plural, show
from fedsim.randomness import numpy_generator, sample_workers
from fedsim.registry import Plug, Registry
from fedsim.system.files import read_bounded

MOST_TRACE_BYTES = 256 * 2**20

speed = Registry("speed", given=("n_workers", "rng"))
noise = Registry("noise", given=("rng", "size", "worker", "start", "n_workers"))

BLOCK = 256  # units of one worker that are drawn together; another number gives other draws
KEPT = 2**15  # blocks that are kept, one for each worker: less than 100 MB

Ratio = Annotated[float, Field(ge=1)]
Sigma = Annotated[float, Field(gt=0, le=10)]  # at 10, factors of e^80 are drawn: more would only overflow
Shape = Annotated[float, Field(gt=1)]  # where a Pareto distribution has a mean


@speed("equal")
def equal(n_workers: int) -> np.ndarray:
    """All workers are equally fast: the factor of time is 1."""
    return np.ones(n_workers)


@speed("list")
def listed(n_workers: int, *, values: list[PositiveFloat]) -> np.ndarray:
    """One factor of time for each worker, as given: 2 takes twice as long.

    Raises ExperimentError unless there are as many values as workers.
    """
    if len(values) != n_workers:
        raise ExperimentError(
            f"clock.speed.values: {plural(len(values), 'value')} for {plural(n_workers, 'worker')}; "
            "give one for each worker"
        )
    return np.array(values, dtype=np.float64)


@speed("linear")
def linear(n_workers: int, rng: np.random.Generator, *, ratio: Ratio = 8.0, shuffle: bool = False) -> np.ndarray:
    """Factors of time evenly spaced from 1 to `ratio`: worker i of n gets 1 + (ratio - 1) i / (n - 1).

    Worker 0 is the fastest and the last one the slowest; `shuffle` deals the factors out at random, so that speed has
    nothing to do with what a partition by number gives a worker. One worker alone gets 1.

    Draws: with `shuffle`, one `rng.permutation`.
    """
    factors = np.linspace(1, ratio, n_workers)
    return rng.permutation(factors) if shuffle else factors


@speed("geometric")
def geometric(n_workers: int, rng: np.random.Generator, *, ratio: Ratio = 8.0, shuffle: bool = False) -> np.ndarray:
    """Factors of time from 1 to `ratio` with an even quotient: worker i of n gets ratio^(i / (n - 1)).

    Worker 0 is the fastest and the last one the slowest; `shuffle` deals the factors out at random, so that speed has
    nothing to do with what a partition by number gives a worker. One worker alone gets 1.

    Draws: with `shuffle`, one `rng.permutation`.
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
    """A fraction of the workers, drawn at random, takes `factor` times as long; the factor of all others is 1.

    They are round(fraction n_workers) workers (halves to even), drawn without replacement.
    """
    factors = np.ones(n_workers)
    factors[sample_workers(rng, n_workers, round(fraction * n_workers))] = factor
    return factors


@speed("lognormal")
def lognormal_speeds(n_workers: int, rng: np.random.Generator, *, sigma: Sigma = 0.5) -> np.ndarray:
    """Lognormal factors of time with median 1: e^(sigma z), z standard normal.

    Their mean is e^(sigma^2 / 2). Draws: one `rng.standard_normal(n_workers)`.
    """
    return np.exp(sigma * rng.standard_normal(n_workers))


@speed("pareto")
def pareto_speeds(n_workers: int, rng: np.random.Generator, *, alpha: Shape = 2.0) -> np.ndarray:
    """Pareto factors of time with mean 1: P(X > x) = (m / x)^alpha for x >= m, m = (alpha - 1) / alpha.

    m is the fastest worker's factor. For alpha <= 2 the variance is infinite: a few workers are slower than all others
    by far. Draws: one `rng.pareto(alpha, n_workers)`.
    """
    return _pareto(n_workers, rng, alpha)


@noise("constant")
def constant(size: int) -> np.ndarray:
    """No noise: every unit of a worker takes equally long, factor 1."""
    return np.ones(size)


@noise("shifted_exponential")
def shifted_exponential(
    rng: np.random.Generator, size: int, *, shift: Annotated[float, Field(ge=0, le=1)] = 0.0
) -> np.ndarray:
    """Shifted exponential factors of time with mean 1: shift + (1 - shift) E, E exponential of mean 1.

    The model of stragglers in coded and k-sync computing (Lee et al. 2018, Dutta et al. 2018). With shift 0, the plain
    exponential, the k-th of n workers of rate mu arrives at (H_n - H_(n-k)) / mu on average, H_n = 1 + 1/2 + ... + 1/n;
    with shift 1 every factor is 1. Draws: one `rng.standard_exponential(size)`.
    """
    return shift + (1 - shift) * rng.standard_exponential(size)


@noise("lognormal")
def lognormal_noise(rng: np.random.Generator, size: int, *, sigma: Sigma = 0.5) -> np.ndarray:
    """Lognormal factors of time with mean 1: e^(sigma z - sigma^2 / 2), z standard normal.

    Their median is e^(-sigma^2 / 2). Draws: one `rng.standard_normal(size)`.
    """
    return np.exp(sigma * rng.standard_normal(size) - sigma**2 / 2)


@noise("pareto")
def pareto_noise(rng: np.random.Generator, size: int, *, alpha: Shape = 2.0) -> np.ndarray:
    """Pareto factors of time with mean 1: P(X > x) = (m / x)^alpha for x >= m, m = (alpha - 1) / alpha.

    m is the smallest factor there is. For alpha <= 2 the variance is infinite. Draws: one `rng.pareto(alpha, size)`.
    """
    return _pareto(size, rng, alpha)


def _pareto(size: int, rng: np.random.Generator, alpha: float) -> np.ndarray:
    return (1 + rng.pareto(alpha, size)) * ((alpha - 1) / alpha)  # NumPy's begins at 0 (Lomax)


@noise("trace")
def trace(size: int, worker: int, start: int, n_workers: int, *, path: str) -> np.ndarray:
    """Factors of time out of a text file: that of unit k stands in line k mod lines.

    A line is one factor for all workers, or one for each worker in their order, separated by commas or blanks: finite
    numbers of at least 0, in the same number on each line. They are taken as they are, whatever their mean. Empty lines
    and what follows a # do not count. The file is read once in a process.

    Raises ExperimentError where the file cannot be read, holds anything else, or is for another number of workers.
    """
    columns = _read_trace(path, os.getcwd())  # a relative path is another file in another folder
    if len(columns) not in (1, n_workers):
        raise ExperimentError(
            f"clock.noise.path = {show(path)}: has {len(columns)} columns for {plural(n_workers, 'worker')}; "
            "give one for all workers, or one for each"
        )
    column = columns[worker if len(columns) > 1 else 0]
    return column[np.arange(start, start + size) % len(column)]


@functools.cache
def _read_trace(path: str, folder: str) -> np.ndarray:
    """The factors of a trace file, [columns, lines]."""
    where = f"clock.noise.path = {show(path)}"
    try:
        text = read_bounded(Path(folder, os.path.expanduser(path)), MOST_TRACE_BYTES).decode("utf-8-sig")
        lines = [(number, line.partition("#")[0].strip()) for number, line in enumerate(StringIO(text, None), start=1)]
    except FileNotFoundError:
        raise ExperimentError(f"{where}: no such file; expected a text file of factors of time") from None
    except (OSError, ValueError) as error:  # ValueError: not text
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ExperimentError(f"{where}: cannot be read: {reason}") from None
    lines = [(number, line) for number, line in lines if line]
    if not lines:
        raise ExperimentError(f"{where}: holds no factors of time")
    rows = [_factors(line, f"{where}: line {number}") for number, line in lines]
    for (number, _), row in zip(lines, rows, strict=True):
        if len(row) != len(rows[0]):
            raise ExperimentError(
                f"{where}: line {number} has {plural(len(row), 'factor')}, line {lines[0][0]} has {len(rows[0])}"
            )
    return np.ascontiguousarray(np.array(rows, dtype=np.float64).T)


def _factors(line: str, where: str) -> list[float]:
    """The numbers of one line of a trace file."""
    factors = []
    for word in line.split(",") if "," in line else line.split():
        try:
            factor = float(word)
        except ValueError:
            factor = math.nan
        if not 0 <= factor < math.inf:
            raise ExperimentError(f"{where}: {show(word.strip())}: must be a finite number of at least 0")
        factors.append(factor)
    return factors


def draw_speeds(plug: Plug, params: dict[str, Any], n_workers: int, seed: int) -> np.ndarray:
    """Each worker's factor of time, float64 [n_workers], by a plug of `speed` with checked `params`.

    A pure function of its arguments: the draws come from numpy_generator(seed, "speed").

    Raises ExperimentError where the plug gives anything else than one positive, finite factor for each worker.
    """
    menu = {"n_workers": n_workers, "rng": numpy_generator(seed, "speed")}
    speeds = np.asarray(plug.bind(params)(**plug.given(**menu)), dtype=np.float64)
    where = f"clock.speed.name = {show(plug.name)}"
    if speeds.shape != (n_workers,):
        raise ExperimentError(f"{where}: must give factors of time [{n_workers}], not of shape {speeds.shape}")
    wrong = np.flatnonzero(~((speeds > 0) & (speeds < math.inf)))
    if len(wrong):
        raise ExperimentError(
            f"{where}: gave worker {wrong[0]} the factor {speeds[wrong[0]]}; it must be positive and finite"
        )
    return speeds


@dataclass(frozen=True)
class BoundNoise:
    """A plug of `noise` with its parameters: call it for the factors of one worker's consecutive units.

    Attributes:
        takes: what it wants to be given.
    """

    function: Callable[..., np.ndarray]
    name: str
    takes: tuple[str, ...]

    @property
    def is_common(self) -> bool:
        """Whether any `size` factors are the same ones, whosever they are."""
        return not {"rng", "worker", "start"} & set(self.takes)

    def __call__(self, seed: int, worker: int, start: int, size: int, n_workers: int) -> np.ndarray:
        """The factors of the units start, ..., start + size - 1, float64 [size].

        Those of a block (start = b size) are a pure function of (seed, worker, b): draws come from
        numpy_generator(seed, "delay", worker, b).

        Raises ExperimentError where the plug gives anything else than `size` finite factors of at least 0.
        """
        menu = {"size": size, "worker": worker, "start": start, "n_workers": n_workers}
        if "rng" in self.takes:
            menu["rng"] = numpy_generator(seed, "delay", worker, start // size)
        factors = np.asarray(self.function(**{name: menu[name] for name in self.takes}), dtype=np.float64)
        if factors.shape != (size,):
            raise ExperimentError(
                f"clock.noise.name = {show(self.name)}: must give factors of time [{size}], not of shape "
                f"{factors.shape}"
            )
        if not (factors.min() >= 0 and factors.max() < math.inf):
            place = np.flatnonzero(~((factors >= 0) & (factors < math.inf)))[0]
            raise ExperimentError(
                f"clock.noise.name = {show(self.name)}: gave unit {start + place} of worker {worker} the factor "
                f"{factors[place]}; it must be finite and at least 0"
            )
        return factors


def bind_noise(plug: Plug, params: dict[str, Any]) -> BoundNoise:
    """The noise `plug` with checked `params`, ready to be called and to be pickled to other processes."""
    return BoundNoise(function=plug.bind(params), name=plug.name, takes=tuple(plug.takes))


NOTHING: tuple[float, memoryview] = (math.inf, memoryview(b""))  # the first unit of a block that holds none


class Delays:
    """How many virtual seconds each worker's units of work take.

    A pure function of (seed, worker, unit) and of what the unit is made of, in whatever order it is asked for: so all
    policies meet the same delays. Noise is drawn in blocks of BLOCK units. Each worker's last block is kept, for at
    most KEPT workers, so it is fastest where a worker's units ascend. Of workers that have not been asked for there is
    nothing but their speed.

    Args:
        speeds: each worker's factor of time, [n_workers], positive.
        noise: the factor of each unit's time.
        seed: what the noise is drawn by.
        base: seconds that one step takes where both factors are 1.
        latency: seconds that every unit takes besides which sends anything.
        bandwidth: bytes per second of the way to the server and back; None: infinite.

    Raises ExperimentError for a number out of bounds, and where the noise cannot be drawn (no such trace file).
    """

    def __init__(
        self,
        speeds: np.ndarray,
        noise: BoundNoise,
        seed: int = 0,
        base: float = 1.0,
        latency: float = 0.0,
        bandwidth: float | None = None,
    ) -> None:
        if not 0 < base < math.inf:
            raise ExperimentError(f"clock.base = {show(base)}: must be a finite number of seconds, greater than 0")
        if not 0 <= latency < math.inf:
            raise ExperimentError(f"clock.latency = {show(latency)}: must be a finite number of seconds, at least 0")
        if bandwidth is not None and not bandwidth > 0:
            raise ExperimentError(f"clock.bandwidth = {show(bandwidth)}: must be greater than 0, in bytes per second")
        self.speeds, self.noise, self.seed = speeds, noise, seed
        self.base, self.latency, self.bandwidth = base, latency, bandwidth
        self._step = memoryview(base * np.asarray(speeds, dtype=np.float64))  # gives Python's floats: faster sums
        self._bandwidth = math.inf if bandwidth is None else bandwidth
        first = self._factors(0, 0)  # here, so that what is wrong with the noise shows before the run
        self._common = first if noise.is_common else None
        self._blocks: dict[int, tuple[float, memoryview]] = {}  # of each worker: first unit, factors

    def __reduce__(self) -> tuple[type[Delays], tuple[Any, ...]]:
        return Delays, (self.speeds, self.noise, self.seed, self.base, self.latency, self.bandwidth)

    def seconds(self, worker: int, unit: int, steps: float, bytes: float = 0) -> float:
        """How long a worker's unit of work takes: `steps` local steps, and `bytes` sent both ways together.

        Units of a worker count from 0. Cost: a fraction of a microsecond; 20 to 40 where a block has to be drawn.

        Raises ValueError where there is no such worker or unit.
        """
        first, factors = self._blocks.get(worker, NOTHING)
        place = unit - first
        if not 0 <= place < BLOCK:
            factors = self._block(worker, unit)
            place = unit % BLOCK
        computing = steps * self._step[worker] * factors[place]
        return computing + self.latency + bytes / self._bandwidth if bytes else computing

    def _block(self, worker: int, unit: int) -> memoryview:
        """The factors of the block that holds the unit; from now on it is the one that is kept of this worker."""
        if not 0 <= worker < len(self._step):
            raise ValueError(f"worker = {worker}: must be between 0 and {len(self._step) - 1}")
        if unit < 0:
            raise ValueError(f"unit = {unit}: must be at least 0")
        if len(self._blocks) >= KEPT and worker not in self._blocks:
            self._blocks.clear()  # what is still wanted is drawn again; taking out one at a time costs more
        start = unit - unit % BLOCK
        factors = self._factors(worker, start) if self._common is None else self._common
        self._blocks[worker] = (start, factors)
        return factors

    def _factors(self, worker: int, start: int) -> memoryview:
        return memoryview(self.noise(self.seed, worker, start, BLOCK, len(self._step)))
