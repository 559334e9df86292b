"""Operations of stacks: replacements for PyTorch's own under vmap, and what a merged batch refuses."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

from fedsim.clients import OuterProductGrad
from fedsim.errors import ExperimentError
from fedsim.training.operations import DataDependenceCheck, MergedBatch, NotMergeableError, VmapOverrides, in_one_chunk
from fedsim.training.stacked_module import StackedModule

IMAGES = (3, 4, 6, 5)
K, BATCH, INPUTS, OUTPUTS = 3, 4, 5, 2


@pytest.fixture
def stacks():
    generator = torch.Generator().manual_seed(1)
    shapes = (K, OUTPUTS, INPUTS), (K, OUTPUTS)
    return [torch.randn(shape, generator=generator, dtype=torch.double, requires_grad=True) for shape in shapes]


@pytest.fixture
def inputs():
    return torch.randn(K * BATCH, INPUTS, generator=torch.Generator().manual_seed(2), dtype=torch.double)


@pytest.mark.parametrize("twice", [False, True])
def test_a_weight_that_is_used_twice_has_the_sum_as_its_gradient(twice):
    """A weight that is used only once has a deferred outer product as its gradient."""

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2, dtype=torch.double)

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x))) if twice else self.layer(x)

    module = StackedModule(Twice, merged=True)
    rows = torch.randn(K, 6, dtype=torch.double, generator=torch.Generator().manual_seed(3))
    inputs, targets = torch.linspace(-1, 1, K * BATCH * 2).double().view(K, BATCH, 2), torch.ones(K, BATCH).long()
    arguments = module.views(rows), [], inputs, targets, torch.full((K, BATCH), 1 / BATCH, dtype=torch.double)
    losses, (weight, bias) = module.gradients(*arguments, leave_products=0)
    expected_losses, (expected, expected_bias) = module.gradients(*arguments)
    assert isinstance(weight, OuterProductGrad) == (not twice)
    torch.testing.assert_close(weight if twice else weight.computed(), expected)
    torch.testing.assert_close((losses, bias), (expected_losses, expected_bias))


def test_the_gradient_of_max_pooling_keeps_the_memory_format_of_the_images():
    images = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    images = images.contiguous(memory_format=torch.channels_last).requires_grad_()
    weights, gradients = torch.linspace(-1, 1, 12), []
    for context in (contextlib.nullcontext(), MergedBatch([], [], len(images))):
        hidden = images * 1.0
        hidden.register_hook(gradients.append)
        with context:
            outputs = F.max_pool2d(hidden, 2).flatten(1)
        (outputs * weights).sum().backward()
    plain, merged = gradients
    assert torch.equal(plain, merged)
    assert merged.is_contiguous(memory_format=torch.channels_last)


NORMS = {  # by name: function, and the shape of its weight
    "layer": (lambda x, weight, bias: F.layer_norm(x, [4, 6], weight, bias, eps=0.5), (4, 6)),
    "group": (lambda x, weight, bias: F.group_norm(x, 2, weight, bias, eps=0.5), (4,)),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_of_a_merged_batch_gives_each_row_the_result_it_has_alone(name):
    (norm, shape), inputs = NORMS[name], random(K, BATCH, 4, 6)
    weight, bias = random(K, *shape), random(K, *shape) + 1
    with MergedBatch([], (weight, bias), K * BATCH):
        outputs = norm(inputs.flatten(0, 1), weight, bias).unflatten(0, (K, BATCH))
    for of_stack, *arguments in zip(outputs, inputs, weight, bias, strict=True):
        assert torch.allclose(of_stack, norm(*arguments), rtol=0, atol=1e-12)


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


# Under vmap


def stacked(function, *tensors, factors=()):
    """Call `function` under vmap with substituted operations, as a StackedModule does."""

    def one(factors, *tensors):
        with VmapOverrides(factors) as substitutes:
            outputs = function(*tensors)
        substitutes.require_all_used()
        return outputs

    return vmap(one)(list(factors), *tensors)


@pytest.mark.parametrize("shapes", [[], [(3, 7)] * 2, [(4, 7)]], ids=["too few", "too many", "other samples"])
def test_factors_that_do_not_fit_the_calls_are_refused(shapes):
    with pytest.raises(
        ExperimentError, match="the model's dropout calls differ between forward passes; use engine=processes"
    ):
        stacked(F.dropout, torch.ones(2, 3, 7), factors=[torch.ones(2, *shape) for shape in shapes])


def test_refused_inputs_are_released():
    inputs = torch.ones(3, 7)
    inputs_ref = weakref.ref(inputs)
    with contextlib.suppress(ExperimentError), VmapOverrides([]):
        F.dropout(inputs)
    del inputs
    gc.collect()
    assert inputs_ref() is None


def random(*shape):
    return torch.randn(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def channels_last(images):
    return images.flatten(0, 1).contiguous(memory_format=torch.channels_last).view(images.shape)


TOKENS = torch.arange(24).view(2, 3, 4) % 6
OPERATIONS = {
    "linear": (F.linear, (random(2, 5, 7), random(2, 3, 7), random(2, 3))),
    "linear without bias": (F.linear, (random(2, 5, 7), random(2, 3, 7))),
    "linear over more dimensions": (F.linear, (random(2, 5, 4, 7), random(2, 3, 7), random(2, 3))),
    "linear of a single sample": (F.linear, (random(2, 7), random(2, 3, 7), random(2, 3))),
    "embedding": (lambda weight: F.embedding(TOKENS[0], weight), (random(2, 6, 5),)),
    "embedding with padding": (lambda weight: F.embedding(TOKENS[0], weight, padding_idx=2), (random(2, 6, 5),)),
    "padding from behind": (lambda weight: F.embedding(TOKENS[0], weight, padding_idx=-1), (random(2, 6, 5),)),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (random(2, *IMAGES), random(2, 4), random(2, 4))),
    "group norm, channels_last": (
        lambda x, w, b: F.group_norm(x, 2, w, b),
        (channels_last(random(2, *IMAGES)), random(2, 4), random(2, 4)),
    ),
}


def has_weights_to_learn(name):
    """Whether the operation takes weights and PyTorch can differentiate with respect to them alone."""
    return len(OPERATIONS[name][1]) > 1 and name != "group norm, channels_last"  # where PyTorch 2.13 crashes


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        *(pytest.param(name, False, id=name) for name in OPERATIONS),
        *(pytest.param(name, True, id=f"{name}, fixed inputs") for name in filter(has_weights_to_learn, OPERATIONS)),
    ],
)
def test_an_operation_gives_each_row_the_result_and_the_gradients_it_has_alone(name, frozen):
    function, tensors = OPERATIONS[name]
    leaves = [tensor.clone().requires_grad_(not (frozen and place == 0)) for place, tensor in enumerate(tensors)]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    outputs = stacked(function, *leaves)
    towards = random(*outputs.shape)
    stacked_gradients = torch.autograd.grad(outputs, wanted, towards)
    for k in range(2):
        row = [leaf.detach()[k].clone().requires_grad_(leaf.requires_grad) for leaf in leaves]
        expected = function(*row)
        assert torch.allclose(outputs[k], expected, rtol=0, atol=1e-12)
        gradients = torch.autograd.grad(expected, [tensor for tensor in row if tensor.requires_grad], towards[k])
        for of_all, gradient in zip(stacked_gradients, gradients, strict=True):
            assert torch.allclose(of_all[k], gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("biases", [True, False])
def test_weights_in_one_chunk_are_in_the_order_of_cudnn_and_have_their_own_gradients(biases):
    network = torch.nn.LSTM(3, 2, 2, bias=biases, bidirectional=True, dtype=torch.double)
    weights = network._flat_weights
    views = in_one_chunk(weights)
    torch.testing.assert_close(views, list(map(torch.clone, weights)), rtol=0, atol=0)
    kinds = ("weight_ih", "weight_hh"), ("bias_ih", "bias_hh")
    ends = [f"_l{layer}{way}" for layer in range(2) for way in ("", "_reverse")]
    order = [f"{name}{end}" for names in kinds[: 1 + biases] for end in ends for name in names]
    expected = torch.cat([network.get_parameter(name).flatten() for name in order])
    chunk = torch.as_strided(views[0], (views[0].untyped_storage().nbytes() // 8,), (1,), 0)
    assert torch.equal(chunk, expected)
    inputs = random(4, 5, 3)
    start = [torch.zeros(4, 5, 2, dtype=torch.double) for _ in range(2)]
    gradients = [
        torch.autograd.grad(torch.lstm(inputs, start, given, biases, 2, 0.0, True, True, False)[0].sin().sum(), weights)
        for given in (views, weights)
    ]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)
