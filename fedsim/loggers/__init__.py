"""Loggers: where the numbers of each round go besides the run folder: TensorBoard, Weights & Biases, MLflow."""

from fedsim.loggers import tensorboard, trackers  # noqa: F401  # they register their loggers
from fedsim.loggers.logger import Log, LoggedRun, logger

__all__ = ["Log", "LoggedRun", "logger"]
