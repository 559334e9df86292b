"""Client algorithms with a personal model in addition to the global model: APFL, Ditto, pFedMe and Per-FedAvg."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedsim.clients.algorithm import ClientAlgorithm, GradientAt, WorkerRound
from fedsim.clients.base import State, add_multiple
from fedsim.clients.capabilities import PersonalModel, UpdateCorrection, client_algorithm
from fedsim.clients.schedule import Schedule
from fedsim.clients.sgd import LocalSGD
from fedsim.core.numbers import Fraction, NonNegativeFloat, PositiveInt
from fedsim.core.rows import Layout
from fedsim.errors import ExperimentError, called


@client_algorithm("apfl")
@dataclass(frozen=True)
class APFL(LocalSGD, PersonalModel):
    """Adaptive personalized federated learning (APFL): a mixture of a local and the global model (Deng et al. 2020).

    The worker's copy x of the global model takes the steps of `sgd`. The worker also keeps a local model v between
    rounds. Each step trains v within the mixture u = alpha v + (1 - alpha) x: v -= lr alpha (gradient at u). The
    personal model is the mixture of v and the global model. The worker keeps the personal model's buffers, such as
    BatchNorm statistics. Only forward passes with the parameters u change these buffers.

    Args:
        alpha: fraction of v in the mixture, 0 <= alpha <= 1. With 0, x moves as under `sgd` and v does not move.
        adaptive: whether each worker learns its own alpha, which starts at `alpha`. Each step moves it along its
            gradient, alpha -= lr <v - x, gradient at u>, and clips it to [0, 1].
        lr, momentum, weight_decay, nesterov, dampening: parameters of SGD (see `sgd`). Of these parameters, only lr
            also applies to v and alpha.

    Cost: two gradients per step, one state tensor [d], and v [d] for each worker that has taken part.

    >>> row, algorithm = torch.tensor([1.0]), fedsim.clients.APFL(lr=0.5, alpha=0.5)
    >>> state = {"personal": torch.tensor([3.0])}
    >>> algorithm.step_rows(row, row.clone(), state, gradient_at=lambda point: point)
    >>> row, state["personal"]
    (tensor([0.5000]), tensor([2.5000]))
    """

    alpha: Fraction = 0.5
    adaptive: bool = False
    element_wise: ClassVar[bool] = False
    personal_beside: ClassVar[bool] = True
    gradients_per_step: ClassVar[int] = 2

    def worker_state(self, row: Tensor) -> State:
        return self._personal(row)

    def _personal(self, rows: Tensor) -> State:
        shares = {"alpha": torch.full_like(rows[..., :1], self.alpha)} if self.adaptive else {}
        return {"personal": rows.clone(), **shares}

    def start(self, rows: Tensor) -> State:
        return {**super().start(rows), **self._personal(rows)}

    def step_rows(self, rows: Tensor, gradients: Tensor, state: State, gradient_at: GradientAt) -> None:
        personal, alpha = state["personal"], state.get("alpha", self.alpha)
        slope = gradient_at(self.personal_rows(rows, state))
        along_alpha = ((personal - rows) * slope).sum(-1, keepdim=True) if self.adaptive else None
        add_multiple(personal, slope.mul_(alpha), -self.lr)
        if along_alpha is not None:
            add_multiple(state["alpha"], along_alpha, -self.lr).clamp_(0, 1)
        self.step(rows, gradients, state)

    def personal_rows(self, rows: Tensor, worker_state: State) -> Tensor:
        alpha = worker_state.get("alpha", self.alpha)
        return alpha * worker_state["personal"] + (1 - alpha) * rows


@client_algorithm("ditto")
@dataclass(frozen=True)
class Ditto(LocalSGD, PersonalModel):
    """Ditto: federated averaging, and a personal model that is pulled towards the global model (Li et al. 2021).

    The worker's copy of the global model takes the steps of `sgd`. At each step the worker's personal model v takes a
    step on the same batch: v -= lr (gradient at v + lam (v - w)), where w is the global model at the start of the
    round. The worker keeps v between rounds, and v is evaluated. The worker also keeps the buffers of v, such as
    BatchNorm statistics, which only the forward passes at v update.

    Args:
        lam: the paper's lambda, >= 0. With 0, v is trained on the worker's samples alone.
        personal_steps: v is trained only in the first `personal_steps` steps of a round. None: in all steps.
        lr, momentum, weight_decay, nesterov, dampening: parameters of SGD (see `sgd`). Of these parameters, only lr
            also applies to v.

    Cost: two gradients per step, two state tensors [d] for v and w, and v [d] for each worker that has taken part.

    >>> row, algorithm = torch.tensor([1.0]), fedsim.clients.Ditto(lr=0.5, lam=1.0)
    >>> state = {"start": torch.tensor([1.0]), "personal": torch.tensor([3.0])}
    >>> algorithm.step_rows(row, torch.tensor([2.0]), state, gradient_at=lambda point: point - 3)
    >>> row, state["personal"]
    (tensor([0.]), tensor([2.]))
    """

    lam: NonNegativeFloat = 0.1
    personal_steps: PositiveInt | None = None
    element_wise: ClassVar[bool] = False
    personal_beside: ClassVar[bool] = True
    gradients_per_step: ClassVar[int] = 2
    uses_start_row: ClassVar[bool] = True

    def gradients(self, steps: int, batches: int) -> int:
        return steps + min(steps, self.personal_steps or steps)

    def worker_state(self, row: Tensor) -> State:
        return {"personal": row.clone()}

    def start(self, rows: Tensor) -> State:
        counts = {"taken": torch.zeros_like(rows[..., :1])} if self.personal_steps else {}
        return {**super().start(rows), **counts, "start": rows.clone(), "personal": rows.clone()}

    def step_rows(self, rows: Tensor, gradients: Tensor, state: State, gradient_at: GradientAt) -> None:
        if not self.personal_steps or bool((state["taken"].add_(1) <= self.personal_steps).all()):
            personal = state["personal"]
            slope = gradient_at(personal).add_(personal - state["start"], alpha=self.lam)
            add_multiple(personal, slope, -self.lr)
        self.step(rows, gradients, state)

    def personal_rows(self, rows: Tensor, worker_state: State) -> Tensor:
        return worker_state["personal"]


@client_algorithm("per_fedavg")
@dataclass(frozen=True)
class PerFedAvg(ClientAlgorithm):
    """Per-FedAvg: model-agnostic meta-learning of the global model, in its first-order form (Fallah et al. 2020).

    Two local steps, on two batches, are one step of the paper: x' = x - inner_lr (gradient at x), then x -= lr
    (gradient at x'). If a round has an odd number of local steps, the last one is ignored. The personal model is x',
    one step away from the global model, so workers need not keep it. If workers are tested after an odd number of local
    steps, x' is tested. The training loss is the mean over both batches.

    Args:
        lr: learning rate of x, >= 0.
        inner_lr: learning rate of x', >= 0.

    Raises ExperimentError if a worker has a single step in a round, because its model would not move.

    Cost: one gradient per local step, a few passes over the row [d], and one state tensor [d].

    >>> row, algorithm = torch.tensor([1.0]), fedsim.clients.PerFedAvg(lr=1.0, inner_lr=0.5)
    >>> state = algorithm.start(row)
    >>> for _ in range(2):
    ...     algorithm.step_rows(row, row.clone(), state, gradient_at=None)
    ...     print(row)
    tensor([0.5000])
    tensor([0.5000])
    """

    lr: NonNegativeFloat = 0.05
    inner_lr: NonNegativeFloat = 0.01
    element_wise: ClassVar[bool] = False

    def start(self, rows: Tensor) -> State:
        return {"x": rows.clone(), "is_inner": torch.zeros_like(rows[..., :1], dtype=torch.bool)}

    def check_work(self, schedule: Schedule, sizes: Mapping[int, int]) -> None:
        for worker, size in sizes.items():
            self._check_steps(worker, schedule.local_steps(schedule.shortest(worker).steps_for(size)))

    def _check_steps(self, worker: int, steps: int) -> None:
        if steps < 2:
            raise ExperimentError(
                'local.algorithm = "per_fedavg": needs two local steps per round, but worker '
                f"{called(worker)} has {steps}; use local.steps = 2 or more, or a smaller local.batch_size"
            )

    def start_round(self, rows: Tensor, worker: WorkerRound) -> State:
        # The check before the run covers only a sample of a virtual population, and policies may choose the steps.
        if not worker.only_tested:
            for k, steps in zip(worker.numbers.workers.tolist(), worker.numbers.steps.tolist(), strict=True):
                self._check_steps(k, steps)
        return self.start(rows)

    def step_rows(self, rows: Tensor, gradients: Tensor, state: State, gradient_at: GradientAt) -> None:
        x, is_inner = state["x"], state["is_inner"]  # is_inner: whether the row is at x'
        torch.where(is_inner, x, rows, out=x)
        rates = torch.where(is_inner, self.lr, torch.full_like(rows[..., :1], self.inner_lr))
        torch.addcmul(x, rates, gradients, value=-1, out=rows)
        is_inner.logical_not_()

    def finish(self, rows: Tensor, state: State, worker: WorkerRound) -> State:
        rows.copy_(torch.where(state["is_inner"], state["x"], rows))
        return {}


@client_algorithm("pfedme")
@dataclass(frozen=True)
class PFedMe(PersonalModel, UpdateCorrection):
    """pFedMe: each step finds a personal model near the worker's model, and moves towards it (Dinh et al. 2020).

    The worker's copy x of the global model w takes local steps with a personal model theta. Each step uses one batch:

        theta = x;  inner_steps times: theta -= lr (gradient at theta + lam (theta - x))
        x -= eta lam (x - theta)

    The server averages: w = (1 - beta) w + beta (mean of the x). The last theta of a round is the personal model. The
    personal model of a worker that has not taken part is w. The worker keeps the buffers of theta, such as BatchNorm
    statistics. Only forward passes at theta update these buffers, including the first one, where theta = x.

    Args:
        lr: learning rate of theta, >= 0.
        eta: learning rate of x, >= 0.
        lam: the paper's lambda, >= 0. lr lam must be small for theta to converge.
        inner_steps: number of steps of theta per local step, > 0.
        beta: step size of the server's average, >= 0. 1 is the mean.

    Cost: `inner_steps` gradients per step, one more if the model has buffers, one state tensor [d], and theta [d] for
    each worker that has taken part.

    >>> row, algorithm = torch.tensor([2.0]), fedsim.clients.PFedMe(lr=0.5, eta=0.5, lam=1.0, inner_steps=2)
    >>> state = algorithm.start(row)
    >>> algorithm.step_rows(row, row.clone(), state, gradient_at=lambda point: point.clone())
    >>> row, state["theta"]
    (tensor([1.5000]), tensor([1.]))
    """

    lr: NonNegativeFloat = 0.05
    eta: NonNegativeFloat = 0.005
    lam: NonNegativeFloat = 15.0
    inner_steps: PositiveInt = 5
    beta: NonNegativeFloat = 1.0
    element_wise: ClassVar[bool] = False
    personal_beside: ClassVar[bool] = True
    starts_from_current: ClassVar[bool] = True
    has_buffers: ClassVar[bool] = False  # whether the model has buffers

    def for_model(self, module: nn.Module) -> ClientAlgorithm:
        return self._copy(has_buffers=bool(Layout.of(module).buffers))

    def having(self, **values: Any) -> ClientAlgorithm:
        return self._copy(**values)

    @property
    def gradients_per_step(self) -> int:  # type: ignore[override]
        return self.inner_steps

    def worker_state(self, row: Tensor) -> State:
        return {"theta": row.clone()}

    def start(self, rows: Tensor) -> State:
        return {"theta": rows.clone()}

    def start_round(self, rows: Tensor, worker: WorkerRound) -> State:
        return self.start(rows)  # each step begins with theta = x

    def step_rows(self, rows: Tensor, gradients: Tensor, state: State, gradient_at: GradientAt) -> None:
        theta = state["theta"].copy_(rows)
        for inner_step in range(self.inner_steps):
            slope = gradient_at(theta) if inner_step or self.has_buffers else gradients
            add_multiple(theta, slope.add_(theta - rows, alpha=self.lam), -self.lr)
        rows.add_(theta - rows, alpha=self.eta * self.lam)

    def correct(self, update: Tensor, server: State, workers: float, population: int) -> None:
        update.mul_(self.beta)

    def personal_rows(self, rows: Tensor, worker_state: State) -> Tensor:
        return worker_state["theta"]
