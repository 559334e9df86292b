"""A stack of rows computed at once, against the same rows one at a time in plain PyTorch."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedsim.core.randomness import preserve_random_state
from fedsim.core.rows import Layout, new_rows
from fedsim.engines.stacking.probe import StackingProbe
from fedsim.engines.stacking.stacked_module import StackedModule
from fedsim.engines.trainers.batches import BatchSource
from fedsim.engines.trainers.dropout import RowDropout, dropout_factors, layer_key
from fedsim.errors import ExperimentError
from tests.engines import zoo

CPU = torch.device("cpu")
SIZES = [4, 2, 3]  # of the rows' batches
BATCH = max(SIZES)


def made(kind):
    """A module, always the same."""
    with preserve_random_state(CPU):
        torch.manual_seed(0)
        return zoo.model(kind=kind).double()


@pytest.fixture
def batches():
    """`batches(kind, sizes)`: inputs [k, 4, ...], targets [k, 4]; beyond a row's size there is only noise."""

    def draw(kind, sizes):
        generator = torch.Generator().manual_seed(1)
        shape = len(sizes), BATCH
        if kind in zoo.TEXTS:
            inputs = torch.randint(0, zoo.WORDS, (*shape, 6), generator=generator)
        else:
            inputs = torch.randn(*shape, 2, 8, 8, generator=generator, dtype=torch.double)
            inputs = inputs.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, shape)
        return inputs, torch.randint(0, zoo.CLASSES, shape, generator=generator)

    return draw


def different_rows(module, k):
    """Rows and buffer rows that all differ, and stay near the module's start."""
    layout, generator = Layout.of(module), torch.Generator().manual_seed(2)
    rows, buffers = new_rows(k, layout.d, torch.double), torch.zeros(k, layout.n_buffer_values, dtype=torch.double)
    rows.copy_(layout.read(module) + 0.1 * torch.randn(k, layout.d, generator=generator))
    buffers.copy_(layout.read_buffers(module))
    for entry in layout.buffers:
        whole_numbers = not dict(module.named_buffers())[entry.name].is_floating_point()
        buffers[:, entry.span] += torch.arange(k).unsqueeze(1) * (1 if whole_numbers else 0.1)
    return rows, buffers


def weights_for(sizes):
    weights = torch.zeros(len(sizes), BATCH, dtype=torch.double)
    for row, size in enumerate(sizes):
        weights[row, :size] = 1 / size
    return weights


def alone(module, row, buffers, inputs, targets):
    """Loss, gradients and buffers of one row in plain PyTorch."""
    layout = Layout.of(module)
    layout.write(row, module)
    layout.write_buffers(buffers, module)
    loss = F.cross_entropy(module.train()(inputs), targets)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return loss.detach(), gradients, layout.read_buffers(module)


def close(found, expected):
    return torch.allclose(found, expected, rtol=0, atol=1e-10)


def compute(kind, batches, sizes, factors=(), merged=False):
    """What a stack gives for rows that differ: losses, gradients, buffer rows."""
    stacked = StackedModule(lambda: made(kind), merged=merged)
    rows, buffers = different_rows(made(kind), len(sizes))
    unpacked = stacked.unpack_buffers(buffers)
    inputs, targets = batches(kind, sizes)
    losses, gradients = stacked.gradients(
        stacked.views(rows), unpacked, inputs, targets, weights_for(sizes), list(factors)
    )
    packed = torch.zeros_like(buffers)
    stacked.pack_buffers(unpacked, packed)
    return losses, gradients, packed


def assert_every_row_is_as_if_alone(kind, batches, sizes, found, dropout=None):
    (losses, gradients, packed), module = found, made(kind)
    rows, buffers = different_rows(module, len(sizes))
    module = module if dropout is None else dropout.new_module()
    inputs, targets = batches(kind, sizes)
    for k, size in enumerate(sizes):
        with contextlib.nullcontext() if dropout is None else dropout.of(k, 1).at(2, size):
            loss, expected, after = alone(module, rows[k], buffers[k], inputs[k, :size], targets[k, :size])
        assert close(losses[k], loss)
        assert close(packed[k], after)
        for gradient, one in zip(gradients, expected, strict=True):
            assert close(gradient[k], one)


PADDED = (
    *("convolution", "groups, stride, circular", "dilation, no bias", "transposed convolution", "one dimension"),
    *("GroupNorm", "LayerNorm", "InstanceNorm", "frozen linear layer", "without dimensions"),
    *("linear, no bias", "linear, more dimensions", "linear, single samples", "linear, transposed", "einsum"),
    *("log-probabilities", "a layer without gradient", "transformer", "attention", "recurrent cell", "padding", "tied"),
)
COUPLED = (
    *("BatchNorm", "BatchNorm frozen", "BatchNorm twice", "InstanceNorm with statistics"),
    *("buffers", "centred batch"),
)
DROPOUTS = (
    *("dropout", "dropout of lines", "dropout of channels", "dropout of volumes", "dropout twice", "in place"),
    *("channels in place", "dropout of a transposed tensor", "dropout where samples stand second"),
    *("dropout of a slice", "dropout of an expanded tensor"),
)
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap, for what it loops over


# All else is not: it sees other samples, or gives parameters to functions that take no stack of them.
MERGED = (
    *("convolution", "groups, stride, circular", "dilation, no bias", "one dimension", "GroupNorm", "LayerNorm"),
    *("frozen linear layer", "linear, more dimensions", "log-probabilities", "a layer without gradient", "padding"),
    "tied",
    *DROPOUTS,
)


