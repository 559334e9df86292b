"""All implementations of a stacked convolution agree with row-by-row convolutions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedsim.engines.stacking.operations import WAYS, Options

K, BATCH = 3, 4
CASES = {  # (convolution, channels, size, kernels, bias, options)
    "plain": (F.conv2d, 2, (6, 7), (4, 2, 3, 3), True, Options()),
    "no bias, same": (F.conv2d, 2, (6, 7), (4, 2, 3, 4), False, Options(padding="same", dilation=(1, 2))),
    "valid": (F.conv2d, 2, (6, 7), (4, 2, 3, 3), True, Options(padding="valid")),
    "groups, strides, dilation": (F.conv2d, 4, (9, 8), (6, 2, 3, 2), True, Options((2, 1), (1, 0), 2, 2)),
    "strides that leave some inputs out": (F.conv2d, 2, (9, 10), (4, 2, 2, 3), True, Options((4, 5))),
    "a channel a group": (F.conv2d, 3, (5, 5), (6, 1, 3, 3), True, Options(1, 1, 1, 3)),
    "one by one pixel": (F.conv2d, 3, (5, 5), (4, 3, 1, 1), True, Options()),
    "one output": (F.conv2d, 3, (4, 5), (2, 3, 4, 5), False, Options()),
    "one dimension": (F.conv1d, 2, (9,), (4, 2, 3), True, Options(2, 1)),
    "one dimension, in a tuple": (F.conv1d, 2, (9,), (4, 1, 3), False, Options((2,), (1,), (2,), 2)),
    "three dimensions": (F.conv3d, 2, (4, 5, 6), (4, 2, 2, 2, 2), True, Options(padding=1)),
    "three dimensions, all different": (
        *(F.conv3d, 2, (5, 6, 7), (2, 1, 2, 3, 1), True),
        Options((1, 2, 3), (1, 0, 2), (2, 1, 1), 2),
    ),
}
IMAGES = [case for case, (convolution, *_) in CASES.items() if convolution is F.conv2d]


def tensors(case, channels_last=False):
    """Return the inputs, weights and (in some cases) biases of K rows."""
    _, channels, size, kernels, with_bias, _ = CASES[case]
    generator = torch.Generator().manual_seed(4)
    shapes = [(K * BATCH, channels, *size), (K, *kernels), (K, kernels[0])][: 3 if with_bias else 2]
    made = [torch.randn(shape, generator=generator, dtype=torch.double) for shape in shapes]
    if channels_last:
        made[0] = made[0].to(memory_format=torch.channels_last)
    return [tensor.requires_grad_() for tensor in made]


def row_by_row(case, inputs, weight, bias=None):
    convolution, *_, options = CASES[case]
    biases = [None] * K if bias is None else bias
    parts = zip(inputs.chunk(K), weight, biases, strict=True)
    return torch.cat([convolution(part, kernels, offsets, *options) for part, kernels, offsets in parts])


def convolved(way, case, leaves):
    convolution, *_, options = CASES[case]
    inputs, weight, bias = (*leaves, None)[:3]
    return way(convolution, inputs, weight, bias, options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("case", "channels_last"), [*((case, False) for case in CASES), *((c, True) for c in IMAGES)])
def test_values_and_gradients_equal_those_of_each_row_by_itself(case, channels_last, way):
    leaves = tensors(case, channels_last)
    actual, expected = convolved(WAYS[way], case, leaves), row_by_row(case, *leaves)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(outputs.sin().sum(), leaves) for outputs in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)
