"""A thread that does one thing at a time, so that whoever has it done can look after something else meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from typing import Any

import torch


class Background:
    """The thread, which is there from the first thing on. It does not keep the program from ending.

    Args:
        device: what it computes on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._things: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, thing: Callable[[], Any]) -> Future[Any]:
        """Have it done; the future of what it gives."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._go_on, name="fedsim-background", daemon=True)
            self._thread.start()
        done: Future[Any] = Future()
        self._things.put((thing, done))
        return done

    def _go_on(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.set_device_index(self._device.index)  # which is each thread's own
        while True:
            thing, done = self._things.get()
            try:
                done.set_result(thing())
            except BaseException as error:
                done.set_exception(error)
            del thing, done  # and what they hold


def ended(future: Future[Any], seconds: float) -> bool:
    """Whether it has come to its end, for which this waits so long at most."""
    try:
        future.exception(timeout=seconds)
    except TimeoutError:
        return False
    return True
