"""CUDA memory that several processes use, with PyTorch's counters of receivers (torch/csrc/CudaIPCTypes.cpp).

All processes are this one. Each pickled tensor has a counter of receivers, which begins at 1. A receiver decrements it
when it frees its memory, or at once if it has the same memory already. If the sender frees memory whose counter is not
zero, PyTorch keeps the memory for ever, and prints a warning at the end of the process. The counters are unsigned.
"""

from __future__ import annotations

import weakref
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import reductions
from torch.multiprocessing.reductions import StorageWeakRef

from tests.device.pretend.placement import DeviceError, on_gpu, place, storage_of

COUNTERS = b"/torch_counters"


class SharedMemory:
    """The memory that a process has sent to others."""

    def __init__(self) -> None:
        self._sent: list[StorageWeakRef] = []  # storage by the number of its counter
        self._counters: list[int] = []

    @property
    def kept_for_ever(self) -> int:
        """Number of counters that are not zero although the sender has freed the memory."""
        return sum(
            storage.expired() and counter != 0 for storage, counter in zip(self._sent, self._counters, strict=True)
        )

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        """Replace the functions by which PyTorch sends and receives CUDA tensors, until `patch` is undone."""
        reduce_on_host = reductions.reduce_tensor

        def reduce(tensor: Tensor) -> tuple[Any, ...]:
            return self._reduced(tensor) if on_gpu(tensor) else reduce_on_host(tensor)

        patch.setattr(reductions, "reduce_tensor", reduce)
        patch.setitem(ForkingPickler._extra_reducers, Tensor, reduce)
        patch.setattr(reductions, "shared_cache", reductions.SharedCache())
        patch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(self._received), raising=False)
        patch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", staticmethod(self._release), raising=False)

    def _reduced(self, tensor: Tensor) -> tuple[Any, ...]:
        number, storage = len(self._sent), storage_of(tensor)
        self._sent.append(StorageWeakRef(storage))
        self._counters.append(1 if storage.nbytes() else 0)
        shape = type(tensor), tensor.size(), tensor.stride(), tensor.storage_offset()
        first = next(k for k, sent in enumerate(self._sent) if sent == self._sent[number])
        memory = (0, b"memory %d" % first, storage.nbytes(), 0) if storage.nbytes() else ("cpu", None, 0, 0)
        return reductions.rebuild_cuda_tensor, (
            *(*shape, torch.TypedStorage, tensor.dtype, *memory, tensor.requires_grad, COUNTERS, number, b"", False),
        )

    def _received(self, device: int, handle: bytes, size: int, offset: int, *counter: Any) -> torch.UntypedStorage:
        sent = self._sent[int(handle.split()[1])]
        if sent.expired():
            raise DeviceError("the memory of a received tensor has been freed by its sender")
        storage = torch.UntypedStorage._new_with_weak_ptr(sent.cdata).clone()
        place(torch.empty(0, dtype=torch.uint8).set_(storage))
        weakref.finalize(storage, self._release, *counter[:2])
        return storage

    def _release(self, counters: bytes, number: int) -> None:
        if counters == COUNTERS:  # otherwise there is no such file, which PyTorch ignores
            self._counters[number] = (self._counters[number] - 1) % 2**64
