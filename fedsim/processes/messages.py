"""Messages between two processes: a pickled object and the open files that it refers to, sent through one pipe.

Tensors in shared memory are pickled as file descriptors. multiprocessing would pass descriptors through a socket in the
temporary folder, which remains there if the process is killed. Here the descriptors follow their message through the
same pipe (SCM_RIGHTS), so no file system is needed.

CUDA tensors are pickled as handles of their memory. The memory belongs to the sender, which keeps it until it calls
`Channel.forget` or closes the channel. By then, the receiver must have released the tensors or ended.

Functions and classes defined in a notebook, an interactive session or another function are pickled by value, because
the other process cannot import them.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import pickle
import socket
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from fedsim.core.import_policy import local_modules
from fedsim.errors import ExperimentError, one_line, show

COUNT_BYTES = 4  # a message starts with the number of files, in this many bytes
MAX_FILES = 200  # in one system call; Linux allows 253
DISMISSED = b""  # sent instead of a message to end the receiver
NO_COUNTER = b"/fedsim-counts-no-receivers"  # name of a file that does not exist

_received: ContextVar[list[int]] = ContextVar("fedsim_received")  # descriptors of the message being unpickled


class Message:
    """A pickled object, and the files (descriptors) and the CUDA memory that it refers to.

    A message can be sent to several processes.
    """

    def __init__(self, content: Any) -> None:
        self.content, self.descriptors, self.lent = content, list[int](), list[torch.UntypedStorage]()
        with _collecting(self), io.BytesIO() as file:
            _Pickler(file, self._reduce).dump((local_modules, content))  # unpickled in this order
            self.data = file.getvalue()

    def _reduce(self, tensor: Tensor) -> tuple[Any, ...]:
        """Pickle a tensor as torch.multiprocessing does, but without counting the receivers of CUDA memory.

        PyTorch expects one receiver for each pickled tensor. Its counter never returns to zero if several processes
        receive the message or if a receiver is killed. The sender would then keep the memory, and print a warning
        when it ends.
        """
        rebuild, arguments = reductions.reduce_tensor(tensor)
        if rebuild is not reductions.rebuild_cuda_tensor:
            return rebuild, arguments
        named = inspect.signature(rebuild).bind(*arguments).arguments
        if named["storage_handle"] is not None:  # not an empty tensor
            counter = named["ref_counter_handle"], named["ref_counter_offset"]
            named["storage_cls"]._release_ipc_counter(*counter, device=named["storage_device"])
            named["ref_counter_handle"] = NO_COUNTER
            self.lent.append(tensor.untyped_storage())
        return _rebuild_cuda_tensor, tuple(named.values())

    def duplicate_for_child(self, descriptor: int) -> int:
        """Add a file to the message, and return its index there. Called by multiprocessing."""
        if descriptor not in self.descriptors:
            self.descriptors.append(descriptor)
        return self.descriptors.index(descriptor)

    def DupFd(self, index: int) -> _File:  # noqa: N802  # multiprocessing's name
        """Return the placeholder for a file in the pickled data. Called by the unpickler."""
        return _File(index)


def sharing_error(device: torch.device, error: Exception) -> ExperimentError:
    """Return the error of a run whose processes cannot share memory of `device`, with PyTorch's `error` as the reason.

    Memory of expandable segments is passed on by pidfd_getfd, which Linux may forbid (Yama's ptrace_scope, seccomp).
    """
    remedy = "unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF or " * any(
        reason in str(error) for reason in ("pidfd", "expandable_segments")
    )
    return ExperimentError(
        f"device = {show(str(device))}: processes cannot share memory of this device ({one_line(error)}); "
        f"{remedy}use engine=serial"
    )


def _rebuild_cuda_tensor(*arguments: Any) -> Tensor:
    """Return a tensor in memory of another process. The arguments are those of PyTorch's function of this name."""
    try:
        return reductions.rebuild_cuda_tensor(*arguments)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        named = inspect.signature(reductions.rebuild_cuda_tensor).bind(*arguments).arguments
        raise sharing_error(torch.device("cuda", named["storage_device"]), error) from error


class _Pickler(cloudpickle.Pickler):
    """The cloudpickle pickler, with a reducer for tensors, and multiprocessing's and PyTorch's reducers for files."""

    def __init__(self, file: io.BytesIO, reduce_tensor: Callable[[Tensor], tuple[Any, ...]]) -> None:
        self.dispatch_table = ChainMap(
            dict.fromkeys((Tensor, torch.nn.Parameter), reduce_tensor),
            ForkingPickler(file).dispatch_table,
            cloudpickle.Pickler.dispatch_table,
        )
        super().__init__(file)


class ReceivedMessage:
    """A message that has not been unpickled yet. Call `load` once."""

    def __init__(self, data: bytes, descriptors: list[int]) -> None:
        self._data, self._descriptors = data, descriptors

    def load(self) -> Any:
        """Unpickle and return the object that was sent, and close the message's file descriptors."""
        token = _received.set(self._descriptors)
        try:
            return pickle.loads(self._data)[1]
        finally:
            _received.reset(token)
            while self._descriptors:
                os.close(self._descriptors.pop())


class Channel:
    """One end of a pipe between two processes, for messages in both directions.

    `multiprocessing.connection.wait` accepts channels.
    """

    def __init__(self, connection: Any) -> None:  # PipeConnection on Windows, Connection elsewhere
        self._connection = connection
        self._lent: dict[int, torch.UntypedStorage] = {}  # CUDA memory of sent tensors, by address

    def send(self, content: Any) -> None:
        """Send an object or a `Message`. Raise OSError if the other end is closed."""
        message = content if isinstance(content, Message) else Message(content)
        descriptors = message.descriptors
        self._lent.update((storage.data_ptr(), storage) for storage in message.lent)
        self._connection.send_bytes(len(descriptors).to_bytes(COUNT_BYTES, "big") + message.data)
        for start in range(0, len(descriptors), MAX_FILES):
            with self._socket() as pipe:
                socket.send_fds(pipe, [b"\0"], descriptors[start : start + MAX_FILES])  # type: ignore[attr-defined, unused-ignore]

    def dismiss(self) -> None:
        """Ask the other end of the pipe to stop. No messages may be sent afterwards."""
        self._connection.send_bytes(DISMISSED)

    def forget(self) -> None:
        """Release the CUDA memory of the tensors that were sent. Call this when the receiver has released them."""
        self._lent.clear()

    def receive(self) -> ReceivedMessage | None:
        """Return the next message, or None if the other end called `dismiss`.

        Raises EOFError or OSError if the other end is closed."""
        data = self._connection.recv_bytes()
        if data == DISMISSED:
            return None
        count, descriptors = int.from_bytes(data[:COUNT_BYTES], "big"), list[int]()
        while len(descriptors) < count:
            with self._socket() as pipe:
                mark, received, *_ = socket.recv_fds(pipe, 1, MAX_FILES)  # type: ignore[attr-defined, unused-ignore]
            if not mark or not received:
                raise EOFError
            descriptors += received
        return ReceivedMessage(data[COUNT_BYTES:], descriptors)

    def poll(self) -> bool:
        """Whether `receive` would return immediately."""
        return self._connection.poll()

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()
        self.forget()

    def _socket(self) -> socket.socket:
        """Return the pipe as a socket. Not on Windows, where messages have no files."""
        pipe = socket.socket(fileno=os.dup(self._connection.fileno()))
        pipe.settimeout(None)  # a default timeout of the user would make the connection non-blocking too
        return pipe


class _File:
    """Placeholder for a file in a pickled message. It contains the index of the file."""

    def __init__(self, index: int) -> None:
        self._index = index

    def detach(self) -> int:
        """Return a new descriptor of the file. Called while the message is unpickled."""
        return os.dup(_received.get()[self._index])


def shared_file(descriptor: int) -> Any:
    """Return an object that represents an open file in a pickled message. The receiver calls its `detach` method to
    get a descriptor of the file.

    Raises ExperimentError on Windows.
    """
    if sys.platform == "win32":
        raise ExperimentError(
            "worker states that are kept between rounds: Windows cannot share their files with processes; use "
            "engine=serial"
        )
    from multiprocessing.reduction import DupFd  # type: ignore[attr-defined, unused-ignore]

    return DupFd(descriptor)


@contextlib.contextmanager
def _collecting(message: Message) -> Iterator[None]:
    """Return a context manager in which the files of pickled objects are added to `message`."""
    if sys.platform == "win32":  # multiprocessing passes handles itself
        yield
        return
    before = get_spawning_popen()
    set_spawning_popen(message)  # type: ignore[arg-type, unused-ignore]
    try:
        yield
    finally:
        set_spawning_popen(before)
