"""Local work of a worker in one round: number of epochs or steps, and batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from fedsim.core.randomness import draw_key, draw_keys

Numbers: TypeAlias = Any  # an int for one worker, or an int64 array [n] for n workers


@dataclass(frozen=True)
class DrawnAmount:
    """Random number of epochs or steps, drawn uniformly from `values` for each worker and round."""

    values: Sequence[int]
    seed: int

    def of(self, worker: Numbers, round: Numbers) -> Numbers:
        """Return the worker's number of epochs or steps in `round`, which depends only on seed, worker and round."""
        if isinstance(worker, np.ndarray):
            drawn = draw_keys(self.seed, "local_work", round, worker) % len(self.values)
            return np.array([self.values[place] for place in drawn.tolist()], dtype=np.int64)
        return self.values[draw_key(self.seed, "local_work", round, worker) % len(self.values)]


# One number for all workers, one number per worker, or drawn at random. `Schedule.of` returns arrays for many workers.
Amount = int | tuple[int, ...] | DrawnAmount | np.ndarray


@dataclass(frozen=True)
class Schedule:
    """How much a worker trains in one round: a number of epochs or of steps, and the batch size.

    If the number is drawn at random for each worker and round, `of` returns the schedule of one worker in one round. A
    step trains on one batch. The parameters are updated only once per `accumulation_steps` batches:
    `local_steps` counts these updates, and all other methods count batches. Methods accept numbers of one worker, or
    int64 arrays [n] of n workers.

    Attributes:
        batch_size: number of samples per batch.
        epochs: number of passes over a worker's samples; not used if `steps` is set.
        steps: number of parameter updates; None to count epochs.
        drop_last: whether an incomplete last batch of an epoch is left out.
        accumulation_steps: number of batches per update of the parameters.

    >>> from fedsim.clients.schedule import DrawnAmount, Schedule
    >>> schedule = Schedule(batch_size=10, epochs=DrawnAmount(range(1, 6), seed=0))
    >>> [schedule.of(worker, round=1).steps_for(n_samples=25) for worker in range(6)]
    [12, 12, 15, 6, 15, 3]
    """

    batch_size: int
    epochs: Amount | None = 1
    steps: Amount | None = None
    drop_last: bool = False
    accumulation_steps: int = 1

    @property
    def drawn(self) -> bool:
        """Whether the amount of work is random, so that it differs between workers and rounds."""
        return isinstance(self._amount, DrawnAmount)

    @property
    def _amount(self) -> Amount:
        amount = self.epochs if self.steps is None else self.steps
        assert amount is not None
        return amount

    @property
    def least(self) -> tuple[int | None, int | None]:
        """Minimum number of epochs and minimum number of steps per round, as a pair. One of the two is None."""
        amount = self._amount
        values = amount.values if isinstance(amount, DrawnAmount) else np.atleast_1d(amount).tolist()
        return (min(values), None) if self.steps is None else (None, min(values))

    def of(self, worker: Numbers, round: Numbers) -> Schedule:
        """Return the schedule of `worker` in `round`, with a fixed number of epochs or steps."""
        amount = self._amount
        if isinstance(amount, DrawnAmount):
            return self._with(amount.of(worker, round))
        if isinstance(amount, tuple):
            return self._with(np.array(amount)[worker] if isinstance(worker, np.ndarray) else amount[worker])
        return self

    def longest(self, worker: int) -> Schedule:
        """Return the schedule with the most epochs or steps that `worker` can draw in a round."""
        return self._with(max(self._amount.values)) if isinstance(self._amount, DrawnAmount) else self.of(worker, 1)

    def shortest(self, worker: int) -> Schedule:
        """Return the schedule with the fewest epochs or steps that `worker` can draw in a round."""
        return self._with(min(self._amount.values)) if isinstance(self._amount, DrawnAmount) else self.of(worker, 1)

    def _with(self, amount: Numbers) -> Schedule:
        return replace(self, epochs=amount) if self.steps is None else replace(self, steps=amount)

    def samples_per_epoch(self, n_samples: Numbers) -> Numbers:
        """Return how many samples a worker with `n_samples` samples processes in one epoch.

        With `drop_last`, an incomplete last batch does not count, unless it is the only batch.
        """
        return n_samples - n_samples % self.batch_size * (self.drop_last & (n_samples > self.batch_size))

    def batches_per_epoch(self, n_samples: Numbers) -> Numbers:
        """Return the number of batches in one epoch of a worker with `n_samples` samples."""
        return self.batches_of_all(self.samples_per_epoch(n_samples))

    def batches_of_all(self, n_samples: Numbers) -> Numbers:
        """Return the number of batches in one pass over `n_samples` samples. The last batch may be incomplete."""
        return -(-n_samples // self.batch_size)

    def steps_for(self, n_samples: Numbers) -> Numbers:
        """Return the number of steps per round of a worker with `n_samples` samples."""
        amount: Numbers = self._amount
        varies = isinstance(amount, (tuple, DrawnAmount))
        assert not varies, "the amount of work varies; call `of` for the schedule of a worker and a round"
        if self.steps is None:
            return amount * self.batches_per_epoch(n_samples)
        return amount * self.accumulation_steps * (np.ones_like(n_samples) if isinstance(n_samples, np.ndarray) else 1)

    def local_steps(self, steps: Numbers) -> Numbers:
        """Return how often the client algorithm updates the parameters in the first `steps` batches of a round."""
        return -(-steps // self.accumulation_steps)

    def samples_in(self, steps: Numbers, n_samples: Numbers) -> Numbers:
        """Return how many samples a worker with `n_samples` samples processes in its first `steps` batches."""
        epochs, steps = divmod(steps, self.batches_per_epoch(n_samples))
        return epochs * self.samples_per_epoch(n_samples) + steps * self.batch_size

    def batch_size_at(self, step: int, n_samples: Numbers) -> Numbers:
        """Return the size of batch number `step` (from 0) in the round of a worker with `n_samples` samples.

        If the round has fewer batches, the result is 0.
        """
        left = self.samples_per_epoch(n_samples) - step % self.batches_per_epoch(n_samples) * self.batch_size
        return (left - (left - self.batch_size) * (left > self.batch_size)) * (step < self.steps_for(n_samples))

    def smallest_batch(self, n_samples: int) -> int:
        """Return the size of the smallest batch in a round of a worker with `n_samples` samples."""
        last = min(self.steps_for(n_samples), self.batches_per_epoch(n_samples)) - 1
        return self.batch_size_at(last, n_samples)
