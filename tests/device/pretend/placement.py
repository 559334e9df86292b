"""Where a tensor lies: a mark on its storage says that it is GPU memory."""

from __future__ import annotations

import torch
from torch import Tensor

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")

_functorch = torch._C._functorch


class DeviceError(RuntimeError):
    """CUDA would have refused this."""


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """The storage of a tensor, or of the tensor inside of the wrappers of vmap and grad."""
    with torch._C.DisableTorchFunction():
        while _functorch.is_functorch_wrapped_tensor(tensor):
            tensor = _functorch.get_unwrapped(tensor)
        return tensor.untyped_storage()


def on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor lies on the pretend GPU."""
    return getattr(storage_of(tensor), "on_gpu", False) is True


def is_unplaced(tensor: Tensor) -> bool:
    """Whether PyTorch made a tensor inside of C++, from which its device cannot be seen here."""
    return getattr(storage_of(tensor), "on_gpu", False) is None


def place(tensor: Tensor) -> Tensor:
    """Mark the memory of a tensor as GPU memory."""
    storage_of(tensor).on_gpu = True
    return tensor


def leave_unplaced(tensor: Tensor) -> None:
    """The first GPU operation that uses this tensor will place it."""
    storage_of(tensor).on_gpu = None


def upload(tensor: Tensor) -> Tensor:
    """A copy of a host tensor on the GPU; not counted."""
    return place(_copy(tensor))


def download(tensor: Tensor) -> Tensor:
    """A copy of a GPU tensor on the host; not counted."""
    return _copy(tensor)


def _copy(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
        return tensor.detach().clone(memory_format=torch.preserve_format)
