"""Numerical precision of training, selected by the key `precision`.

Rows (parameters, momentum, aggregates, the global row) are float64 for "float64" and float32 otherwise. Only training
can use lower precision: "tf32" allows TF32 in matrix products and convolutions, and "bf16" runs the forward pass under
`torch.autocast`, whose gradients are float32. Tests, losses before training and aggregation use full precision.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedsim.errors import ExperimentError, one_line


@dataclass(frozen=True)
class Precision:
    """Numerical precision of training, one of the values of the key `precision`.

    Attributes:
        name: value of the key `precision`.
        rows: dtype of rows (flat parameter vectors) and of the loss.
        autocast: dtype for `torch.autocast` in the forward pass of training. None: no autocast.
        tf32: whether matrix products and convolutions in training may round float32 inputs to TF32, on CUDA.
    """

    name: str
    rows: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    tf32: bool = False

    def forward(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager in which to compute the forward pass of training on `device`, but not the loss."""
        return contextlib.nullcontext() if self.autocast is None else torch.autocast(device.type, self.autocast)

    @contextlib.contextmanager
    def forwards_of(self, module: nn.Module, device: torch.device) -> Iterator[None]:
        """Inside the `with` block, run each forward pass of `module` in this precision."""
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
            while entered:  # PyTorch calls no hooks after an interrupt
                leave(module, None, None)

    def widened(self, outputs: Tensor) -> Tensor:
        """Convert the outputs of a forward pass to the dtype of the loss."""
        return outputs if self.autocast is None else outputs.to(self.rows)

    def training(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager for training on `device`, which enables TF32 if this precision allows TF32."""
        return tf32_allowed(self.tf32) if device.type == "cuda" else contextlib.nullcontext()

    def require(self, device: torch.device) -> None:
        """Raise ExperimentError if `device` does not support this precision."""
        reduced, on_cuda = self.tf32 or self.autocast is not None, device.type == "cuda"
        older = on_cuda and torch.cuda.get_device_capability(device) < (8, 0)  # PyTorch would emulate bfloat16, slowly
        if (self.tf32 and not on_cuda) or (reduced and older):
            raise ExperimentError(
                f'precision = "{self.name}": {device} does not support {self.name.upper()}, which on an NVIDIA GPU '
                "needs compute capability 8.0 or higher; use float32"
            )
        if self.autocast is None:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # PyTorch warns and continues without autocast
                self.forward(device)
        except (RuntimeError, UserWarning) as error:
            raise ExperimentError(f'precision = "{self.name}": not supported on {device}: {one_line(error)}') from None

    def metadata(self) -> dict[str, Any]:
        """Return the dtypes and the TF32 setting for the run record, as a JSON-serializable dict."""
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


def full_precision(device: torch.device, convolutions: bool = True) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that disables TF32, which PyTorch uses by default for convolutions on CUDA.

    If `convolutions` is false, only matrix products need full precision. The context manager then costs no time unless
    the user has allowed TF32 in matrix products.
    """
    if not convolutions and device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # the user has set `fp32_precision` instead
            if not getattr(*_older_switches()[0]):
                return contextlib.nullcontext()
    return FULL.training(device)


@contextlib.contextmanager
def tf32_allowed(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 in matrix products and convolutions on CUDA inside the `with` block."""
    value: bool | str = allowed
    switches, cuda, cudnn = _older_switches(), cast(Any, torch.backends.cuda), cast(Any, torch.backends.cudnn)
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
        for switch, earlier in zip(switches, before, strict=True):
            setattr(*switch, earlier)


@cache
def _older_switches() -> list[tuple[Any, str]]:
    """Return the attributes that allow TF32 in matrix products and in convolutions, in all PyTorch versions.

    PyTorch 2.9 reports in the first use of one that they are deprecated. This use is here, and the report is
    suppressed. A `catch_warnings` in each use would let Python show all warnings again, also those of the user's code.
    """
    switches = [(torch.backends.cuda.matmul, "allow_tf32"), (torch.backends.cudnn, "allow_tf32")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for switch in switches:
            with contextlib.suppress(RuntimeError):
                setattr(*switch, getattr(*switch))
    return switches


@contextlib.contextmanager
def without_recurrent_advice(device: torch.device) -> Iterator[None]:
    """Suppress a warning of PyTorch's recurrent networks on CUDA inside the `with` block, which is a whole run.

    The advice of this warning, to call `flatten_parameters()`, would separate the parameters from their row. Other
    filters that change inside the block stay changed.
    """
    if device.type != "cuda":
        yield
        return
    filters = cast("list[Any]", warnings.filters)
    before = [*filters]
    warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk of memory")
    ours = filters[:1]
    try:
        yield
    finally:
        if ours[0] not in before and ours[0] in filters:
            filters.remove(ours[0])


def cast_for_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Cast floating-point tensors to the dtype of autocast. Without autocast, and for float64, nothing changes."""
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.is_floating_point() or tensor.dtype is torch.double:
            return tensor
        return tensor.to(dtype)

    return tuple(map(cast, tensors))
