"""Client algorithms that correct federated averaging for heterogeneous workers: FedDyn, FedNova, Mime, SCAFFOLD.

FedDyn and SCAFFOLD correct the local steps of workers whose data differ. FedNova divides updates by the amount of local
work. Mime and MimeLite take local steps with the server's momentum, which is constant during a round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedsim.clients.algorithm import ClientAlgorithm, GradientAt, WorkerRound
from fedsim.clients.base import OuterProductGrad, State, add_multiple
from fedsim.clients.capabilities import CohortGradient, UpdateCorrection, client_algorithm
from fedsim.clients.sgd import LocalSGD, SGDSteps
from fedsim.core.numbers import FractionBelowOne, NonNegativeFloat, PositiveFloat


@client_algorithm("feddyn")
@dataclass(frozen=True)
class FedDyn(LocalSGD, UpdateCorrection):
    """FedDyn: SGD on the loss plus a dynamic regulariser, - <h_k, x_k> + alpha / 2 |x_k - w|^2 (Acar et al. 2021).

    Algorithm 1 of the paper, where w is the global model, x_k the model of worker k, and h and h_k start at 0:

        worker k:  x_k = w;  local steps of sgd along the gradient - h_k + alpha (x_k - w)
                   h_k -= alpha (x_k - w);  sends x_k - w
        server:    D = aggregate of the x_k - w over the cohort S
                   h -= alpha |S| / N D;  w += D - h / alpha

    N is the number of workers. The paper averages without weights (`aggregate = "mean"`), so that |S| D is the sum of
    the updates. With another aggregation rule, h is updated with the result of this rule. Workers that are not in the
    cohort keep their h_k. The server does not send h.

    Args:
        alpha: strength of the regulariser, > 0. A small alpha requires accurate local solutions.
        lr, momentum, weight_decay, nesterov: parameters of SGD (see `sgd`).

    Cost: one row [d] for each worker that has taken part, and one more pass over the row per step than `sgd`. The
    communication is that of `sgd`.

    >>> algorithm = fedsim.clients.FedDyn(lr=0.1, alpha=0.5)
    >>> update, server = torch.tensor([1.0]), algorithm.server_state(torch.zeros(1))
    >>> algorithm.correct(update, server, workers=1, population=2)
    >>> update, server
    (tensor([1.5000]), {'h': tensor([-0.2500])})
    """

    alpha: PositiveFloat = 0.01
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

    def correct(self, update: Tensor, server: State, workers: float, population: int) -> None:
        h = server["h"].sub_(update, alpha=self.alpha * workers / population)
        update.sub_(h, alpha=1 / self.alpha)


@client_algorithm("fednova")
@dataclass(frozen=True)
class FedNova(LocalSGD, UpdateCorrection):
    """FedNova: federated averaging of updates that are normalised by the amount of local work (Wang et al. 2020).

    Section 4 of the paper, where x is the global model:

        worker k:  y = x;  K local steps of sgd;  sends (y - x) / |a_k|, |a_k|, and its weight p_k
        server:    x += tau_eff times the aggregate of the (y - x) / |a_k|,  tau_eff = sum p_k |a_k| / sum p_k

    a_k[s] is the factor of the gradient of step s in the update: y - x = -lr sum_s a_k[s] gradient[s]. Its sum |a_k| is
    K without momentum, A = (K - r (1 - r^K) / (1 - r)) / (1 - r) with momentum r, and K + r A with Nesterov momentum.
    If K is the same for all workers, FedNova equals FedAvg.

    The weights p_k are those of the aggregation, for example the sample counts. They are equal if the rule has no
    weights. With `aggregate.weights = "inverse_probability"` the aggregate is unbiased, but its product with tau_eff is
    biased, because tau_eff is a ratio of sums over the same cohort.

    Args:
        lr, momentum, weight_decay, nesterov: parameters of SGD (see `sgd`). Weight decay counts as part of the
            gradient.

    Cost: that of `sgd`, and one more state tensor [d]. Each worker sends two more numbers.

    >>> algorithm = fedsim.clients.FedNova(lr=0.1, momentum=0.5)
    >>> algorithm.normaliser(torch.tensor([1, 2, 3]))  # 1, 1 + 1.5, 1 + 1.5 + 1.75
    tensor([1.0000, 2.5000, 4.2500], dtype=torch.float64)
    """

    def normaliser(self, steps: Tensor) -> Tensor:
        """Return the divisor |a_k| of the update of a worker with `steps` local steps, as a float64 number."""
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
        divisor = torch.where(worker.steps > 0, normaliser, 1)  # workers without samples take no steps
        rows.sub_(state["start"]).div_(divisor).add_(state["start"])
        return {"weight": worker.weights, "weighted_normaliser": worker.weights * normaliser}

    def receive(self, server: State, sums: State, workers: int, population: int) -> None:
        if workers:
            server["tau_eff"].copy_(sums["weighted_normaliser"] / sums["weight"])

    def correct(self, update: Tensor, server: State, workers: float, population: int) -> None:
        update.mul_(server["tau_eff"])


@client_algorithm("mimelite")
@dataclass(frozen=True)
class MimeLite(ClientAlgorithm):
    """MimeLite: SGD with the server's momentum m, which is constant during a round (Karimireddy et al. 2020).

    Each local step is x -= lr ((1 - beta) gradient + beta m). After the round m = beta m + (1 - beta) c, where c is the
    mean over the cohort of each worker's full gradient: the mean gradient of its samples at the model that it received.
    It is computed in batches of `local.batch_size` samples, and each batch counts by its number of samples. With
    beta = 0 the results are bit-identical to `sgd`.

    Args:
        lr: learning rate, >= 0.
        beta: decay rate of m, 0 <= beta < 1.

    Cost: one more pass over each worker's samples per round, and one state tensor [d]. Each worker receives and sends d
    more numbers than with `sgd`.

    >>> row, algorithm = torch.tensor([1.0]), fedsim.clients.MimeLite(lr=0.5, beta=0.5)
    >>> algorithm.step(row, torch.tensor([2.0]), {"momentum": torch.tensor([-2.0])})
    >>> row
    tensor([1.])
    """

    lr: NonNegativeFloat = 0.05
    beta: FractionBelowOne = 0.9
    full_gradient: ClassVar[bool] = True

    def server_state(self, row: Tensor) -> State:
        return {"momentum": torch.zeros_like(row)}

    def message(self, row: Tensor) -> State:
        return {"full_gradient": torch.zeros_like(row)}

    def start(self, rows: Tensor) -> State:
        return {"momentum": torch.zeros_like(rows)}

    def start_round(self, rows: Tensor, worker: WorkerRound) -> State:
        return {"momentum": worker.received["momentum"].expand_as(rows).clone()}

    def step(self, rows: Tensor, gradients: Tensor, state: State) -> None:
        add_multiple(rows, gradients, -self.lr * (1 - self.beta))
        add_multiple(rows, state["momentum"], -self.lr * self.beta)

    def step_fused(self, rows: Tensor, product: OuterProductGrad, state: State) -> None:
        product.add_to(rows, alpha=-self.lr * (1 - self.beta))
        rows.add_(state["momentum"], alpha=-self.lr * self.beta)

    def finish(self, rows: Tensor, state: State, worker: WorkerRound) -> State:
        assert worker.full_gradient is not None
        return {"full_gradient": worker.full_gradient}

    def receive(self, server: State, sums: State, workers: int, population: int) -> None:
        server["momentum"].lerp_(sums["full_gradient"] / workers, 1 - self.beta)


@client_algorithm("mime")
@dataclass(frozen=True)
class Mime(MimeLite, CohortGradient, UpdateCorrection):
    """Mime: `mimelite` with gradients that are corrected as in SVRG (Karimireddy et al. 2020).

    Each step replaces the batch's gradient at x by (gradient at x) - (gradient at w) + c. w is the model that the
    worker received. c, which the server sends, is the mean of the cohort's full gradients at w. Workers that drop out
    (`sampling.dropout_rate`) do not count in c. If a worker is trained only for an evaluation, w is the model that it
    starts with, and c is the worker's own full gradient at w.

    Args:
        lr: learning rate, >= 0.
        beta: decay rate of the server's momentum m, 0 <= beta < 1.

    Cost: two gradients per step, one more pass over each worker's samples per round, and three state tensors [d]. Each
    worker receives 2 d more numbers and sends d more numbers than with `sgd`. All workers send their full gradients
    before any worker takes a step.

    >>> row, algorithm = torch.tensor([1.0]), fedsim.clients.Mime(lr=0.5, beta=0.0)
    >>> state = {"start": torch.tensor([3.0]), "mean_gradient": torch.tensor([4.0]), "momentum": torch.tensor([0.0])}
    >>> algorithm.step_rows(row, row.clone(), state, gradient_at=lambda point: point)
    >>> row
    tensor([0.])
    """

    element_wise: ClassVar[bool] = False
    gradients_per_step: ClassVar[int] = 2
    uses_start_row: ClassVar[bool] = True

    def server_state(self, row: Tensor) -> State:
        return {"momentum": torch.zeros_like(row), "mean_gradient": torch.zeros_like(row)}

    def message(self, row: Tensor) -> State:
        return {}

    def numbers_sent(self, d: int) -> tuple[int, int]:
        return 2 * d, d

    def receive_gradients(self, server: State, mean: Tensor) -> None:
        server["mean_gradient"].copy_(mean)

    def start(self, rows: Tensor) -> State:
        return {"momentum": torch.zeros_like(rows), "mean_gradient": torch.zeros_like(rows), "start": rows.clone()}

    def start_round(self, rows: Tensor, worker: WorkerRound) -> State:
        state = {name: tensor.expand_as(rows).clone() for name, tensor in worker.received.items()}
        if worker.only_tested:  # the last cohort's mean gradient belongs to an earlier model
            assert worker.full_gradient is not None
            state["mean_gradient"] = worker.full_gradient.clone()
        return {**state, "start": rows.clone()}

    def step_rows(self, rows: Tensor, gradients: Tensor, state: State, gradient_at: GradientAt) -> None:
        gradients.sub_(gradient_at(state["start"])).add_(state["mean_gradient"])
        self.step(rows, gradients, state)

    def finish(self, rows: Tensor, state: State, worker: WorkerRound) -> State:
        return {}

    def correct(self, update: Tensor, server: State, workers: float, population: int) -> None:
        server["momentum"].lerp_(server["mean_gradient"], 1 - self.beta)  # the update is not corrected


@client_algorithm("scaffold")
@dataclass(frozen=True)
class Scaffold(SGDSteps):
    """SCAFFOLD, stochastic controlled averaging: SGD with corrected gradients (Karimireddy et al. 2020).

    Algorithm 1 of the paper, where x is the global model, and the control variates c and c_k start at 0:

        server sends x and c to the cohort S
        worker k:  y = x;  for each of its K batches:  y -= lr (gradient(y) - c_k + c)
                   c_k+ = full gradient at x (option 1), or c_k - c + (x - y) / (K lr) (option 2)
                   sends y - x and c_k+ - c_k;  c_k = c_k+
        server:    x += aggregate of the y - x;  c += sum over S of (c_k+ - c_k) / N

    N is the number of workers. The paper averages the updates without weights (`aggregate = "mean"`). Workers that are
    not in the cohort keep their c_k, and so do workers that take no step with option 2. Momentum is not available,
    because option 2 uses (x - y) / (K lr) as a mean of gradients.

    Args:
        lr: learning rate, > 0.
        weight_decay: factor of the L2 penalty, >= 0, which adds weight_decay y to each gradient.
        option: 1 or 2, how a worker updates c_k. Option 1 costs one more pass over its samples.

    Cost: one row [d] for each worker that has taken part, two more passes over the row per step, and twice the
    communication of `sgd` in both directions.

    >>> algorithm = fedsim.clients.Scaffold(lr=0.1)
    >>> algorithm.numbers_sent(d=3)
    (3, 3)
    """

    lr: PositiveFloat = 0.05
    weight_decay: NonNegativeFloat = 0.0
    option: Literal[1, 2] = 2

    @property
    def full_gradient(self) -> bool:  # type: ignore[override]
        return self.option == 1

    def worker_state(self, row: Tensor) -> State:
        return {"c_k": torch.zeros_like(row)}

    def server_state(self, row: Tensor) -> State:
        return {"c": torch.zeros_like(row)}

    def message(self, row: Tensor) -> State:
        return {"change": torch.zeros_like(row)}

    def start(self, rows: Tensor) -> State:
        return {"start": rows.clone(), "constant": torch.zeros_like(rows)}

    def start_round(self, rows: Tensor, worker: WorkerRound) -> State:
        return {"start": rows.clone(), "constant": worker.received["c"] - worker.kept["c_k"]}

    def finish(self, rows: Tensor, state: State, worker: WorkerRound) -> State:
        before = worker.kept["c_k"]
        if self.option == 1:
            assert worker.full_gradient is not None
            after = worker.full_gradient + self.weight_decay * state["start"]
        else:
            travelled = worker.steps.to(rows.dtype) * self.lr
            after = state["start"].sub_(rows).div_(travelled).sub_(state["constant"])
            torch.where(travelled > 0, after, before, out=after)
        worker.kept["c_k"] = after
        return {"change": torch.sub(after, before, out=state["constant"])}

    def receive(self, server: State, sums: State, workers: int, population: int) -> None:
        server["c"] += sums["change"] / population
