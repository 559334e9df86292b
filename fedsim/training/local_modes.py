"""Choice of how workers compute gradients and take steps, which depends on the client algorithm of the run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from fedsim.clients import FeatureLoss
from fedsim.core.training import Optimizer
from fedsim.training.accumulation import AccumulatingOptimizer
from fedsim.training.feature_gradients import FeatureGradients
from fedsim.training.gradients_at_points import PointModules, PointOptimizer
from fedsim.training.local_training import BatchGradients, LocalModel, LocalOptimizer
from fedsim.training.sample_gradients import PrivateGradients, SampleGradients
from fedsim.training.task import RunTask


def gradients_for(task: RunTask, modules: PointModules) -> Callable[[LocalModel], BatchGradients]:
    """Return the function that makes the `BatchGradients` of a worker.

    Args:
        task: description of the run.
        modules: modules for points other than the worker's parameters.
    """
    if (samples := SampleGradients.of(task)) is not None:
        return partial(PrivateGradients, task.objective, samples)
    if isinstance(task.algorithm, FeatureLoss):
        return partial(FeatureGradients, task.objective, task.algorithm, modules)
    return partial(BatchGradients, task.objective)


def optimizer_for(
    task: RunTask, modules: PointModules, personal_buffers: Tensor | None
) -> Callable[[LocalModel, BatchGradients], Optimizer]:
    """Return the function that makes the optimizer of a worker.

    Args:
        task: description of the run.
        modules: modules for points other than the worker's parameters.
        personal_buffers: buffers [cohort, b] of personal models that workers train in addition; None if there are none.
    """
    if not task.algorithm.element_wise:
        return lambda local, gradients: PointOptimizer(task, local, gradients, modules, personal_buffers)
    if (every := task.schedule.accumulation_steps) > 1:
        return lambda local, gradients: AccumulatingOptimizer(LocalOptimizer(task, local), every)
    return lambda local, gradients: LocalOptimizer(task, local)
