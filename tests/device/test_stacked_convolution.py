"""Stacked convolution on a GPU: the result of row-by-row convolutions, with a constant number of launches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedsim.engines.stacking.operations import Options, one_by_one, stacked_convolution
from tests.device.agreement import some_gpu, to_gpu
from tests.device.pretend import upload

MOST_LAUNCHES = 3  # forward or backward, with padding and all derivatives


def tensors(k, batch=2):
    generator = torch.Generator().manual_seed(0)
    shapes = (k * batch, 3, 7, 6), (k, 4, 3, 3, 2), (k, 4)
    return [torch.randn(shape, generator=generator, dtype=torch.double) for shape in shapes]


@pytest.mark.gpu
@pytest.mark.parametrize("k", [2, 10])
def test_a_gpu_gives_the_outputs_and_derivatives_of_one_row_after_another(k):
    def outputs_and_derivatives(convolve, leaves):
        leaves = [leaf.requires_grad_() for leaf in leaves]
        outputs = convolve(F.conv2d, *leaves, Options(padding=1))
        return outputs.detach(), *torch.autograd.grad(outputs, leaves, outputs.detach())

    expected = outputs_and_derivatives(one_by_one, tensors(k))
    with some_gpu():
        actual = outputs_and_derivatives(stacked_convolution, [to_gpu(tensor) for tensor in tensors(k)])
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.allclose(ours.cpu(), theirs, rtol=0, atol=1e-9 * float(theirs.abs().max()))


@pytest.mark.parametrize("k", [2, 5])
def test_launches_do_not_grow_with_the_rows(k, gpu):
    leaves = [upload(tensor).requires_grad_() for tensor in tensors(k)]
    with gpu.counting() as forward:
        outputs = stacked_convolution(F.conv2d, *leaves, Options(padding=1))
    ones = torch.ones_like(outputs)
    with gpu.counting() as backward:
        torch.autograd.grad(outputs, leaves, ones)
    assert forward.waits == backward.waits == 0
    assert forward.launches <= MOST_LAUNCHES, forward.table()
    assert backward.launches <= MOST_LAUNCHES, backward.table()
