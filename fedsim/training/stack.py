"""Stack: workers of a cohort that are trained together, with their batches and losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from operator import getitem
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsim.core.model_inputs import Inputs, named, on_each
from fedsim.core.rows import index_of
from fedsim.system.devices import to_device, wide_dtype
from fedsim.training.batches import SAMPLES_AT_ONCE, Alteration, BatchSource, WorkItems
from fedsim.training.forward_functions import Dropout, FactorsAhead, layer_keys
from fedsim.training.task import RunTask

SAMPLES_AT_ONCE_ON_GPU = 2**20  # maximum number of samples in a table of batches on a GPU: 12 MB
STEPS_AT_A_TIME = 256  # number of steps whose sample positions are copied to the device at once


class StepBatch(NamedTuple):
    """Batches of m workers that are trained together, for one training step or several steps.

    With several steps, all tensors have an additional first dimension [steps, ...]. Workers that have finished have
    batches of size 0.

    Attributes:
        step: number of the (first) step, counted from 0 at the start of the workers' training.
        in_stack: positions of the m workers in the stack: a range, or a list if they are not consecutive.
        sizes: number of samples in each worker's batch, [m], on the CPU.
        counts: the same numbers as `sizes`, in floating point on the device.
        positions: indices of the samples in the data set, int64 [m, batch]. Short batches are padded.
        weights: weight of each sample in the loss, [m, batch]: 1 / size, or 0 for padding.
    """

    step: int
    in_stack: range | list[int]
    sizes: np.ndarray
    counts: Tensor
    positions: Tensor
    weights: Tensor

    @property
    def stack_index(self) -> slice | list[int]:
        """Index of the m workers in a tensor of the stack: a slice if they are consecutive, otherwise a list."""
        return self.in_stack if isinstance(self.in_stack, list) else slice(self.in_stack.start, self.in_stack.stop)

    def part(self, index: Any, step: int, in_stack: range | list[int]) -> StepBatch:
        """Return a StepBatch with only some of the steps, some of the workers, or both.

        Args:
            index: index that selects these steps and workers in each tensor, as in `positions[index]`.
            step: first selected step, counted from 0 at the start of the workers' training.
            in_stack: positions of the selected workers in the stack.
        """
        parts = self.sizes[index], self.counts[index], self.positions[index], self.weights[index]
        return StepBatch(step, in_stack, *parts)

    def by_step(self) -> Iterator[StepBatch]:
        """Yield one StepBatch for each step, without workers that have finished."""
        for step, active in enumerate((self.sizes > 0).sum(1).tolist()):
            yield self.part((step, slice(active)), self.step + step, range(active))

    def by_size(self) -> Iterator[StepBatch]:
        """Yield one StepBatch for each batch size, with all batches of this size, without padding."""
        for size in np.unique(self.sizes).tolist():
            chosen = np.flatnonzero(self.sizes == size).tolist()
            cut = self._replace(positions=self.positions[:, :size], weights=self.weights[:, :size])
            is_whole = len(chosen) == len(self.in_stack)
            yield cut if is_whole else cut.part(chosen, self.step, [self.in_stack[position] for position in chosen])


class Stacks(list["Stack"]):
    """Workers that a process trains in a round, divided into stacks, each trained in batched calls, and their losses.

    Args:
        work: the workers. Workers of the same stack follow one another.
        task: run to compute.
        batch_source: source of the workers' batches.

    Attributes:
        of: all workers, as passed in `work`.
    """

    def __init__(self, work: WorkItems, task: RunTask, batch_source: BatchSource) -> None:
        self.of = work
        numbers = (np.diff(work.stacks, prepend=work.stacks[:1]) != 0).cumsum()  # in order of appearance
        work = work[np.lexsort((-work.steps, numbers))]
        self._slots, self._samples = torch.from_numpy(work.slots), np.zeros(len(work), dtype=np.int64)
        self._loss_sums = torch.zeros(len(work), dtype=wide_dtype(task.device), device=task.device)
        parts = [slice(*ends) for ends in pairwise([0, *(np.flatnonzero(np.diff(numbers, append=-1)) + 1).tolist()])]
        super().__init__(
            Stack(work[part], task, batch_source, table, self._loss_sums[part], self._samples[part])
            for part, table in zip(parts, _tables(work, parts, task, batch_source), strict=True)
        )

    def write_losses(self, train_loss: Tensor) -> None:
        """Write each worker's mean loss per sample to its element of `train_loss`, float64 [cohort], on the CPU."""
        train_loss[self._slots] = self._loss_sums.cpu().double() / torch.from_numpy(self._samples)


