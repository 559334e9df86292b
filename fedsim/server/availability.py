"""Cohort strategies that draw among the workers that are available: by a trace, or by a daily pattern."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, PositiveFloat

from fedsim.core.randomness import numpy_generator, sample_workers
from fedsim.errors import ExperimentError, show
from fedsim.server.cohort import Chosen, sampling_strategy
from fedsim.system.files import read_bounded

COLUMNS = ["worker", "from", "to"]
MOST_BYTES = 2**30


@sampling_strategy("available")
@dataclass(frozen=True)
class Available:
    """Workers are drawn uniformly among those that a trace of availability says are available.

    The trace is a CSV file with the columns worker, from, to: the worker is available at the times from <= t < to.
    Times are numbers of rounds, from 1, or virtual seconds with mode = "clock". A worker may have several lines; one
    without a line is never available. If fewer workers are available than the cohort has, all of them take part. If
    none is, the round is skipped; with mode = "clock" that is an error, since no time would pass. The number of
    available workers is recorded as `available_workers`.

    A worker has the probability cohort / available workers, at most 1. Cost: O(lines) for each round.

    Args:
        trace: path of the CSV file.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "trace.csv"
    >>> _ = file.write_text("worker,from,to\\n0,1,5\\n7,3,5\\n")
    >>> Available(str(file))(2, 4, np.random.default_rng(0), {})
    (array([0, 7]), array([1., 1.]))
    """

    trace: Annotated[str, Field(examples=["trace.csv"])]

    def __call__(self, size: int, now: float, rng: np.random.Generator, metrics: dict[str, Any]) -> Chosen:
        workers, begin, end = self._lines
        return _draw(np.unique(workers[(begin <= now) & (now < end)]), size, rng, metrics)

    def check(self, n_workers: int, size: int) -> None:
        """Raise ExperimentError if the trace cannot be read, or names a worker that does not exist."""
        if (most := self._lines[0].max()) >= n_workers:
            raise ExperimentError(f"{self._place}: names worker {most}; workers are 0 to {n_workers - 1}")

    @property
    def _place(self) -> str:
        return f"sampling.trace = {show(self.trace)}"

    @cached_property
    def _lines(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the columns: workers, int64, and times, float64."""
        try:
            text = read_bounded(Path(self.trace), MOST_BYTES).decode("utf-8-sig")
            lines = list(csv.reader(StringIO(text)))
        except (OSError, ValueError, csv.Error) as error:
            raise ExperimentError(
                f"{self._place}: cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from None
        if not lines or [name.strip() for name in lines[0]] != COLUMNS:
            raise ExperimentError(f"{self._place}: the first line must be {','.join(COLUMNS)}")
        intervals = [self._parsed(number, line) for number, line in enumerate(lines[1:], 2) if line]
        if not intervals:
            raise ExperimentError(f"{self._place}: has no lines after the first, so no worker is ever available")
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
                f"{self._place}: line {number}, {show(','.join(line))}: must be a worker >= 0 and two times, from < to"
            )
        return worker, begin, end


@sampling_strategy("daily")
@dataclass(frozen=True)
class Daily:
    """Workers are drawn uniformly among those that are on; each is on for the same part of every day.

    Worker k is on at time t if the fractional part of t / period + phase_k is less than `online`; its phase is drawn
    uniformly from [0, 1). A round with fewer workers than the cohort, or none, is as with `available`. The number of
    workers that are on is recorded as `available_workers`.

    A worker has the probability cohort / workers that are on, at most 1. Draws: one
    `numpy_generator(seed, "availability").random(n_workers)`. Cost: O(n_workers) for each round.

    Args:
        period: of the pattern, a day: in rounds, or in virtual seconds with mode = "clock".
        online: part of the period in which a worker is on.

    >>> metrics = {}
    >>> _ = Daily(period=24, online=0.25)(1000, 10, 3, 0, np.random.default_rng(0), metrics)
    >>> metrics
    {'available_workers': 258}
    """

    period: PositiveFloat = 24.0
    online: Annotated[float, Field(gt=0, le=1)] = 0.5

    def __call__(
        self, n_workers: int, size: int, now: float, seed: int, rng: np.random.Generator, metrics: dict[str, Any]
    ) -> Chosen:
        on = (now / self.period + _phases(seed, n_workers)) % 1 < self.online
        return _draw(np.flatnonzero(on), size, rng, metrics)


@lru_cache(maxsize=4)
def _phases(seed: int, n_workers: int) -> np.ndarray:
    return numpy_generator(seed, "availability").random(n_workers)


def _draw(available: np.ndarray, size: int, rng: np.random.Generator, metrics: dict[str, Any]) -> Chosen:
    """`size` of the available workers, or all of them if they are fewer."""
    metrics["available_workers"] = len(available)
    count = min(size, len(available))
    return available[sample_workers(rng, len(available), count)], np.full(count, size / max(size, len(available)))
