"""Engines: how and in which processes the workers of a round are trained."""

from fedsim.engines.auto import AutoEngine
from fedsim.engines.base import Engine, EngineRegistry
from fedsim.engines.distributed import DistributedEngine
from fedsim.engines.named import BatchedEngine, ProcessesEngine, SerialEngine, SpawnEngine
from fedsim.training.task import RunTask

engine = EngineRegistry("engine", inputs=("processes", "threads", "timeout", "start_method"))
engine("serial")(SerialEngine)
engine("processes")(ProcessesEngine)
engine("spawn")(SpawnEngine)
engine("batched")(BatchedEngine)
engine("auto")(AutoEngine)
engine("distributed")(DistributedEngine)

__all__ = [
    "AutoEngine",
    "BatchedEngine",
    "DistributedEngine",
    "Engine",
    "ProcessesEngine",
    "RunTask",
    "SerialEngine",
    "SpawnEngine",
    "engine",
]
