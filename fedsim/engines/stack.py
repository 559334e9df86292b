"""Members of a cohort that are trained together as a stack of rows: their batches, step by step, and what they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedsim.engines.feed import Feed, Member
from fedsim.engines.job import Task
from fedsim.engines.stacked_module import StackedModule
from fedsim.local import Solver, State
from fedsim.randomness import Stream
from fedsim.system.devices import wide_dtype

STEPS_AT_A_TIME = 256  # for so many steps the positions of samples go to the device at once


class Lot(NamedTuple):
    """Batches of one step, for some members of a stack.

    Attributes:
        members: their places in the stack, [m]: a range, or a list where they do not stand side by side.
        sizes: how many samples each has, [m], on the host; `counts` are the same on the device, in a wide type.
        positions: of the samples in the data set, int64 [m, batch]; the batch's first again beyond the size, since even
            what has weight 0 shows where it is not finite.
        weights: of the samples in the loss, [m, batch]: one over the size, and 0 beyond it.
    """

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
        slots: the places of their rows, int64 [k].
        evenly: the same as a slice, which selects a view, where the slots ascend in steps of one size; else None.
    """

    def __init__(self, members: Sequence[Member], task: Task, feed: Feed) -> None:
        self.members = sorted(members, key=lambda member: -feed.steps_of(member))
        self._task, self._feed = task, feed
        self.slots = torch.tensor([member.slot for member in self.members])
        self.evenly = _evenly_spaced([member.slot for member in self.members])
        self._laps = [feed.lap(member) for member in self.members]
        self.alterations = [lap.alter for lap in self._laps]
        self._loss_sum = torch.zeros(len(members), dtype=wide_dtype(task.device), device=task.device)
        self._samples = np.zeros(len(members), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.members)

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
            yield from self._on_device(positions, sizes)

    def streams(self, *step: int) -> list[Stream]:
        """For each member the stream from which its layers draw."""
        task, streams = self._task, []
        for member in self.members:
            round, *moment = member.moment
            streams.append(Stream(task.device, task.seed, "layers", round, member.worker, *moment, *step))
        return streams

    def count(self, lot: Lot, losses: Tensor | None = None) -> None:
        """Add up mean losses [m] of a lot, without waiting for the device; None where others do that."""
        if losses is not None:
            self._loss_sum[lot.places] += losses * lot.counts
        self._samples[lot.places] += lot.sizes

    def add_losses(self, sums: Tensor) -> None:
        """Add sums of losses, for each member over the samples of several lots."""
        self._loss_sum += sums

    def mean_losses(self) -> Tensor:
        """Of each member, per sample, on the host."""
        return self._loss_sum.cpu().double() / torch.from_numpy(self._samples)

    def _on_device(self, positions: np.ndarray, sizes: np.ndarray) -> Iterator[Lot]:
        device = self._task.device
        on_device, counts = (torch.from_numpy(array).to(device) for array in (positions, sizes))
        inside = torch.arange(positions.shape[2], device=device) < counts.unsqueeze(2)
        weights = inside.to(self._task.dtype) / counts.clamp(min=1).unsqueeze(2)
        counts = counts.to(self._loss_sum.dtype)
        for step, active in enumerate((sizes > 0).sum(1).tolist()):
            yield Lot(
                range(active),
                sizes[step, :active],
                counts[step, :active],
                on_device[step, :active],
                weights[step, :active],
            )


def _evenly_spaced(numbers: list[int]) -> slice | None:
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    even = step > 0 and all(b - a == step for a, b in pairwise(numbers))
    return slice(numbers[0], numbers[-1] + 1, step) if even else None


def starting_states(solver: Solver, rows: Tensor, module: StackedModule) -> list[State]:
    """What a solver keeps of rows [k, d] at their start, as stacks [k, ...] for each parameter."""
    views = {name: module.views(tensor) for name, tensor in solver.start(rows).items()}
    return [{name: of_all[place] for name, of_all in views.items()} for place in range(len(module.layout.parameters))]


@dataclass
class Holdings:
    """What the members of a stack hold, [k, ...] each: parameters, the solver's state for each of them, buffers."""

    parameters: list[Tensor]
    states: list[State]
    buffers: list[Tensor]

    def of(self, lot: Lot) -> Holdings:
        """The holdings of a lot's members: views, or copies where they do not stand side by side."""
        places = lot.places
        return Holdings(
            [tensor[places] for tensor in self.parameters],
            [{name: tensor[places] for name, tensor in state.items()} for state in self.states],
            [tensor[places] for tensor in self.buffers],
        )

    def take_back(self, lot: Lot, theirs: Holdings) -> None:
        """What has become of the holdings of a lot's members."""
        places = lot.places
        for ours, new in zip(self.buffers, theirs.buffers, strict=True):
            ours[places] = new
        for parameter, new, state, new_state in zip(
            self.parameters, theirs.parameters, self.states, theirs.states, strict=True
        ):
            if isinstance(places, list):
                parameter[places] = new
            for name, tensor in new_state.items():
                if name not in state:  # a solver that had nothing to keep before its first step
                    state[name] = torch.zeros_like(parameter)
                if isinstance(places, list) or tensor.data_ptr() != state[name][places].data_ptr():
                    state[name][places] = tensor
