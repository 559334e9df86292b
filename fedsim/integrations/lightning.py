"""Robust gradient aggregation in Lightning's data-parallel training."""

# ruff: noqa: E402  (the package is checked before it is imported)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from fedsim.aggregation.inputs import Nonfinite
from fedsim.aggregation.resolve import Stage
from fedsim.errors import ExperimentError
from fedsim.hints.attributes import takes_component
from fedsim.integrations.ddp import RobustState, robust_hook
from fedsim.system.packages import import_extra

import_extra("lightning", extra="lightning", purpose="fedsim.integrations.lightning")

from lightning.pytorch import Callback, LightningModule, Trainer


class RobustGradients(Callback):
    """A Lightning callback that aggregates the gradients of all ranks with a robust rule instead of averaging them.

        Trainer(strategy="ddp", devices=8, callbacks=[RobustGradients("krum", f=2)])

    When training starts, the callback registers `fedsim.integrations.ddp.robust_hook` with a new RobustState. Unlike
    DDPStrategy's argument `ddp_comm_hook`, which Lightning ignores on CPUs, the callback works on every device.

    Args:
        name: aggregation rule, as in `fedsim.aggregate`: a name, a function, or a list of pre-aggregators that ends
            with a rule.
        seed: seed for the rule's random draws.
        nonfinite: what to do with gradients that contain NaN or infinity: "error", "exclude" or "keep".
        params: parameters of the rule, such as f.

    Raises ExperimentError (a ValueError) for an unknown rule or an invalid parameter, and when training starts with a
    strategy that is not based on DistributedDataParallel.
    """

    @takes_component("aggregate", "rule")
    def __init__(
        self, name: Stage | Sequence[Stage], *, seed: int = 0, nonfinite: Nonfinite = "error", **params: Any
    ) -> None:
        self._new_state = lambda: RobustState(name, seed=seed, nonfinite=nonfinite, **params)
        self._new_state()  # raises an error now if a parameter is invalid

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = trainer.strategy.model
        if not isinstance(model, DistributedDataParallel):
            strategy = type(trainer.strategy).__name__
            raise ExperimentError(
                f"RobustGradients: needs data-parallel training, but the strategy is {strategy}; "
                'use Trainer(strategy="ddp")'
            )
        model.register_comm_hook(self._new_state(), robust_hook)
