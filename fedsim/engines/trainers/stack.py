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
    """Batches of m workers that are trained together, for one training step or several steps.

    With several steps, all tensors have an additional first dimension [steps, ...]. Workers that have finished have
    batches of size 0.

    Attributes:
        step: number of the (first) step, counted from 0 at the start of the workers' training.
        members: positions of the m workers in the stack: a range, or a list if they are not consecutive.
        sizes: number of samples in each worker's batch, [m], on the CPU.
        counts: the same numbers as `sizes`, in floating point on the device.
        positions: indices of the samples in the data set, int64 [m, batch]. Short batches are padded.
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
        """Index of the m workers in a tensor of the stack: a slice if they are consecutive, otherwise a list."""
        return self.members if isinstance(self.members, list) else slice(self.members.start, self.members.stop)

    def part(self, index: Any, step: int, members: range | list[int]) -> StepBatch:
        """Return some of the batches as a StepBatch.

        Args:
            index: index of the selected steps, workers, or both.
            step: number of the first selected step.
            members: positions of the selected workers in the stack.
        """
        parts = self.sizes[index], self.counts[index], self.positions[index], self.weights[index]
        return StepBatch(step, members, *parts)

    def by_step(self) -> Iterator[StepBatch]:
        """Yield one StepBatch for each step, without workers that have finished."""
        for step, active in enumerate((self.sizes > 0).sum(1).tolist()):
            yield self.part((step, slice(active)), self.step + step, range(active))

    def by_size(self) -> Iterator[StepBatch]:
        """Yield one StepBatch for each batch size, with all batches of this size, without padding."""
        for size in np.unique(self.sizes).tolist():
            places = np.flatnonzero(self.sizes == size).tolist()
            cut = self._replace(positions=self.positions[:, :size], weights=self.weights[:, :size])
            is_whole = len(places) == len(self.members)
            yield cut if is_whole else cut.part(places, self.step, [self.members[place] for place in places])


class Stack:
    """Workers that are trained together (a stack of k workers), and their losses in a round.

    Attributes:
        members: the workers, each as a `WorkItem`, sorted by descending number of steps.
        slots: positions of the workers in the tensors of the cohort, int64 [k], on the CPU.
        index: index of the workers in the tensors of the cohort: a slice, or an index tensor on the device.
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
        """Return the index of the workers of `step_batch` in the tensors of the cohort."""
        if isinstance(self.index, Tensor):
            return self.index[step_batch.places]
        return index_of([self.members[place].slot for place in step_batch.members], self._task.device)

    def step_batches(self) -> Iterator[StepBatch]:
        """Yield the batches of one step after another, for the workers that have not finished."""
        return (step_batch for block in self.blocks(STEPS_AT_A_TIME) for step_batch in block.by_step())

    def blocks(self, at_a_time: int) -> Iterator[StepBatch]:
        """Yield the batches of all steps, in blocks of at most `at_a_time` steps."""
        if all(member.step is not None for member in self.members):
            batches = [next(iterator) for iterator in self._iterators]
            sizes = np.array([len(batch) for batch in batches])
            return iter([self._block(0, torch.cat(batches), (sizes.cumsum() - sizes)[None], sizes[None])])
        return self._blocks_of_rounds(np.array(self.steps), at_a_time)

    def _blocks_of_rounds(self, steps: np.ndarray, at_a_time: int) -> Iterator[StepBatch]:
        """Yield the batches of all steps in blocks, for workers that train more than one step.

        Args:
            steps: number of steps of each worker, descending.
            at_a_time: maximum number of steps per block.
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
        """Yield batches that contain each training sample of each worker exactly once, in the order of the dataset."""
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
        """Return the random seed of the dropout layers of each worker in the round, [k]."""
        return [layer_key(self._task.experiment.seed, member.round, member.worker) for member in self.members]

    def dropout_factors(self, dropouts: Sequence[Dropout], *, after: bool = False) -> FactorsAhead:
        """Return the workers' dropout masks.

        Args:
            dropouts: dropout calls of a forward pass, in call order.
            after: whether to return masks for additional steps, after the last step of each worker's round.
        """
        task = self._task
        first_steps = self.steps if after else [member.step or 0 for member in self.members]
        on_host = [self.layer_keys, first_steps] if dropouts else [[], []]
        keys, first = torch.tensor(on_host, device=task.device)
        return FactorsAhead(keys, self.steps[0], task.schedule.batch_size, dropouts, task.dtype, first_step=first)

    def alter(
        self, step_batch: StepBatch, inputs: Tensor, targets: Tensor, alterations: Sequence[Alteration | None] = ()
    ) -> None:
        """Augment or poison the batches of m workers in one step, in place.

        Args:
            step_batch: positions and sizes of the batches.
            inputs, targets: samples of the batches, [m, batch, ...] each.
            alterations: for each worker of the stack, a function that alters its batch, or None to keep it. By default,
                the functions of training are used.
        """
        for place, member in enumerate(step_batch.members):
            if alter := alterations[member] if alterations else self._iterators[member].alter:
                step, size = (self.members[member].step or 0) + step_batch.step, int(step_batch.sizes[place])
                inputs[place, :size], targets[place, :size] = alter(inputs[place, :size], targets[place, :size], step)

    def alterations_of_view(self, purpose: str) -> list[Alteration | None]:
        """Return, for each worker, a function that transforms and poisons its batches without augmentation, or None.

        Different names `purpose` give different random numbers.
        """
        source = self._batch_source
        return [source.alteration_of_view(member.worker, member.round, purpose) for member in self.members]

    def count(self, step_batch: StepBatch, losses: Tensor) -> None:
        """Add samples and losses of one step to the sums of the round. `losses` [m] are the mean losses."""
        sums = self._loss_sum[step_batch.places]
        sums.addcmul_(losses, step_batch.counts)
        if isinstance(step_batch.places, list):  # `sums` is a copy
            self._loss_sum[step_batch.places] = sums
        self._samples[step_batch.places] += step_batch.sizes

    def count_samples(self, block: StepBatch) -> None:
        """Add the samples of several steps to the sums of the round. `add_losses` adds their losses."""
        self._samples[: block.sizes.shape[1]] += block.sizes.sum(0)

    def add_losses(self, sums: Tensor) -> None:
        """Add losses to the sums of the round. `sums` [k] are each worker's losses, summed over samples."""
        self._loss_sum += sums

    def mean_losses(self) -> Tensor:
        """Return each worker's mean loss per sample, float64 [k], on the CPU."""
        return self._loss_sum.cpu().double() / torch.from_numpy(self._samples)

    def _block(self, start: int, positions: Tensor, begins: np.ndarray, sizes: np.ndarray) -> StepBatch:
        """Return the batches of m workers for several steps, beginning with step number `start`.

        Args:
            start: number of the first step.
            positions: indices of samples in the data set, int64 [n], on the device.
            begins: for each batch, the index into `positions` where its samples begin, int64 [steps, m].
            sizes: number of samples in each batch, int64 [steps, m]; 0 if the worker has finished.
        """
        device = self._task.device
        table = torch.from_numpy(np.stack([begins * (sizes > 0), sizes])).to(device)
        place = torch.arange(self._task.schedule.batch_size, device=device)
        inside = place < table[1].unsqueeze(2)
        gathered = positions[table[0].unsqueeze(2) + place * inside]
        weights = inside.to(self._task.dtype) / table[1].clamp(min=1).unsqueeze(2)
        return StepBatch(start, range(sizes.shape[1]), sizes, table[1].to(self._loss_sum.dtype), gathered, weights)
