"""Members of a cohort that are trained together as a stack of rows: their batches, step by step, and what they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsim.engines.dropout import FactorsAhead, layer_key
from fedsim.engines.feed import Feed, Member
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
        batch_size = self._task.schedule.batch_size
        steps = np.array([self._feed.steps_of(member) for member in self.members])
        for start in range(0, int(steps.max()), STEPS_AT_A_TIME):
            ahead = np.clip(steps - start, 0, STEPS_AT_A_TIME)
            positions = np.zeros((ahead.max(), len(self), batch_size), dtype=np.int64)
            sizes = np.zeros((ahead.max(), len(self)), dtype=np.int64)
            for member, count in enumerate(ahead.tolist()):
                for step, batch in enumerate(islice(self._laps[member], count)):
                    positions[step, member, : len(batch)] = batch
                    positions[step, member, len(batch) :] = batch[0]
                    sizes[step, member] = len(batch)
            yield from self._on_device(start, positions, sizes)

    def dropout_factors(self, dropouts: Sequence[Dropout]) -> FactorsAhead:
        """What these dropouts of the members multiply by, step by step."""
        task, members = self._task, self.members
        keys = [layer_key(task.seed, member.round, member.worker) for member in members]
        first_steps = [member.step or 0 for member in members]
        on_device = torch.tensor([keys, first_steps], device=task.device)
        steps = max(map(self._feed.steps_of, members))
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

    def _on_device(self, start: int, positions: np.ndarray, sizes: np.ndarray) -> Iterator[Lot]:
        device = self._task.device
        on_device, counts = (torch.from_numpy(array).to(device) for array in (positions, sizes))
        inside = torch.arange(positions.shape[2], device=device) < counts.unsqueeze(2)
        weights = inside.to(self._task.dtype) / counts.clamp(min=1).unsqueeze(2)
        counts = counts.to(self._loss_sum.dtype)
        for step, active in enumerate((sizes > 0).sum(1).tolist()):
            yield Lot(
                start + step,
                range(active),
                sizes[step, :active],
                counts[step, :active],
                on_device[step, :active],
                weights[step, :active],
            )
