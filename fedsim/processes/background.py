"""A daemon thread that runs functions one at a time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch


class SingleThreadExecutor:
    """Executor that runs functions one after another on one daemon thread, which does not delay the program's end.

    Args:
        device: current device of the thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fedsim-background", daemon=True)
        self._thread.start()

    def begin(self, function: Callable[[], Any]) -> Future[Any]:
        """Run a function on the thread, and return a future for its result."""
        done: Future[Any] = Future()
        self._calls.put((function, done))
        return done

    def end(self, seconds: float) -> bool:
        """Stop the thread after the queued functions. Return whether the thread ended within `seconds`."""
        self._calls.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.set_device_index(self._device.index)  # each thread has its own current device
        while (call := self._calls.get()) is not None:
            function, done = call
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)
            del call, function, done  # frees the objects that they refer to while the thread waits
