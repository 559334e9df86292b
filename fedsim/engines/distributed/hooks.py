"""Communication hooks: how ranks send the gradients that they average.

A hook begins the exchange of one bucket of gradients and returns a Future of their mean over the ranks, which it also
writes to the bucket. The hooks are those of PyTorch's DistributedDataParallel. Their positional parameters receive

    state   what `start(process_group, seed)` of the hook returned at the start of the run; without this method, the
            process group
    bucket  a `Bucket`: this rank's share of the average, times the number of ranks

and the fields of a hook are its configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from fedsim.core.registry import Component, Registry
from fedsim.errors import ExperimentError

Mean = torch.futures.Future[Tensor]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]


class Bucket:
    """Consecutive parameters of a gradient row, with the methods of torch.distributed.GradBucket that hooks call.

    Args:
        columns: of the row [d].
        shapes: of the parameters in these columns.
    """

    def __init__(self, number: int, last: bool, columns: Tensor, shapes: list[torch.Size]) -> None:
        self._number, self._last, self._columns = number, last, columns
        parts = columns.split([shape.numel() for shape in shapes])
        self._gradients = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def index(self) -> int:
        return self._number

    def is_last(self) -> bool:
        return self._last

    def buffer(self) -> Tensor:
        return self._columns

    def gradients(self) -> list[Tensor]:
        return self._gradients


@dataclass(frozen=True)
class CommunicationHook(Component):
    """A hook with its parameters."""

    function: Any

    @property
    def keeps(self) -> bool:
        """Whether it has a state."""
        return hasattr(self.function, "start")

    def start(self, process_group: dist.ProcessGroup, seed: int) -> Callable[[Bucket], Mean]:
        """Make the function that begins to send a bucket, for a run."""
        return partial(self.function, self.function.start(process_group, seed) if self.keeps else process_group)


hook = Registry("communication hook", inputs=("state", "bucket"), component=CommunicationHook)


@hook("allreduce")
def allreduce(state: dist.ProcessGroup, bucket: Any) -> Mean:
    """The mean, sent in the rows' own type: the same global rows as elsewhere, up to rounding.

    Sent by all ranks together: 2 (P - 1) d s bytes a step, as of one all-reduce.
    """
    return default_hooks.allreduce_hook(state, bucket)


@hook("fp16")
def fp16(state: dist.ProcessGroup, bucket: Any) -> Mean:
    """The mean, summed and sent as float16: half of the bytes of float32.

    Each rank divides by P before it rounds, so that sums stay in range; what is above 65,504 becomes infinite all the
    same, which ends the run, and what is below 6e-8 vanishes. PyTorch's `fp16_compress_hook`.
    """
    return default_hooks.fp16_compress_hook(state, bucket)


@hook("bf16")
def bf16(state: dist.ProcessGroup, bucket: Any) -> Mean:
    """The mean, summed and sent as bfloat16: half of the bytes of float32, its range, and 8 bits of precision.

    PyTorch's `bf16_compress_hook`; with NCCL from 2.10 on.
    """
    return default_hooks.bf16_compress_hook(state, bucket)


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
        return powerSGD_hook.PowerSGDState(process_group, random_seed=seed, **asdict(self))

    def __call__(self, state: powerSGD_hook.PowerSGDState, bucket: Any) -> Mean:
        return powerSGD_hook.powerSGD_hook(state, bucket)
