"""The kernels of a round, their durations, and the share of the time in which the device was busy."""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

MOST_KERNELS = 12  # in the report


class Profile:
    """Records the round after round `after_round`, as `on_round` of a run."""

    def __init__(self, after_round: int) -> None:
        self._after = after_round
        self._profile = profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU])

    def on_round(self, record: dict[str, Any]) -> None:
        if record["round"] == self._after:
            self._profile.start()
        if record["round"] == self._after + 1:
            torch.cuda.synchronize()
            self._profile.stop()

    def facts(self) -> dict[str, Any]:
        events = [event for event in self._profile.events() if event.device_type.name == "CUDA"]
        return summarize([(event.name, event.time_range.start, event.time_range.end) for event in events])


def summarize(kernels: list[tuple[str, float, float]]) -> dict[str, Any]:
    """Of kernels with start and end in microseconds: the device is busy where at least one of them runs."""
    microseconds: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    busy, last = 0.0, float("-inf")
    for name, start, end in sorted(kernels, key=lambda kernel: kernel[1:]):
        microseconds[name] += end - start
        counts[name] += 1
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    span = last - min((start for _, start, _ in kernels), default=last) if kernels else 0.0
    top = [[name[:70], counts[name], round(us / 1e3, 3)] for name, us in microseconds.most_common(MOST_KERNELS)]
    return {
        **{"kernels": len(kernels), "busy_ms": round(busy / 1e3, 3), "span_ms": round(span / 1e3, 3)},
        **{"busy_share": round(busy / span, 3) if span else None, "top": top},
    }
