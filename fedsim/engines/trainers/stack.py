"""Stack: workers of a cohort that are trained together, with their batches and losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsim.core.rows import index_of
from fedsim.engines.task import RunTask
from fedsim.engines.trainers.batches import SAMPLES_AT_ONCE, Alteration, BatchSource, WorkItem
from fedsim.engines.trainers.dropout import Dropout, FactorsAhead, layer_key
from fedsim.system.devices import wide_dtype

STEPS_AT_A_TIME = 256  # number of steps whose sample positions are copied to the device at once


class StepBatch(NamedTuple):
    """Batches of one step or of several steps, for m workers of a stack.

    With several steps, all tensors have a leading dimension [steps, ...], and workers that have finished have size 0.

    Attributes:
        step: number of the first step, counted from 0 at the start of the workers' training.
        members: positions of the m workers in the stack: a range, or a list if they are not consecutive.
        sizes: number of samples in each worker's batch, [m], on the host.
        counts: `sizes` as floating-point numbers on the device.
        positions: positions of the samples in the data set, int64 [m, batch]. Padding repeats the first sample of the
            batch, because NaN would reach the loss even with weight 0.
        weights: weight of each sample in the loss, [m, batch]: 1 / size, or 0 for padding.
    """

    step: int
    members: range | list[int]
    sizes: np.ndarray
    counts: Tensor
    positions: Tensor
    weights: Tensor

    @property
    def places(self) -> slice | list[int]:
        """Index that selects the workers from a stacked tensor: a slice if they are consecutive, otherwise a list."""
        return self.members if isinstance(self.members, list) else slice(self.members.start, self.members.stop)

    def part(self, index: Any, step: int, members: range | list[int]) -> StepBatch:
        """Return the batches that `index` selects from all tensors, with new values of `step` and `members`."""
        parts = self.sizes[index], self.counts[index], self.positions[index], self.weights[index]
        return StepBatch(step, members, *parts)

    def by_step(self) -> Iterator[StepBatch]:
        """Split batches of several steps: yield one StepBatch per step, of the workers that have not finished."""
        for step, active in enumerate((self.sizes > 0).sum(1).tolist()):
            yield self.part((step, slice(active)), self.step + step, range(active))

    def by_size(self) -> Iterator[StepBatch]:
        """Split by batch size: yield one StepBatch per size, without padding."""
        for size in np.unique(self.sizes).tolist():
            places = np.flatnonzero(self.sizes == size).tolist()
            cut = self._replace(positions=self.positions[:, :size], weights=self.weights[:, :size])
            is_whole = len(places) == len(self.members)
            yield cut if is_whole else cut.part(places, self.step, [self.members[place] for place in places])


class Stack:
    """Stack of k workers that are trained together, and their losses in a round.

    Attributes:
        members: work items of the workers, sorted by descending number of steps.
        slots: row numbers of the workers, int64 [k], on the host.
        index: index that selects the workers' rows on the device; a slice gives a view (see `core.rows.index_of`).
        steps: number of steps of each worker, descending.
    """

    def __init__(self, members: Sequence[WorkItem], task: RunTask, batch_source: BatchSource) -> None:
        self.members = sorted(members, key=lambda member: -batch_source.steps_of(member))
        self.steps = [batch_source.steps_of(member) for member in self.members]
        self._task, self._batch_source = task, batch_source
        slots = [member.slot for member in self.members]
        self.slots, self.index = torch.tensor(slots), index_of(slots, task.device)
        self._iterators = [batch_source.iterator_of(member) for member in self.members]
        self._loss_sum = torch.zeros(len(members), dtype=wide_dtype(task.device), device=task.device)
        self._samples = np.zeros(len(members), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.members)

    def index_of(self, step_batch: StepBatch) -> slice | Tensor:
        """Return the index that selects the rows of the workers in `step_batch`, on the device."""
        if isinstance(self.index, Tensor):
            return self.index[step_batch.places]
        return index_of([self.members[place].slot for place in step_batch.members], self._task.device)

    def step_batches(self) -> Iterator[StepBatch]:
        """Yield one StepBatch per step, of the workers that have not finished."""
        return (step_batch for block in self.blocks(STEPS_AT_A_TIME) for step_batch in block.by_step())

    def blocks(self, at_a_time: int) -> Iterator[StepBatch]:
        """Yield the batches of all steps, `at_a_time` steps at a time."""
        if all(member.step is not None for member in self.members):
            batches = [next(iterator) for iterator in self._iterators]
            sizes = np.array([len(batch) for batch in batches])
            return iter([self._block(0, torch.cat(batches), (sizes.cumsum() - sizes)[None], sizes[None])])
        return self._blocks_of_rounds(np.array(self.steps), at_a_time)

    def _blocks_of_rounds(self, steps: np.ndarray, at_a_time: int) -> Iterator[StepBatch]:
        """Yield the `blocks` of workers that train whole rounds, computed by a few array operations.

        Args:
            steps: number of steps of each worker, descending.
            at_a_time: number of steps per block.
        """
        schedule, members = self._task.schedule, self.members
        shards = np.array([self._batch_source.size(member.worker) for member in members])
        samples = np.array([schedule.samples_per_epoch(size) for size in shards.tolist()])
        batches = -(-samples // schedule.batch_size)  # per epoch
        first = np.array([member.step or 0 for member in members])
        longest = int(batches.max())
        span = at_a_time * -(-longest * max(1, SAMPLES_AT_ONCE // int(shards.sum())) // at_a_time)
        for start in range(0, int(steps.max()), span):
            k = int((steps > start).sum())  # the members that have not finished come first
            stop = np.minimum(steps, start + span)[:k]
            from_epoch = (first[:k] + start) // batches[:k]
            to_epoch = -(-(first[:k] + stop) // batches[:k])
            wanted = [
                (member.worker, member.round, epoch)
                for member, begin_epoch, end_epoch in zip(members, from_epoch.tolist(), to_epoch.tolist(), strict=False)
                for epoch in range(begin_epoch, end_epoch)
            ]
            positions, taken = torch.cat(self._batch_source.orders(wanted)), (to_epoch - from_epoch) * samples[:k]
            begin = taken.cumsum() - taken  # begin of each member's first epoch in `positions`
            for some in range(start, int(stop.max()), at_a_time):
                step = np.arange(some, min(some + at_a_time, int(stop.max())))[:, None]
                epoch, batch = np.divmod(first[:k] + step, batches[:k])
                before = batch * schedule.batch_size
                sizes = np.minimum(schedule.batch_size, samples[:k] - before) * (step < steps[:k])
                yield self._block(some, positions, begin + (epoch - from_epoch) * samples[:k] + before, sizes)

    def full_pass(self) -> Iterator[StepBatch]:
        """Yield batches that contain each training sample of each worker once, in the order of the dataset."""
        workers, size = [member.worker for member in self.members], self._task.schedule.batch_size
        positions, starts = self._batch_source.shards_of(workers)
        samples = np.array([self._batch_source.size(worker) for worker in workers])
        for start in range(0, -(-int(samples.max()) // size), STEPS_AT_A_TIME):
            begin = np.arange(start, start + STEPS_AT_A_TIME)[:, None] * size
            sizes = np.clip(samples - begin, 0, size)
            block = self._block(start, positions, np.array(starts) + begin, sizes)
            for step in range(int((sizes.max(1) > 0).sum())):
                some = np.flatnonzero(sizes[step]).tolist()
                yield block.part((step, some), start + step, range(len(some)) if some[-1] < len(some) else some)

    @property
    def layer_keys(self) -> list[int]:
        """Random key of dropout for each worker; see `layer_key`."""
        return [layer_key(self._task.experiment.seed, member.round, member.worker) for member in self.members]

    def dropout_factors(self, dropouts: Sequence[Dropout], *, after: bool = False) -> FactorsAhead:
        """Return the dropout factors of the workers' steps, or of the steps after their last one if `after` is true."""
        task = self._task
        first_steps = self.steps if after else [member.step or 0 for member in self.members]
        on_host = [self.layer_keys, first_steps] if dropouts else [[], []]
        keys, first = torch.tensor(on_host, device=task.device)
        return FactorsAhead(keys, self.steps[0], task.schedule.batch_size, dropouts, task.dtype, first_step=first)

    def alter(
        self, step_batch: StepBatch, inputs: Tensor, targets: Tensor, alterations: Sequence[Alteration | None] = ()
    ) -> None:
        """Augment or poison the batches of a step, inputs and targets [m, batch, ...], in place.

        Args:
            step_batch: batches of m workers.
            alterations: for each worker of the stack, a function or None to keep its batch; by default the functions
                that are used in training.
        """
        for place, member in enumerate(step_batch.members):
            if alter := alterations[member] if alterations else self._iterators[member].alter:
                step, size = (self.members[member].step or 0) + step_batch.step, int(step_batch.sizes[place])
                inputs[place, :size], targets[place, :size] = alter(inputs[place, :size], targets[place, :size], step)

    def alterations_of_view(self, purpose: str) -> list[Alteration | None]:
        """Return a function for each worker that poisons its batches without augmentation; None to keep them.

        `purpose` is part of the random key.
        """
        source = self._batch_source
        return [source.alteration_of_view(member.worker, member.round, purpose) for member in self.members]

    def count(self, step_batch: StepBatch, losses: Tensor) -> None:
        """Add the mean losses [m] of `step_batch` to the workers' totals, without waiting for the device."""
        sums = self._loss_sum[step_batch.places]
        sums.addcmul_(losses, step_batch.counts)
        if isinstance(step_batch.places, list):  # `sums` is a copy
            self._loss_sum[step_batch.places] = sums
        self._samples[step_batch.places] += step_batch.sizes

    def count_samples(self, block: StepBatch) -> None:
        """Count the samples of a block whose losses are added by `add_losses`."""
        self._samples[: block.sizes.shape[1]] += block.sizes.sum(0)

    def add_losses(self, sums: Tensor) -> None:
        """Add one loss sum per worker, [k], over several StepBatches."""
        self._loss_sum += sums

    def mean_losses(self) -> Tensor:
        """Return each worker's mean loss per sample, float64 [k], on the host."""
        return self._loss_sum.cpu().double() / torch.from_numpy(self._samples)

    def _block(self, start: int, positions: Tensor, begins: np.ndarray, sizes: np.ndarray) -> StepBatch:
        """Return the batches of several steps, beginning with step `start`.

        Args:
            positions: sample positions in the data set, int64 [n], on the device.
            begins: first index into `positions` of each batch, int64 [steps, m].
            sizes: number of samples of each batch, int64 [steps, m]; 0 if the worker has finished.
        """
        device = self._task.device
        table = torch.from_numpy(np.stack([begins * (sizes > 0), sizes])).to(device)
        place = torch.arange(self._task.schedule.batch_size, device=device)
        inside = place < table[1].unsqueeze(2)
        gathered = positions[table[0].unsqueeze(2) + place * inside]
        weights = inside.to(self._task.dtype) / table[1].clamp(min=1).unsqueeze(2)
        return StepBatch(start, range(sizes.shape[1]), sizes, table[1].to(self._loss_sum.dtype), gathered, weights)