Table = Callable[[], StepBatch]  # returns the batches of all steps of a stack


def _tables(work: WorkItems, parts: Sequence[slice], task: RunTask, source: BatchSource) -> Iterator[Table | None]:
    """Yield, for each stack, a function that returns the batches of all its steps.

    The batches of consecutive stacks are computed together, when the first of these stacks needs them. None is yielded
    instead of a function if a stack has too many samples to store all its batches.

    Args:
        work: workers of all stacks.
        parts: slice of `work` for each stack.
        task: run to compute.
        source: source of the workers' batches.
    """
    begin, limit = 0, SAMPLES_AT_ONCE if task.device.type == "cpu" else SAMPLES_AT_ONCE_ON_GPU
    drawn = source.epochs_of(work) * work.sizes.astype(float)
    numbers = np.stack([work.steps.astype(float), task.batch_sizes(work), drawn])  # floats cannot overflow
    most = np.array([numbers[:, part].max(1) for part in parts]).reshape(-1, 3).T
    ends = np.array([part.stop for part in parts])
    while begin < len(parts):
        start, (steps, batch, samples) = parts[begin].start, np.maximum.accumulate(most[:, begin:], 1)
        count = int((np.maximum(steps * batch, samples) * (ends[begin:] - start) <= limit).sum())
        if count:
            together = lru_cache(1)(partial(_table, work[start : int(ends[begin + count - 1])], task, source))
            for part in parts[begin : begin + count]:
                index = slice(0, int(work.steps[part.start])), slice(part.start - start, part.stop - start)
                yield partial(_part_of_table, together, index, int(task.batch_sizes(work[part]).max()))
        else:
            yield None
        begin += max(1, count)


def _table(work: WorkItems, task: RunTask, source: BatchSource) -> StepBatch:
    [whole] = blocks_of_rounds(work, task, source, int(work.steps.max()))
    return whole


def _part_of_table(table: Table, index: tuple[slice, slice], batch: int) -> StepBatch:
    part = table().part(index, 0, range(index[1].stop - index[1].start))
    return part._replace(positions=part.positions[..., :batch], weights=part.weights[..., :batch])


