"""Synchronous SGD with a weighted mean on several ranks, like PyTorch's DistributedDataParallel.

All workers of a rank share two flat vectors [d]. Their modules' parameters are views of the global parameters, and
their gradients accumulate in one gradient vector, which the ranks average. Each worker's loss is multiplied by the
worker's share in the mean. During the backward pass of the last worker, each bucket of gradients is sent as soon as all
its gradients are computed. Per-worker gradients are not stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fedsim.aggregation import AggregationInputs
from fedsim.core.randomness import draw_key
from fedsim.core.rows import Layout
from fedsim.errors import DivergedError
from fedsim.processes.hooks import Bucket, Mean
from fedsim.processes.process_group import RankGroup
from fedsim.system.devices import synchronize
from fedsim.training.batches import WorkItem
from fedsim.training.row_module import RowModule
from fedsim.training.sequential import RowTrainer
from fedsim.training.weights import AggregationContext, linear_shares, screen

BUCKET = 25 * 2**20  # bytes; default of DistributedDataParallel


class BucketSender:
    """Averages gradients over the ranks during the backward pass, one group of parameters (bucket) at a time.

    A bucket is sent as soon as all its gradients are computed.

    Args:
        row: flat gradient vector [d].
        layout: positions of the parameters in `row`.
        send: function that starts to average a bucket; see `CommunicationHook.start`.
        most: maximum number of gradient values in a bucket.
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
        self._missing: list[set[str]] | None = None  # per bucket, parameters without a gradient; None: sending is off
        self._sent: list[Mean] = []

    def watch(self, module: nn.Module) -> nn.Module:
        """Register gradient hooks on the module that send each bucket once it is complete. Return the module."""
        for name, parameter in module.named_parameters():
            if name in self._bucket_of:
                parameter.register_post_accumulate_grad_hook(partial(self._complete, name))
        return module

    def begin(self) -> None:
        """Start sending buckets. Call this method before the last backward pass of a step."""
        self._missing, self._sent = [set(names) for names in self._names], []

    def finish(self) -> list[Mean]:
        """End a step: send the remaining buckets, and return a future (`Mean`) for each bucket."""
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
            raise RuntimeError(
                f"the gradient of {name} changed after it had been sent to the other ranks; change the model so that "
                "a backward pass computes this gradient only once"
            )
        self._missing[number].discard(name)
        self._send_complete(next((bucket for bucket, names in enumerate(self._missing) if names), len(self._buckets)))

    def _send_complete(self, count: int) -> None:
        while len(self._sent) < count:
            self._sent.append(self._send(self._buckets[len(self._sent)]))


class ParallelTrainer(RowTrainer):
    """Trainer that trains a rank's workers one after another, and averages gradients during the backward pass."""

    averages = True

    def __init__(self, *arguments: Any, ranks: RankGroup) -> None:
        super().__init__(*arguments)
        task, layout, self._ranks = self._task, self._modules[0].layout, ranks
        assert task.experiment.gradient_hook is not None
        # If the backend cannot sum the gradients on this device, they are sent from the host after the backward pass.
        self._wire = self._gradient if ranks.sums_where_rows_lie else self._gradient.cpu()
        self.hook = task.experiment.gradient_hook.start(ranks.group, draw_key(task.experiment.seed, "hook") % 2**32)
        # A hook with state sends several messages per bucket. Gloo would mix up the messages of two buckets.
        most = layout.d if task.experiment.gradient_hook.keeps else BUCKET // self._wire.element_size()
        self._sender = BucketSender(self._wire, layout, self.hook, most)
        self._modules = [self._new_row_module()]
        self._shares = lru_cache(1)(partial(linear_shares, task))  # the shares rarely change between steps

    def step_along_mean(self, step: int, context: AggregationContext) -> list[float]:
        """Average the gradients of all workers, and update the global parameters with the mean.

        Returns the coefficient of each worker's gradient. Raises DivergedError if the mean contains NaN or infinity.

        Args:
            step: number of the step in the round, from 0.
            context: workers that take part in the step, of all ranks.
        """
        task, shares = self._task, self._shares(context.weights, len(context.workers))
        assert shares is not None
        with task.precision.training(task.device):
            mean = self._mean_gradient(step, dict(zip(context.workers, shares.tolist(), strict=True)))
            if task.experiment.nonfinite != "keep" and not math.isfinite(mean.sum()):
                self._refuse(step, context)
        task.algorithm_at(*context.moment).step(self._shared.server.row, mean, self._shared.server.states["gradients"])
        synchronize(task.device)
        return shares.tolist()

    def _mean_gradient(self, step: int, shares: Mapping[int, float]) -> Tensor:
        """Return the weighted mean gradient [d] of all workers of all ranks. It is the same in all ranks.

        The next call overwrites the returned tensor.

        Args:
            step: number of the step in the round, from 0.
            shares: weight of each worker that still has data, by worker ID.
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
        self._wire.copy_(self._gradient)  # does nothing if both are the same tensor
        self._ranks.wait_for(self._sender.finish)
        return self._gradient.copy_(self._wire)

    def _refuse(self, step: int, context: AggregationContext) -> NoReturn:
        """Raise DivergedError for a mean gradient with NaN or infinity, naming the workers that caused it."""
        bad = torch.zeros(len(context.workers))
        for participant in self._active:
            self._gradient.zero_()
            self._loss_of(participant, step).backward()
            bad[context.workers.index(participant.member.worker)] = not self._gradient.isfinite().all()
        positions = self._ranks.all_reduce(bad).nonzero().flatten().tolist()
        inputs = AggregationInputs(bad[:, None], context.weights, workers=context.workers)
        screen(self._task, context.moment[0], inputs, positions)
        assert self._task.experiment.gradient_hook is not None
        hook = f'distributed.hook = "{self._task.experiment.gradient_hook.name}"'
        message = f"{hook}: the mean gradient contains NaN or infinity, although the workers' gradients do not"
        raise DivergedError(message, "", context.moment[0])

    def _gradient_of(self, member: WorkItem) -> Tensor:
        return self._gradient  # the same tensor for all workers

    def _new_row_module(self) -> RowModule:
        return RowModule(lambda: self._sender.watch(self._dropout.new_module()))
