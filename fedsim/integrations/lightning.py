"""Robust aggregation of gradients in Lightning's data-parallel training."""

# ruff: noqa: E402  (the package is checked before it is imported)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from fedsim.aggregation.inputs import Nonfinite
from fedsim.aggregation.resolve import Stage
from fedsim.errors import ExperimentError
from fedsim.integrations.ddp import RobustState, robust_hook
from fedsim.system.packages import import_extra

import_extra("lightning", extra="lightning", purpose="fedsim.integrations.lightning")

from lightning.pytorch import Callback, LightningModule, Trainer


class RobustGradients(Callback):
    """A callback that aggregates the gradients of all ranks by a rule, in place of their mean.

        Trainer(strategy="ddp", devices=8, callbacks=[RobustGradients("krum", f=2)])

    It registers `fedsim.integrations.ddp.robust_hook` as training starts. Unlike the argument `ddp_comm_hook` of
    DDPStrategy, which Lightning ignores on CPUs, it has an effect on every device. Each fit begins with a new state.

    Args:
        rule, seed, nonfinite, params: as of `RobustState`.

    Raises ExperimentError (a ValueError) for an unknown rule or a wrong parameter, and as training starts if the
    strategy is not "ddp" or one that derives from it.
    """

    def __init__(
        self, rule: Stage | Sequence[Stage], *, seed: int = 0, nonfinite: Nonfinite = "error", **params: Any
    ) -> None:
        self._new_state = lambda: RobustState(rule, seed=seed, nonfinite=nonfinite, **params)
        self._new_state()  # raises an error now if a parameter is wrong

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = trainer.strategy.model
        if not isinstance(model, DistributedDataParallel):
            strategy = type(trainer.strategy).__name__
            raise ExperimentError(f'RobustGradients: needs Trainer(strategy="ddp"), not {strategy}')
        model.register_comm_hook(self._new_state(), robust_hook)
