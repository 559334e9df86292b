"""Cohort strategies that draw among the available workers, which a trace file or a daily pattern determines."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from io import StringIO
from typing import Annotated, Any

import numpy as np

from fedsim.core.numbers import Example, PositiveFloat, PositiveFraction
from fedsim.core.randomness import numpy_generator, sample_workers
from fedsim.errors import ExperimentError, show
from fedsim.server.cohort import Chosen, sampling_strategy
from fedsim.system.files import read_bounded, user_path

COLUMNS = ["worker", "from", "to"]
MOST_BYTES = 2**30  # maximum size of a trace file
MOST_WORKERS = 10_000_000  # each of them gets a phase


@sampling_strategy("available")
@dataclass(frozen=True)
class Available:
    """Uniform sampling among the workers that are available according to a trace file.

    The trace is a CSV file with the columns worker, from, to: the worker is available at the times from <= t < to.
    Times are round numbers, from 1, or virtual seconds with mode = "clock". A worker may have several lines. A worker
    without a line is never available. If fewer workers than the cohort size are available, all of them take part. If
    no worker is available, the round is skipped, or raises an error with mode = "clock", because no time would pass.
    The number of available workers is recorded as `available_workers`.

    Each available worker is chosen with probability (cohort size) / (number of available workers), at most 1. Cost:
    O(lines of the trace) per round.

    Args:
        trace: path of the CSV file.

    >>> import pathlib, tempfile
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "trace.csv"
    >>> _ = file.write_text("worker,from,to\\n0,1,5\\n7,3,5\\n")
    >>> Available(str(file))(2, 4, np.random.default_rng(0), {})
    (array([0, 7]), array([1., 1.]))
    """

    trace: Annotated[str, Example("trace.csv")]

    def __call__(self, size: int, now: float, rng: np.random.Generator, metrics: dict[str, Any]) -> Chosen:
        workers, begin, end = self._lines
        return _draw(np.unique(workers[(begin <= now) & (now < end)]), size, rng, metrics)

    def check(self, n_workers: int, size: int) -> None:
        """Raise ExperimentError if the trace file cannot be read, or names a worker that does not exist."""
        if (most := self._lines[0].max()) >= n_workers:
            raise ExperimentError(f"{self._place}: contains worker {most}; workers are 0 to {n_workers - 1}")

    @property
    def _place(self) -> str:
        return f"sampling.trace = {show(self.trace)}"

    @cached_property
    def _lines(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Columns of the trace file: worker IDs (int64), start times and end times (float64)."""
        try:
            text = read_bounded(user_path(self.trace), MOST_BYTES).decode("utf-8-sig")
            lines = list(csv.reader(StringIO(text)))
        except (OSError, ValueError, csv.Error) as error:
            raise ExperimentError(
                f"{self._place}: cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from None
        if not lines or [name.strip() for name in lines[0]] != COLUMNS:
            raise ExperimentError(f"{self._place}: the first line must be {','.join(COLUMNS)}")
        intervals = [self._parsed(number, line) for number, line in enumerate(lines[1:], 2) if line]
        if not intervals:
            raise ExperimentError(f"{self._place}: has no lines after the header, so no worker is ever available")
        workers, begin, end = zip(*intervals, strict=True)
        return np.array(workers, dtype=np.int64), np.array(begin, dtype=float), np.array(end, dtype=float)

    def _parsed(self, number: int, line: list[str]) -> tuple[int, float, float]:
        try:
            worker, begin, end = int(line[0]), float(line[1]), float(line[2])
            valid = len(line) == 3 and 0 <= worker < 2**63 and begin < end and not math.isnan(begin + end)
        except (ValueError, IndexError):
            valid = False
        if not valid:
            raise ExperimentError(
                f"{self._place}: line {number}, {show(','.join(line))}: must be worker,from,to with worker >= 0 and "
                "from < to"
            )
        return worker, begin, end


@sampling_strategy("daily")
@dataclass(frozen=True)
class Daily:
    """Uniform sampling among the workers that are online, where each worker is online for a fixed part of every day.

    Worker k is online at time t if the fractional part of t / period + phase_k is less than `online`. Its phase_k is
    drawn uniformly from [0, 1). If fewer workers than the cohort size are online, all of them take part. If no worker
    is online, the round is skipped, or raises an error with mode = "clock". The number of online workers is recorded
    as `available_workers`.

    Each online worker is chosen with probability (cohort size) / (number of online workers), at most 1. Draws: one
    `numpy_generator(seed, "availability").random(n_workers)`. Cost: O(n_workers) per round.

    Args:
        period: length of a day, in rounds, or in virtual seconds with mode = "clock".
        online: fraction of the day in which a worker is online.

    >>> metrics = {}
    >>> _ = Daily(period=24, online=0.25)(1000, 10, 3, 0, np.random.default_rng(0), metrics)
    >>> metrics
    {'available_workers': 258}
    """

    period: PositiveFloat = 24.0
    online: PositiveFraction = 0.5

    def check(self, n_workers: int, size: int) -> None:
        if n_workers > MOST_WORKERS:
            raise ExperimentError(
                f'sampling.name = "daily": supports at most {MOST_WORKERS:,} workers, not {n_workers:,}'
            )

    def __call__(
        self, n_workers: int, size: int, now: float, seed: int, rng: np.random.Generator, metrics: dict[str, Any]
    ) -> Chosen:
        is_online = (now / self.period + _phases(seed, n_workers)) % 1 < self.online
        return _draw(np.flatnonzero(is_online), size, rng, metrics)


@lru_cache(maxsize=1)
def _phases(seed: int, n_workers: int) -> np.ndarray:
    return numpy_generator(seed, "availability").random(n_workers)


def _draw(available: np.ndarray, size: int, rng: np.random.Generator, metrics: dict[str, Any]) -> Chosen:
    """Draw `size` of the available workers, or all of them if there are fewer.

    Returns the chosen workers and the probability of each.
    """
    metrics["available_workers"] = len(available)
    count = min(size, len(available))
    return available[sample_workers(rng, len(available), count)], np.full(count, size / max(size, len(available)))
