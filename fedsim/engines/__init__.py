"""Engines: who trains the rows of a cohort, and where."""

from fedsim.engines.auto import AutoEngine
from fedsim.engines.batched import BatchedEngine
from fedsim.engines.distributed import DistributedEngine
from fedsim.engines.engine import Engine
from fedsim.engines.job import Memory, Schedule, Task
from fedsim.engines.serial import SerialEngine
from fedsim.engines.spawn import SpawnEngine
from fedsim.registry import Registry

engine = Registry("engine", given=("processes", "threads", "timeout"))
engine("serial")(SerialEngine)
engine("spawn")(SpawnEngine)
engine("batched")(BatchedEngine)
engine("auto")(AutoEngine)
engine("distributed")(DistributedEngine)

__all__ = [
    "AutoEngine",
    "BatchedEngine",
    "DistributedEngine",
    "Engine",
    "Memory",
    "Schedule",
    "SerialEngine",
    "SpawnEngine",
    "Task",
    "engine",
]
