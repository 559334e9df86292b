"""All ways of convolving a stack agree with one row after another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedsim.engines.stacked_convolution import Options, grouped, one_by_one, stacked_convolution

K, BATCH = 3, 2
CASES = {  # convolution, channels, size, kernels, bias, options
    "plain": (F.conv2d, 2, (6, 7), (4, 2, 3, 3), True, Options()),
    "no bias, padded": (F.conv2d, 2, (6, 7), (4, 2, 3, 3), False, Options(padding="same")),
    "groups, strides, dilation": (F.conv2d, 4, (9, 8), (6, 2, 3, 2), True, Options((2, 1), (1, 0), 2, 2)),
    "one dimension": (F.conv1d, 2, (9,), (4, 2, 3), True, Options(2, 1)),
    "three dimensions": (F.conv3d, 2, (4, 5, 6), (4, 2, 2, 2, 2), True, Options(padding=1)),
}


@pytest.mark.parametrize("way", [one_by_one, grouped, stacked_convolution])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_each_row_by_itself(case, way):
    convolution, channels, size, kernels, with_bias, options = CASES[case]
    generator = torch.Generator().manual_seed(4)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.double, requires_grad=True)

    inputs, weight = random(K * BATCH, channels, *size), random(K, *kernels)
    given = [inputs, weight, random(K, kernels[0])] if with_bias else [inputs, weight]
    bias = given[2] if with_bias else None
    expected = torch.cat(
        [convolution(inputs[2 * k : 2 * k + 2], weight[k], bias[k] if with_bias else None, *options) for k in range(K)]
    )
    found = way(convolution, inputs, weight, bias, options)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(outputs.sin().sum(), given) for outputs in (found, expected)]
    torch.testing.assert_close(*gradients)
