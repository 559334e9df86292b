"""Synchronous SGD on ranks with a mean: the gradients of all workers add up in one row, which the ranks average.

The modules of a rank's workers are bound to the same rows: their parameters are views of the global row, and their
gradients views of one gradient row. Each worker's loss is multiplied by its share in the mean. During the backward pass
of the last worker, each bucket of gradients is sent as soon as it is complete, as PyTorch's DistributedDataParallel
does. There are no rows of single workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fedsim.aggregation import AggregationInputs
from fedsim.core.randomness import draw_key
from fedsim.core.rows import Layout
from fedsim.engines.aggregator import linear_shares, screen
from fedsim.engines.distributed.hooks import Bucket, Mean
from fedsim.engines.distributed.process_group import RankGroup
from fedsim.engines.round_stats import AggregationContext, AggregationStats
from fedsim.engines.trainers.batches import WorkItem
from fedsim.engines.trainers.row_module import RowModule
from fedsim.engines.trainers.sequential import RowTrainer, SyncParticipant
from fedsim.errors import DivergedError
from fedsim.system.devices import synchronize

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
    """Trains rows one after another; where gradients are aggregated, `step_along_mean` does it without rows."""

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
        self._shares = lru_cache(1)(partial(linear_shares, task))  # mostly those of the step before

    def begin_gradient_round(self, members: Sequence[WorkItem]) -> list[SyncParticipant]:
        shared = self._shared
        self._batch_source.announce(members)
        while len(self._modules) < len(members):
            self._modules.append(self._new_row_module())
        self._participants = []
        for member, module in zip(members, self._modules, strict=False):
            module.load(shared.server.row, self._gradient, shared.cohort.buffers[member.slot])
            self._participants.append(self._participant(member, module))
        return self._participants

    def step_along_mean(self, step: int, context: AggregationContext) -> AggregationStats:
        """Move the global row by the client algorithm's step along the mean of all ranks' gradients, alike in all
        ranks.

        Raises DivergedError in all ranks if the mean is not finite.
        """
        task, shares = self._task, self._shares(context.weights, len(context.workers))
        assert shares is not None
        with task.precision.training(task.device):
            mean = self._mean_gradient(step, dict(zip(context.workers, shares.tolist(), strict=True)))
            if task.experiment.nonfinite != "keep" and not math.isfinite(mean.sum()):
                self._refuse(step, context)
        task.algorithm_at(*context.moment).step(self._shared.server.row, mean, self._shared.server.states["gradients"])
        synchronize(task.device)
        return AggregationStats(shares.tolist())

    def _mean_gradient(self, step: int, shares: Mapping[int, float]) -> Tensor:
        """Return the mean of all ranks' gradients of the next batches [d], the same in all ranks.

        The next call overwrites it.

        Args:
            shares: share in the mean of each worker that still has data.
        """
        self._gradient.zero_()
        self._active = [participant for participant in self._participants if participant.member.worker in shares]
        with_share = [participant for participant in self._active if shares[participant.member.worker]]
        for participant in self._active:
            share = shares[participant.member.worker]
            with self._process.working_on(participant.member.worker, participant.member.round):
                participant.batch = next(participant.batches)
                with torch.set_grad_enabled(share != 0):  # a share of 0 still updates the buffers
                    loss = self._loss_of(participant, step)
                participant.count(loss.detach())
                if with_share and participant is with_share[-1] and self._wire is self._gradient:
                    self._sender.begin()
                if share:
                    (loss * (share * self._ranks.count)).backward()
        self._wire.copy_(self._gradient)  # does nothing if they are one
        self._ranks.wait_for(self._sender.finish)
        return self._gradient.copy_(self._wire)

    def _refuse(self, step: int, context: AggregationContext) -> NoReturn:
        """Raise DivergedError, which names the workers whose gradients of this step, computed again, are not finite."""
        bad = torch.zeros(len(context.workers))
        for participant in self._active:
            self._gradient.zero_()
            self._loss_of(participant, step).backward()
            bad[context.workers.index(participant.member.worker)] = not self._gradient.isfinite().all()
        positions = self._ranks.all_reduce(bad).nonzero().flatten().tolist()
        inputs = AggregationInputs(bad[:, None], context.weights, workers=context.workers)
        screen(self._task, context, inputs, positions)
        assert self._task.experiment.gradient_hook is not None
        hook = f'distributed.hook = "{self._task.experiment.gradient_hook.name}"'
        message = f"the mean of the gradients is not finite, though each of them is ({hook})"
        raise DivergedError(message, "", context.moment[0])

    def _new_row_module(self) -> RowModule:
        return RowModule(lambda: self._sender.watch(self._dropout.new_module()))
