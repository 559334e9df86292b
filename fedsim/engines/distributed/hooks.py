"""Communication hooks: how ranks send the gradients that DistributedDataParallel averages.

A hook is a function that begins the exchange of one bucket of gradients, a flat tensor `bucket.buffer()`, and gives a
Future of their mean over the ranks, of the same shape. This is PyTorch's signature, so the import path of any DDP
communication hook works. Its positional parameters receive, by name,

    process_group  the ranks
    bucket         torch.distributed.GradBucket: this rank's share of the average, times the number of ranks
    state          what the hook's method `start(process_group, seed)` has given at the start of the run, for hooks that
                   keep something; such a hook is a frozen dataclass

and what is keyword-only, or a field, is its configuration.

A resumed run starts the state again, with a warning.

`@hook(name, exact=True)` declares that it returns the exact mean; with other hooks, results depend on the number of
ranks and on the assignment of workers to ranks. `at_once=True` declares that it begins to send all parts of a bucket
before it returns. Otherwise (P, then Q of PowerSGD) gloo, which begins later parts in its own threads, would mix up the
parts of two buckets; so the next bucket waits for the end of the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from fedsim.core.registry import Plug, Registry
from fedsim.errors import ExperimentError


class HookRegistry(Registry):
    """A Registry whose decorator also takes `exact` and `at_once`."""

    def __call__(
        self, name: str, *, exact: bool = False, at_once: bool = False
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        register = super().__call__(name)

        def mark(target: Callable[..., Any]) -> Any:
            for mark in ["exact"] * exact + ["at_once"] * at_once:
                setattr(target, mark, True)  # a user's imported hook can set it too
            return register(target)

        return mark


hook = HookRegistry("communication hook", given=("process_group", "bucket", "state"))

Mean = torch.futures.Future[Tensor]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]


@dataclass(frozen=True)
class BoundHook:
    """A hook with its parameters, which can be pickled to other processes."""

    function: Any
    name: str
    takes: tuple[str, ...]
    exact: bool = False
    at_once: bool = False

    @property
    def keeps(self) -> bool:
        """Whether it has a state."""
        return "state" in self.takes

    def start(self, process_group: dist.ProcessGroup, seed: int) -> Callable[[dist.GradBucket], Mean]:
        """Make the function that begins to send a bucket, for a run."""
        state = self.function.start(process_group, seed) if self.keeps else None

        def send(bucket: dist.GradBucket) -> Mean:
            given = {"process_group": process_group, "state": state, "bucket": bucket}
            return self.function(**{name: given[name] for name in self.takes})

        return send


def bind_hook(plug: Plug, params: dict[str, Any]) -> BoundHook:
    """The hook `plug` with checked `params`."""
    return BoundHook(
        plug.bind(params),
        plug.name,
        tuple(plug.takes),
        exact=getattr(plug.target, "exact", False),
        at_once=getattr(plug.target, "at_once", False),
    )


@hook("allreduce", exact=True, at_once=True)
def allreduce(process_group: dist.ProcessGroup, bucket: dist.GradBucket) -> Mean:
    """The mean, sent in the rows' own type: the same global rows as elsewhere, up to rounding.

    Sent by all ranks together: 2 (P - 1) d s bytes a step, as of one all-reduce.
    """
    return default_hooks.allreduce_hook(process_group, bucket)


@hook("fp16", at_once=True)
def fp16(process_group: dist.ProcessGroup, bucket: dist.GradBucket) -> Mean:
    """The mean, summed and sent as float16: half of the bytes of float32.

    Each rank divides by P before it rounds, so that sums stay in range; what is above 65,504 becomes infinite all the
    same, which ends the run, and what is below 6e-8 vanishes. PyTorch's `fp16_compress_hook`.
    """
    return default_hooks.fp16_compress_hook(process_group, bucket)


@hook("bf16", at_once=True)
def bf16(process_group: dist.ProcessGroup, bucket: dist.GradBucket) -> Mean:
    """The mean, summed and sent as bfloat16: half of the bytes of float32, its range, and 8 bits of precision.

    PyTorch's `bf16_compress_hook`; with NCCL from 2.10 on.
    """
    return default_hooks.bf16_compress_hook(process_group, bucket)


@hook("powersgd")
@dataclass(frozen=True)
class PowerSGD:
    """Every weight matrix as two factors of low rank, by a step of power iteration. Vogels et al. 2019.

    A gradient [o, i] (of a convolution: [o, the rest]) plus the error that was left over is M; P = M Q is summed over
    the ranks and orthogonalised, Q = M^T P is averaged, and the result is P Q^T. It sends r (o + i) numbers in place of
    o i, in two all-reduces one after the other, and biases as they are.

    Names, meanings and defaults are those of PyTorch's `PowerSGDState`: matrix_approximation_rank is r; until step
    start_powerSGD_iter of the run all is sent as it is; a matrix is compressed where that saves a factor of
    min_compression_rate at least; use_error_feedback adds what compression has left out to the next gradient,
    warm_start begins with the last Q, and needs no other; orthogonalization_epsilon keeps a gradient of zeros from
    becoming NaN where r is 1 or 2.

    Each rank keeps, for the whole run and to itself, its left-over error [d] and the factors P and Q: d (1 + 1 / the
    compression) numbers. Constraint: start_powerSGD_iter >= 2 with error feedback or a warm start.
    """

    matrix_approximation_rank: Positive = 1
    start_powerSGD_iter: Count = 1_000  # noqa: N815
    min_compression_rate: NonNegative = 2.0
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: NonNegative = 0.0

    def __post_init__(self) -> None:
        if self.start_powerSGD_iter < 2 and (self.use_error_feedback or self.warm_start):
            raise ExperimentError(
                f"distributed.hook.start_powerSGD_iter = {self.start_powerSGD_iter}: must be 2 at least with "
                "use_error_feedback or warm_start"
            )

    def start(self, process_group: dist.ProcessGroup, seed: int) -> powerSGD_hook.PowerSGDState:
        return powerSGD_hook.PowerSGDState(
            process_group,
            matrix_approximation_rank=self.matrix_approximation_rank,
            start_powerSGD_iter=self.start_powerSGD_iter,
            min_compression_rate=self.min_compression_rate,
            use_error_feedback=self.use_error_feedback,
            warm_start=self.warm_start,
            orthogonalization_epsilon=self.orthogonalization_epsilon,
            random_seed=seed,
        )

    def __call__(self, state: powerSGD_hook.PowerSGDState, bucket: dist.GradBucket) -> Mean:
        return powerSGD_hook.powerSGD_hook(state, bucket)
