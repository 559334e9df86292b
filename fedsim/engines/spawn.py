"""The engine `spawn`: P persistent processes share the rows, the columns and the test batches among themselves."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from fedsim.engines.crew import Crew, Seat
from fedsim.engines.engine import Engine
from fedsim.engines.job import Memory, Task
from fedsim.engines.station import MakeTrainer, Station
from fedsim.engines.trainer import RowTrainer
from fedsim.errors import ExperimentError, FedsimError, one_line, show
from fedsim.system.devices import release_memory, synchronize


class SpawnEngine(Engine):
    """P processes started once with `torch.multiprocessing` spawn, N workers dealt to them.

    Rows, gradients and data lie in shared memory, or in CUDA memory that the processes open by handle; nothing large
    goes through a pipe. On a CPU the results are bit-identical to the engine `serial`.
    """

    racing: ClassVar[str] = "spawn"

    def __init__(self, processes: int, threads: int, timeout: float) -> None:
        self._staff = processes, threads, timeout
        self._crew = Crew(*self._staff)
        self._began = False

    def begin(self, task: Task, memory: Memory, trainer: MakeTrainer = RowTrainer) -> None:
        self.leave()
        if not self.at_work:  # it lost its processes as it began before
            self._crew = Crew(*self._staff)
        self.memory = memory.share()
        self._began = True
        self._work = task, self.memory, trainer
        release_memory(task.device)  # what this process used to try the model, say
        try:
            self._call(_take_station, *self._work)
        except RuntimeError as error:
            if isinstance(error, FedsimError) or task.device.type == "cpu":
                raise
            raise ExperimentError(
                f"device = {show(str(task.device))}: its memory cannot be shared between processes here "
                f"({one_line(error)}); use engine=serial"
            ) from error

    @property
    def can_lose_processes(self) -> bool:
        return True

    def replace_processes(self) -> None:
        """All of them, since the others may be in the middle of anything; they start side by side, as fast as one."""
        self._crew.close()
        release_memory(self.memory.global_row.device)
        self._crew = Crew(*self._staff)
        self.memory.unfit.zero_()  # new stations count aggregations from the first
        self._call(_take_station, *self._work)

    def facts(self) -> dict[str, Any]:
        return {"processes": self._crew.count}

    def _each(self, method: str, *arguments: object) -> list[Any]:
        return self._call(_at_station, method, *arguments)

    def call(self, function: Callable[..., Any], *arguments: object) -> list[Any]:
        """Run `function(seat, station, *arguments)` in every process; the results in their order. See `Crew.call`."""
        return self._call(_beside_station, function, *arguments)

    def _call(self, function: Callable[..., Any], *arguments: object) -> list[Any]:
        """Call a function in every process, which finds on the device what this process has written there."""
        synchronize(self.memory.global_row.device)
        return self._crew.call(function, *arguments)

    @property
    def at_work(self) -> bool:
        return self._crew.at_work

    def close(self) -> None:
        try:
            self.leave()
        finally:
            self._crew.close()

    def leave(self) -> None:
        """Processes first: CUDA memory must be let go of before its owner frees it."""
        if not self._began:
            return
        self._began = False
        device = self.memory.global_row.device
        try:
            if self._crew.at_work:
                self._crew.call(_leave_station)  # no need to wait for a device, which may have failed
        finally:
            del self.memory, self._work
        release_memory(device)


def _take_station(seat: Seat, task: Task, memory: Memory, trainer: MakeTrainer) -> None:
    if task.device.type != "cpu":
        torch.get_device_module(task.device).set_device(task.device)
    seat.belongings["station"] = Station(seat, task, memory, trainer)


def _at_station(seat: Seat, method: str, *arguments: object) -> Any:
    return seat.belongings["station"].do(method, *arguments)


def _beside_station(seat: Seat, function: Callable[..., Any], *arguments: object) -> Any:
    return function(seat, seat.belongings["station"], *arguments)


def _leave_station(seat: Seat) -> None:
    seat.belongings.clear()
    gc.collect()