@pytest.mark.parametrize("kind", [*PADDED, *COUPLED, *DROPOUTS])
def test_batches_are_merged_where_they_can_be(kind, prepared):
    assert StackingProbe.of(*prepared(kind)).merged == (kind in MERGED)


@pytest.mark.parametrize("kind", [*PADDED, *COUPLED])
def test_each_row_of_a_stack_is_computed_as_if_alone(kind, batches):
    sizes = [BATCH] * 3 if kind in COUPLED else SIZES
    assert_every_row_is_as_if_alone(kind, batches, sizes, compute(kind, batches, sizes, merged=kind in MERGED))


@pytest.mark.parametrize("kind", DROPOUTS)
def test_rows_with_dropout_are_as_if_each_had_drawn_alone(kind, batches, prepared):
    """Factors drawn for all rows at once, in batches of one size, against each row's own, in short batches."""
    task, shared = prepared(kind)
    dropouts = StackingProbe.of(task, shared).dropouts
    keys = torch.tensor([layer_key(task.seed, 1, k) for k in range(len(SIZES))])
    factors = [of_step[0] for of_step in dropout_factors(keys, 2, 1, BATCH, dropouts, torch.double)]
    assert any((of_all == 0).any() and (of_all > 1).any() for of_all in factors)
    dropout = RowDropout(task, shared, BatchSource(task, shared))
    for merged in (False, True):
        found = compute(kind, batches, SIZES, factors, merged)
        assert_every_row_is_as_if_alone(kind, batches, SIZES, found, dropout)


@pytest.mark.parametrize("count", [0, 2])
def test_factors_for_fewer_or_more_dropouts_than_there_are_are_refused(count, batches):
    factors = [torch.ones(3, BATCH, 4, 6, 6, dtype=torch.double)] * count
    with pytest.raises(ExperimentError, match="which dropouts it calls is not always the same"):
        compute("dropout", batches, SIZES, factors)


class Shared(nn.Module):
    """Two parameters that are added, whose gradients autograd holds in one tensor, and one that is summed up."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.summed = (nn.Parameter(torch.zeros(3, n)) for n in (128, 128, 2))

    def forward(self, pictures):
        return F.linear(pictures.flatten(1), self.first + self.second) * self.summed.sum()


def test_gradients_have_memory_of_their_own(batches):
    """A solver may write to them."""
    stacked = StackedModule(lambda: Shared().double())
    rows = new_rows(3, stacked.layout.d, torch.double).fill_(0.1)
    inputs, targets = batches("convolution", SIZES)
    _, gradients = stacked.gradients(stacked.views(rows), [], inputs, targets, weights_for(SIZES))
    kept = [gradient.clone() for gradient in gradients]
    assert torch.equal(kept[0], kept[1])
    assert all(gradient.any() for gradient in kept)
    for gradient in gradients:
        gradient[0, 0, 0] += 1
    for gradient, before in zip(gradients, kept, strict=True):
        before[0, 0, 0] += 1
        assert torch.equal(gradient, before)


def test_parameters_are_views_of_the_rows_which_nothing_moves_but_the_solver(batches):
    stacked = StackedModule(lambda: made("convolution"))
    rows, _ = different_rows(made("convolution"), 3)
    before, views = rows.clone(), stacked.views(rows)
    inputs, targets = batches("convolution", SIZES)
    stacked.gradients(views, [], inputs, targets, weights_for(SIZES))
    assert torch.equal(rows, before)
    for number, view in enumerate(views):
        view.fill_(number)
    places = [entry.span for entry in stacked.layout.parameters]
    assert all((rows[:, span] == number).all() for number, span in enumerate(places))


def test_a_parameter_that_is_not_used_has_the_gradient_0(batches):
    stacked = StackedModule(lambda: zoo.linear(lambda self, outputs: outputs, unused=nn.Linear(2, 3)).double())
    rows = new_rows(3, stacked.layout.d, torch.double)
    inputs, targets = batches("convolution", SIZES)
    _, gradients = stacked.gradients(stacked.views(rows), [], inputs, targets, weights_for(SIZES))
    by_name = {entry.name: gradient for entry, gradient in zip(stacked.layout.parameters, gradients, strict=True)}
    assert not by_name["unused.weight"].any()
    assert by_name["unused.weight"].shape == (3, 3, 2)
    assert by_name["layer.bias"].any()


def test_buffers_come_in_the_module_s_own_types_and_go_back_as_they_came():
    stacked = StackedModule(lambda: zoo.model(kind="BatchNorm").float())
    rows = torch.arange(2.0 * stacked.layout.n_buffer_values, dtype=torch.double).view(2, -1)
    before, unpacked = rows.clone(), stacked.unpack_buffers(rows)
    kinds = {entry.name: buffer for entry, buffer in zip(stacked.layout.buffers, unpacked, strict=True)}
    assert kinds["1.running_mean"].dtype == torch.float32
    assert kinds["1.num_batches_tracked"].dtype == torch.long
    assert kinds["1.num_batches_tracked"].tolist() == rows[:, -1].tolist()
    packed = torch.zeros_like(rows)
    stacked.pack_buffers(unpacked, packed)
    assert torch.equal(packed, before)
    for buffer in unpacked:
        buffer.zero_()
    assert torch.equal(rows, before), "copies, not views"


def test_whole_numbers_that_an_average_has_made_fractions_of_are_rounded():
    stacked = StackedModule(lambda: zoo.model(kind="BatchNorm"))
    rows = torch.full((1, stacked.layout.n_buffer_values), 2.6, dtype=torch.double)
    assert stacked.unpack_buffers(rows)[-1].tolist() == [3]
