"""Memory-efficient attention as on CUDA. Without dropout, its random seed and offset are tensors on the host."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.device.pretend.placement import on_gpu

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_efficient_attention.default
BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default


def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, is_causal: bool = False, **kwargs: Any) -> Tensor:
    """Compute F.scaled_dot_product_attention, on the GPU by the operation that CUDA chooses for float32 tensors."""
    if not on_gpu(query) or args or kwargs or query.dim() != 4 or query.dtype is torch.float64:
        return F.scaled_dot_product_attention(query, key, value, *args, is_causal=is_causal, **kwargs)
    return FORWARD(query, key, value, None, True, 0.0, is_causal)[0]


class StandIn:
    """A function that computes, on the CPU, an operation of CUDA for which PyTorch has no CPU kernel."""

    is_view, tags = False, ()

    def __init__(self, operation: Any, compute: Any) -> None:
        self._schema, self._compute = operation._schema, compute

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compute(*args, **kwargs)


def _forward(query: Tensor, key: Tensor, value: Tensor, _bias: None, _sums: bool, *options: Any) -> tuple[Tensor, ...]:
    results = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, *options)
    return (*results, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64))


def _backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, _bias: None, *saved: Any) -> tuple[Any, ...]:
    output, sums, _seed, _offset, dropout, _wanted, *is_causal = saved
    inputs = gradient, query, key, value, output, sums, dropout, any(is_causal)
    return (*aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs), None)


STAND_INS = {FORWARD: StandIn(FORWARD, _forward), BACKWARD: StandIn(BACKWARD, _backward)}
