"""The engine `spawn`: P persistent processes share the rows, the columns and the test batches among themselves."""

from __future__ import annotations

import gc

import torch

from fedsim.devices import synchronize
from fedsim.engines.crew import Crew, Seat
from fedsim.engines.engine import Engine
from fedsim.engines.job import Memory, Task
from fedsim.engines.station import Station


class SpawnEngine(Engine):
    """P processes started once with `torch.multiprocessing` spawn, N workers dealt to them.

    Rows, gradients and data lie in shared memory, or in CUDA memory that the processes open by handle; nothing large
    goes through a pipe. On a CPU the results are bit-identical to the engine `serial`.
    """

    def __init__(self, processes: int, threads: int, timeout: float) -> None:
        self._crew = Crew(processes, threads, timeout)
        self._busy = False

    def begin(self, task: Task, memory: Memory) -> None:
        self._leave()
        self.memory = memory.share()
        self._busy = True
        self._crew.call(_take_station, task, self.memory)

    def _each(self, method: str, *arguments: object) -> None:
        self._crew.call(_at_station, method, *arguments)

    def close(self, *, at_once: bool = False) -> None:
        if not at_once:
            self._leave()
        self._crew.close(at_once=at_once)

    def _leave(self) -> None:
        """Let go of the present task in all processes: CUDA memory must be let go of before its owner frees it."""
        if self._busy:
            self._crew.call(_leave_station)
            self._busy = False


def _take_station(seat: Seat, task: Task, memory: Memory) -> None:
    if task.device.type != "cpu":
        torch.get_device_module(task.device).set_device(task.device)
    seat.belongings["station"] = Station(seat, task, memory)


def _at_station(seat: Seat, method: str, *arguments: object) -> None:
    getattr(seat.belongings["station"], method)(*arguments)


def _leave_station(seat: Seat) -> None:
    station = seat.belongings.pop("station", None)
    if station is not None and station.task.device.type != "cpu":
        device = station.task.device
        del station
        gc.collect()
        synchronize(device)
