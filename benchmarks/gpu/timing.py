"""Times of work on a device and on its host. Imports PyTorch only."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

FEWEST, MOST = 3, 2000  # calls


def microseconds(work: Callable[[], object], device: str, seconds: float = 0.15) -> dict[str, float]:
    """Of one call: until the device has done it, and until the host can go on. As many calls as fill the time."""
    for _ in range(FEWEST):
        work()
    once = _timed(work, device, 1)[0]
    count = max(FEWEST, min(MOST, int(seconds / max(once, 1e-7))))
    whole, host = _timed(work, device, count)
    return {"us": round(1e6 * whole / count, 2), "host_us": round(1e6 * host / count, 2)}


def _timed(work: Callable[[], object], device: str, count: int) -> tuple[float, float]:
    _wait(device)
    started = time.perf_counter()
    for _ in range(count):
        work()
    host = time.perf_counter() - started
    _wait(device)
    return time.perf_counter() - started, host


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)
