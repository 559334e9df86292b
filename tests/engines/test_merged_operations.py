"""What a merged batch refuses, and the products that it leaves."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from fedsim.clients import OuterProductGrad
from fedsim.engines.stacking.operations import DataDependenceCheck, MergedBatch, NotMergeableError
from fedsim.engines.stacking.stacked_module import StackedModule

K, BATCH, INPUTS, OUTPUTS = 3, 4, 5, 2


@pytest.fixture
def stacks():
    generator = torch.Generator().manual_seed(1)
    shapes = (K, OUTPUTS, INPUTS), (K, OUTPUTS)
    return [torch.randn(shape, generator=generator, dtype=torch.double, requires_grad=True) for shape in shapes]


@pytest.fixture
def inputs():
    return torch.randn(K * BATCH, INPUTS, generator=torch.Generator().manual_seed(2), dtype=torch.double)


def row_by_row(inputs, weight, bias):
    return torch.cat([F.linear(x, w, b) for x, w, b in zip(inputs.chunk(K), weight, bias, strict=True)])


def test_a_gradient_is_left_as_a_product_where_that_is_asked_for(stacks, inputs):
    products = [[], []]
    with MergedBatch((), stacks, K * BATCH, products):
        found = F.linear(inputs, *stacks)
    weight, bias = torch.autograd.grad(found.square().sum(), stacks, allow_unused=True)
    expected = torch.autograd.grad(row_by_row(inputs, *stacks).square().sum(), stacks)
    (product,) = products[0]
    assert weight is None
    torch.testing.assert_close(product.computed(), expected[0])
    torch.testing.assert_close(bias, expected[1])
    assert not product.left.requires_grad
    assert not product.right.requires_grad


@pytest.mark.parametrize("twice", [False, True])
def test_a_weight_that_is_used_twice_has_the_sum_as_its_gradient(twice):
    """Left as a product where it is used once."""

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2, dtype=torch.double)

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x))) if twice else self.layer(x)

    module = StackedModule(Twice, merged=True)
    rows = torch.randn(K, 6, dtype=torch.double, generator=torch.Generator().manual_seed(3))
    inputs, targets = torch.linspace(-1, 1, K * BATCH * 2).double().view(K, BATCH, 2), torch.ones(K, BATCH).long()
    given = module.views(rows), [], inputs, targets, torch.full((K, BATCH), 1 / BATCH, dtype=torch.double)
    losses, (weight, bias) = module.gradients(*given, leave_products=0)
    expected_losses, (expected, expected_bias) = module.gradients(*given)
    assert isinstance(weight, OuterProductGrad) == (not twice)
    torch.testing.assert_close(weight if twice else weight.computed(), expected)
    torch.testing.assert_close((losses, bias), (expected_losses, expected_bias))


@pytest.mark.parametrize(
    "use",
    [
        lambda x, weight, bias: x + bias,
        lambda x, weight, bias: torch.cat([x, weight]),
        lambda x, weight, bias: x.matmul(weight.mT),
        lambda x, weight, bias: F.linear(x, weight, torch.ones(OUTPUTS)),
        lambda x, weight, bias: F.linear(x, torch.ones(OUTPUTS, INPUTS), bias),
        lambda x, weight, bias: F.linear(x[0], weight, bias),
        lambda x, weight, bias: F.linear(x[: K * BATCH // 2], weight, bias),
        lambda x, weight, bias: F.conv1d(x[0], weight),
    ],
)
def test_other_operations_on_stacks_are_refused(use, stacks, inputs):
    with MergedBatch((), stacks, K * BATCH), pytest.raises(NotMergeableError):
        use(inputs, *stacks)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x.sum().item(),
        lambda x: float(x.sum()),
        lambda x: int(x.argmax()),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: torch.equal(x, x),
        lambda x: x.allclose(x),
        lambda x: 0.5 in x,
        lambda x: [0, 1][x.argmax() > 100],
    ],
)
def test_data_dependent_control_flow_is_refused(read, stacks, inputs):
    with MergedBatch((), stacks, K * BATCH), pytest.raises(NotMergeableError):
        read(inputs)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x[x[:, 0] > 0],
        lambda x: x[(x[:, 0] > 0).nonzero()[:, 0]],
        lambda x: x.masked_select(x > 0),
        lambda x: x.round().unique(),
        lambda x: x.repeat_interleave((x[:, 0] > 0).long(), 0),
        lambda x: x[:, : (x > 0).sum()],
        lambda x: x * x.abs().max().item(),
        lambda x: F.one_hot(x.abs().long()),
    ],
)
def test_shapes_that_depend_on_values_are_refused_in_a_probe(use, inputs):
    with DataDependenceCheck(), pytest.raises(NotMergeableError):
        use(inputs)


def test_integer_indices_are_allowed_in_a_probe(inputs):
    with DataDependenceCheck():
        assert len(inputs[torch.tensor([2, 0])]) == 2


@pytest.mark.parametrize("word", [INPUTS, -1])
def test_an_index_out_of_range_does_not_read_another_row(word):
    words = torch.zeros(K * BATCH, dtype=torch.long)
    words[BATCH] = word
    table = torch.randn(K, INPUTS, OUTPUTS)
    with MergedBatch((), [table], K * BATCH), pytest.raises(RuntimeError, match="out of range"):
        F.embedding(words, table)


def test_probes_do_not_import_the_compiler():
    """Which takes more than a second, and makes a folder among the temporary files."""
    program = (
        "import sys, torch; from fedsim.engines.stacking.operations import DataDependenceCheck\n"
        "from fedsim.engines.auto import FlopCount\n"
        "with DataDependenceCheck(): torch.ones(2).detach()\n"
        "with FlopCount(): torch.ones(2, 2) @ torch.ones(2, 2)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
