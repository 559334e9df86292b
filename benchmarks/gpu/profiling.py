"""The kernels of a block with their times, the fraction of time in which the device was busy, and the host's calls."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fedsim.system.devices import synchronize

MOST_KERNELS = 12  # maximum number in the report
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


@contextlib.contextmanager
def profiled() -> Iterator[tuple[Callable[[], object], Callable[[], object], dict[str, Any]]]:
    """Yield functions that start and stop a recording, and a dict that is filled at the end of the block."""
    on_gpu = torch.cuda.is_available()
    recording = profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])
    device = torch.device("cuda" if on_gpu else "cpu")
    figures: dict[str, Any] = {}

    def stop() -> None:
        synchronize(device)
        recording.stop()

    yield recording.start, stop, figures
    events = [
        (event.name, event.device_type.name == "CUDA", event.time_range.start, event.time_range.end)
        for event in recording.events()
    ]
    figures |= summarize(events)


def summarize(events: list[tuple[str, bool, float, float]]) -> dict[str, Any]:
    """Summarize events (name, whether on the device, start and end in microseconds).

    The device is busy while at least one of its events lasts.
    """
    microseconds: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    kernels = sorted((start, end, name) for name, on_device, start, end in events if on_device)
    busy, last = 0.0, float("-inf")
    for start, end, name in kernels:
        microseconds[name] += end - start
        counts[name] += 1
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    span = last - kernels[0][0] if kernels else 0.0
    calls = [name for name, on_device, *_ in events if not on_device]
    return {
        **{"kernels": len(kernels), "launches": sum(name.startswith(LAUNCHES) for name in calls)},
        **{"waits": sum(name.startswith(WAITS) for name in calls)},
        "graphs": sum(name.startswith("cudaGraphLaunch") for name in calls),
        **{"busy_ms": round(busy / 1e3, 3), "span_ms": round(span / 1e3, 3)},
        "busy_share": round(busy / span, 3) if span else None,
        "top": [[name[:70], counts[name], round(us / 1e3, 3)] for name, us in microseconds.most_common(MOST_KERNELS)],
    }
