"""Properties of the engines, which decide the experiments and settings that an engine supports.

The classes of the engines are in `fedsim.engines`. They import this module, not the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fedsim.config.components import registry_of
from fedsim.system.devices import default_processes

DEFAULT_ENGINE = "auto"
RACING = "processes"  # the engine that runs `mode = "race"`
SETTINGS_OF_POOLS = frozenset(("start_method", "process_timeout", "max_restarts"))


@dataclass(frozen=True)
class EngineTraits:
    """Properties of an engine that decide which experiments and settings it supports.

    Attributes:
        own_settings: engine-specific settings that this engine supports, such as `cuda_graphs`, without the settings of
            process pools.
        pool_from: minimum number of processes for which the engine starts a process pool; None if it never does.
        one_process_on_gpu: whether the engine uses one process by default if the device is not a CPU.
        stacks: whether the engine may train several workers at once.
        ranks: whether a launcher such as torchrun starts the engine's processes.
        spawns: whether the engine always spawns its processes, regardless of the setting `start_method`.
        chooses: whether the engine itself chooses how a task is computed, as the engine `auto` does.
        races_on: name of the engine that replaces this engine in experiments with `mode = "race"`; None if this engine
            does not support these experiments.
    """

    own_settings: frozenset[str] = frozenset()
    pool_from: int | None = None
    one_process_on_gpu: bool = False
    stacks: bool = False
    ranks: bool = False
    spawns: bool = False
    chooses: bool = False
    races_on: str | None = None

    def may_lose_processes(self, processes: int) -> bool:
        """Whether the engine, with up to `processes` processes, starts child processes, which may die."""
        return self.pool_from is not None and processes >= self.pool_from

    def settings(self, processes: int) -> frozenset[str]:
        """Return the settings, such as `processes`, that this engine uses with up to `processes` processes."""
        return self.own_settings | (SETTINGS_OF_POOLS if self.may_lose_processes(processes) else frozenset())

    def default_processes(self, device: torch.device, cohort: int, threads: int) -> int:
        """Return the default number of processes for `cohort` workers per round and `threads` threads per process."""
        if self.pool_from is None or (self.one_process_on_gpu and device.type != "cpu"):
            return 1
        return default_processes(device, cohort, threads)


TRAITS = {
    "serial": EngineTraits(),
    "processes": EngineTraits(frozenset({"processes"}), pool_from=1, races_on=RACING),
    "spawn": EngineTraits(frozenset({"processes"}), pool_from=1, spawns=True, races_on="spawn"),
    "batched": EngineTraits(
        frozenset({"processes", "batched", "cuda_graphs"}), pool_from=2, one_process_on_gpu=True, stacks=True
    ),
    "auto": EngineTraits(
        frozenset({"processes", "batched"}),
        pool_from=1,
        one_process_on_gpu=True,
        stacks=True,
        chooses=True,
        races_on=RACING,
    ),
    "distributed": EngineTraits(frozenset({"distributed"}), stacks=True, ranks=True),
}
SETTINGS_OF_ENGINES = SETTINGS_OF_POOLS.union(*(traits.own_settings for traits in TRAITS.values()))


def engine_class(name: str) -> Any:
    """Return the class of the engine with this name or import path, a subclass of `fedsim.engines.Engine`.

    Raises ExperimentError if there is no such engine.
    """
    return registry_of("engines").get(name, "engine").target


def traits_of(name: str) -> EngineTraits:
    """Return the `EngineTraits` of the engine with this name or import path.

    Raises ExperimentError if there is no such engine.
    """
    return TRAITS[name] if name in TRAITS else engine_class(name).traits
