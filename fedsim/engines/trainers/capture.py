"""Capture of computations as CUDA graphs, after a trial run that refuses what a graph cannot hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedsim.core.randomness import global_states, preserve_random_state
from fedsim.errors import ExperimentError

WARM_UPS = 1  # runs on the stream of a capture, in which libraries allocate workspaces; trial runs come before

Run = Callable[[], None]

_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}
# How the allocator stops to use the memory pool of a capture: since PyTorch 2.8, and before.
_END_ALLOCATION = "_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"


def can_capture(device: torch.device) -> bool:
    """Whether a device has CUDA graphs."""
    return device.type == "cuda"


class GraphPool:
    """Captures computations on one device as CUDA graphs that share one pool of memory and one stream.

    A graph may reuse the memory of another for its intermediate results, because graphs of one pool never run at the
    same time. What has to last from one replay to the next must lie outside of the pool: in tensors that exist before
    the capture.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def capture(self, run: Run) -> Run:
        """Capture a call of `run`; returns what replays it.

        `run` is called several times before, and must leave the same tensors at the same addresses.

        Raises ExperimentError if `run` does what a graph cannot hold, and whatever CUDA raises if the capture fails.
        After that the random generators and the allocator work as before.
        """
        require_capturable(run, self.device)
        return self.record(run)

    def record(self, run: Run) -> Run:
        """The part of `capture` that needs a CUDA device."""
        with torch.cuda.device(self.device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    run()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._handle, stream=self._stream):
                    run()
            except Exception as error:
                self._recover()
                raise error.__context__ or error from None  # the end of a failed capture raises an error of its own
        return graph.replay

    @cached_property
    def _handle(self) -> Any:
        return torch.cuda.graph_pool_handle()

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def _recover(self) -> None:
        """After a failed capture: make the random generator and the allocator leave the state of capturing.

        PyTorch does so itself from version 2.12 on.
        """
        generator = torch.cuda.default_generators[self.device.index]
        generator.graphsafe_set_state(generator.clone_state())
        for name in _END_ALLOCATION:
            if hasattr(torch._C, name):
                with contextlib.suppress(RuntimeError):  # there is nothing to end
                    getattr(torch._C, name)(self.device.index, self._handle)


def require_capturable(run: Run, device: torch.device) -> None:
    """Call `run` twice, and raise ExperimentError with the reason if a CUDA graph cannot hold the second call.

    The first call may do what happens only once, such as to upload a constant. The state of the global random
    generators is the same afterwards.
    """
    with preserve_random_state(device):
        run()
        before = global_states(device)
        with CaptureCheck(device):
            run()
        if global_states(device) != before:
            raise ExperimentError("it draws random numbers")


class OperationCheck(TorchDispatchMode):
    """A dispatch mode that does not import PyTorch's compiler, which takes more than a second."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def depends_on_values(function: Any, args: tuple, indexing: Collection[Any]) -> bool:
    """Whether an operation reads values of its tensors on the host, or derives shapes from them.

    Args:
        indexing: operations whose second argument is a list of indices, of which only masks determine shapes.
    """
    if function in indexing:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return bool(_READS & set(function.tags))


class CaptureCheck(OperationCheck):
    """Raises ExperimentError if an operation reads numbers of the device, or works with tensors of another device.

    CUDA reports such reads only when a capture has failed. Values of CPU tensors it does not report at all: a graph
    keeps those of the capture.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._constants: list[Tensor] = []  # numbers of Python that PyTorch turned into tensors

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if depends_on_values(function, args, _INDEXING):
            raise ExperimentError(f"it reads numbers of the device ({function})")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        result = function(*args, **kwargs)
        if function is torch.ops.aten.scalar_tensor.default:
            self._constants.append(result)
        if given:  # a tensor that is made from nothing matters when it is used
            self._require_here(function, [*given, *(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))])
        return result

    def _require_here(self, function: Any, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if tensor.device != self._device and not any(tensor is constant for constant in self._constants):
                raise ExperimentError(f"it works with a tensor on {tensor.device} ({function})")
