"""Replacements for the functions of torch.cuda and torch.accelerator, for one GPU that is always idle."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._dynamo  # imported first, because it stores the functions of torch.cuda that exist at import time

from tests.device.pretend.counting import SYNCHRONISATION
from tests.device.pretend.placement import CPU, GPU, DeviceError, on_gpu
from tests.device.pretend.recording import Recording

if TYPE_CHECKING:
    from tests.device.pretend.gpu import PretendGpu


def cuda_api(gpu: PretendGpu, patch: pytest.MonkeyPatch) -> None:
    """Replace the functions by which Python asks PyTorch about GPUs, until `patch` is undone."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def synchronize(device: Any = None) -> None:
        if device is None or torch.device(device).type != "cpu":
            gpu.wait(SYNCHRONISATION, "synchronize")

    class Stream(_Stream):
        def synchronize(self) -> None:
            synchronize()

    stream, card = Stream(), gpu.card
    one_gpu = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "synchronize": synchronize,
        "current_stream": lambda device=None: stream,
        "empty_cache": nothing,
        "set_device_index": nothing,
        "current_device_index": lambda: 0,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
    }
    for name, value in one_gpu.items():
        patch.setattr(torch.accelerator, name, value, raising=False)
    of_cuda = {
        **{name: one_gpu[name] for name in ("is_available", "device_count", "synchronize", "current_stream")},
        **dict.fromkeys(("init", "_lazy_init", "set_device", "empty_cache", "ipc_collect", "set_stream"), nothing),
        **{name: lambda device=None: card.total - card.free for name in ("memory_allocated", "max_memory_allocated")},
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
        "device": lambda device=None: contextlib.nullcontext(),
        "stream": lambda stream=None: contextlib.nullcontext(),
        "Stream": Stream,
        "CUDAGraph": lambda *args, **kwargs: _Graph(gpu),
        "graph_pool_handle": lambda: (0, 1),
        "is_current_stream_capturing": lambda: gpu.capturing is not None,
    }
    for name, value in of_cuda.items():
        patch.setattr(torch.cuda, name, value, raising=False)
    patch.setattr(torch._C, "_host_emptyCache", nothing, raising=False)  # torch.cuda.graph calls it
    patch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: gpu.pools.discard(pool), raising=False)
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


class _Stream:
    """A CUDA stream on which all work finishes at once."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = GPU

    def wait_stream(self, stream: _Stream) -> None:
        pass


class _Graph:
    """A CUDA graph; `torch.cuda.graph` calls `capture_begin` and `capture_end`."""

    def __init__(self, gpu: PretendGpu) -> None:
        self._gpu, self._recording = gpu, Recording()

    def capture_begin(self, pool: object = None, **kwargs: Any) -> None:
        if self._gpu.capturing is not None:
            raise RuntimeError("a capture is under way")
        self._pool = pool
        self._gpu.pools.add(pool)
        self._gpu.generator.captured = True
        self._gpu.capturing = self._recording

    def capture_end(self) -> None:
        self._gpu.capturing = None
        if self._recording.broken:  # the rest of the clean-up is skipped, as before PyTorch 2.12
            raise DeviceError("CUDA error: operation failed due to a previous error during capture")
        self._gpu.pools.remove(self._pool)
        self._gpu.generator.captured = False
        self._gpu.graphs.append(self._recording)

    def replay(self) -> None:
        self._gpu.replay(self._recording)