def blocks_of_rounds(work: WorkItems, task: RunTask, source: BatchSource, at_a_time: int) -> Iterator[StepBatch]:
    """Yield the batches of all steps, in blocks of at most `at_a_time` steps.

    Args:
        work: workers, sorted by descending number of steps if there is more than one block.
        task: run to compute.
        source: source of the workers' batches.
        at_a_time: maximum number of steps per block.
    """
    schedule, steps, first = task.schedule.of(work.workers, work.rounds), work.steps, work.first
    samples, batch_sizes = schedule.samples_per_epoch(work.sizes), task.batch_sizes(work)
    batches = schedule.batches_of_all(samples)  # per epoch
    longest, most = int(batches.max()), int(steps.max())
    span = at_a_time * -(-longest * max(1, SAMPLES_AT_ONCE // int(work.sizes.sum())) // at_a_time)
    for start in range(0, most, span):
        k = int((steps > start).sum())  # the workers that have not finished come first
        stop = np.minimum(steps, start + span)[:k]
        from_epoch = (first[:k] + start) // batches[:k]
        orders = source.orders(work[:k], from_epoch, -(-(first[:k] + stop) // batches[:k]))
        for some in range(start, int(stop.max()), at_a_time):
            step = np.arange(some, min(some + at_a_time, int(stop.max())))[:, None]
            epoch, batch = np.divmod(first[:k] + step, batches[:k])
            before = batch * batch_sizes[:k]
            sizes = np.minimum(batch_sizes[:k], samples[:k] - before) * (step < steps[:k])
            begins = orders.begins + (epoch - from_epoch) * orders.lengths + before
            yield block_of(task, int(batch_sizes.max()), some, orders.positions, begins, sizes)


def block_of(
    task: RunTask, batch: int, start: int, positions: Tensor, begins: np.ndarray, sizes: np.ndarray
) -> StepBatch:
    """Return the batches of m workers for several steps, beginning with step number `start`.

    Args:
        task: run to compute.
        batch: number of samples to which batches are padded.
        start: number of the first step.
        positions: indices of samples in the data set, int64 [n], on the device.
        begins: for each batch, the index into `positions` where its samples begin, int64 [steps, m].
        sizes: number of samples in each batch, int64 [steps, m]; 0 if the worker has finished.
    """
    table = to_device(torch.from_numpy(np.stack([begins * (sizes > 0), sizes])), task.device)
    number = torch.arange(batch, device=task.device)
    inside = number < table[1].unsqueeze(2)
    gathered = positions[table[0].unsqueeze(2) + number * inside]
    weights = inside.to(task.dtype) / table[1].clamp(min=1).unsqueeze(2)
    return StepBatch(start, range(sizes.shape[1]), sizes, table[1].to(wide_dtype(task.device)), gathered, weights)


def alter_in_place(alter: Alteration, inputs: Inputs, targets: Tensor, index: tuple[int, slice], step: int) -> None:
    """Replace the samples at `index` by `alter(inputs, targets, step)`, among the batches of several workers."""
    views = on_each(getitem, inputs, index)
    altered, targets[index] = alter(views, targets[index], step)
    for name, values in named(altered).items():
        named(views)[name].copy_(values)


class Stack:
    """Workers that are trained together (a stack of k workers), and their losses in a round.

    Attributes:
        members: the workers, sorted by descending number of steps.
        slots: positions of the workers in the tensors of the cohort, int64 [k], on the CPU.
        index: index of the workers in the tensors of the cohort: a slice, or an index tensor on the device.
        steps: number of steps of each worker, descending, int64 [k].
        batch: number of samples to which batches are padded.
        settings: settings of the steps that differ between the workers (see `RunTask.step_settings`).
    """

    def __init__(
        self,
        members: WorkItems,
        task: RunTask,
        batch_source: BatchSource,
        table: Table | None,
        loss_sum: Tensor,
        samples: np.ndarray,
    ) -> None:
        self.members, self.steps, self.batch = members, members.steps, int(task.batch_sizes(members).max())
        self.settings = task.step_settings(members.workers, members.rounds)
        self._task, self._batch_source, self._table = task, batch_source, table
        self.slots, self.index = torch.from_numpy(members.slots), index_of(members.slots, task.device)
        self._loss_sum, self._samples = loss_sum, samples
        self._by_step = bool((members.step >= 0).all())
        self._iterators = [batch_source.iterator_of(member) for member in members] if self._by_step else []
        alterations = [iterator.alter for iterator in self._iterators] or batch_source.alterations(members)
        self._alterations = alterations if any(alterations) else []

    def __len__(self) -> int:
        return len(self.members)

    def index_of(self, step_batch: StepBatch) -> slice | Tensor:
        """Return the index of the workers of `step_batch` in the tensors of the cohort."""
        if isinstance(self.index, Tensor):
            return self.index[step_batch.stack_index]
        return index_of(self.members.slots[step_batch.stack_index], self._task.device)

    def draw(self) -> None:
        """Draw the batches of all steps in advance. If they have too many samples, they are drawn during training."""
        if self._table is not None:
            self._table()

    def step_batches(self) -> Iterator[StepBatch]:
        """Yield the batches of one step after another, for the workers that have not finished."""
        return (step_batch for block in self.blocks(STEPS_AT_A_TIME) for step_batch in block.by_step())

    def blocks(self, at_a_time: int) -> Iterator[StepBatch]:
        """Yield the batches of all steps, in blocks of at most `at_a_time` steps."""
        if self._by_step:
            batches = [next(iterator) for iterator in self._iterators]
            sizes = np.array([len(batch) for batch in batches])
            begins = (sizes.cumsum() - sizes)[None]
            return iter([block_of(self._task, self.batch, 0, torch.cat(batches), begins, sizes[None])])
        if self._table is None:
            return blocks_of_rounds(self.members, self._task, self._batch_source, at_a_time)
        whole, self._table = self._table(), None  # the table is freed after the last stack that uses it
        starts = range(0, len(whole.sizes), at_a_time)
        return (whole.part(slice(start, start + at_a_time), start, whole.in_stack) for start in starts)

    def full_pass(self) -> Iterator[StepBatch]:
        """Yield batches that contain each training sample of each worker exactly once, in the order of the dataset."""
        samples, size = self.members.sizes, self._task.batch_sizes(self.members)
        positions, starts = self._batch_source.shards_of(self.members.workers)
        for start in range(0, int((-(-samples // size)).max()), STEPS_AT_A_TIME):
            begin = np.arange(start, start + STEPS_AT_A_TIME)[:, None] * size
            sizes = np.clip(samples - begin, 0, size)
            block = block_of(self._task, self.batch, start, positions, starts + begin, sizes)
            for step in range(int((sizes.max(1) > 0).sum())):
                some = np.flatnonzero(sizes[step]).tolist()
                in_stack = range(len(some)) if some[-1] < len(some) else some
                index = some if in_stack is some else slice(len(some))  # a list would have to be copied to the device
                yield block.part((step, index), start + step, in_stack)

    @property
    def layer_keys(self) -> np.ndarray:
        """Random seed of each worker's dropout masks in the round, int64 [k]."""
        return layer_keys(self._task.experiment.seed, self.members.rounds, self.members.workers)

    def dropout_factors(self, dropouts: Sequence[Dropout], *, after: bool = False) -> FactorsAhead:
        """Return the workers' dropout masks.

        Args:
            dropouts: dropout calls of a forward pass, in call order.
            after: whether to return masks for forward passes after the last step of each worker's round, which need
                masks other than those of the training steps.
        """
        task, first_steps = self._task, self.steps if after else self.members.first
        if not dropouts:
            return FactorsAhead(torch.zeros(0), 0, 0, (), task.dtype)
        keys, first = to_device(torch.from_numpy(np.stack([self.layer_keys, first_steps])), task.device)
        return FactorsAhead(keys, int(self.steps[0]), self.batch, dropouts, task.dtype, first_step=first)

    def alter(
        self,
        step_batch: StepBatch,
        inputs: Inputs,
        targets: Tensor,
        alterations: Sequence[Alteration | None] | None = None,
    ) -> None:
        """Augment or poison the batches of m workers in one step, in place.

        Args:
            step_batch: positions and sizes of the batches.
            inputs, targets: samples of the batches, [m, batch, ...] each.
            alterations: for each worker of the stack, a function that alters its batch, or None to keep it. An empty
                list keeps all batches. None: the functions that training uses.
        """
        alterations = self._alterations if alterations is None else alterations
        for row, position in enumerate(step_batch.in_stack if alterations else ()):
            if alter := alterations[position]:
                step, size = int(self.members.first[position]) + step_batch.step, int(step_batch.sizes[row])
                alter_in_place(alter, inputs, targets, (row, slice(size)), step)

    def count(self, step_batch: StepBatch, losses: Tensor) -> None:
        """Add the samples and losses of a step to the sums of the round.

        `losses` [m] are the mean losses of the batches in `step_batch`.
        """
        sums = self._loss_sum[step_batch.stack_index]
        sums.addcmul_(losses, step_batch.counts)
        if isinstance(step_batch.stack_index, list):  # `sums` is a copy
            self._loss_sum[step_batch.stack_index] = sums
        self._samples[step_batch.stack_index] += step_batch.sizes

    def count_samples(self, block: StepBatch) -> None:
        """Add the samples of several steps to the sums of the round. `add_losses` adds their losses."""
        self._samples[: block.sizes.shape[1]] += block.sizes.sum(0)

    def add_losses(self, sums: Tensor) -> None:
        """Add losses to the sums of the round. `sums` [k] are each worker's losses, summed over samples."""
        self._loss_sum += sums
