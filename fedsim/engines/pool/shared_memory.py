"""Memory that several processes work on: on Linux a file in memory without a name, elsewhere PyTorch's own way.

Such a file (memfd_create) is bounded by main memory alone. /dev/shm, where PyTorch would put tensors, has a size of its
own, 64 MB in a container unless somebody asks for more; what is written beyond that kills the process. A file without
a name also cannot stay behind, whenever its processes are killed. All tensors that are shared together lie in one, so
that it takes one file descriptor for each process, not one for each tensor.
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

NOT_HERE = (errno.ENOSYS, errno.EPERM, errno.EACCES)  # an old kernel, or a filter of system calls


def memory_file(nbytes: int) -> int | None:
    """Return the descriptor of a new file in memory, full of zeros; None where the system has no such files.

    Raises ExperimentError where it cannot be that large, or no more files can be opened.
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
    """Move tensors that lie on the host to memory that other processes can map, in place.

    Views of one storage still share it afterwards, if all of them are given. Raises ExperimentError if there is not
    enough memory, since writing to it would kill the process.
    """
    once = {id(tensor): tensor for tensor in tensors}.values()  # the labels may be the shards' too
    on_host = [tensor for tensor in once if tensor.device.type == "cpu" and not tensor.is_shared()]
    of_tensors = (tensor.untyped_storage() for tensor in on_host)
    storages = {storage.data_ptr(): storage for storage in of_tensors if storage.nbytes()}
    sizes = [-(-storage.nbytes() // ALIGNMENT) * ALIGNMENT for storage in storages.values()]
    if not sizes:
        return
    require_memory(sum(sizes), "what the processes share", "a smaller cohort, or engine=serial, which shares nothing")
    block = _block(sum(sizes))
    if block is None:
        require_shared_memory(sum(sizes))
        for tensor in on_host:
            tensor.share_memory_()
        return
    places = dict(zip(storages, itertools.accumulate(sizes, initial=0), strict=False))  # of the storages, by address
    for address, storage in storages.items():
        room = block[places[address] : places[address] + storage.nbytes()]
        room.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
    for tensor in on_host:
        place = places.get(tensor.untyped_storage().data_ptr(), 0)
        offset = place // tensor.element_size() + tensor.storage_offset()
        tensor.set_(block.untyped_storage(), offset, tensor.size(), tensor.stride())


def _block(nbytes: int) -> Tensor | None:
    """Bytes that PyTorch sends to other processes by their descriptor; None where there are no files in memory."""
    descriptor = memory_file(nbytes)
    if descriptor is None:
        return None
    try:
        storage = torch.UntypedStorage._new_shared_fd_cpu(descriptor, nbytes)  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise _no_memory(nbytes, one_line(error), "") from error
    finally:
        os.close(descriptor)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _no_memory(nbytes: int, reason: str, remedy: str) -> ExperimentError:
    return ExperimentError(
        f"shared memory: {show_bytes(nbytes)} cannot be had: {reason}{remedy}; or use engine=serial, which needs none"
    )
