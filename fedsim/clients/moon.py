"""MOON: SGD with a contrastive term between the features of three models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from fedsim.clients.algorithm import WorkerRound
from fedsim.clients.sgd import LocalSGD
from fedsim.clients.solver import NonNegative, Positive, State, solver


@solver("moon")
@dataclass(frozen=True)
class Moon(LocalSGD):
    """SGD on the loss plus mu times a contrastive loss between features of models. Li et al. 2021.

    For a sample with the features z of the worker's model, z_global of the row it was sent and z_previous of its model
    at the end of its last round (at first the first global model), with the cosine similarity `sim`:

        -log(exp(sim(z, z_global) / t) / (exp(sim(z, z_global) / t) + exp(sim(z, z_previous) / t)))

    Features are what the model's `features`, a method or a module that its forward calls, returns; otherwise the input
    of the last nn.Linear that forward calls. All three models compute them in training mode, with the same dropout
    masks. The paper uses evaluation mode for the last two. With mu = 0 it is `sgd`.

    Args:
        mu: weight of the contrastive loss, >= 0. The paper tries 0.1 to 10.
        temperature: t, > 0.
        lr, momentum, weight_decay, nesterov: see `SGD`.

    Cost: as sgd, and two more forward passes and two states [d]; each worker keeps its last model, [d].

    >>> solver = fedsim.clients.Moon(mu=1.0)
    >>> z = torch.tensor([[1.0, 0.0]])
    >>> solver.feature_loss(z, [z, -z])
    tensor([0.0181])
    """

    mu: NonNegative = 1.0
    temperature: Positive = 0.5
    uses_start_row: ClassVar[bool] = True

    def worker_state(self, row: Tensor) -> State:
        return {"previous": row.clone()} if self.mu else {}

    def start(self, rows: Tensor) -> State:
        return {**super().start(rows), **({"sent": rows.clone(), "previous": rows.clone()} if self.mu else {})}

    def start_round(self, rows: Tensor, worker: WorkerRound) -> State:
        state = self.start(rows)
        for name, kept in worker.kept.items():
            state[name].copy_(kept)
        return state

    def finish(self, rows: Tensor, state: State, worker: WorkerRound) -> State:
        if self.mu:
            worker.kept["previous"] = rows.clone()
        return {}

    def feature_points(self, state: State) -> Sequence[Tensor]:
        return [state["sent"], state["previous"]] if "sent" in state else []

    def feature_loss(self, features: Tensor, at_points: Sequence[Tensor]) -> Tensor:
        to_sent, to_previous = (F.cosine_similarity(features, other, dim=-1) for other in at_points)
        return self.mu * F.softplus((to_previous - to_sent) / self.temperature)
