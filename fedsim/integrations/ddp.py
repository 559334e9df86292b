"""Robust aggregation of gradients in PyTorch's DistributedDataParallel, and in a training loop of one process.

    model = DistributedDataParallel(module)
    model.register_comm_hook(RobustState("krum", f=1), robust_hook)

Each rank is a worker. In each step every rank receives the gradients of all P ranks, and aggregates them by the rule in
place of their mean: it receives (P - 1) d numbers, holds P d, for a moment 2 P d, and computes the rule itself.

DistributedDataParallel cuts gradients into buckets. Rules such as krum compare whole gradients; applied to each bucket
they would give another result, which depends on the size of buckets. So the hook begins to send each bucket at once,
and with the last one aggregates the whole gradients. The size of buckets changes no result.
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
from fedsim.integrations.rounds import RuleOverRounds

# PyTorch compares the annotations of a hook with its own classes, so they must not be strings: without `annotations`.
GradientFuture = torch.futures.Future[Tensor]


class BucketPart:
    """One bucket, which is being sent to all ranks.

    Attributes:
        parameters: whose gradients it has.
        result: the future of its aggregate.
    """

    def __init__(self, bucket: dist.GradBucket, process_group: dist.ProcessGroup | None) -> None:
        row = bucket.buffer()
        self.parameters, self.dtype = bucket.parameters(), row.dtype
        self.result = GradientFuture(devices=[] if row.device.type == "cpu" else [row.device])
        self._rows = row.new_empty(dist.get_world_size(process_group), len(row))
        self._work = dist.all_gather(list(self._rows), row, group=process_group, async_op=True)

    def received(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter, and its gradients of all ranks [P, columns]. Waits for them."""
        self._work.wait()
        return zip(self.parameters, self._rows.split([each.numel() for each in self.parameters], dim=1), strict=True)


class RobustState:
    """The state of `robust_hook`: a rule, and what it keeps from step to step.

    Use one object for one model. It is not part of the model's checkpoint.

    Args:
        rule: as of `fedsim.aggregate`: a name, a function, or a list of pre-aggregators that ends with a rule. Rules
            that need `root` or `losses` cannot be used.
        process_group: the ranks of the model; None: all.
        seed: of random draws; the same on all ranks.
        nonfinite: "error", "exclude" or "keep" gradients that hold NaN or infinity.
        params: parameters of the rule, such as f.

    Raises ExperimentError (a ValueError) for an unknown rule or a wrong parameter.

    >>> from fedsim.integrations.ddp import RobustState, robust_hook
    >>> state = RobustState(["nnm", "trimmed_mean"], f=1)  # then model.register_comm_hook(state, robust_hook)
    """

    def __init__(
        self,
        rule: Stage | Sequence[Stage],
        *,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
        nonfinite: Nonfinite = "error",
        **params: Any,
    ) -> None:
        self.process_group = process_group
        self.rule = RuleOverRounds(rule, params, seed=seed, nonfinite=nonfinite, sync="gradients")
        self._step = 0
        # Of the current step, or of the last one. gloo's thread needs Python's lock to free what it has sent, unless it
        # is kept here, and PyTorch may wait for that thread with the lock, as the program ends.
        self._parts: list[BucketPart] = []
        self._order: dict[Tensor, int] = {}  # of parameters in the first step; later buckets have another order

    def add(self, bucket: dist.GradBucket) -> GradientFuture:
        """Begin to send a bucket; with the last one, aggregate. Returns the future of the bucket's aggregate."""
        if bucket.index() == 0:
            self._parts = []
        part = BucketPart(bucket, self.process_group)
        self._parts.append(part)
        if bucket.is_last():
            self._step += 1
            self._aggregate()
        return part.result

    def _aggregate(self) -> None:
        """Aggregate the gradients of all ranks, and complete the futures of all buckets."""
        columns = {parameter: rows for part in self._parts for parameter, rows in part.received()}
        for parameter in columns:
            self._order.setdefault(parameter, len(self._order))
        ordered = sorted(columns, key=self._order.__getitem__)
        update = self.rule(torch.cat([columns[parameter] for parameter in ordered], dim=1), round=self._step)
        pieces = dict(zip(ordered, update.split([each.numel() for each in ordered]), strict=True))
        for part in self._parts:
            part.result.set_result(torch.cat([pieces[parameter] for parameter in part.parameters]).to(part.dtype))


def robust_hook(state: RobustState, bucket: dist.GradBucket) -> GradientFuture:
    """Return the communication hook: `model.register_comm_hook(RobustState("krum", f=1), robust_hook)`.

    Args:
        state: the rule. All ranks have the same rule and seed.
        bucket: gradients of this rank.

    Returns a future of the aggregate. Raises ExperimentError, on all ranks, if the rule does not accept the gradients.
    """
    if bucket.buffer().is_sparse:
        raise ExperimentError("robust_hook: gradients are sparse; create the embedding with sparse=False")
    return state.add(bucket)


def set_gradients(
    parameters: Iterable[nn.Parameter],
    gradients: Sequence[Sequence[Tensor | None]],
    weights: Tensor | Sequence[float] | None = None,
    rule: Stage | Sequence[Stage] = "mean",
    **options: Any,
) -> None:
    """Set `.grad` of the parameters to the aggregate of the gradients of several workers, in one process.

    Args:
        parameters: of the model.
        gradients: of each worker, one for each parameter, as `torch.autograd.grad` returns; None is zero.
        weights, rule, options: as of `fedsim.aggregate`.

    Raises ExperimentError (a ValueError) as `fedsim.aggregate`, or if a worker has another number of gradients.

    >>> from fedsim.integrations.ddp import set_gradients
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> gradients = [torch.autograd.grad((weight * x).sum(), [weight]) for x in (1.0, 2.0, 90.0)]
    >>> set_gradients([weight], gradients, rule="median")
    >>> weight.grad
    tensor([2., 2.])
    """
    parameters, updates = list(parameters), []
    for worker, worker_gradients in enumerate(gradients):
        if len(worker_gradients) != len(parameters):
            raise ExperimentError(
                f"gradients[{worker}]: {len(parameters)} parameters need as many gradients, not {len(worker_gradients)}"
            )
        pairs = zip(parameters, worker_gradients, strict=True)
        updates.append([torch.zeros_like(like) if gradient is None else gradient for like, gradient in pairs])
    _, form = as_rows([parameters], "parameters")
    rows, _ = as_rows(updates, "gradients", form)
    for parameter, gradient in zip(parameters, form.rebuild(aggregate(rows, weights, rule, **options)), strict=True):
        parameter.grad = gradient
