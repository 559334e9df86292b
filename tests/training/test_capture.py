"""The check of operations before a capture. The device `meta` takes the place of a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.func import vmap

from fedsim.errors import ExperimentError
from fedsim.training.capture import CaptureCheck

GPU = torch.device("meta")


@pytest.fixture
def attention():
    """Return operations that, like efficient attention, return two states of a generator on the CPU, and read them."""
    with torch.library._scoped_library("fedsim_tests", "DEF") as library:
        library.define("attention(Tensor x) -> (Tensor, Tensor, Tensor)")
        library.define("attention_backward(Tensor x, Tensor seed, Tensor offset) -> Tensor")
        library.define("other(Tensor x, Tensor seed) -> Tensor")
        states = [torch.zeros((), dtype=torch.long) for _ in range(2)]
        library.impl("attention", lambda x: (x.clone(), *states), "Meta")
        for name in ("attention_backward", "other"):
            library.impl(name, lambda x, *states: x.clone(), "Meta")
        yield torch.ops.fedsim_tests


def test_attention_returns_and_reads_states_of_its_generator_on_the_cpu(attention):
    x = torch.ones(3, device=GPU)
    with CaptureCheck(GPU):
        outputs, seed, offset = attention.attention(x)
        attention.attention_backward(outputs, seed.detach(), offset)
    for use in (
        lambda: attention.other(outputs, seed),
        lambda: seed + 1,
        lambda: attention.attention_backward(seed.float(), seed, seed),
    ):
        with CaptureCheck(GPU), pytest.raises(ExperimentError, match="the computation uses a tensor on cpu"):
            use()


NUMBERS = {
    "product": lambda x: x * 0.99,
    "sum": lambda x: x + 1,
    "product in place": lambda x: x.clone().mul_(2),
    "floor": lambda x: x // 2,
    "where": lambda x: torch.where(x > 0, x, 0.5),
    "difference": lambda x: 1 - x,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("use", NUMBERS)
def test_python_numbers_are_constants_of_a_graph_also_under_vmap(use, dtype):
    for x in (torch.ones(3, dtype=dtype, device=GPU), torch.ones(3, 2, dtype=dtype, device=GPU)):
        with CaptureCheck(GPU):
            vmap(NUMBERS[use])(x)


TENSORS_OF_THE_CPU = {
    "a number of the CPU": lambda x: x * torch.ones(()),
    "a number of the CPU that is converted": lambda x: x * torch.ones(()).double(),
}


@pytest.mark.parametrize("use", TENSORS_OF_THE_CPU)
def test_other_tensors_of_the_cpu_are_refused(use):
    x = torch.ones(3, device=GPU)
    with CaptureCheck(GPU), pytest.raises(ExperimentError, match="the computation uses a tensor on cpu"):
        TENSORS_OF_THE_CPU[use](x)
