"""The local work of workers between two synchronisations: how many epochs or steps, of which batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedsim.core.randomness import draw_key


@dataclass(frozen=True)
class DrawnAmount:
    """A number of epochs or steps that is drawn for each worker and round, uniformly from `values`."""

    values: Sequence[int]
    seed: int

    def of(self, worker: int, round: int) -> int:
        """Return the number of a worker in a round: a pure function of (seed, "local_work", round, worker)."""
        return self.values[draw_key(self.seed, "local_work", round, worker) % len(self.values)]


Amount = int | tuple[int, ...] | DrawnAmount  # the same for all workers, one for each worker, or drawn


@dataclass(frozen=True)
class Schedule:
    """The local work of a worker between two synchronisations: whole local epochs, or a number of steps.

    If the amount differs between workers or rounds, only the schedule that `of` returns has a number of steps.

    With `accumulate`, the client algorithm steps along the mean gradient of so many batches, of fewer at the end of a
    round. The methods count the steps before that, one for each batch; `local_steps` counts those of the client
    algorithm.

    >>> from fedsim.engines.schedule import DrawnAmount, Schedule
    >>> schedule = Schedule(batch_size=10, epochs=DrawnAmount(range(1, 6), seed=0))
    >>> [schedule.of(worker, round=1).steps_for(n_samples=25) for worker in range(6)]
    [12, 12, 15, 6, 15, 3]
    """

    batch_size: int
    epochs: Amount | None = 1
    steps: Amount | None = None
    drop_last: bool = False
    accumulate: int = 1

    @property
    def drawn(self) -> bool:
        """Whether the amount of work is drawn for each worker and round."""
        return isinstance(self._amount, DrawnAmount)

    @property
    def _amount(self) -> Amount:
        amount = self.epochs if self.steps is None else self.steps
        assert amount is not None
        return amount

    @property
    def least(self) -> tuple[int | None, int | None]:
        """The fewest epochs of a round, or the fewest steps, of any worker; the other one is None."""
        amount = self._amount
        values = amount.values if isinstance(amount, DrawnAmount) else (amount,) if isinstance(amount, int) else amount
        return (min(values), None) if self.steps is None else (None, min(values))

    def of(self, worker: int, round: int) -> Schedule:
        """Return the schedule of one worker in one round."""
        amount = self._amount
        if isinstance(amount, int):
            return self
        return self._with(amount[worker] if isinstance(amount, tuple) else amount.of(worker, round))

    def longest(self, worker: int) -> Schedule:
        """Return the schedule of the longest round that a worker can have."""
        return self._with(max(self._amount.values)) if isinstance(self._amount, DrawnAmount) else self.of(worker, 1)

    def shortest(self, worker: int) -> Schedule:
        """Return the schedule of the shortest one."""
        return self._with(min(self._amount.values)) if isinstance(self._amount, DrawnAmount) else self.of(worker, 1)

    def _with(self, amount: int) -> Schedule:
        return replace(self, epochs=amount) if self.steps is None else replace(self, steps=amount)

    def samples_per_epoch(self, n_samples: int) -> int:
        """Samples that a worker with this many goes through in one epoch.

        With `drop_last` all but those of a last batch that is smaller than the others; a shard smaller than a batch is
        one batch all the same.
        """
        left_out = n_samples % self.batch_size if self.drop_last and n_samples > self.batch_size else 0
        return n_samples - left_out

    def batches_per_epoch(self, n_samples: int) -> int:
        """Batches, so steps, of such an epoch."""
        return self.batches_of_all(self.samples_per_epoch(n_samples))

    def batches_of_all(self, n_samples: int) -> int:
        """Batches of one pass over all samples, of which the last may be smaller."""
        return -(-n_samples // self.batch_size)

    def steps_for(self, n_samples: int) -> int:
        """Steps that a worker with this many samples takes in one round."""
        amount = self._amount
        assert isinstance(amount, int), "`of` gives the schedule of a worker in a round"
        return amount * (self.accumulate if self.steps is not None else self.batches_per_epoch(n_samples))

    def local_steps(self, steps: int) -> int:
        """Steps of the client algorithm in so many steps from the start of a round."""
        return -(-steps // self.accumulate)

    def samples_for(self, n_samples: int) -> int:
        """Samples that a worker with this many goes through in one round, repetitions counted."""
        return self.samples_in(self.steps_for(n_samples), n_samples)

    def samples_in(self, steps: int, n_samples: int) -> int:
        """Return the same for so many steps from the start of a round."""
        epochs, steps = divmod(steps, self.batches_per_epoch(n_samples))
        return epochs * self.samples_per_epoch(n_samples) + steps * self.batch_size

    def batch_size_at(self, step: int, n_samples: int) -> int:
        """Samples in a worker's batch number `step` (from 0) of a round; 0 when its round is over by then."""
        if step >= self.steps_for(n_samples):
            return 0
        before = step % self.batches_per_epoch(n_samples) * self.batch_size
        return min(self.batch_size, self.samples_per_epoch(n_samples) - before)

    def smallest_batch(self, n_samples: int) -> int:
        """Samples in the smallest batch of a round."""
        last = min(self.steps_for(n_samples), self.batches_per_epoch(n_samples)) - 1
        return self.batch_size_at(last, n_samples)
