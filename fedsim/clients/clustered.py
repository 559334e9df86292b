"""Clustered federated learning: each worker trains the global model with the lowest loss on its samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from torch import Tensor

from fedsim.clients.base import State
from fedsim.clients.capabilities import PersonalModel, client_algorithm
from fedsim.clients.sgd import LocalSGD
from fedsim.core.numbers import Example, PositiveInt


@client_algorithm("ifca")
@dataclass(frozen=True)
class IFCA(LocalSGD, PersonalModel):
    """IFCA: k global models, of which each worker trains the one with the least loss on its data (Ghosh et al. 2020).

    Algorithm 1 of the paper with model averaging, where w_1, ..., w_k are the global models:

        worker i:  c = argmin_j (loss of w_j on the training samples of i);  x = w_c;  local steps of sgd;
                   sends x - w_c and c
        server:    w_j += aggregate of the updates with c = j;  without such updates w_j does not change

    The k models have different random initial parameters. The first starts like the global model of other client
    algorithms, so with k = 1 the results are those of `sgd`. Of models with equal losses, a worker selects the first.
    The aggregation rule is applied to the updates of each model separately, and so is an attack.

    The personal model of a worker is the global model with the least loss on its training samples. Tests of the global
    model, such as `test_accuracy` and tests of clients without training samples, use the first model. The records of
    rounds contain the selected models as `clusters`: 0 to k - 1 for each worker of `cohort`.

    Args:
        k: number of global models, > 0.
        lr, momentum, weight_decay, nesterov, dampening: parameters of SGD (see `sgd`).

    Cost: that of `sgd`, and k forward passes over the worker's samples per round, which the virtual clock does not
    count. A worker receives k models [d], and the server keeps k models.

    >>> algorithm = fedsim.clients.IFCA(lr=0.1, k=4)
    >>> algorithm.numbers_sent(d=100)  # besides the first model, and besides the update
    (300, 0)
    """

    k: Annotated[PositiveInt, Example(2)] = field(kw_only=True)

    @property
    def clusters(self) -> int:  # type: ignore[override]
        return self.k

    def server_state(self, row: Tensor) -> State:
        return {"clusters": row.expand(self.k - 1, -1)} if self.k > 1 else {}

    def personal_rows(self, rows: Tensor, worker_state: State) -> Tensor:
        return rows
