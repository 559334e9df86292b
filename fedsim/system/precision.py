"""In which numbers an experiment computes: the key `precision`, one of four names.

Rows (parameters, momentum, aggregates, the global row) are float32, or float64 for "float64". What is lower than that
is the arithmetic of training alone: products in TF32, or the forward pass under `torch.autocast`, from which gradients
come back in float32. Tests, losses before training and aggregation are in full precision.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedsim.errors import ExperimentError, one_line


@dataclass(frozen=True)
class Precision:
    """One precision.

    Attributes:
        name: as an experiment says it.
        rows: the type of rows, and of the loss.
        autocast: to what the forward pass of training is cast by `torch.autocast`; None: it is not.
        tf32: whether matrix products and convolutions of training may round their float32 inputs to TF32, on CUDA.
    """

    name: str
    rows: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    tf32: bool = False

    def forward(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Around a forward pass of training on `device`; neither around its loss nor around its backward pass."""
        return contextlib.nullcontext() if self.autocast is None else torch.autocast(device.type, self.autocast)

    def widened(self, outputs: Tensor) -> Tensor:
        """What came out of such a forward pass, in the type in which its loss is computed."""
        return outputs if self.autocast is None else outputs.to(self.rows)

    def training(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Around training on `device`: TF32 as this precision has it. Everything else happens in `full_precision`."""
        return tf32_allowed(self.tf32) if device.type == "cuda" else contextlib.nullcontext()

    def require(self, device: torch.device) -> None:
        """Raise ExperimentError where `device` cannot compute so."""
        if self.tf32 and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
            raise ExperimentError(
                f'precision = "tf32": {device} has no TF32, which NVIDIA cards have from compute capability 8.0 on; '
                "use float32"
            )
        if self.autocast is None:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # PyTorch's way to say that it goes on without
                self.forward(device)
        except (RuntimeError, UserWarning) as error:
            raise ExperimentError(f'precision = "{self.name}": not on {device}: {one_line(error)}') from None

    def facts(self) -> dict[str, Any]:
        """For the run record: what was in force."""
        return {
            "rows": _name(self.rows),
            "forward": _name(self.autocast or self.rows),
            "tf32": self.tf32,
        }


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("float32"),
        Precision("float64", rows=torch.float64),
        Precision("tf32", tf32=True),
        Precision("bf16", autocast=torch.bfloat16),
    )
}
FULL = PRECISIONS["float32"]


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """float32 that is float32: without TF32, which PyTorch allows convolutions on CUDA unless it is told otherwise."""
    return FULL.training(device)


@contextlib.contextmanager
def tf32_allowed(allowed: bool) -> Iterator[None]:
    """Allow, or forbid, TF32 in matrix products and convolutions on CUDA; as it was before when the block ends.

    PyTorch has two sets of switches for that, and the older one raises where somebody has used the newer one to say
    what it cannot express; only then the newer one is used here.
    """
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    switches = [(cuda.matmul, "allow_tf32"), (cudnn, "allow_tf32")]
    value: bool | str = allowed
    with _without_warnings():
        try:
            before = [getattr(*switch) for switch in switches]
        except RuntimeError:
            switches = [(part, "fp32_precision") for part in (cuda.matmul, cudnn.conv, cudnn.rnn)]
            before = [getattr(*switch) for switch in switches]
            value = "tf32" if allowed else "ieee"
        _turn(switches, [value] * len(switches))
    try:
        yield
    finally:
        with _without_warnings():
            _turn(switches, before)


def _turn(switches: Sequence[tuple[Any, str]], values: Sequence[Any]) -> None:
    for (owner, name), value in zip(switches, values, strict=True):
        setattr(owner, name, value)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Some versions of PyTorch warn, once, that the older switches will go."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def cast_for_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """What autocast would make of an operation's operands; as they are where none is in force.

    For operations that bring a derivative of their own, which autocast does not look into.
    """
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.is_floating_point() or tensor.dtype is torch.double:
            return tensor
        return tensor.to(dtype)

    return tuple(map(cast, tensors))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
