"""Communication hooks: how ranks exchange gradients to average them.

A hook starts to average one bucket of gradients over the ranks. It returns a Future of the mean, which is also written
to the bucket. As in PyTorch's DistributedDataParallel, a hook takes two positional parameters:

    state   result of the hook's method `start(process_group, seed)` at the start of the run, or the process group if
            the hook has no such method
    bucket  a `Bucket`: this rank's contribution to the mean, multiplied by the number of ranks

The dataclass fields of a hook are its settings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from fedsim.core.numbers import NonNegativeFloat, NonNegativeInt, PositiveInt
from fedsim.core.registry import Component, Registry
from fedsim.errors import ExperimentError

Mean = torch.futures.Future[Tensor]


class Bucket:
    """Gradients of consecutive parameters, which the ranks average together.

    The class has the methods of torch.distributed.GradBucket that communication hooks call.

    Args:
        number: position of the bucket in the order of sending, from 0.
        last: whether this is the last bucket of a training step.
        columns: gradients of the bucket's parameters, as a view of the flat gradient vector.
        shapes: shape of each parameter in the bucket, in order.
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
    """Method of averaging gradients over the ranks: a communication hook as in DistributedDataParallel."""

    function: Any

    @property
    def keeps(self) -> bool:
        """Whether the hook has a state that is kept between training steps."""
        return hasattr(self.function, "start")

    def start(self, process_group: dist.ProcessGroup, seed: int) -> Callable[[Bucket], Mean]:
        """Return a function that starts to average a bucket of gradients over the ranks.

        Args:
            process_group: group of all ranks.
            seed: seed for the random numbers of the hook.
        """
        return partial(self.function, self.function.start(process_group, seed) if self.keeps else process_group)


hook = Registry("communication hook", inputs=("state", "bucket"), component=CommunicationHook)


@hook("allreduce")
def allreduce(state: dist.ProcessGroup, bucket: Any) -> Mean:
    """Average the gradients by all-reduce, in their own dtype. Results agree with other engines up to rounding.

    P ranks send 2 (P - 1) d s bytes in total per step, for d parameters of s bytes each.
    """
    return default_hooks.allreduce_hook(state, bucket)


@hook("fp16")
def fp16(state: dist.ProcessGroup, bucket: Any) -> Mean:
    """Average the gradients by all-reduce in float16. P ranks send 4 (P - 1) d bytes per step, half of float32.

    Each rank divides its gradients by the number of ranks before it rounds them. Values above 65,504 still become
    infinite, which ends the run, and values below 6e-8 become 0. This is PyTorch's `fp16_compress_hook`.
    """
    return default_hooks.fp16_compress_hook(state, bucket)


@hook("bf16")
def bf16(state: dist.ProcessGroup, bucket: Any) -> Mean:
    """Average the gradients by all-reduce in bfloat16. P ranks send 4 (P - 1) d bytes per step, half of float32.

    bfloat16 has the range of float32 and 8 bits of precision. This is PyTorch's `bf16_compress_hook`, which needs NCCL
    2.10 or newer if the backend is NCCL.
    """
    return default_hooks.bf16_compress_hook(state, bucket)


@hook("powersgd")
@dataclass(frozen=True)
class PowerSGD:
    """Low-rank approximation of each weight matrix's gradient by one step of power iteration (Vogels et al. 2019).

    Let M be the gradient [o, i] of a weight with o outputs and i inputs, plus the error of the last compression (a
    convolution's weight is flattened to [out channels, rest]). The ranks sum P = M Q and orthogonalise P, then average
    Q = M^T P. The averaged gradient is P Q^T, a matrix of low rank r. Two consecutive all-reduces send r (o + i)
    numbers instead of o i. Biases are sent uncompressed.

    Names, meanings and defaults are those of PyTorch's `PowerSGDState`:

    - matrix_approximation_rank is the rank r.
    - Before step start_powerSGD_iter of the run, all gradients are sent uncompressed.
    - A matrix is compressed only if it becomes smaller by at least the factor min_compression_rate.
    - use_error_feedback adds the error of the last compression to the next gradient.
    - warm_start reuses Q of the last step instead of drawing a new one.
    - orthogonalization_epsilon prevents NaN for a gradient of zeros if r is 1 or 2.

    For the whole run, each rank stores its compression error, d numbers, and the factors P and Q, d / c numbers for a
    compression rate c. Constraint: start_powerSGD_iter >= 2 with error feedback or a warm start.
    """

    matrix_approximation_rank: PositiveInt = 1
    start_powerSGD_iter: NonNegativeInt = 1_000  # noqa: N815
    min_compression_rate: NonNegativeFloat = 2.0
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        if self.start_powerSGD_iter < 2 and (self.use_error_feedback or self.warm_start):
            raise ExperimentError(
                f"distributed.hook.start_powerSGD_iter = {self.start_powerSGD_iter}: must be at least 2 with "
                "use_error_feedback or warm_start"
            )

    def start(self, process_group: dist.ProcessGroup, seed: int) -> powerSGD_hook.PowerSGDState:
        return powerSGD_hook.PowerSGDState(process_group, random_seed=seed, **asdict(self))

    def __call__(self, state: powerSGD_hook.PowerSGDState, bucket: Any) -> Mean:
        return powerSGD_hook.powerSGD_hook(state, bucket)
