"""Capture of computations as CUDA graphs. A trial run first rejects operations that a graph does not support."""

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

WARM_UPS = 1  # warm-up runs on the capture stream, in which libraries allocate workspaces

Run = Callable[[], None]

_VALUE_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}
# Functions that convert a Python number to a tensor on the CPU, if they have no other input.
_OF_NUMBERS = {torch.ops.aten.scalar_tensor.default, torch.ops.aten._to_copy.default}
# Functions that end allocation from a capture's memory pool: from PyTorch 2.8 on, and before.
_END_ALLOCATION = "_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"


def can_capture(device: torch.device) -> bool:
    """Whether a device supports CUDA graphs."""
    return device.type == "cuda"


class GraphPool:
    """Captures CUDA graphs on one device. The graphs share memory, so only one may run at a time.

    A replay overwrites this memory. Graphs must therefore write results to tensors allocated before the capture.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def capture(self, run: Run) -> Run:
        """Capture a call of `run` as a CUDA graph, and return a function that replays it.

        Raises ExperimentError if `run` uses an operation that a CUDA graph does not support.

        `run` is a function that uses the same tensors in each call.
        """
        require_capturable(run, self.device)
        return self.record(run)

    def record(self, run: Run, warm_up: Run | None = None) -> Run:
        """Do what `capture` does, but without first checking whether a CUDA graph supports all operations.

        Args:
            run: function that uses the same tensors in each call.
            warm_up: function that is called before the capture: a part of `run` with the same operations. None: `run`
                itself is called.
        """
        with torch.cuda.device(self.device):
            caller, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
            self._stream.wait_stream(caller)
            try:
                with torch.cuda.stream(self._stream):
                    for _ in range(WARM_UPS):
                        (warm_up or run)()
            finally:
                caller.wait_stream(self._stream)  # also if a warm-up fails: later work uses its memory again
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # the pool cannot use this memory
            # torch.cuda.graph would stay on this stream if a failed capture cannot be ended
            with torch.cuda.stream(self._stream):
                self._record(graph, run)
        return graph.replay

    def _record(self, graph: torch.cuda.CUDAGraph, run: Run) -> None:
        """Capture a call of `run` on the current stream. Other threads, as in a notebook, may use the GPU meanwhile."""
        try:
            graph.capture_begin(self._handle, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # a second error, if the first one has spoiled the capture
                    graph.capture_end()
                raise
            graph.capture_end()
        except BaseException:
            self._recover()
            raise

    @cached_property
    def _handle(self) -> Any:
        return torch.cuda.graph_pool_handle()

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def _recover(self) -> None:
        """Reset PyTorch's random generator and memory allocator after a failed capture.

        A graph releases its reference to the memory pool only if its capture has been ended.
        """
        generator = torch.cuda.default_generators[self.device.index]
        generator.graphsafe_set_state(generator.clone_state())
        pool = self.device.index, self._handle
        for name in _END_ALLOCATION:
            if hasattr(torch._C, name):
                with contextlib.suppress(RuntimeError):  # raised if the capture has been ended
                    getattr(torch._C, name)(*pool)
                    torch._C._cuda_releasePool(*pool)
        del self._handle  # PyTorch does not capture into a pool that has been released


def require_capturable(run: Run, device: torch.device) -> int:
    """Return the approximate number of kernels that `run` launches, which are the nodes of a CUDA graph.

    Raises ExperimentError, with the reason, if a CUDA graph does not support the operations of `run`.

    `run` is called twice. The global random state does not change.
    """
    with preserve_random_state(device):
        run()
        before = global_states(device)
        with CaptureCheck(device) as check:
            run()
        if global_states(device) != before:
            raise ExperimentError("a training step draws random numbers, which a CUDA graph does not support")
    return check.nodes


def kernels_of(function: Any, args: tuple) -> int:
    """Return how many kernels an operation launches: none for a view, about one for most other operations.

    One operation runs all time steps of all layers of a recurrent network. cuDNN launches about two kernels for each
    step of a layer: a matrix product, and the gates.
    """
    if function.is_view or "rnn" not in function.name():
        return int(not function.is_view)
    named = dict(zip((argument.name for argument in function._schema.arguments), args, strict=False))
    state = named.get("hx")  # [layers, samples, values]; the inputs are [time, samples, values], in any order
    return 1 if state is None else 2 * len(state) * (named["input"][..., 0].numel() // state.shape[1])


class OperationCheck(TorchDispatchMode):
    """Base class for contexts that inspect each PyTorch operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def depends_on_values(function: Any, args: tuple, indexing: Collection[Any]) -> bool:
    """Whether an operation copies tensor values to the CPU, or the shape of its result depends on tensor values.

    Args:
        function: operation.
        args: arguments of the call.
        indexing: operations whose second argument is a list of indices.
    """
    if function in indexing:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return bool(_VALUE_DEPENDENT & set(function.tags))


class CaptureCheck(OperationCheck):
    """Context manager that raises ExperimentError for operations that a CUDA graph does not support.

    These are operations that copy values from the GPU to the CPU, or that use tensors on another device. Two kinds of
    CPU tensors are allowed: Python numbers that PyTorch converts to tensors, which become constants of the graph, and
    the random state that attention passes to its backward pass, which is on the GPU during a capture.

    `nodes` is the approximate number of kernels that the operations launch.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self.nodes = device, 0
        self._constants: list[Tensor] = []  # Python numbers that PyTorch converted to tensors

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if depends_on_values(function, args, _INDEXING):
            raise ExperimentError(
                f"the computation reads tensor values on the host (in {function}), which a CUDA graph does not support"
            )
        self.nodes += kernels_of(function, args)
        input_tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        result = function(*args, **kwargs)
        if function in _OF_NUMBERS and not input_tensors:
            self._constants.append(result)
        if input_tensors and not function.is_view:  # a view or a tensor without inputs is checked when it is used
            tensors = [*input_tensors, *(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))]
            if "attention" in function.name():  # the others are states of the random generator
                tensors = [tensor for tensor in tensors if tensor.is_floating_point()]
            self._require_here(function, tensors)
        return result

    def _require_here(self, function: Any, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if tensor.device != self._device and not any(tensor is constant for constant in self._constants):
                raise ExperimentError(
                    f"the computation uses a tensor on {tensor.device} (in {function}), but a CUDA graph needs all "
                    f"tensors on {self._device}"
                )
