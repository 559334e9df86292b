"""Local work of a worker in one round: number of epochs or steps, and batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np

from fedsim.core.randomness import draw_keys

Numbers: TypeAlias = Any  # a number for one worker, or an array [n] for n workers


@dataclass(frozen=True)
class Varying:
    """Setting whose value differs between workers or rounds.

    Attributes:
        form: how the value is chosen. "list": `values` contains one value per worker. "choice": the value is drawn from
            `values` for each worker and round. "uniform": the value is drawn between the two `values`. "function": the
            value is `values(worker, round)`.
        values: list of numbers, or a function.
        seed: seed of the draws.
        purpose: name of the draws. Settings with different names are drawn independently.
        kind: type of the values, int or float.

    >>> from fedsim.clients.schedule import Varying
    >>> [Varying("uniform", [1, 5]).of(worker, 1) for worker in range(6)]
    [4, 4, 5, 2, 5, 1]
    """

    form: Literal["list", "uniform", "choice", "function"]
    values: Any
    seed: int = 0
    purpose: str = "local_work"
    kind: type = int

    def of(self, worker: Numbers, round: Numbers) -> Numbers:
        """Return the worker's value in `round`, which depends only on the setting, the seed, worker and round."""
        if not isinstance(worker, np.ndarray):
            return self.of(np.array([worker]), np.array([round])).item()
        if self.form == "function":
            pairs = zip(worker.tolist(), round.tolist(), strict=True)
            return np.array([self.values(*pair) for pair in pairs], dtype=self.kind)
        if self.form == "list":
            return self._table[worker]
        keys = draw_keys(self.seed, self.purpose, round, worker)
        if self.form == "choice":
            return self._table[keys % len(self._table)]
        low, high = self.values
        return low + (keys % (high - low + 1) if self.kind is int else (high - low) * (keys / 2**63))

    @cached_property
    def _table(self) -> np.ndarray:
        return np.array(self.values, dtype=self.kind)

    def possible(self, worker: int) -> Sequence[int]:
        """Return the integer values that `worker` can have, ascending. For a function, only its value in round 1."""
        if self.form == "uniform":
            return range(self.values[0], self.values[1] + 1)
        return sorted(set(self.values)) if self.form == "choice" else [self.of(worker, 1)]

    @property
    def largest(self) -> Any:
        """Largest value of all workers and rounds. For a function, its value for worker 0 in round 1."""
        return self.of(0, 1) if self.form == "function" else max(self.values)


# One number for all workers, or one that varies. `Schedule.of` returns arrays for many workers.
Amount = int | Varying | np.ndarray


@dataclass(frozen=True)
class Schedule:
    """How much a worker trains in one round: a number of epochs or of steps, and the batch size.

    If a number varies between workers or rounds, `of` returns the schedule of one worker in one round. A step trains on
    one batch. The parameters are updated only once per `accumulation_steps` batches: `local_steps` counts these
    updates, and all other methods count batches. Methods accept numbers of one worker, or int64 arrays [n] of n
    workers.

    Attributes:
        batch_size: number of samples per batch.
        epochs: number of passes over a worker's samples; not used if `steps` is set.
        steps: number of parameter updates; None to count epochs.
        drop_last: whether an incomplete last batch of an epoch is left out.
        accumulation_steps: number of batches per update of the parameters.

    >>> from fedsim.clients.schedule import Schedule, Varying
    >>> schedule = Schedule(batch_size=10, epochs=Varying("uniform", [1, 5]))
    >>> [schedule.of(worker, round=1).steps_for(n_samples=25) for worker in range(6)]
    [12, 12, 15, 6, 15, 3]
    """

    batch_size: Any  # an Amount
    epochs: Amount | None = 1
    steps: Amount | None = None
    drop_last: bool = False
    accumulation_steps: int = 1

    @property
    def _amount(self) -> Amount:
        amount = self.epochs if self.steps is None else self.steps
        assert amount is not None
        return amount

    @property
    def largest_batch(self) -> int:
        """Number of samples in the largest batch, for estimates and trial runs (see `Varying.largest`)."""
        return self.batch_size.largest if isinstance(self.batch_size, Varying) else self.batch_size

    def of(self, worker: Numbers, round: Numbers) -> Schedule:
        """Return a schedule in which each `Varying` is replaced by its value for `worker` in `round`."""
        return self._with(lambda name, value: value.of(worker, round))

    def longest(self, worker: int) -> Schedule:
        """Return the schedule with the most steps that `worker` can have in a round (see `Varying.possible`)."""
        return self._with(lambda name, value: value.possible(worker)[0 if name == "batch_size" else -1])

    def shortest(self, worker: int) -> Schedule:
        """Return the schedule with the fewest steps that `worker` can have in a round (see `Varying.possible`)."""
        return self._with(lambda name, value: value.possible(worker)[-1 if name == "batch_size" else 0])

    def _with(self, number_of: Callable[[str, Varying], Numbers]) -> Schedule:
        """Return a schedule in which each `Varying` value is replaced by `number_of(name, value)`."""
        values = {name: getattr(self, name) for name in ("batch_size", "epochs", "steps")}
        fixed = {name: number_of(name, value) for name, value in values.items() if isinstance(value, Varying)}
        return replace(self, **fixed) if fixed else self

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
        assert not isinstance(amount, Varying), "the amount of work varies; call `of` for a worker and a round"
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
