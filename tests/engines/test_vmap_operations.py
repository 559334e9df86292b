"""Dropouts recorded and multiplied in, and what takes the place of PyTorch's own operations under vmap."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vmap

from fedsim.core.randomness import preserve_random_state
from fedsim.engines.stacking.operations import VmapOverrides
from fedsim.engines.trainers.dropout import Recording
from fedsim.errors import ExperimentError

CPU = torch.device("cpu")
IMAGES = (3, 4, 6, 5)


@pytest.fixture(autouse=True)
def random_state():
    with preserve_random_state(CPU):
        yield


class Twice(nn.Module):
    """Dropouts of elements and of channels, and some that do nothing."""

    def forward(self, images):
        images = F.dropout2d(images, 0.5, self.training)
        images = F.dropout(F.dropout(images, 0.9, training=False), p=0.0)
        return F.dropout(images.flatten(1), 0.2, self.training)


def test_a_recording_notes_the_dropouts_leaves_them_out_and_draws_nothing():
    images, state = torch.rand(IMAGES), torch.get_rng_state()
    with Recording() as recording:
        outputs = Twice()(images)
    assert torch.equal(outputs, images.flatten(1))
    assert torch.equal(torch.get_rng_state(), state)
    assert [(d.function, d.p, d.shape) for d in recording.dropouts] == [
        (F.dropout2d, 0.5, (4, 1, 1)),
        (F.dropout, 0.2, (120,)),
    ]
    assert recording.samples == [3, 3]
    with Recording() as recording:
        Twice().eval()(images)
    assert recording.dropouts == []


def stacked(function, *tensors, factors=()):
    """Under vmap with substitutes, as a StackedModule calls it."""

    def one(factors, *tensors):
        with VmapOverrides(factors) as substitutes:
            outputs = function(*tensors)
        substitutes.require_all_used()
        return outputs

    return vmap(one)(list(factors), *tensors)


def test_each_dropout_multiplies_by_factors_of_its_own():
    images = torch.rand(2, *IMAGES)
    first, second = torch.rand(2, 3, 4, 1, 1), torch.rand(2, 3, 120)
    outputs = stacked(Twice(), images, factors=[first, second])
    assert torch.equal(outputs, (images * first).flatten(2) * second)


def test_a_dropout_in_place_changes_what_it_is_given():
    def change(x):
        F.dropout(x, 0.5, True, True)
        return x

    inputs, factors = torch.ones(2, 3, 7), torch.rand(2, 3, 7)
    assert torch.equal(stacked(change, inputs, factors=[factors]), factors)


@pytest.mark.parametrize("shapes", [[], [(3, 7)] * 2, [(4, 7)]], ids=["too few", "too many", "other samples"])
def test_factors_that_do_not_fit_the_calls_are_refused(shapes):
    with pytest.raises(ExperimentError, match="which dropouts it calls is not always the same; use engine=spawn"):
        stacked(F.dropout, torch.ones(2, 3, 7), factors=[torch.ones(2, *shape) for shape in shapes])


def test_what_was_refused_is_kept_nowhere():
    inputs = torch.ones(3, 7)
    kept = weakref.ref(inputs)
    with contextlib.suppress(ExperimentError), VmapOverrides([]):
        F.dropout(inputs)
    del inputs
    gc.collect()
    assert kept() is None


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
    """Whether the operation has tensors besides its inputs, and PyTorch a derivative for these alone."""
    return len(OPERATIONS[name][1]) > 1 and name != "group norm, channels_last"  # at which PyTorch 2.13 crashes


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
    found = torch.autograd.grad(outputs, wanted, towards)
    for k in range(2):
        row = [leaf.detach()[k].clone().requires_grad_(leaf.requires_grad) for leaf in leaves]
        expected = function(*row)
        assert torch.allclose(outputs[k], expected, rtol=0, atol=1e-12)
        gradients = torch.autograd.grad(expected, [tensor for tensor in row if tensor.requires_grad], towards[k])
        for of_all, gradient in zip(found, gradients, strict=True):
            assert torch.allclose(of_all[k], gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shared", [(0,), (1,), (2,), (1, 2), (0, 2)])
def test_a_linear_layer_may_share_its_inputs_its_weight_or_its_bias_among_the_rows(shared):
    _, tensors = OPERATIONS["linear"]
    tensors = [tensor[0] if place in shared else tensor for place, tensor in enumerate(tensors)]
    dims = tuple(None if place in shared else 0 for place in range(3))

    def one(*tensors):
        with VmapOverrides([]):
            return F.linear(*tensors)

    outputs = vmap(one, in_dims=dims)(*tensors)
    for k in range(2):
        row = [tensor if place in shared else tensor[k] for place, tensor in enumerate(tensors)]
        assert torch.allclose(outputs[k], F.linear(*row), rtol=0, atol=1e-12)


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_an_embedding_of_a_sort_that_is_not_computed_is_refused(option):
    with pytest.raises(ExperimentError, match="an embedding with max_norm, scale_grad_by_freq or sparse; use engine"):
        stacked(lambda weight: F.embedding(TOKENS[0], weight, **option), random(2, 6, 5))
