"""Members of a cohort that are trained together as a stack of rows: their batches, step by step, and what they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsim.engines.dropout import FactorsAhead, layer_key
from fedsim.engines.feed import SAMPLES_AT_ONCE, Feed, Member
from fedsim.engines.job import Task
from fedsim.engines.stacked_operations import Dropout
from fedsim.rows import index_of
from fedsim.system.devices import wide_dtype

STEPS_AT_A_TIME = 256  # for so many steps the positions of samples go to the device at once


class Lot(NamedTuple):
    """Batches of one step, for some members of a stack.

    Attributes:
        step: number of the step, from 0 at the start of the members' work.
        members: their places in the stack, [m]: a range, or a list where they do not stand side by side.
        sizes: how many samples each has, [m], on the host; `counts` are the same on the device, in a wide type.
        positions: of the samples in the data set, int64 [m, batch]; the batch's first again beyond the size, since even
            what has weight 0 shows where it is not finite.
        weights: of the samples in the loss, [m, batch]: one over the size, and 0 beyond it.
    """

    step: int
    members: range | list[int]
    sizes: np.ndarray
    counts: Tensor
    positions: Tensor
    weights: Tensor

    @property
    def places(self) -> slice | list[int]:
        """What selects the members from a stacked tensor: views where they stand side by side."""
        return self.members if isinstance(self.members, list) else slice(self.members.start, self.members.stop)

    def by_size(self) -> list[Lot]:
        """The same batches in lots of one size each, without any filling."""
        sizes = np.unique(self.sizes)
        if len(sizes) == 1:
            return [self._replace(positions=self.positions[:, : sizes[0]], weights=self.weights[:, : sizes[0]])]
        lots = []
        for size in sizes.tolist():
            these = np.flatnonzero(self.sizes == size).tolist()
            lots.append(
                Lot(
                    self.step,
                    [self.members[place] for place in these],
                    self.sizes[these],
                    self.counts[these],
                    self.positions[these, :size],
                    self.weights[these, :size],
                )
            )
        return lots


class Stack:
    """Members that are trained together, those with most steps first, and their losses in a round.

    Attributes:
        slots: the places of their rows, int64 [k], on the host.
        index: selects their rows on the device, as a view if it is a slice (see `index_of`).
    """

    def __init__(self, members: Sequence[Member], task: Task, feed: Feed) -> None:
        self.members = sorted(members, key=lambda member: -feed.steps_of(member))
        self._task, self._feed = task, feed
        slots = [member.slot for member in self.members]
        self.slots, self.index = torch.tensor(slots), index_of(slots, task.device)
        self._laps = [feed.lap(member) for member in self.members]
        self._loss_sum = torch.zeros(len(members), dtype=wide_dtype(task.device), device=task.device)
        self._samples = np.zeros(len(members), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.members)

    def index_of(self, lot: Lot) -> slice | Tensor:
        """What selects the rows of a lot's members on the device."""
        if isinstance(self.index, Tensor):
            return self.index[lot.places]
        return index_of([self.members[place].slot for place in lot.members], self._task.device)

    def lots(self) -> Iterator[Lot]:
        """For each step the batches of those who have not finished, until everybody has."""
        steps = np.array([self._feed.steps_of(member) for member in self.members])
        if all(member.step is not None for member in self.members):
            batches = [next(lap) for lap in self._laps]
            sizes = np.array([len(batch) for batch in batches])
            return self._gathered(0, torch.cat(batches), (sizes.cumsum() - sizes)[None], sizes[None])
        return self._lots_of_rounds(steps)

    def _lots_of_rounds(self, steps: np.ndarray) -> Iterator[Lot]:
        """The same, of members who go through whole rounds, [k] steps each: all positions by a few operations."""
        schedule, members = self._task.schedule, self.members
        shards = np.array([self._feed.size(member.worker) for member in members])
        samples = np.array([schedule.samples_per_epoch(size) for size in shards.tolist()])
        batches = -(-samples // schedule.batch_size)  # of an epoch
        first = np.array([member.step or 0 for member in members])
        longest = int(batches.max())
        span = max(STEPS_AT_A_TIME, longest * max(1, SAMPLES_AT_ONCE // int(shards.sum())))
        for start in range(0, int(steps.max()), span):
            k = int((steps > start).sum())  # those who have not finished are the first
            stop = np.minimum(steps, start + span)[:k]
            from_epoch = (first[:k] + start) // batches[:k]
            to_epoch = -(-(first[:k] + stop) // batches[:k])
            wanted = [
                (member.worker, member.round, epoch)
                for member, one, end in zip(members, from_epoch.tolist(), to_epoch.tolist(), strict=False)
                for epoch in range(one, end)
            ]
            positions, begins = self._feed.draw(wanted)
            epochs = to_epoch - from_epoch
            begin = np.array(begins)[epochs.cumsum() - epochs]  # of each member's first epoch
            apart = shards[:k] + shards[:k] % 2  # the epochs of a member
            for some in range(start, int(stop.max()), STEPS_AT_A_TIME):
                step = np.arange(some, min(some + STEPS_AT_A_TIME, int(stop.max())))[:, None]
                epoch, batch = np.divmod(first[:k] + step, batches[:k])
                before = batch * schedule.batch_size
                sizes = np.minimum(schedule.batch_size, samples[:k] - before) * (step < steps[:k])
                yield from self._gathered(some, positions, begin + (epoch - from_epoch) * apart + before, sizes)

    def dropout_factors(self, dropouts: Sequence[Dropout]) -> FactorsAhead:
        """What these dropouts of the members multiply by, step by step."""
        task, members = self._task, self.members if dropouts else []
        keys = [layer_key(task.seed, member.round, member.worker) for member in members]
        first_steps = [member.step or 0 for member in members]
        on_device = torch.tensor([keys, first_steps], device=task.device)
        steps = max(map(self._feed.steps_of, members), default=0)
        return FactorsAhead(
            on_device[0], steps, task.schedule.batch_size, dropouts, task.dtype, first_step=on_device[1]
        )

    def alter(self, lot: Lot, inputs: Tensor, targets: Tensor) -> None:
        """Alter the batches of a lot in place, as the experiment has it: inputs [m, batch, ...], targets [m, batch]."""
        for place, member in enumerate(lot.members):
            if alter := self._laps[member].alter:
                step, size = (self.members[member].step or 0) + lot.step, int(lot.sizes[place])
                inputs[place, :size], targets[place, :size] = alter(inputs[place, :size], targets[place, :size], step)

    def count(self, lot: Lot, losses: Tensor | None = None) -> None:
        """Add up mean losses [m] of a lot, without waiting for the device; None where others do that."""
        if losses is not None:
            sums = self._loss_sum[lot.places]
            sums.addcmul_(losses, lot.counts)
            if isinstance(lot.places, list):  # `sums` is a copy
                self._loss_sum[lot.places] = sums
        self._samples[lot.places] += lot.sizes

    def add_losses(self, sums: Tensor) -> None:
        """Add sums of losses, for each member over the samples of several lots."""
        self._loss_sum += sums

    def mean_losses(self) -> Tensor:
        """Of each member, per sample, on the host."""
        return self._loss_sum.cpu().double() / torch.from_numpy(self._samples)

    def _gathered(self, start: int, positions: Tensor, begins: np.ndarray, sizes: np.ndarray) -> Iterator[Lot]:
        """The lots of some steps from number `start` on, whose batches are parts of `positions`.

        Args:
            positions: of samples in the data set, int64 [n], on the device.
            begins, sizes: of each batch, int64 [steps, m]; the size is 0 where a member has finished.
        """
        device = self._task.device
        table = torch.from_numpy(np.stack([begins * (sizes > 0), sizes])).to(device)
        place = torch.arange(self._task.schedule.batch_size, device=device)
        inside = place < table[1].unsqueeze(2)
        gathered = positions[table[0].unsqueeze(2) + place * inside]
        weights = inside.to(self._task.dtype) / table[1].clamp(min=1).unsqueeze(2)
        counts = table[1].to(self._loss_sum.dtype)
        for step, active in enumerate((sizes > 0).sum(1).tolist()):
            yield Lot(
                start + step,
                range(active),
                sizes[step, :active],
                counts[step, :active],
                gathered[step, :active],
                weights[step, :active],
            )
