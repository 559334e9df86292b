"""Muon, an optimizer for weight matrices whose steps have orthogonal directions, together with AdamW."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedsim.clients.adaptive import AdamW
from fedsim.clients.algorithm import ClientAlgorithm, GradientAt
from fedsim.clients.base import State, add_multiple
from fedsim.clients.capabilities import client_algorithm
from fedsim.core.name_patterns import matching
from fedsim.core.numbers import FractionBelowOne, Limits, NonNegativeFloat, PositiveFloat, PositiveInt
from fedsim.core.rows import ColumnSpans, Entry, Layout
from fedsim.errors import ExperimentError, show

NS_COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of Jordan et al. 2024 and of PyTorch


@client_algorithm("muon")
@dataclass(frozen=True)
class Muon(ClientAlgorithm):
    """Muon for weight matrices, like `torch.optim.Muon`, and AdamW for all other parameters (Jordan et al. 2024).

    A step moves each weight matrix W [n, m] along its momentum B, whose singular values are all set to about 1:

        B = momentum B + (1 - momentum) gradient
        O = orthogonalized((1 - momentum) gradient + momentum B), or of B without Nesterov momentum
        W = (1 - lr weight_decay) W - lr r O
        r = sqrt(max(1, n / m)) for "original", 0.2 sqrt(max(n, m)) for "match_rms_adamw" (Liu et al. 2025)

    The documentation of `torch.optim.Muon` recommends AdamW for parameters that are not matrices of hidden layers. So
    these parameters take steps of `adamw`: all that are not two-dimensional (biases, norms, filters of convolutions),
    embeddings and output layers that share their weights, and the parameters that `adamw` names, which should include
    the output layer.

    The orthogonalization is computed in the dtype of the model. PyTorch rounds it to bfloat16, which is faster on GPUs.

    Args:
        lr: learning rate, >= 0.
        momentum: momentum factor, 0 <= momentum < 1.
        nesterov: whether to use Nesterov momentum.
        weight_decay: weight decay rate of matrices, >= 0.
        ns_steps: number of Newton-Schulz iterations, less than 100.
        eps: lower bound of the norm by which a matrix is divided, > 0.
        adjust_lr_fn: how the length of a step depends on the shape of the matrix.
        adamw: shell-style patterns for the names of matrices that AdamW trains, such as `["head.*"]`.
        adamw_lr_ratio: learning rate of AdamW, as a multiple of lr, >= 0.
        adamw_weight_decay: weight decay rate of AdamW, >= 0.
        beta1, beta2: decay rates of AdamW, 0 <= beta < 1.

    Raises ExperimentError if the model has no matrix for Muon.

    Cost: for each matrix [n, m] with n <= m, 2 ns_steps products of n^2 m and ns_steps products of n^3 multiplications,
    and one state tensor [d], or four for the parameters of AdamW.

    >>> model = torch.nn.Linear(2, 2, bias=False)
    >>> row, algorithm = torch.zeros(4), fedsim.clients.Muon(lr=0.1).for_model(model)
    >>> algorithm.step_rows(row, torch.tensor([3.0, 0.0, 0.0, 5.0]), algorithm.start(row), gradient_at=None)
    >>> bool((row.view(2, 2).diagonal() < -0.06).all())
    True
    """

    lr: NonNegativeFloat = 1e-3
    momentum: FractionBelowOne = 0.95
    nesterov: bool = True
    weight_decay: NonNegativeFloat = 0.1
    ns_steps: Annotated[PositiveInt, Limits(lt=100)] = 5
    eps: PositiveFloat = 1e-7
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
    adamw: tuple[str, ...] = ()
    adamw_lr_ratio: NonNegativeFloat = 1.0
    adamw_weight_decay: NonNegativeFloat = 0.01
    beta1: FractionBelowOne = 0.9
    beta2: FractionBelowOne = 0.999
    element_wise: ClassVar[bool] = False
    matrices: ClassVar[tuple[Entry, ...]] = ()  # of the model, see `for_model`

    def for_model(self, module: nn.Module) -> ClientAlgorithm:
        embeddings = [part for part in module.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag))]
        tables, named = {id(part.weight) for part in embeddings}, dict(module.named_parameters())
        entries = [entry for entry in Layout.of(module).parameters if len(entry.shape) == 2]
        others = matching(self.adamw, [entry.name for entry in entries], "local.adamw", "matrix")
        matrices = [entry for entry in entries if entry.name not in others and id(named[entry.name]) not in tables]
        if not matrices:
            named_by_user = f" that local.adamw = {show(self.adamw)} leaves" if others else ""
            raise ExperimentError(
                f'local.algorithm = "muon": the model has no matrix of a hidden layer{named_by_user}; use '
                "local.algorithm=adamw"
            )
        return self._copy(matrices=tuple(matrices))

    def having(self, **values: Any) -> ClientAlgorithm:
        return self._copy(**values)

    @property
    def _columns(self) -> ColumnSpans:
        return ColumnSpans.of_entries(self.matrices)

    @property
    def _adamw(self) -> AdamW:
        lr = self.lr * self.adamw_lr_ratio
        return AdamW(lr=lr, beta1=self.beta1, beta2=self.beta2, weight_decay=self.adamw_weight_decay)

    def start(self, rows: Tensor) -> State:
        others = self._columns.others(rows.shape[-1]).of(rows)
        return {"momentum": rows.new_zeros(*rows.shape[:-1], self._columns.width), **self._adamw.start(others)}

    def step_rows(self, rows: Tensor, gradients: Tensor, state: State, gradient_at: GradientAt) -> None:
        others, done = self._columns.others(rows.shape[-1]), 0
        values = others.of(rows)
        self._adamw.step(values, others.of(gradients), state)
        others.write(rows, values)
        for entry in self.matrices:
            n, m = entry.shape
            weights, gradient = (tensor[..., entry.span].unflatten(-1, (n, m)) for tensor in (rows, gradients))
            momentum = state["momentum"][..., done : (done := done + n * m)].unflatten(-1, (n, m))
            self._step_matrix(weights, gradient, momentum)

    def _step_matrix(self, weights: Tensor, gradient: Tensor, momentum: Tensor) -> None:
        """Move weights [..., n, m] by one step, in place, and update their `momentum` [..., n, m]."""
        n, m = weights.shape[-2:]
        lr, factor = (value.unsqueeze(-1) if isinstance(value, Tensor) else value for value in (self.lr, self.momentum))
        momentum.lerp_(gradient, 1 - factor)
        direction = torch.lerp(gradient, momentum, factor) if self.nesterov else momentum
        ratio = math.sqrt(max(1, n / m)) if self.adjust_lr_fn == "original" else 0.2 * math.sqrt(max(n, m))
        weights.mul_(1 - lr * self.weight_decay)
        add_multiple(weights, orthogonalized(direction, self.ns_steps, self.eps), -lr * ratio)


def orthogonalized(matrices: Tensor, steps: int, eps: float) -> Tensor:
    """Replace the singular values of matrices [..., n, m] by numbers near 1, with the Newton-Schulz iteration of Muon.

    Args:
        matrices: matrices, of any norm.
        steps: number of iterations. After 5, singular values larger than 0.01 times the norm are in about [0.7, 1.2].
        eps: lower bound of the Frobenius norm by which a matrix is divided first.

    >>> from fedsim.clients.muon import orthogonalized
    >>> orthogonalized(torch.tensor([[0.0, 4.0]]), steps=5, eps=1e-7).abs() > 0.65
    tensor([[False,  True]])
    """
    a, b, c = NS_COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if is_tall else x
