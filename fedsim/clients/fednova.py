"""FedNova: updates are divided by the worker's amount of local work, so that uneven work does not bias the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.clients.algorithm import WorkerRound
from fedsim.clients.sgd import LocalSGD
from fedsim.clients.solver import State, solver


@solver("fednova")
@dataclass(frozen=True)
class FedNova(LocalSGD):
    """Normalised averaging of the updates of `sgd`. Wang et al. 2020, section 4.

        worker k:  y = x;  K local steps of sgd;  sends (y - x) / |a_k|, |a_k|, and its weight p_k
        server:    x += tau_eff times the aggregate of the (y - x) / |a_k|,  tau_eff = sum p_k |a_k| / sum p_k

    y - x = -lr times the sum over the steps s of a_k[s] gradient[s]; |a_k| = sum of a_k[s]. It is K without momentum,
    A = (K - r (1 - r^K) / (1 - r)) / (1 - r) with momentum r, and K + r A with Nesterov's. With equal K it is FedAvg.
    The weights p_k are those of the aggregation, for example the numbers of samples; rules without weights give equal
    ones. With weights by inverse probability, the aggregate is unbiased, but not its product with tau_eff, which is a
    ratio of sums over the same cohort.

    Args:
        lr, momentum, weight_decay, nesterov: see `SGD`; weight decay counts as a part of the gradient.

    Cost: as sgd, with a state of [d] for the row that was sent, and two numbers sent by each worker.

    >>> algorithm = fedsim.clients.FedNova(lr=0.1, momentum=0.5)
    >>> algorithm.normaliser(torch.tensor([1, 2, 3]))  # 1, 1 + 1.5, 1 + 1.5 + 1.75
    tensor([1.0000, 2.5000, 4.2500], dtype=torch.float64)
    """

    def normaliser(self, steps: Tensor) -> Tensor:
        """|a_k|, the sum of the factors of all gradients after so many steps, float64."""
        r, steps = self.momentum, steps.double()
        with_momentum = (steps - r * (1 - r**steps) / (1 - r)) / (1 - r)
        return steps + r * with_momentum if self.nesterov else with_momentum

    def server_state(self, row: Tensor) -> State:
        return {"tau_eff": row.new_zeros(1)}

    def send(self, server: State) -> State:
        return {}

    def message(self, row: Tensor) -> State:
        return {"weight": row.new_zeros(1), "weighted_normaliser": row.new_zeros(1)}

    def start(self, rows: Tensor) -> State:
        return {**super().start(rows), "start": rows.clone()}

    def finish(self, rows: Tensor, state: State, worker: WorkerRound) -> State:
        normaliser = self.normaliser(worker.steps).to(rows.dtype)
        divisor = torch.where(worker.steps > 0, normaliser, 1)  # the update of a worker without samples is 0
        rows.copy_(state["start"] + (rows - state["start"]) / divisor)
        return {"weight": worker.weights, "weighted_normaliser": worker.weights * normaliser}

    def receive(self, server: State, sums: State, workers: int, population: int) -> None:
        if workers:
            server["tau_eff"].copy_(sums["weighted_normaliser"] / sums["weight"])

    def correct(self, update: Tensor, server: State, workers: int, population: int) -> None:
        update.mul_(server["tau_eff"])
