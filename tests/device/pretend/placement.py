"""Device of a tensor: a mark on its storage means GPU memory."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.device.pretend.memory import Block, Memory

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")

_functorch = torch._C._functorch
memory = Memory()  # of the pretend GPU that is in use


class DeviceError(RuntimeError):
    """Error for an operation that CUDA would refuse."""


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor, or of the tensor inside the wrappers of vmap and grad."""
    with torch._C.DisableTorchFunction():
        while _functorch.is_functorch_wrapped_tensor(tensor):
            tensor = _functorch.get_unwrapped(tensor)
        return tensor.untyped_storage()


def mark_of(tensor: Tensor) -> bool | None:
    """Return the mark of a tensor: True on the pretend GPU, False on the host.

    The mark None means that the device is unknown because PyTorch created the tensor inside C++.
    """
    return getattr(storage_of(tensor), "on_gpu", False)


def on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor is on the pretend GPU."""
    return mark_of(tensor) is True


def is_pinned(tensor: Tensor) -> bool:
    """Whether a host tensor is in pinned memory, which the GPU reads and writes without the host."""
    return getattr(storage_of(tensor), "pinned", False)


def is_unplaced(tensor: Tensor) -> bool:
    """Whether the device of a tensor is unknown."""
    return mark_of(tensor) is None


def place(tensor: Tensor) -> Tensor:
    """Mark the memory of a tensor as GPU memory."""
    storage = storage_of(tensor)
    if getattr(storage, "on_gpu", None) is not True:
        storage.on_gpu, storage.block = True, Block(memory, storage.nbytes())
    return tensor


def leave_unplaced(tensor: Tensor) -> None:
    """Mark a tensor's device as unknown. The first GPU operation that uses the tensor places it on the GPU."""
    storage_of(tensor).on_gpu = None


def upload(tensor: Tensor) -> Tensor:
    """Return an uncounted copy of a host tensor on the GPU."""
    return place(_copy(tensor))


def download(tensor: Tensor) -> Tensor:
    """Return an uncounted copy of a GPU tensor on the host."""
    return _copy(tensor)


def _copy(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
        return tensor.detach().clone(memory_format=torch.preserve_format)
