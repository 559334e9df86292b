"""The precision of an experiment: the key `precision`, one of four names.

Rows (parameters, momentum, aggregates, the global row) are float32, or float64 for "float64". What is lower than that
is the arithmetic of training alone: products in TF32, or the forward pass under `torch.autocast`, from which gradients
come back in float32. Tests, losses before training and aggregation are in full precision.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.errors import ExperimentError, one_line


@dataclass(frozen=True)
class Precision:
    """One precision.

    Attributes:
        name: in an experiment.
        rows: the type of rows, and of the loss.
        autocast: the type of the forward pass of training under `torch.autocast`; None: no autocast.
        tf32: whether matrix products and convolutions of training may round their float32 inputs to TF32, on CUDA.
    """

    name: str
    rows: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    tf32: bool = False

    def forward(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """A context for a forward pass of training on `device`, without its loss and backward pass."""
        return contextlib.nullcontext() if self.autocast is None else torch.autocast(device.type, self.autocast)

    @contextlib.contextmanager
    def forwards_of(self, module: nn.Module, device: torch.device) -> Iterator[None]:
        """Compute each forward pass of `module` and of its copies in this precision; outputs have the type of the loss.

        The rest of the block is in full precision. Each forward pass has an autocast of its own, since autocast casts a
        weight once only.
        """
        if self.autocast is None:
            yield
            return
        entered: list[contextlib.AbstractContextManager[Any]] = []

        def enter(module: nn.Module, inputs: Any) -> None:
            entered.append(self.forward(device))
            entered[-1].__enter__()

        def leave(module: nn.Module, inputs: Any, outputs: Any) -> Any:
            entered.pop().__exit__(None, None, None)
            return self.widened(outputs) if isinstance(outputs, Tensor) else outputs

        hooks = (
            module.register_forward_pre_hook(enter, prepend=True),
            module.register_forward_hook(leave, always_call=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            while entered:  # an interrupt, after which PyTorch calls no hooks
                leave(module, None, None)

    def widened(self, outputs: Tensor) -> Tensor:
        """The outputs of a forward pass in the type of the loss."""
        return outputs if self.autocast is None else outputs.to(self.rows)

    def training(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """A context for training on `device`, with TF32 if this precision has it. The rest uses `full_precision`."""
        return tf32_allowed(self.tf32) if device.type == "cuda" else contextlib.nullcontext()

    def require(self, device: torch.device) -> None:
        """Raise ExperimentError if `device` does not have this precision."""
        if self.tf32 and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
            raise ExperimentError(
                f'precision = "tf32": {device} has no TF32, which NVIDIA GPUs have from compute capability 8.0 on; '
                "use float32"
            )
        if self.autocast is None:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # PyTorch warns and continues without autocast
                self.forward(device)
        except (RuntimeError, UserWarning) as error:
            raise ExperimentError(f'precision = "{self.name}": not on {device}: {one_line(error)}') from None

    def facts(self) -> dict[str, Any]:
        """The precision for the run record."""
        rows, forward = (str(dtype).removeprefix("torch.") for dtype in (self.rows, self.autocast or self.rows))
        return {"rows": rows, "forward": forward, "tf32": self.tf32}


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
    """A context without TF32, which PyTorch uses for convolutions on CUDA by default."""
    return FULL.training(device)


@contextlib.contextmanager
def tf32_allowed(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 in matrix products and convolutions on CUDA in the block.

    PyTorch has two sets of switches. The older one raises if the newer one has a value that it cannot express; only
    then this function uses the newer one.
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
        for switch in switches:
            setattr(*switch, value)
    try:
        yield
    finally:
        with _without_warnings():
            for switch, earlier in zip(switches, before, strict=True):
                setattr(*switch, earlier)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Some versions of PyTorch warn that the older switches are deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def cast_for_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The operands of an operation as autocast would cast them; unchanged without autocast.

    For operations with a derivative of their own, whose operands autocast does not cast.
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
