"""Synchronous SGD on ranks with a mean: the gradients of all workers add up in one row, which the ranks average.

The modules of a rank's workers are bound to the same rows: their parameters are views of the global row, and their
gradients views of one gradient row. Each worker's loss is multiplied by its share in the mean. During the backward pass
of the last worker, each bucket of gradients is sent as soon as it is complete, as PyTorch's DistributedDataParallel
does. There are no rows of single workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.core.randomness import draw_key
from fedsim.core.rows import Layout
from fedsim.engines.distributed.hooks import Bucket, Mean
from fedsim.engines.distributed.process_group import RankGroup
from fedsim.engines.trainers.batches import WorkItem
from fedsim.engines.trainers.row_module import RowModule
from fedsim.engines.trainers.sequential import RowTrainer

BUCKET = 25 * 2**20  # bytes; that of DistributedDataParallel


class BucketSender:
    """Begins to send each bucket of a gradient row when its parameters' gradients are complete, in the same order.

    Args:
        row: the gradient row [d].
        send: the hook of the run.
        most: numbers in a bucket.
    """

    def __init__(self, row: Tensor, layout: Layout, send: Callable[[Bucket], Mean], most: int) -> None:
        self._send, self._buckets, self._names = send, list[Bucket](), list[list[str]]()
        # A backward pass completes the last parameters first.
        for _, group in groupby(reversed(layout.parameters), lambda entry: (layout.d - entry.span.stop) // most):
            entries = [*group][::-1]
            columns = row[entries[0].offset : entries[-1].span.stop]
            is_last = entries[0] is layout.parameters[0]
            self._buckets.append(Bucket(len(self._buckets), is_last, columns, [entry.shape for entry in entries]))
            self._names.append([entry.name for entry in entries])
        self._bucket_of = {name: number for number, names in enumerate(self._names) for name in names}
        self._missing: list[set[str]] | None = None  # parameters without a gradient, by bucket; None: nothing is sent
        self._sent: list[Mean] = []

    def watch(self, module: nn.Module) -> nn.Module:
        """Count the gradients of a module from now on; returns the module."""
        for name, parameter in module.named_parameters():
            if name in self._bucket_of:
                parameter.register_post_accumulate_grad_hook(partial(self._complete, name))
        return module

    def begin(self) -> None:
        """Send what the next backward pass completes."""
        self._missing, self._sent = [set(names) for names in self._names], []

    def finish(self) -> list[Mean]:
        """Send all that has not been sent; returns what to wait for."""
        if self._missing is None:
            self.begin()
        self._send_complete(len(self._buckets))
        self._missing = None
        return self._sent

    def _complete(self, name: str, parameter: Tensor) -> None:
        if self._missing is None:
            return
        number = self._bucket_of[name]
        if number < len(self._sent):
            raise RuntimeError(f"{name} gets a gradient twice in a backward pass, after the first has been sent")
        self._missing[number].discard(name)
        self._send_complete(next((place for place, names in enumerate(self._missing) if names), len(self._buckets)))

    def _send_complete(self, count: int) -> None:
        while len(self._sent) < count:
            self._sent.append(self._send(self._buckets[len(self._sent)]))


class ParallelTrainer(RowTrainer):
    """Trains rows one after another, and averages gradients by `mean_gradient`."""

    def __init__(self, *arguments: Any, ranks: RankGroup) -> None:
        super().__init__(*arguments)
        task, layout, self._ranks = self._task, self._modules[0].layout, ranks
        assert task.experiment.gradient_hook is not None
        # A row that the backend cannot sum is copied to the host, and sent after the backward pass.
        self._wire = self._gradient if ranks.sums_where_rows_lie else self._gradient.cpu()
        self.hook = task.experiment.gradient_hook.start(ranks.group, draw_key(task.experiment.seed, "hook") % 2**32)
        # Gloo would mix up the parts of two buckets of a hook that sends them one after another.
        most = layout.d if task.experiment.gradient_hook.keeps else BUCKET // self._wire.element_size()
        self._sender = BucketSender(self._wire, layout, self.hook, most)
        self._modules = [self._new_row_module()]

    def begin_gradient_round(self, members: Sequence[WorkItem]) -> None:
        shared = self._shared
        self._batch_source.announce(members)
        while len(self._modules) < len(members):
            self._modules.append(self._new_row_module())
        self._participants = []
        for member, module in zip(members, self._modules, strict=False):
            module.load(shared.server.row, self._gradient, shared.cohort.buffers[member.slot])
            self._participants.append(self._participant(member, module))

    def mean_gradient(self, step: int, shares: Mapping[int, float]) -> Tensor:
        """The mean of all ranks' gradients of the next batches [d], the same in all ranks; the next call overwrites it.

        Args:
            shares: share in the mean of each member of this rank that still has data, by slot; may be empty.
        """
        self._gradient.zero_()
        self._active = [participant for participant in self._participants if participant.member.slot in shares]
        last = max(
            (participant.member.slot for participant in self._active if shares[participant.member.slot]), default=None
        )
        for participant in self._active:
            slot = participant.member.slot
            with self._process.working_on(participant.member.worker, participant.member.round):
                participant.batch = next(participant.batches)
                with torch.set_grad_enabled(shares[slot] != 0):  # a share of 0 still updates the buffers
                    loss = self._loss_of(participant, step)
                participant.count(loss.detach())
                if slot == last and self._wire is self._gradient:
                    self._sender.begin()
                if shares[slot]:
                    (loss * (shares[slot] * self._ranks.count)).backward()
        self._wire.copy_(self._gradient)  # does nothing if they are one
        self._ranks.wait_for(self._sender.finish)
        return self._gradient.copy_(self._wire)

    def not_finite(self, step: int) -> list[int]:
        """The slots of members whose gradients of this step, computed again, are not finite."""
        slots = []
        for participant in self._active:
            self._gradient.zero_()
            self._loss_of(participant, step).backward()
            if not self._gradient.isfinite().all():
                slots.append(participant.member.slot)
        return slots

    def _new_row_module(self) -> RowModule:
        return RowModule(lambda: self._sender.watch(self._dropout.new_module()))
