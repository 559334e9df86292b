"""FedSAM: local steps along the gradient at a nearby point of greater loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.clients.algorithm import GradientAt
from fedsim.clients.sgd import LocalSGD
from fedsim.clients.solver import NonNegative, State, solver


@solver("fedsam")
@dataclass(frozen=True)
class FedSAM(LocalSGD):
    """Sharpness-aware minimization at the workers. Qu et al. 2022; Foret et al. 2021.

    g = gradient at x;  x takes the step of `sgd` along the gradient of the same batch at x + rho g / |g|.

    Args:
        rho: distance of the point, >= 0. With 0, and where g is 0, it is `sgd` to the bit.
        lr, momentum, weight_decay, nesterov, dampening: see `SGD`.

    Cost: two gradients a step, and a few passes over the row [d].

    >>> row, solver = torch.tensor([3.0, 4.0]), fedsim.clients.FedSAM(lr=0.5, rho=1.0)
    >>> solver.step_rows(row, row.clone(), solver.start(row), gradient_at=lambda point: 2 * point)
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
