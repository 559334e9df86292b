"""Stochastic gradient descent, and its variants DP-SGD, FedProx, FedSAM and MOON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.clients.algorithm import ClientAlgorithm, GradientAt, SampleNoise, WorkerRound
from fedsim.clients.base import OuterProductGrad, State, add_multiple
from fedsim.clients.capabilities import FeatureLoss, GradientMessage, client_algorithm
from fedsim.core.numbers import FractionBelowOne, NonNegativeFloat, PositiveFloat
from fedsim.errors import ExperimentError


class SGDSteps(ClientAlgorithm):
    """Base class of client algorithms whose local steps are those of SGD, with or without momentum.

    A tensor "constant" [..., d] in the optimizer state is added to each gradient.
    """

    lr: float
    weight_decay: float
    momentum: float = 0.0
    nesterov: bool = False
    dampening: float = 0.0

    @property
    def decay(self) -> float:
        """Factor c of the weight decay: each step adds c w to the gradient at the weights w."""
        return self.weight_decay

    def step(self, rows: Tensor, gradients: Tensor, state: State) -> None:
        if self.decay:
            gradients.add_(rows, alpha=self.decay)
        if "constant" in state:
            gradients.add_(state["constant"])
        direction = gradients
        if "momentum" in state:
            velocity = self._averaged(state["momentum"], gradients)
            direction = add_multiple(gradients, velocity, self.momentum) if self.nesterov else velocity
        add_multiple(rows, direction, -self.lr)

    def _averaged(self, velocity: Tensor, gradients: Tensor) -> Tensor:
        return velocity.mul_(self.momentum).add_(gradients, alpha=1 - self.dampening)

    def step_fused(self, rows: Tensor, product: OuterProductGrad, state: State) -> None:
        if self.nesterov:  # the gradient is used twice
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


@dataclass(frozen=True)
class LocalSGD(SGDSteps):
    """Base class of client algorithms with the parameters of SGD with momentum."""

    lr: NonNegativeFloat = 0.05
    momentum: FractionBelowOne = 0.0
    weight_decay: NonNegativeFloat = 0.0
    nesterov: bool = False
    dampening: FractionBelowOne = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        for key, is_set in (("nesterov = true", self.nesterov), (f"dampening = {self.dampening}", self.dampening)):
            if is_set and not self.momentum:
                raise ExperimentError(f"local.{key}: needs local.momentum > 0")
        if self.nesterov and self.dampening:
            raise ExperimentError("local.nesterov = true: needs local.dampening = 0")

    def having(self, **values: Any) -> ClientAlgorithm:
        return self._copy(**values)  # momentum 0 of a worker with `nesterov` is no mistake

    def start(self, rows: Tensor) -> State:
        """Return the optimizer state: the momentum [..., d], if any."""
        return {"momentum": torch.zeros_like(rows)} if self.momentum else {}


@client_algorithm("sgd")
@dataclass(frozen=True)
class SGD(LocalSGD, GradientMessage):
    """Stochastic gradient descent with optional momentum and weight decay, as in `torch.optim.SGD`.

    Each step moves the weights w (Robbins and Monro 1951):

        g = gradient + weight_decay w;  v = momentum v + (1 - dampening) g;  w -= lr v

    With Nesterov momentum the step is w -= lr (g + momentum v). There are two differences from `torch.optim.SGD`.
    First, v starts at 0 here. PyTorch's first step sets v = g without dampening, so with dampening PyTorch's first
    steps are longer. Second, a parameter that a batch does not use has gradient 0 here, so weight decay and momentum
    still move it. PyTorch skips such a parameter.

    With momentum_at = "worker" and sync = "gradients", worker k sends its momentum v_k instead of its gradient g_k, as
    is usual with robust rules (El Mhamdi et al. 2021, or Karimireddy et al. 2021 with dampening = momentum):

        v_k = momentum v_k + (1 - dampening) g_k;  w -= lr (rule(v_1, ..., v_n) + weight_decay w)

    A worker that is not in the cohort keeps its v_k. With a linear rule, all workers in each step and no weight decay,
    momentum at the workers equals momentum at the server up to rounding.

    Args:
        lr: learning rate, >= 0.
        momentum: momentum factor, 0 <= momentum < 1.
        weight_decay: factor of the L2 penalty, >= 0.
        nesterov: whether to use Nesterov momentum. Requires momentum > 0, dampening = 0 and momentum_at = "server".
        dampening: dampening of the momentum, 0 <= dampening < 1. Requires momentum > 0.
        momentum_at: where momentum is applied. "server": to the aggregated gradient, or to the local steps of a round.
            "worker": to the gradients that each worker sends, which requires momentum > 0.

    Cost: a few passes over the row [d]. With momentum one state tensor [d], or one for each worker that has taken part
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
    def setting(self) -> str:  # type: ignore[override]
        return 'local.momentum_at = "worker"' if self.alters_gradients else ""

    @property
    def alters_gradients(self) -> bool:  # type: ignore[override]
        return self.momentum_at == "worker"

    def worker_state(self, row: Tensor) -> State:
        return {"momentum": torch.zeros_like(row)} if self.alters_gradients else {}

    def send_gradients(self, gradients: Tensor, worker_state: State) -> None:
        gradients.copy_(self._averaged(worker_state["momentum"], gradients))

    def start(self, rows: Tensor) -> State:
        return {} if self.alters_gradients else super().start(rows)


