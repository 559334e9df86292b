"""Replacements for the functions of torch.cuda and torch.accelerator, for one GPU that is always idle."""

from __future__ import annotations

from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._dynamo  # imported first, because it stores the functions of torch.cuda that exist at import time

from tests.device.pretend.counting import SYNCHRONISATION
from tests.device.pretend.memory import Pool
from tests.device.pretend.placement import CPU, GPU, DeviceError, on_gpu
from tests.device.pretend.recording import Recording
from tests.device.pretend.streams import Event, Stream

if TYPE_CHECKING:
    from tests.device.pretend.gpu import PretendGpu


def cuda_api(gpu: PretendGpu, patch: pytest.MonkeyPatch) -> None:
    """Replace the functions by which Python asks PyTorch about GPUs, until `patch` is undone."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def synchronize(device: Any = None) -> None:
        if device is None or torch.device(device).type != "cpu":
            gpu.wait(SYNCHRONISATION, "synchronize", gpu.everything)

    memory, card = gpu.memory, gpu.card
    one_gpu = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "synchronize": synchronize,
        "current_stream": lambda device=None: gpu.stream,
        "empty_cache": nothing,
        "set_device_index": nothing,
        "current_device_index": lambda: 0,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
    }
    for name, value in one_gpu.items():
        patch.setattr(torch.accelerator, name, value, raising=False)
    of_cuda = {
        **{name: one_gpu[name] for name in ("is_available", "device_count", "synchronize", "current_stream")},
        **dict.fromkeys(("init", "_lazy_init", "set_device", "empty_cache", "ipc_collect"), nothing),
        **{
            name: lambda device=None: memory.sizes.total() - memory.free.total()
            for name in ("memory_allocated", "max_memory_allocated")
        },
        "memory_reserved": lambda device=None: memory.sizes.total(),
        "set_per_process_memory_fraction": lambda part, device=None: setattr(memory, "limit", part * card.total),
        "set_stream": gpu.set_stream,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "mem_get_info": lambda device=None: (card.free, card.total),
        "get_device_name": lambda device=None: card.name,
        "get_device_capability": lambda device=None: card.capability,
        "get_device_properties": lambda device=None: card.properties,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or card.computes_bf16,
        "default_generators": (gpu.generator,),
        "get_rng_state": lambda device=None: gpu.generator.get_state(),
        "set_rng_state": lambda state, device=None: gpu.generator.set_state(state),
        "manual_seed": gpu.generator.manual_seed,
        "manual_seed_all": gpu.generator.manual_seed,
        **dict.fromkeys(("_exchange_device", "_maybe_exchange_device"), lambda index: 0),
        "default_stream": lambda device=None: gpu.default_stream,
        "Stream": partial(Stream, gpu),
        "Event": partial(Event, gpu),
        "CUDAGraph": lambda *args, **kwargs: Graph(gpu),
        "graph_pool_handle": lambda: next(memory.new_pools),
        "is_current_stream_capturing": lambda: gpu.capturing is not None,
    }
    for name, value in of_cuda.items():
        patch.setattr(torch.cuda, name, value, raising=False)
    patch.setattr(torch._C, "_host_emptyCache", nothing, raising=False)  # torch.cuda.graph calls it
    patch.setattr(torch._C, "_cuda_endAllocateToPool", memory.end, raising=False)
    patch.setattr(torch._C, "_cuda_releasePool", memory.release, raising=False)
    patch.setattr(torch.cuda.graph, "default_capture_stream", None)
    patch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: False)  # nn.LSTM would move its weights
    patch.setattr(torch.Tensor, "device", property(_device_of))
    patch.setattr(torch.Tensor, "is_cuda", property(on_gpu))
    patch.setattr(torch.Tensor, "get_device", lambda tensor: 0 if on_gpu(tensor) else -1)
    _autocast_as_on_cpu(patch)


def _device_of(tensor: torch.Tensor) -> torch.device:
    if on_gpu(tensor):
        return GPU
    with torch._C.DisableTorchFunction():
        return torch._C.TensorBase.device.__get__(tensor)


def _autocast_as_on_cpu(patch: pytest.MonkeyPatch) -> None:
    """Redirect CUDA autocast to CPU autocast, because all operations are CPU operations."""

    class Autocast(torch.autocast):
        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            super().__init__(CPU.type if device_type == GPU.type else device_type, *args, **kwargs)

    patch.setattr(torch, "autocast", Autocast)
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        of_cpu = getattr(torch, name)
        patch.setattr(torch, name, lambda device_type=None, of_cpu=of_cpu: of_cpu(CPU.type))


class Graph:
    """A CUDA graph; `torch.cuda.graph` calls `capture_begin` and `capture_end`."""

    def __init__(self, gpu: PretendGpu) -> None:
        self._gpu, self.recording, self._pools = gpu, Recording(), list[Pool]()

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global", **options: Any) -> None:
        gpu = self._gpu
        if gpu.capture is not None or gpu.stream is gpu.default_stream:
            raise RuntimeError("a capture is under way, or the current stream is the default stream")
        self.stream, self.thread, self.mode = gpu.stream, get_ident(), capture_error_mode
        self._pool = pool or next(gpu.memory.new_pools)
        gpu.memory.begin(self._pool)
        gpu.capture, gpu.generator.captured = self, True

    def capture_end(self) -> None:
        gpu = self._gpu
        gpu.capture, gpu.memory.pool = None, (0, 0)
        if self.recording.broken:  # the rest of the clean-up is skipped, as before PyTorch 2.12
            raise DeviceError("CUDA error: operation failed due to a previous error during capture")
        gpu.memory.end(0, self._pool)
        self._pools.append(self._pool)
        gpu.generator.captured = False
        gpu.graphs.append(self.recording)

    def replay(self) -> None:
        self._gpu.replay(self.recording)

    def reset(self) -> None:
        """Release the pool, if the capture has succeeded."""
        while self._pools:
            self._gpu.memory.release(0, self._pools.pop())

    __del__ = reset
