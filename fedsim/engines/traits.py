"""What an engine can do, known before it starts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedsim.system.devices import default_processes

SETTINGS_OF_POOLS = frozenset(("timeout", "worker_retries"))


@dataclass(frozen=True)
class EngineTraits:
    """Facts about an engine for the checks of an experiment.

    Attributes:
        own_settings: the keys of `SETTINGS_OF_ENGINES` that it uses, besides those of process pools.
        pool_from: the number of processes from which it starts a pool, whose processes may die; None: never.
        one_process_on_gpu: whether one process is the default on an accelerator.
        stacks: whether it may train stacks of rows.
        ranks: whether it is one of several programs that a launcher has started.
        chooses: whether it runs a task as another engine, which it chooses.
        races_on: the engine whose processes race if this one is named; None: it cannot race.
    """

    own_settings: frozenset[str] = frozenset()
    pool_from: int | None = None
    one_process_on_gpu: bool = False
    stacks: bool = False
    ranks: bool = False
    chooses: bool = False
    races_on: str | None = None

    def may_lose_processes(self, processes: int) -> bool:
        """Whether one of at most so many processes may die while the run continues."""
        return self.pool_from is not None and processes >= self.pool_from

    def settings(self, processes: int) -> frozenset[str]:
        """The keys of `SETTINGS_OF_ENGINES` that the engine uses with at most so many processes."""
        return self.own_settings | (SETTINGS_OF_POOLS if self.may_lose_processes(processes) else frozenset())

    def default_processes(self, device: torch.device, cohort: int, threads: int) -> int:
        """The number of processes for a cohort if the experiment does not set it."""
        if self.pool_from is None or (self.one_process_on_gpu and device.type != "cpu"):
            return 1
        return default_processes(device, cohort, threads)