@client_algorithm("dp_sgd")
@dataclass(frozen=True)
class DPSGD(LocalSGD):
    """DP-SGD: each sample's gradient is clipped, and Gaussian noise is added to the mean (Abadi et al. 2016).

    Steps are those of `sgd` along

        (sum_i g_i min(1, C / |g_i|) + N(0, (z C)^2 I)) / batch size

    where g_i is the gradient of the loss of sample i. C is reduced by 0.001 percent when gradients are clipped, so that
    no rounded norm exceeds C. The noise is that of the unreduced C. The samples of a worker are thereby protected even
    from a server that sees the worker's updates. Each sample is in only one batch of an epoch, so an epoch costs as
    much privacy as one step. Neighbouring data sets differ in one sample, whose gradients are replaced by zeros.
    `metrics.epsilon` is an upper bound. It counts each epoch of each round, as if a worker took part in every round.
    With `local.steps` it counts each step, as if all steps used the same sample.

    The gradients of samples are computed with `torch.func.vmap`. Models in which samples depend on each other, such as
    those with BatchNorm, are refused.

    Args:
        clip: maximum L2 norm C of the gradient of a sample, > 0.
        noise: noise multiplier z, >= 0. With 0, gradients are only clipped.
        lr, momentum, weight_decay, nesterov, dampening: parameters of SGD (see `sgd`).

    Cost: that of `sgd`, with a gradient [d] of each sample in memory (at most 32 MB at once), and d random numbers per
    step.

    >>> fedsim.clients.DPSGD(lr=0.1, clip=1.0, noise=1.1).sample_noise
    SampleNoise(clip=1.0, noise=1.1)
    """

    clip: PositiveFloat = field(default=1.0, kw_only=True)
    noise: NonNegativeFloat = field(default=1.0, kw_only=True)

    @property
    def sample_noise(self) -> SampleNoise:  # type: ignore[override]
        return SampleNoise(self.clip, self.noise)


@client_algorithm("fedprox")
@dataclass(frozen=True)
class FedProx(LocalSGD):
    """FedProx: SGD on the loss plus mu / 2 |w - w_start|^2, which keeps workers near the global model (Li et al. 2020).

    w_start is the model that the worker received at the start of the round. Steps are those of `sgd` along
    gradient + mu (w - w_start). With mu = 0 the results are bit-identical to `sgd`.

    Args:
        mu: strength of the proximal term, >= 0.
        lr, momentum, weight_decay, nesterov, dampening: parameters of SGD (see `sgd`).

    Cost: that of `sgd`, with one more state tensor [d] and one more pass over the row per step.

    >>> row = torch.tensor([1.0])
    >>> algorithm = fedsim.clients.FedProx(lr=0.5, mu=1.0)
    >>> state = algorithm.start(row)
    >>> for _ in range(2):
    ...     algorithm.step(row, torch.tensor([1.0]), state)
    >>> row
    tensor([0.2500])
    """

    mu: NonNegativeFloat = 0.01
    uses_start_row: ClassVar[bool] = True

    @property
    def decay(self) -> float:
        return self.weight_decay + self.mu

    def start(self, rows: Tensor) -> State:
        return {**super().start(rows), **({"constant": rows * -self.mu} if self.mu else {})}


