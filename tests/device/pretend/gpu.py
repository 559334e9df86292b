"""The pretend GPU: its generator, its counts and the graph that is being captured."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from threading import get_ident

import pytest
import torch
from torch import Tensor

from tests.device.pretend import placement
from tests.device.pretend.cards import LARGE, Card
from tests.device.pretend.counting import DOWNLOAD, IN_GRAPH, LAUNCH, UPLOAD, Counting, Counts, source_line
from tests.device.pretend.cuda_api import Graph, cuda_api
from tests.device.pretend.generators import AnyGenerator, Generator
from tests.device.pretend.ipc import SharedMemory
from tests.device.pretend.memory import Memory
from tests.device.pretend.placement import DeviceError, is_pinned, on_gpu, storage_of
from tests.device.pretend.python_api import PythonApi
from tests.device.pretend.recording import Recording
from tests.device.pretend.rules import DeviceRules
from tests.device.pretend.streams import Clock, Event, Stream, advance, require_done

STAGED_AT_ONCE = 2**16  # largest copy from pageable memory, in bytes, for which CUDA does not wait for the stream


class PretendGpu:
    """A pretend GPU.

    Attributes:
        card: model of the card.
        generator: generator of the random numbers on the GPU.
        capture: the graph whose capture is under way, or None.
        memory: memory allocator.
        default_stream: the default stream.
        everything: an event after all work.
        host: what the host has waited for.
        graphs: the captured graphs, in order.
        launches: total number of kernel launches, inside and outside of counting blocks.
        shared_memory: memory that has been sent to other processes.
    """

    def __init__(self, card: Card) -> None:
        self.card = card
        self.generator = Generator()
        self.capture: Graph | None = None
        self.memory, self.host = Memory(), Clock()
        self.everything, self.default_stream = Event(self), Stream(self)
        self.graphs: list[Recording] = []
        self.shared_memory = SharedMemory()
        self.launches = 0
        self._counting, self._of_thread = Counting(), threading.local()

    def counting(self) -> contextlib.AbstractContextManager[Counts]:
        """Return a context manager that counts launches and waits. Blocks can be nested."""
        return self._counting.block()

    @property
    def stream(self) -> Stream:
        """The current stream of this thread."""
        return getattr(self._of_thread, "stream", self.default_stream)

    def set_stream(self, stream: Stream | None) -> None:
        self._of_thread.stream = stream or self.stream

    @property
    def capturing(self) -> Recording | None:
        """What records the operations of the current stream in a capture, or None."""
        return self.capture.recording if self.capture and self.capture.stream is self.stream else None

    def launch(self, operation: str, read: Iterable[Tensor] = (), written: Iterable[Tensor] = ()) -> None:
        """Count one kernel launch on the current stream. The kernel reads and writes the given tensors."""
        self.launches += 1
        if self.capturing is None:
            self._counting.add(LAUNCH, operation)
            self.stream.work(read, written)
        else:
            self.capturing.launches += 1

    def wait(self, kind: str, operation: str, waited: Event | None = None) -> None:
        """Count one wait of the host, for the current stream or `waited`. Raises DeviceError in a capture."""
        waited = waited or self.stream
        self.require_no_capture(f"{kind} ({operation})", waited)
        self._counting.add(kind, operation)
        advance(self.host, waited.clock)

    def read(self, kind: str, operation: str, *tensors: Tensor) -> None:
        """Count one wait of the host for the current stream, which reads tensors."""
        self.stream.work(tensors, ())
        self.wait(kind, operation)

    def copy(self, target: Tensor, source: Tensor, operation: str, non_blocking: bool = False) -> None:
        """Count a copy between the devices. The host waits for it, unless it asks not to and CUDA can do without."""
        to_gpu, pinned = on_gpu(target), is_pinned(target) or is_pinned(source)
        staged = to_gpu and not pinned  # so the host may change the source when this call returns
        self.stream.work([] if staged else [source], [target])
        if non_blocking and (pinned or (staged and source.nbytes <= STAGED_AT_ONCE)):
            self.require_no_capture(operation, self.stream)
            self._counting.add(f"{UPLOAD if to_gpu else DOWNLOAD} without a wait", operation)
        else:
            self.wait(UPLOAD if to_gpu else DOWNLOAD, operation)

    def use_on_host(self, read: Iterable[Tensor], written: Iterable[Tensor] = ()) -> None:
        """Check that copies of host memory, to which the host did not wait, are done."""
        for tensors, uses in ((read, "written"), (written, "uses")):
            for tensor in tensors:
                require_done(storage_of(tensor), uses, self.host)

    def require_no_capture(self, call: str, waited: Event | None = None) -> None:
        """Raise DeviceError if a capture forbids a call of the host. The call spoils the capture, too."""
        capture = self.capture
        spoils = capture and (capture.mode == "global" or capture.thread == get_ident())
        if capture and (spoils or waited in (capture.stream, self.everything)):
            capture.recording.broken = True
            raise DeviceError(f"operation not permitted when stream is capturing: {call}, at {source_line()}")

    @property
    def factory(self) -> str | None:
        """Device type for which this thread is calling a tensor factory, or None if it is not calling one."""
        return getattr(self._of_thread, "factory", None)

    @contextlib.contextmanager
    def making(self, to_gpu: bool) -> Iterator[None]:
        """Mark this thread as calling a tensor factory."""
        before, self._of_thread.factory = self.factory, "cuda" if to_gpu else "cpu"
        try:
            yield
        finally:
            self._of_thread.factory = before

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Let PyTorch's default generator draw the numbers of the GPU's generator."""
        if self.generator.captured and self.capturing is None:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        default = torch.default_generator
        of_host = default.get_state()
        default.set_state(self.generator.get_state())
        try:
            yield
        finally:
            self.generator.set_state(default.get_state())
            default.set_state(of_host)

    def replay(self, recording: Recording) -> None:
        self.launch("replay of a graph", written=recording.memory)
        self._counting.add(IN_GRAPH, "replay of a graph", recording.launches)
        with self.drawing():
            recording.replay()

    def modes(self) -> contextlib.ExitStack:
        """Return a context manager that enters the two modes which intercept all calls of the current thread."""
        stack = contextlib.ExitStack()
        stack.enter_context(PythonApi(self))
        stack.enter_context(DeviceRules(self))
        return stack


@contextlib.contextmanager
def pretend_gpu(card: Card = LARGE) -> Iterator[PretendGpu]:
    """Provide one pretend GPU, `cuda:0`, for this thread and for threads that start inside the block."""
    gpu = PretendGpu(card)
    run = threading.Thread.run

    def run_with_gpu(thread: threading.Thread) -> None:
        with gpu.modes():
            run(thread)

    with pytest.MonkeyPatch.context() as patch:
        cuda_api(gpu, patch)
        patch.setattr(torch, "Generator", AnyGenerator)
        patch.setattr(placement, "memory", gpu.memory)
        gpu.shared_memory.patch(patch)
        patch.setattr(threading.Thread, "run", run_with_gpu)
        with gpu.modes():
            yield gpu
