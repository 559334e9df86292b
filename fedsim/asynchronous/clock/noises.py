"""Noise of the virtual clock: a random factor for the time of each work item.

A plug of the registry `noise` is a function that returns factors of at least 0, [size], for the work items ("units")
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
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedsim.asynchronous.clock.speeds import ParetoShape, Sigma, check_factors, pareto
from fedsim.core.randomness import numpy_generator
from fedsim.core.registry import Plug, Registry
from fedsim.errors import ExperimentError, plural, show
from fedsim.system.files import read_bounded

MOST_TRACE_BYTES = 256 * 2**20
BoundNoise = Callable[[int, int, int, int, int], np.ndarray]

noise = Registry("noise", given=("rng", "size", "worker", "start", "n_workers"))


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
    """The factors of a trace file, [columns, rows]."""
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


def bind_noise(plug: Plug, params: dict[str, Any]) -> BoundNoise:
    """The noise `plug` with checked `params`: a function of (seed, worker, start, size, n_workers).

    It returns the factors of the units start, ..., start + size - 1 of a worker, float64 [size]. `start` is a multiple
    of `size`: draws are of numpy_generator(seed, "delay", worker, start // size).

    The function raises ExperimentError unless the plug returns `size` finite factors of at least 0.
    """
    function = plug.bind(params)

    def factors(seed: int, worker: int, start: int, size: int, n_workers: int) -> np.ndarray:
        rng = numpy_generator(seed, "delay", worker, start // size)
        given = plug.given(rng=rng, size=size, worker=worker, start=start, n_workers=n_workers)
        return check_factors(plug, function(**given), size, f"unit {{}} of worker {worker}", start)

    return factors
