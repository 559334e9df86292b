"""The engine `serial`: this process trains one row after another. The reference for all others."""

from __future__ import annotations

from typing import Any

import torch

from fedsim.engines.crew import Seat, whereabouts, worker_in_hand
from fedsim.engines.engine import Engine
from fedsim.engines.job import Memory, Task
from fedsim.engines.station import MakeTrainer, Station
from fedsim.engines.trainer import RowTrainer
from fedsim.errors import FedsimError, WorkerError
from fedsim.system.devices import release_memory
from fedsim.system.limits import lines_of


class SerialEngine(Engine):
    """One process, one row after another."""

    one_process = True

    @classmethod
    def default_processes(cls, device: torch.device, cohort: int, threads: int) -> int:
        return 1

    def __init__(self, processes: int, threads: int, timeout: float) -> None:
        self._threads_before = torch.get_num_threads()
        self._station: Station | None = None
        self._began = False
        torch.set_num_threads(threads)

    def begin(self, task: Task, memory: Memory, trainer: MakeTrainer = RowTrainer) -> None:
        self.memory, self._began = memory, True
        self._seat = Seat.alone()
        self._station = Station(self._seat, task, memory, trainer)

    def facts(self) -> dict[str, Any]:
        return {"processes": 1}

    def leave(self) -> None:
        if not self._began:
            return
        self._began, self._station = False, None
        device = self.memory.global_row.device
        del self.memory
        release_memory(device)

    def _each(self, method: str, *arguments: object) -> list[Any]:
        try:
            return [self._station.do(method, *arguments)]
        except FedsimError:
            raise
        except Exception as error:
            here = self._seat.board, self._seat.index
            worker = worker_in_hand(*here)
            where = f"{worker} failed" if worker else f"failed {whereabouts(*here)}"
            raise WorkerError(f"{where}: {lines_of(error)}") from error

    def close(self) -> None:
        self.leave()
        torch.set_num_threads(self._threads_before)
