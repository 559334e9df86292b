"""Robust gradient aggregation in PyTorch's DistributedDataParallel, and in training loops with one process.

    model = DistributedDataParallel(module)
    model.register_comm_hook(RobustState("krum", f=1), robust_hook)

Each rank is a worker. In each step, every rank receives the gradients of all P ranks and aggregates them with the rule
instead of the mean. For d parameters, a rank receives (P - 1) d numbers, and stores P d numbers (temporarily 2 P d).

DistributedDataParallel splits gradients into buckets. Rules such as krum compare whole gradients. Applied to each
bucket separately, they would give a different result, which depends on the bucket size. So the hook starts sending each
bucket as soon as it is ready, and aggregates the whole gradients after the last bucket.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fedsim.aggregation import aggregate
from fedsim.aggregation.containers import as_rows
from fedsim.aggregation.inputs import Nonfinite
from fedsim.aggregation.resolve import Stage
from fedsim.errors import ExperimentError
from fedsim.hints.attributes import takes_component
from fedsim.integrations.rounds import RuleOverRounds

# This file does not import `annotations` from __future__, because PyTorch compares the hook's annotations with classes.
GradientFuture = torch.futures.Future[Tensor]


class BucketPart:
    """A bucket (part of the gradients in DistributedDataParallel) that is being sent to all ranks.

    Attributes:
        parameters: the parameters whose gradients are in the bucket.
        dtype: dtype of the gradients.
        result: future for the aggregated gradients.
    """

    def __init__(self, bucket: dist.GradBucket, process_group: dist.ProcessGroup | None) -> None:
        row = bucket.buffer()
        self.parameters, self.dtype = bucket.parameters(), row.dtype
        self.result = GradientFuture(devices=[] if row.device.type == "cpu" else [row.device])
        self._rows = row.new_empty(dist.get_world_size(process_group), len(row))
        self._work = dist.all_gather(list(self._rows), row, group=process_group, async_op=True)

    def received(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Wait for all ranks, and yield each parameter with its gradients from all ranks, [ranks, elements]."""
        self._work.wait()
        return zip(self.parameters, self._rows.split([p.numel() for p in self.parameters], dim=1), strict=True)


class RobustState:
    """State of `robust_hook`: an aggregation rule, and the tensors that the rule keeps from step to step.

    Create a separate RobustState for each model. It is not saved in the model's checkpoint.

    Args:
        name: aggregation rule, as in `fedsim.aggregate`: a name, a function, or a list of pre-aggregators that ends
            with a rule. Rules that need `root` or `losses` are not supported.
        process_group: process group of the model; None: all ranks.
        seed: seed for the rule's random draws; must be equal on all ranks.
        nonfinite: what to do with gradients that contain NaN or infinity: "error", "exclude" or "keep",
            as in `fedsim.aggregate`.
        params: parameters of the rule, such as f.

    Raises ExperimentError (a ValueError) for an unknown rule or an invalid parameter.

    >>> from fedsim.integrations.ddp import RobustState, robust_hook
    >>> state = RobustState(["nnm", "trimmed_mean"], f=1)  # then model.register_comm_hook(state, robust_hook)
    """

    @takes_component("aggregate", "rule")
    def __init__(
        self,
        name: Stage | Sequence[Stage],
        *,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
        nonfinite: Nonfinite = "error",
        **params: Any,
    ) -> None:
        self.process_group = process_group
        self.rule = RuleOverRounds(name, params, seed=seed, nonfinite=nonfinite, sync="gradients")
        self._step = 0
        # Buckets of the current or last step. They are kept until the next step to avoid a deadlock at exit: gloo's
        # thread needs the GIL to free sent tensors, and PyTorch may hold the GIL while it waits for that thread.
        self._parts: list[BucketPart] = []
        self._order: dict[Tensor, int] = {}  # order of the parameters in the first step; DDP changes it later

    def add(self, bucket: dist.GradBucket) -> GradientFuture:
        """Start sending a bucket of gradients to all ranks, and return a future for its aggregated gradients."""
        if bucket.index() == 0:
            self._parts = []
        part = BucketPart(bucket, self.process_group)
        self._parts.append(part)
        if bucket.is_last():
            self._step += 1
            self._aggregate()
        return part.result

    def _aggregate(self) -> None:
        """Aggregate the gradients of all ranks, and deliver the results to the waiting futures."""
        columns = {parameter: rows for part in self._parts for parameter, rows in part.received()}
        for parameter in columns:
            self._order.setdefault(parameter, len(self._order))
        ordered = sorted(columns, key=self._order.__getitem__)
        update = self.rule(torch.cat([columns[parameter] for parameter in ordered], dim=1), round=self._step)
        pieces = dict(zip(ordered, update.split([parameter.numel() for parameter in ordered]), strict=True))
        for part in self._parts:
            part.result.set_result(torch.cat([pieces[parameter] for parameter in part.parameters]).to(part.dtype))


def robust_hook(state: RobustState, bucket: dist.GradBucket) -> GradientFuture:
    """Aggregate the gradients of all ranks with a robust rule instead of averaging them (a DDP communication hook).

    Register the hook with `model.register_comm_hook(RobustState("krum", f=1), robust_hook)`.

    Args:
        state: the rule and its state. Rule and seed must be equal on all ranks.
        bucket: gradients of this rank.

    Returns a future for the bucket's aggregated gradients. Raises ExperimentError, on all ranks, if the rule does not
    accept the gradients.
    """
    if bucket.buffer().is_sparse:
        raise ExperimentError("robust_hook: does not support sparse gradients; create embeddings with sparse=False")
    return state.add(bucket)


def set_gradients(
    parameters: Iterable[nn.Parameter],
    gradients: Sequence[Sequence[Tensor | None]],
    name: Stage | Sequence[Stage] = "mean",
    **options: Any,
) -> None:
    """Aggregate the gradients of several workers in one process, and store the result in the parameters' `.grad`.

    Args:
        parameters: parameters of the model.
        gradients: for each worker, one gradient per parameter, as returned by `torch.autograd.grad`; None means zero.
        name: aggregation rule, as in `fedsim.aggregate`: a name, a function, or a list of pre-aggregators that ends
            with a rule.
        options: parameters of the rule and other options of `fedsim.aggregate`, such as `weights`.

    Raises ExperimentError (a ValueError) like `fedsim.aggregate`, or if a worker's number of gradients is not the
    number of parameters.

    >>> from fedsim.integrations.ddp import set_gradients
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> gradients = [torch.autograd.grad((weight * x).sum(), [weight]) for x in (1.0, 2.0, 90.0)]
    >>> set_gradients([weight], gradients, "median")
    >>> weight.grad
    tensor([2., 2.])
    """
    parameters, updates = list(parameters), []
    for worker, worker_gradients in enumerate(gradients):
        if len(worker_gradients) != len(parameters):
            raise ExperimentError(
                f"gradients[{worker}]: contains {len(worker_gradients)} gradients for {len(parameters)} parameters; "
                "must contain one gradient (or None) for each parameter"
            )
        pairs = zip(parameters, worker_gradients, strict=True)
        updates.append([torch.zeros_like(like) if gradient is None else gradient for like, gradient in pairs])
    _, form = as_rows([parameters], "parameters")
    rows, _ = as_rows(updates, "gradients", form)
    for parameter, gradient in zip(parameters, form.rebuild(aggregate(rows, name, **options)), strict=True):
        parameter.grad = gradient
