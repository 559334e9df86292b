"""The pretend GPU: its generator, its counts and the graph that is being captured."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch

from tests.device.pretend.cards import LARGE, Card
from tests.device.pretend.counting import IN_GRAPH, LAUNCH, Counting, Counts, source_line
from tests.device.pretend.cuda_api import cuda_api
from tests.device.pretend.generators import AnyGenerator, Generator
from tests.device.pretend.ipc import SharedMemory
from tests.device.pretend.placement import DeviceError
from tests.device.pretend.python_api import PythonApi
from tests.device.pretend.recording import Recording
from tests.device.pretend.rules import DeviceRules


class PretendGpu:
    """A pretend GPU.

    Attributes:
        card: model of the card.
        generator: generator of the random numbers on the GPU.
        capturing: the graph that is being captured, or None.
        graphs: the captured graphs, in order.
        launches: total number of kernel launches, inside and outside of counting blocks.
        shared_memory: memory that has been sent to other processes.
        pools: memory pools from which the allocator takes memory during a capture.
    """

    def __init__(self, card: Card) -> None:
        self.card = card
        self.generator = Generator()
        self.capturing: Recording | None = None
        self.graphs: list[Recording] = []
        self.pools = set[object]()
        self.shared_memory = SharedMemory()
        self.launches = 0
        self._counting, self._of_thread = Counting(), threading.local()

    def counting(self) -> contextlib.AbstractContextManager[Counts]:
        """Return a context manager that counts launches and waits. Blocks can be nested."""
        return self._counting.block()

    def launch(self, operation: str) -> None:
        self.launches += 1
        if self.capturing is None:
            self._counting.add(LAUNCH, operation)
        else:
            self.capturing.launches += 1

    def wait(self, kind: str, operation: str) -> None:
        """Count one wait of the host. Raises DeviceError while a graph is captured."""
        if self.capturing is not None:
            self.capturing.broken = True
            raise DeviceError(
                f"operation not permitted when stream is capturing: {kind} ({operation}), at {source_line()}"
            )
        self._counting.add(kind, operation)

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
        self.launch("replay of a graph")
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
        gpu.shared_memory.patch(patch)
        patch.setattr(threading.Thread, "run", run_with_gpu)
        with gpu.modes():
            yield gpu
