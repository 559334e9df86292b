"""The ways to convolve a stack on the pretend GPU: the numbers of the CPU, and launches that do not grow with rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedsim.engines.stacking.convolution import WAYS, Options, stacked_convolution
from tests.device.pretend import download, upload

MOST_LAUNCHES = 3  # forward, and backward, padded, with derivatives by all


def tensors(k, batch=2):
    generator = torch.Generator().manual_seed(0)
    shapes = (k * batch, 3, 7, 6), (k, 4, 3, 3, 2), (k, 4)
    return [torch.randn(shape, generator=generator, dtype=torch.double) for shape in shapes]


@pytest.mark.parametrize("way", [*WAYS, "that of the device"])
def test_the_numbers_are_those_of_the_cpu(way, gpu):
    given, options = tensors(3), Options(stride=2, padding=1)
    way = WAYS.get(way, stacked_convolution)
    leaves = [upload(tensor).requires_grad_() for tensor in given]
    found = way(F.conv2d, *leaves, options)
    gradients = torch.autograd.grad(found.square().sum(), leaves)
    leaves = [tensor.requires_grad_() for tensor in given]
    expected = stacked_convolution(F.conv2d, *leaves, options)
    torch.testing.assert_close(download(found), expected.detach())
    expected_gradients = torch.autograd.grad(expected.square().sum(), leaves)
    torch.testing.assert_close([download(gradient) for gradient in gradients], list(expected_gradients))


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
