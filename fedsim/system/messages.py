"""Messages between two processes: a pickled object and the open files that it refers to, sent through one pipe.

Tensors in shared memory are pickled as file descriptors. multiprocessing would pass descriptors through a socket in the
temporary folder, which remains there if the process is killed. Here the descriptors follow their message through the
same pipe (SCM_RIGHTS), so no file system is needed.

Functions and classes defined in a notebook, an interactive session or another function are pickled by value, because
the other process cannot import them.
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

PASSES_FILES = hasattr(socket, "send_fds")  # false on Windows, where multiprocessing passes handles itself
COUNT_BYTES = 4  # a message starts with the number of files, in this many bytes
MAX_FILES = 200  # in one system call; Linux allows 253
DISMISSED = b""  # sent instead of a message to end the receiver

_received: ContextVar[list[int]] = ContextVar("fedsim_received")  # descriptors of the message being unpickled


class Message:
    """A pickled object and the files (descriptors) that it refers to, ready to be sent to another process."""

    def __init__(self, content: Any) -> None:
        self.content, self.descriptors = content, list[int]()
        with _collecting(self):
            self.data = _dumps(content)

    def duplicate_for_child(self, descriptor: int) -> int:
        """Add a file to the message, and return its index there. Called by multiprocessing."""
        if descriptor not in self.descriptors:
            self.descriptors.append(descriptor)
        return self.descriptors.index(descriptor)

    def DupFd(self, index: int) -> _File:  # noqa: N802  # multiprocessing's name
        """Return the placeholder for a file in the pickled data. Called by the unpickler."""
        return _File(index)


class _Pickler(cloudpickle.Pickler):
    """The cloudpickle pickler, with the reducers of multiprocessing and PyTorch for tensors and files."""

    dispatch_table: ClassVar = ChainMap(
        ForkingPickler._extra_reducers,  # type: ignore[attr-defined]
        cloudpickle.Pickler.dispatch_table,
    )


def _dumps(content: Any) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(content)
        return file.getvalue()


class ReceivedMessage:
    """A message that has not been unpickled yet. Call `load` once."""

    def __init__(self, data: bytes, descriptors: list[int]) -> None:
        self._data, self._descriptors = data, descriptors

    def load(self) -> Any:
        """Unpickle and return the object that was sent, and close the message's file descriptors."""
        token = _received.set(self._descriptors)
        try:
            return ForkingPickler.loads(self._data)
        finally:
            _received.reset(token)
            while self._descriptors:
                os.close(self._descriptors.pop())


class Channel:
    """One end of a pipe between two processes, for messages in both directions.

    `multiprocessing.connection.wait` accepts channels.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, content: Any) -> None:
        """Send an object or a `Message`. Raise OSError if the other end is closed."""
        message = content if isinstance(content, Message) else Message(content)
        descriptors = message.descriptors
        self._connection.send_bytes(len(descriptors).to_bytes(COUNT_BYTES, "big") + message.data)
        for start in range(0, len(descriptors), MAX_FILES):
            with self._socket() as pipe:
                socket.send_fds(pipe, [b"\0"], descriptors[start : start + MAX_FILES])

    def dismiss(self) -> None:
        """Ask the other end of the pipe to stop. No messages may be sent afterwards."""
        self._connection.send_bytes(DISMISSED)

    def receive(self) -> ReceivedMessage | None:
        """Return the next message, or None if the other end called `dismiss`.

        Raises EOFError or OSError if the other end is closed."""
        data = self._connection.recv_bytes()
        if data == DISMISSED:
            return None
        count, descriptors = int.from_bytes(data[:COUNT_BYTES], "big"), list[int]()
        while len(descriptors) < count:
            with self._socket() as pipe:
                mark, received, *_ = socket.recv_fds(pipe, 1, MAX_FILES)
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

    def _socket(self) -> socket.socket:
        """Return the pipe as a socket, on systems where PASSES_FILES is true."""
        return socket.socket(fileno=os.dup(self._connection.fileno()))


class _File:
    """Placeholder for a file in a pickled message. It contains the index of the file."""

    def __init__(self, index: int) -> None:
        self._index = index

    def detach(self) -> int:
        """Return a new descriptor of the file. Called while the message is unpickled."""
        return os.dup(_received.get()[self._index])


@contextlib.contextmanager
def _collecting(message: Message) -> Iterator[None]:
    """Inside the `with` block, files in pickled objects are added to `message`."""
    if not PASSES_FILES:
        yield
        return
    before = get_spawning_popen()
    set_spawning_popen(message)  # type: ignore[arg-type]
    try:
        yield
    finally:
        set_spawning_popen(before)
