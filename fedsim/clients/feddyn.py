"""FedDyn: a linear term and a proximal term, whose fixed point is the optimum of the joint loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.clients.algorithm import WorkerRound
from fedsim.clients.sgd import LocalSGD
from fedsim.clients.solver import Positive, State, solver


@solver("feddyn")
@dataclass(frozen=True)
class FedDyn(LocalSGD):
    """SGD on the loss - <h_k, x_k> + alpha / 2 |x_k - w|^2, a dynamic regulariser. Acar et al. 2021, algorithm 1.

        worker k:  x_k = w;  local steps of sgd along the gradient - h_k + alpha (x_k - w)       (h, h_k = 0 at first)
                   h_k -= alpha (x_k - w);  sends x_k - w
        server:    D = aggregate of the x_k - w over the cohort S
                   h -= alpha |S| / N D;  w += D - h / alpha

    N is the number of workers. The paper averages without weights: `aggregate = "mean"`, so that |S| D is the sum of
    the updates. With another rule h follows what the rule returns. Workers who are not in the cohort keep their h_k.
    The server keeps h, and does not send it.

    Args:
        alpha: > 0. A small alpha needs accurate local solutions.
        lr, momentum, weight_decay, nesterov: see `SGD`.

    Cost: a row [d] for each worker that has taken part, and one more pass over the row in a step; the bytes of
    `sgd`.

    >>> algorithm = fedsim.clients.FedDyn(lr=0.1, alpha=0.5)
    >>> update, server = torch.tensor([1.0]), algorithm.server_state(torch.zeros(1))
    >>> algorithm.correct(update, server, workers=1, population=2)
    >>> update, server
    (tensor([1.5000]), {'h': tensor([-0.2500])})
    """

    alpha: Positive = 0.01
    uses_start_row: ClassVar[bool] = True

    def worker_state(self, row: Tensor) -> State:
        return {"h_k": torch.zeros_like(row)}

    def server_state(self, row: Tensor) -> State:
        return {"h": torch.zeros_like(row)}

    def send(self, server: State) -> State:
        return {}

    @property
    def decay(self) -> float:
        return self.weight_decay + self.alpha

    def start(self, rows: Tensor) -> State:
        return {**super().start(rows), "constant": rows * -self.alpha}

    def start_round(self, rows: Tensor, worker: WorkerRound) -> State:
        state = self.start(rows)
        state["constant"] -= worker.kept["h_k"]
        return state

    def finish(self, rows: Tensor, state: State, worker: WorkerRound) -> State:
        worker.kept["h_k"] = state["constant"].add_(rows, alpha=self.alpha).neg_()
        return {}

    def correct(self, update: Tensor, server: State, workers: int, population: int) -> None:
        h = server["h"].sub_(update, alpha=self.alpha * workers / population)
        update.sub_(h, alpha=1 / self.alpha)
