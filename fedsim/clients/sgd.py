"""Stochastic gradient descent: plain, with the terms of FedProx and MOON, and along the gradients of FedSAM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.clients.algorithm import ClientAlgorithm, GradientAt, WorkerRound
from fedsim.clients.base import Decay, NonNegative, OuterProductGrad, Positive, State, client_algorithm
from fedsim.errors import ExperimentError


@dataclass(frozen=True)
class LocalSGD(ClientAlgorithm):
    """SGD with momentum at the worker. Base class of client algorithms that need several local steps."""

    lr: NonNegative = 0.05
    momentum: Decay = 0.0
    weight_decay: NonNegative = 0.0
    nesterov: bool = False
    dampening: Decay = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        for key, is_set in (("nesterov = true", self.nesterov), (f"dampening = {self.dampening}", self.dampening)):
            if is_set and not self.momentum:
                raise ExperimentError(f"local.{key}: needs local.momentum > 0")
        if self.nesterov and self.dampening:
            raise ExperimentError("local.nesterov = true: needs local.dampening = 0")

    @property
    def decay(self) -> float:
        """The weight decay of a step: `decay` times the row is added to the gradient."""
        return self.weight_decay

    def start(self, rows: Tensor) -> State:
        """Return the state; subclasses may add a tensor "constant" [..., d], which each step adds to the gradient."""
        return {"momentum": torch.zeros_like(rows)} if self.momentum else {}

    def step(self, rows: Tensor, gradients: Tensor, state: State) -> None:
        if self.decay:
            gradients.add_(rows, alpha=self.decay)
        if "constant" in state:
            gradients.add_(state["constant"])
        direction = gradients
        if "momentum" in state:
            velocity = self._averaged(state["momentum"], gradients)
            direction = gradients.add_(velocity, alpha=self.momentum) if self.nesterov else velocity
        rows.add_(direction, alpha=-self.lr)

    def _averaged(self, velocity: Tensor, gradients: Tensor) -> Tensor:
        return velocity.mul_(self.momentum).add_(gradients, alpha=1 - self.dampening)

    def step_fused(self, rows: Tensor, product: OuterProductGrad, state: State) -> None:
        if self.nesterov:  # uses the gradient twice
            self.step(rows, product.computed(), state)
        elif "momentum" in state:
            velocity, share = state["momentum"], 1 - self.dampening
            product.add_to(velocity, beta=self.momentum, alpha=share)
            if self.decay:
                velocity.add_(rows, alpha=share * self.decay)
            if "constant" in state:
                velocity.add_(state["constant"], alpha=share)
            rows.add_(velocity, alpha=-self.lr)
        else:
            product.add_to(rows, beta=1 - self.lr * self.decay, alpha=-self.lr)
            if "constant" in state:
                rows.add_(state["constant"], alpha=-self.lr)


@client_algorithm("sgd")
@dataclass(frozen=True)
class SGD(LocalSGD):
    """Stochastic gradient descent with momentum, Nesterov momentum and weight decay, as in `torch.optim.SGD`.

    g = gradient + weight_decay w;  v = momentum v + (1 - dampening) g;  w -= lr v

    With Nesterov w -= lr (g + momentum v). v = 0 at first, where `torch.optim.SGD` has v = g after its first step: with
    dampening its first steps are longer. A parameter that a step does not use has gradient 0 here, so weight decay and
    momentum still move it; `torch.optim.SGD` skips it. Robbins and Monro 1951.

    With momentum_at = "worker" and sync = "gradients", worker k sends its momentum in place of its gradient g_k, which
    is how robust rules are used (El Mhamdi et al. 2021; with dampening = momentum: Karimireddy et al. 2021):

        v_k = momentum v_k + (1 - dampening) g_k;  w -= lr (rule(v_1, ..., v_n) + weight_decay w)

    v_k is kept while k is not in the cohort. With a linear rule, all workers in each step and no weight decay, this is
    the momentum of the server up to rounding.

    Args:
        lr: learning rate, >= 0.
        momentum: 0 <= momentum < 1.
        weight_decay: >= 0.
        nesterov: needs momentum > 0, dampening = 0 and momentum_at = "server".
        dampening: 0 <= dampening < 1; needs momentum > 0.
        momentum_at: "server": of the aggregated gradient, or of the steps of a round; "worker": needs momentum > 0.

    Cost: a few passes over the row [d]; with momentum a state of [d], which is one for each worker that has taken part
    with momentum_at = "worker".

    >>> row = torch.tensor([1.0])
    >>> algorithm = fedsim.clients.SGD(lr=0.1)
    >>> algorithm.step(row, torch.tensor([2.0]), algorithm.start(row))
    >>> row
    tensor([0.8000])
    """

    momentum_at: Literal["server", "worker"] = field(default="server", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.setting and not self.momentum:
            raise ExperimentError(f"{self.setting}: needs local.momentum > 0")
        if self.setting and self.nesterov:
            raise ExperimentError("local.nesterov = true: needs local.momentum_at=server")

    @property
    def setting(self) -> str:
        return 'local.momentum_at = "worker"' if self.alters_gradients else ""

    @property
    def alters_gradients(self) -> bool:
        return self.momentum_at == "worker"

    def worker_state(self, row: Tensor) -> State:
        return {"momentum": torch.zeros_like(row)} if self.alters_gradients else {}

    def send_gradients(self, gradients: Tensor, worker_state: State) -> None:
        gradients.copy_(self._averaged(worker_state["momentum"], gradients))

    def start(self, rows: Tensor) -> State:
        return {} if self.alters_gradients else super().start(rows)


@client_algorithm("fedprox")
@dataclass(frozen=True)
class FedProx(LocalSGD):
    """SGD on the loss plus mu / 2 |w - w_start|^2, which keeps a worker near the global row. Li et al. 2020.

    The gradient is gradient + mu (w - w_start), otherwise it is `sgd`; with mu = 0 it is `sgd` to the bit. w_start is
    the row at the start of a worker's round.

    Args:
        mu: >= 0.
        lr, momentum, weight_decay, nesterov, dampening: see `SGD`.

    Cost: as sgd, with another state of [d] and one more pass over the row.

    >>> row = torch.tensor([1.0])
    >>> algorithm = fedsim.clients.FedProx(lr=0.5, mu=1.0)
    >>> state = algorithm.start(row)
    >>> for _ in range(2):
    ...     algorithm.step(row, torch.tensor([1.0]), state)
    >>> row
    tensor([0.2500])
    """

    mu: NonNegative = 0.01
    uses_start_row: ClassVar[bool] = True

    @property
    def decay(self) -> float:
        return self.weight_decay + self.mu

    def start(self, rows: Tensor) -> State:
        return {**super().start(rows), **({"constant": rows * -self.mu} if self.mu else {})}


@client_algorithm("fedsam")
@dataclass(frozen=True)
class FedSAM(LocalSGD):
    """Sharpness-aware minimization at the workers. Qu et al. 2022; Foret et al. 2021.

    g = gradient at x;  x takes the step of `sgd` along the gradient of the same batch at x + rho g / |g|.

    Args:
        rho: distance of the point, >= 0. With 0, and where g is 0, it is `sgd` to the bit.
        lr, momentum, weight_decay, nesterov, dampening: see `SGD`.

    Cost: two gradients a step, and a few passes over the row [d].

    >>> row, algorithm = torch.tensor([3.0, 4.0]), fedsim.clients.FedSAM(lr=0.5, rho=1.0)
    >>> algorithm.step_rows(row, row.clone(), algorithm.start(row), gradient_at=lambda point: 2 * point)
    >>> row
    tensor([-0.6000, -0.8000])
    """

    rho: NonNegative = 0.05
    element_wise: ClassVar[bool] = False

    @property
    def gradients_per_step(self) -> int:  # type: ignore[override]
        return 2 if self.rho else 1

    def step_rows(self, rows: Tensor, gradients: Tensor, state: State, gradient_at: GradientAt) -> None:
        if self.rho:
            norms = torch.linalg.vector_norm(gradients, dim=-1, keepdim=True)
            ascent = gradients / norms.clamp_(min=torch.finfo(norms.dtype).tiny)
            gradients = gradient_at(rows.add(ascent, alpha=self.rho))
        self.step(rows, gradients, state)


@client_algorithm("moon")
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

    >>> algorithm = fedsim.clients.Moon(mu=1.0)
    >>> z = torch.tensor([[1.0, 0.0]])
    >>> algorithm.feature_loss(z, [z, -z])
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
        for name, tensor in worker.kept.items():
            state[name].copy_(tensor)
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
