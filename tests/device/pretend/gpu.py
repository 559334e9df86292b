"""The pretend GPU itself: its generator, its counts, and the graph that is being captured."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch

from tests.device.pretend.counting import IN_GRAPH, LAUNCH, Counting, Counts, source_line
from tests.device.pretend.cuda_api import cuda_api
from tests.device.pretend.placement import DeviceError
from tests.device.pretend.python_api import PythonApi
from tests.device.pretend.recording import Recording
from tests.device.pretend.rules import DeviceRules


class Generator(torch.Generator):
    """The generator of a GPU, which stays in the state of capturing when a capture fails, as before PyTorch 2.12."""

    captured = False

    def graphsafe_set_state(self, state: torch.Generator) -> None:
        self.set_state(state.get_state())
        self.captured = False


class PretendGpu:
    """One pretend GPU.

    Attributes:
        generator: from which random numbers on the GPU are drawn.
        capturing: the graph that is being captured, if any.
        graphs: the graphs that were captured, in this order.
        launches: how many there were, counted or not.
        pools: the memory pools to which the allocator directs what is allocated in a capture.
    """

    def __init__(self) -> None:
        self.generator = Generator()
        self.capturing: Recording | None = None
        self.graphs: list[Recording] = []
        self.pools = set[object]()
        self.launches = 0
        self._counting, self._of_thread = Counting(), threading.local()

    def counting(self) -> contextlib.AbstractContextManager[Counts]:
        """A block that counts launches and waits; blocks can be nested."""
        return self._counting.block()

    def launch(self, operation: str) -> None:
        self.launches += 1
        if self.capturing is None:
            self._counting.add(LAUNCH, operation)
        else:
            self.capturing.launches += 1

    def wait(self, kind: str, operation: str) -> None:
        """Count a wait of the host. Raises DeviceError while a graph is captured."""
        if self.capturing is not None:
            self.capturing.broken = True
            raise DeviceError(
                f"operation not permitted when stream is capturing: {kind} ({operation}), at {source_line()}"
            )
        self._counting.add(kind, operation)

    @property
    def factory(self) -> str | None:
        """The type of the device for which Python is calling a factory in this thread; None if it calls none."""
        return getattr(self._of_thread, "factory", None)

    @contextlib.contextmanager
    def making(self, to_gpu: bool) -> Iterator[None]:
        """A block in which Python calls a factory."""
        before, self._of_thread.factory = self.factory, "cuda" if to_gpu else "cpu"
        try:
            yield
        finally:
            self._of_thread.factory = before

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """A block in which PyTorch's default generator draws what the GPU's generator would."""
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
        """The two modes that see all calls of the thread that enters them."""
        stack = contextlib.ExitStack()
        stack.enter_context(PythonApi(self))
        stack.enter_context(DeviceRules(self))
        return stack


@contextlib.contextmanager
def pretend_gpu() -> Iterator[PretendGpu]:
    """Have one pretend GPU, `cuda:0`, in this thread and in those that start until the block ends."""
    gpu = PretendGpu()
    run = threading.Thread.run

    def run_with_gpu(thread: threading.Thread) -> None:
        with gpu.modes():
            run(thread)

    with pytest.MonkeyPatch.context() as patch:
        cuda_api(gpu, patch)
        patch.setattr(threading.Thread, "run", run_with_gpu)
        with gpu.modes():
            yield gpu
