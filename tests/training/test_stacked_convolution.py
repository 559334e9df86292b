"""All implementations of a stacked convolution agree with row-by-row convolutions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fedsim.training.operations import WAYS, Options, way_for

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")

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
CASES |= {
    "same, of odd reach": (F.conv2d, 2, (6, 7), (4, 2, 3, 4), True, Options(padding="same")),
    "padding as far as the kernels reach": (F.conv2d, 2, (6, 7), (4, 2, 3, 2), True, Options(padding=(2, 1))),
    "padding beyond the kernels": (F.conv2d, 2, (6, 7), (4, 2, 3, 2), True, Options(padding=2)),
    "groups, dilation, padding": (F.conv2d, 4, (9, 8), (6, 2, 3, 2), True, Options(1, (3, 0), (2, 3), 2)),
    "one dimension, same": (F.conv1d, 2, (9,), (4, 2, 3), False, Options(padding="same", dilation=2)),
    "three dimensions, dilated": (F.conv3d, 2, (4, 5, 6), (4, 1, 2, 3, 1), True, Options(1, (0, 2, 0), (3, 1, 2), 2)),
}
ORDINARY = {  # cases in which the gradient of the inputs is not computed with turned kernels
    *("groups, strides, dilation", "strides that leave some inputs out", "one dimension", "one dimension, in a tuple"),
    *("three dimensions, all different", "same, of odd reach", "padding beyond the kernels"),
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


class InputGradients(TorchDispatchMode):
    """Counts the gradients of inputs that PyTorch's own backward pass of convolutions computes."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.convolution_backward.default:
            self.count += args[-1][0]
        return function(*args, **kwargs or {})


def input_gradients(way, case):
    leaves = tensors(case)
    outputs = convolved(way, case, leaves)
    with InputGradients() as counted:
        torch.autograd.grad(outputs.sum(), leaves)
    return counted.count


@pytest.mark.parametrize("case", CASES)
def test_kernels_are_turned_where_the_gradient_of_the_inputs_is_a_forward_convolution(case):
    assert input_gradients(WAYS["turned"], case) == (case in ORDINARY)
    assert input_gradients(WAYS["grouped"], case) == 1


@pytest.mark.parametrize(
    ("shape", "groups", "way"),
    [
        ((2, 20, 10, 5, 5), 1, "turned"),  # 500 products
        ((2, 64, 32, 5, 5), 1, "grouped"),  # 1,600
        ((2, 40, 32, 5, 5), 1, "turned"),  # 1,000
        ((2, 64, 32, 5, 5), 2, "turned"),  # 800 in each group
        ((2, 6, 1, 3, 3), 3, "grouped"),  # depthwise
        ((1, 20, 10, 5, 5), 1, "one by one"),
        ((2, 1001, 2, 1), 1, "grouped"),
    ],
)
def test_a_gpu_turns_kernels_where_an_input_gradient_sums_few_products(shape, groups, way):
    """The device `meta` takes the place of a GPU."""
    weight = torch.empty(shape, device="meta")
    assert way_for(weight, groups, turns=True) == way
    assert way_for(weight, groups, turns=False) == ("one by one" if shape[0] == 1 else "grouped")
    assert way_for(torch.empty(shape), groups, turns=True) == "one by one"


@pytest.mark.parametrize("case", ["plain", "no bias, same", "groups, dilation, padding", "one dimension, same"])
def test_turned_kernels_have_second_derivatives_and_frozen_inputs_or_kernels(case):
    leaves = tensors(case)
    assert torch.autograd.gradgradcheck(lambda *given: convolved(WAYS["turned"], case, given), leaves, fast_mode=True)
    for frozen in range(len(leaves)):
        leaves = [leaf.detach().requires_grad_(place != frozen) for place, leaf in enumerate(tensors(case))]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        pair = [
            torch.autograd.grad(convolved(WAYS[way], case, leaves).sin().sum(), wanted) for way in ("turned", "grouped")
        ]
        torch.testing.assert_close(*pair, rtol=0, atol=1e-12)


@pytest.mark.parametrize("autocast", [False, True])
def test_turned_kernels_save_what_an_ordinary_convolution_saves(autocast):
    def run(way):
        saved = {}
        leaves = [leaf.detach().float().requires_grad_() for leaf in tensors("plain")]
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t).detach(), lambda t: t),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            outputs = convolved(WAYS[way], "plain", leaves)
        sizes = sorted((str(tensor.dtype), tensor.shape) for tensor in saved.values())
        return outputs, torch.autograd.grad(outputs.float().sin().sum(), leaves), sizes

    (turned, gradients, sizes), (grouped, expected, usual) = run("turned"), run("grouped")
    assert sizes == usual
    assert turned.dtype == (torch.bfloat16 if autocast else torch.float32)
    assert torch.equal(turned, grouped)
    # Two roundings of bfloat16 at most, whose kernels differ between CPUs.
    tolerance = {"rtol": 2**-6, "atol": 0.1} if autocast else {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(gradients, expected, **tolerance)
