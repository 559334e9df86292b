"""The convolution of a stack on the pretend GPU: launches that do not grow with rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedsim.engines.stacking.operations import Options, stacked_convolution
from tests.device.pretend import upload

MOST_LAUNCHES = 3  # forward, and backward, padded, with derivatives by all


def tensors(k, batch=2):
    generator = torch.Generator().manual_seed(0)
    shapes = (k * batch, 3, 7, 6), (k, 4, 3, 3, 2), (k, 4)
    return [torch.randn(shape, generator=generator, dtype=torch.double) for shape in shapes]


@pytest.mark.parametrize("k", [2, 5])
def test_launches_do_not_grow_with_the_rows(k, gpu):
    leaves = [upload(tensor).requires_grad_() for tensor in tensors(k)]
    with gpu.counting() as forward:
        found = stacked_convolution(F.conv2d, *leaves, Options(padding=1))
    ones = torch.ones_like(found)
    with gpu.counting() as backward:
        torch.autograd.grad(found, leaves, ones)
    assert forward.waits == backward.waits == 0
    assert forward.launches <= MOST_LAUNCHES, forward.table()
    assert backward.launches <= MOST_LAUNCHES, backward.table()