@client_algorithm("fedsam")
@dataclass(frozen=True)
class FedSAM(LocalSGD):
    """FedSAM: sharpness-aware minimization at the workers (Qu et al. 2022, Foret et al. 2021).

    With g = gradient at x, the model x takes a step of `sgd` along the same batch's gradient at x + rho g / |g|.

    Args:
        rho: distance from x at which the gradient is computed, >= 0. With rho = 0, or where g is 0, steps are
            bit-identical to `sgd`.
        lr, momentum, weight_decay, nesterov, dampening: parameters of SGD (see `sgd`).

    Cost: two gradients per step, and a few passes over the row [d].

    >>> row, algorithm = torch.tensor([3.0, 4.0]), fedsim.clients.FedSAM(lr=0.5, rho=1.0)
    >>> algorithm.step_rows(row, row.clone(), algorithm.start(row), gradient_at=lambda point: 2 * point)
    >>> row
    tensor([-0.6000, -0.8000])
    """

    rho: NonNegativeFloat = 0.05
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
class Moon(LocalSGD, FeatureLoss):
    """MOON: SGD on the loss plus mu times a contrastive loss between features of three models (Li et al. 2021).

    The contrastive loss of a sample, with the cosine similarity `sim`, is

        -log(exp(sim(z, z_global) / t) / (exp(sim(z, z_global) / t) + exp(sim(z, z_previous) / t)))

    z are the features of the sample in the worker's model, and z_global the features in the global model that the
    worker received. z_previous are the features in the worker's model at the end of its previous round (in its first
    round, in the initial global model).

    Features are the result of the model's `features`, a method or module that `forward` calls. A model without
    `features` uses the input of the last nn.Linear that `forward` calls. All three models are in training mode (in the
    paper only the worker's model is) and use the same dropout masks. With mu = 0 the algorithm is `sgd`.

    Args:
        mu: weight of the contrastive loss, >= 0. The paper tries 0.1 to 10.
        temperature: temperature t, > 0.
        lr, momentum, weight_decay, nesterov: parameters of SGD (see `sgd`).

    Cost: that of `sgd`, two more forward passes per step, and two state tensors [d]. Each worker that has taken part
    keeps its last model, [d].

    >>> algorithm = fedsim.clients.Moon(mu=1.0)
    >>> z = torch.tensor([[1.0, 0.0]])
    >>> algorithm.feature_loss(z, [z, -z])
    tensor([0.0181])
    """

    mu: NonNegativeFloat = 1.0
    temperature: PositiveFloat = 0.5
    uses_start_row: ClassVar[bool] = True

    def worker_state(self, row: Tensor) -> State:
        return {"previous": row.clone()} if self.mu else {}

    def start(self, rows: Tensor) -> State:
        return {**super().start(rows), **({"sent": rows.clone(), "previous": rows.clone()} if self.mu else {})}

    def finish(self, rows: Tensor, state: State, worker: WorkerRound) -> State:
        if self.mu:
            worker.kept["previous"] = rows.clone()
        return {}

    def feature_points(self, state: State) -> Sequence[Tensor]:
        return [state["sent"], state["previous"]] if "sent" in state else []

    def feature_loss(self, features: Tensor, at_points: Sequence[Tensor]) -> Tensor:
        to_sent, to_previous = (F.cosine_similarity(features, reference, dim=-1) for reference in at_points)
        return self.mu * F.softplus((to_previous - to_sent) / self.temperature)
