"""Shared memory for several processes: unnamed in-memory files on Linux, PyTorch's shared memory elsewhere.

An unnamed in-memory file (memfd_create) is limited only by main memory. PyTorch would use /dev/shm, which has a size
limit of its own (64 MB by default in a container), and a write beyond this limit kills the process. An unnamed file
also disappears if its processes are killed. All tensors that are shared in one call are in one file, so each process
needs one file descriptor instead of one per tensor.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterable

import torch
from torch import Tensor

from fedsim.core.rows import ALIGNMENT
from fedsim.errors import ExperimentError, one_line, show_bytes
from fedsim.system.devices import require_memory, require_shared_memory
from fedsim.system.limits import limit_hint

NOT_HERE = (errno.ENOSYS, errno.EPERM, errno.EACCES)  # errors of an old kernel or a system-call filter


def memory_file(nbytes: int) -> int | None:
    """Create a file of `nbytes` zeros in memory, and return its descriptor; None if the system has no such files.

    Raises ExperimentError if there is not enough memory, or if no more files can be opened.
    """
    if not hasattr(os, "memfd_create"):
        return None
    descriptor = None
    try:
        descriptor = os.memfd_create("fedsim")
        os.ftruncate(descriptor, nbytes)
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        elif error.errno in NOT_HERE:
            return None
        raise _no_memory(
            nbytes, one_line(error) if error.strerror is None else error.strerror, limit_hint(error)
        ) from error
    return descriptor


def share(tensors: Iterable[Tensor]) -> None:
    """Move all CPU tensors of `tensors` to shared memory, in place. Tensors on other devices do not change.

    Raises ExperimentError if there is not enough memory.
    """
    distinct = {id(tensor): tensor for tensor in tensors}.values()  # shards may contain the dataset's label tensor
    on_host = [tensor for tensor in distinct if tensor.device.type == "cpu" and not tensor.is_shared()]
    of_tensors = (tensor.untyped_storage() for tensor in on_host)
    storages = {storage.data_ptr(): storage for storage in of_tensors if storage.nbytes()}
    sizes = [-(-storage.nbytes() // ALIGNMENT) * ALIGNMENT for storage in storages.values()]
    if not sizes:
        return
    require_memory(sum(sizes), "shared memory of the processes", "a smaller cohort, or engine=serial, which needs none")
    block = _block(sum(sizes))
    if block is None:
        require_shared_memory(sum(sizes))
        for tensor in on_host:
            tensor.share_memory_()
        return
    starts = dict(zip(storages, itertools.accumulate(sizes, initial=0), strict=False))  # offsets by storage address
    for address, storage in storages.items():
        room = block[starts[address] : starts[address] + storage.nbytes()]
        room.copy_(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))
    bases = (tensor._base for tensor in on_host)  # PyTorch's views keep their base, which would keep its old memory
    for tensor in {id(each): each for each in (*on_host, *bases) if each is not None}.values():
        start = starts.get(tensor.untyped_storage().data_ptr(), 0)
        offset = start // tensor.element_size() + tensor.storage_offset()
        tensor.set_(block.untyped_storage(), offset, tensor.size(), tensor.stride())


def _block(nbytes: int) -> Tensor | None:
    """Return a uint8 tensor [nbytes] in shared memory; None if the system does not support it."""
    descriptor = memory_file(nbytes)
    if descriptor is None:
        return None
    try:
        storage = torch.UntypedStorage._new_shared_fd_cpu(descriptor, nbytes)  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise _no_memory(nbytes, one_line(error), "") from error
    finally:
        os.close(descriptor)
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def _no_memory(nbytes: int, reason: str, remedy: str) -> ExperimentError:
    return ExperimentError(
        f"shared memory: {show_bytes(nbytes)} cannot be allocated: {reason}{remedy}; or use engine=serial, which needs "
        "none"
    )
