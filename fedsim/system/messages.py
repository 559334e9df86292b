"""Messages between two processes: a pickled object and the open files that it refers to, through one pipe.

Tensors in shared memory are pickled as file descriptors. multiprocessing would pass descriptors
through a socket in the temporary folder, which stays there if the process is killed. Here the descriptors follow their
message through the same pipe (SCM_RIGHTS), so no file system is needed.

Functions and classes of a notebook, an interactive session or a function are pickled by value, since the other process
cannot import them.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
from collections import ChainMap
from collections.abc import Iterator
from contextvars import ContextVar
from multiprocessing.connection import Connection
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

import cloudpickle

PASSES_FILES = hasattr(socket, "send_fds")  # not on Windows, where multiprocessing passes handles by itself
COUNT_BYTES = 4  # length of the number of files, with which a message starts
MAX_FILES = 200  # in one system call; Linux allows 253
DISMISSED = b""  # instead of a message: the receiver is to end

_received: ContextVar[list[int]] = ContextVar("fedsim_received")  # of the message that is being unpickled


class Message:
    """An object as bytes, and the descriptors of the files that it refers to.

    Keeps the object, since its files have to stay open until the message is sent.
    """

    def __init__(self, content: Any) -> None:
        self.content, self.descriptors = content, list[int]()
        with _collecting(self):
            self.data = _dumps(content)

    def duplicate_for_child(self, descriptor: int) -> int:
        """Called by multiprocessing for each file that is pickled; see `_collecting`."""
        if descriptor not in self.descriptors:
            self.descriptors.append(descriptor)
        return self.descriptors.index(descriptor)

    def DupFd(self, index: int) -> _File:  # noqa: N802  # multiprocessing's name
        """Return the placeholder of a file in the pickled data."""
        return _File(index)


class _Pickler(cloudpickle.Pickler):
    """cloudpickle's pickler with the reducers of multiprocessing and PyTorch for tensors and files."""

    dispatch_table: ClassVar = ChainMap(
        ForkingPickler._extra_reducers,  # type: ignore[attr-defined]
        cloudpickle.Pickler.dispatch_table,
    )


def _dumps(content: Any) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(content)
        return file.getvalue()


class ReceivedMessage:
    """A message that is not unpickled yet; call `load` once."""

    def __init__(self, data: bytes, descriptors: list[int]) -> None:
        self._data, self._descriptors = data, descriptors

    def load(self) -> Any:
        """Unpickle the object, and close the descriptors."""
        token = _received.set(self._descriptors)
        try:
            return ForkingPickler.loads(self._data)
        finally:
            _received.reset(token)
            while self._descriptors:
                os.close(self._descriptors.pop())


class Channel:
    """One end of a duplex pipe of multiprocessing; `multiprocessing.connection.wait` accepts it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, content: Any) -> None:
        """Send an object or a `Message`. Raises OSError if the other end is closed, and errors of pickling."""
        message = content if isinstance(content, Message) else Message(content)
        descriptors = message.descriptors
        self._connection.send_bytes(len(descriptors).to_bytes(COUNT_BYTES, "big") + message.data)
        for start in range(0, len(descriptors), MAX_FILES):
            with self._socket() as pipe:
                socket.send_fds(pipe, [b"\0"], descriptors[start : start + MAX_FILES])

    def dismiss(self) -> None:
        """Ask the other end to stop: no message follows."""
        self._connection.send_bytes(DISMISSED)

    def receive(self) -> ReceivedMessage | None:
        """The next message; None after `dismiss`. Raises EOFError or OSError if the other end is closed."""
        data = self._connection.recv_bytes()
        if data == DISMISSED:
            return None
        count, descriptors = int.from_bytes(data[:COUNT_BYTES], "big"), list[int]()
        while len(descriptors) < count:
            with self._socket() as pipe:
                mark, some, *_ = socket.recv_fds(pipe, 1, MAX_FILES)
            if not mark or not some:
                raise EOFError
            descriptors += some
        return ReceivedMessage(data[COUNT_BYTES:], descriptors)

    def poll(self) -> bool:
        """Whether `receive` would return at once."""
        return self._connection.poll()

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()

    def _socket(self) -> socket.socket:
        """The pipe as a socket, which it is on systems that pass files."""
        return socket.socket(fileno=os.dup(self._connection.fileno()))


class _File:
    """Placeholder of a file in a pickled message, by its index."""

    def __init__(self, index: int) -> None:
        self._index = index

    def detach(self) -> int:
        """Return a duplicate of the file's descriptor; the caller closes it."""
        return os.dup(_received.get()[self._index])


@contextlib.contextmanager
def _collecting(message: Message) -> Iterator[None]:
    """Within the block, multiprocessing passes the files of pickled objects to `message`.

    It does so by `duplicate_for_child`, as if `message` were a process that is being started.
    """
    if not PASSES_FILES:
        yield
        return
    before = get_spawning_popen()
    set_spawning_popen(message)  # type: ignore[arg-type]
    try:
        yield
    finally:
        set_spawning_popen(before)
