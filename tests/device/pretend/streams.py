"""Streams and events. A use of memory that may begin before an earlier use has ended is refused, by vector clocks."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor, UntypedStorage

from tests.device.pretend.counting import SYNCHRONISATION, source_line
from tests.device.pretend.placement import GPU, DeviceError, storage_of

if TYPE_CHECKING:
    from tests.device.pretend.gpu import PretendGpu

LOCK = threading.Lock()  # several threads may use one stream
Clock = dict["Stream", int]  # how much of the work of each stream is done


def advance(clock: Clock, to: Clock) -> None:
    """Note in `clock` that the work counted by the clock `to` is done."""
    clock.update({stream: tick for stream, tick in to.items() if tick > clock.get(stream, 0)})


def require_done(storage: UntypedStorage, uses: str, *clocks: Clock) -> None:
    """Raise DeviceError unless one of the clocks has reached the last uses ("uses") or writes ("written") of memory."""
    for stream, tick in getattr(storage, uses, {}).items():
        if all(tick > clock.get(stream, 0) for clock in clocks):
            raise DeviceError(f"used before the stream of its last use has been waited for, at {source_line()}")


class Event:
    """A CUDA event. `clock`: what is done when the event has been waited for."""

    def __init__(self, gpu: PretendGpu, *options: Any, **more: Any) -> None:
        self._gpu = gpu
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or self._gpu.stream).clock)

    def wait(self, stream: Stream | None = None) -> None:
        advance((stream or self._gpu.stream).clock, self.clock)

    def query(self) -> bool:
        self._gpu.require_no_capture("query of an event")
        advance(self._gpu.host, self.clock)
        return True

    def synchronize(self) -> None:
        self._gpu.wait(SYNCHRONISATION, "synchronize", self)


class Stream(Event):
    """A CUDA stream, like an event that is recorded after all its work."""

    device = GPU

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    wait_stream = wait_event

    def work(self, read: Iterable[Tensor], written: Iterable[Tensor]) -> None:
        """Read and write memory after all that this stream and the host have waited for."""
        with LOCK:
            tick = self.clock[self] = self._gpu.everything.clock[self] = self.clock.get(self, 0) + 1
            for storage in map(storage_of, read):
                require_done(storage, "written", self.clock, self._gpu.host)
                storage.uses = {**getattr(storage, "uses", {}), self: tick}
            for storage in map(storage_of, written):
                require_done(storage, "uses", self.clock, self._gpu.host)
                storage.written, storage.uses = {self: tick}, {self: tick}
