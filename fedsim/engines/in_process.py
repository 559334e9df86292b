"""The backend of engines with one process: this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from fedsim.engines.backend import Backend
from fedsim.engines.executor import Executor, MakeTrainer
from fedsim.engines.pool.process_context import ProcessContext
from fedsim.engines.task import SharedState, TaskSpec
from fedsim.errors import FedsimError, WorkerError
from fedsim.system.devices import release_memory
from fedsim.system.limits import format_failure

T = TypeVar("T")


class InProcess(Backend):
    """This process, with so many threads; they are as before when it is closed."""

    processes: int = 1

    def __init__(self, threads: int) -> None:
        self._threads_before = torch.get_num_threads()
        self._executor: Executor | None = None
        self._began = False
        torch.set_num_threads(threads)

    def begin(self, task: TaskSpec, shared: SharedState, make_trainer: MakeTrainer) -> None:
        self.shared, self._began = shared, True
        self._process = ProcessContext.alone()
        self._executor = Executor(self._process, task, shared, make_trainer)

    def run(self, method: Callable[..., T], *arguments: object) -> list[T]:
        assert self._executor is not None
        try:
            return [self._executor.run(method, *arguments)]
        except FedsimError:
            raise
        except Exception as error:
            raise WorkerError(f"{self._describe_failure()}: {format_failure(error)}") from error

    def _describe_failure(self) -> str:
        table = self._process.table
        worker = table.worker(0)
        return f"{worker} failed" if worker else f"failed {table.activity(0)}"

    def leave(self) -> None:
        if not self._began:
            return
        self._began, self._executor = False, None
        device = self.shared.global_row.device
        del self.shared
        release_memory(device)

    def close(self) -> None:
        self.leave()
        torch.set_num_threads(self._threads_before)
