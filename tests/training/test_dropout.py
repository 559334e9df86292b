"""Counter-based dropout: its definition, and its effect on inputs."""

from __future__ import annotations

import functools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fedsim
from fedsim.core.philox import blocks
from fedsim.core.randomness import draw_key
from fedsim.training import gradient_rounds
from fedsim.training.batches import BatchSource
from fedsim.training.forward_functions import Dropout, FactorsAhead, RowDropout, dropout_factors

SEEN: list[torch.Tensor] = []  # masks that dropout has applied to ones


class Seeing(nn.Module):
    """A model that records the dropout of ones: by element, by channel, and in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(784, 10)
        self.drops = nn.ModuleList([nn.Dropout(0.5), nn.Dropout2d(0.3), nn.Dropout(0.2, inplace=True)])

    def forward(self, images):
        shapes = (7,), (3, 2, 5), (4, 2)
        SEEN.extend(drop(images.new_ones(len(images), *s)) for drop, s in zip(self.drops, shapes, strict=True))
        return self.linear(images.flatten(1))


@functools.cache
def word(key, number, step, layer):
    """Return word `number` of the stream, from block number // 4."""
    counter = (torch.tensor(value) for value in (number // 4, step, layer, 0))
    return int(blocks(tuple(counter), torch.tensor(key))[number % 4])


def factors_by_definition(worker, step, layer, samples, shape, p):
    """Return dropout factors [samples, *shape], computed one by one."""
    key, count = draw_key(3, "layers", 1, worker), samples * math.prod(shape)
    mask = [word(key, number, step, layer) < round((1 - p) * 2**32) for number in range(count)]
    return torch.tensor(mask).float().view(samples, *shape) / (1 - p)


def test_masks_equal_those_of_the_definition():
    """Two workers with 5 samples each take two steps, with batches of 3 and 2."""
    SEEN.clear()
    fedsim.run(
        {
            **{"model": f"{__name__}:Seeing", "engine": "serial", "workers": 2, "rounds": 1, "seed": 3},
            **{"data": {"name": "tests.components:tiny", "train": 10}, "local": {"batch_size": 3}},
        }
    )
    drops = Seeing().drops
    # drops the masks of tests and of the recorded forward pass, and the three of the check before the first round
    masks = [mask for mask in SEEN if not bool((mask == 1).all())][3:]
    assert len(masks) == 12
    for call, mask in enumerate(masks):
        worker, step, layer = call // 6, call // 3 % 2, call % 3
        samples, p = (3, 2)[step], drops[layer].p
        shape = ((7,), (3, 1, 1), (4, 2))[layer]
        expected = factors_by_definition(worker, step, layer, samples, shape, p).expand_as(mask)
        assert torch.allclose(mask, expected, rtol=1e-6, atol=0)


WAYS = {
    "a step at a time": {"policy": "asgd", "mode": "clock"},
    "gradients": {"sync": "gradients"},
    "under vmap": {"engine": "batched", "processes": 1, "model": f"{__name__}:coupled"},
}


def coupled():
    """Return a model whose samples are coupled by BatchNorm, so that its stacks run under vmap."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 10))


@pytest.mark.parametrize("way", WAYS)
def test_one_worker_has_the_dropout_of_plain_sgd_in_every_way_of_running(way):
    """With one worker, all these settings take the same steps on the same batches."""
    tables = {
        **{"workers": 1, "rounds": 2, "precision": "float64", "engine": "serial", "seed": 4},
        **{"data": {"name": "tests.components:tiny", "train": 60}, "local": {"batch_size": 8, "lr": 0.05}},
    }
    tables["model"] = WAYS[way].get("model", "net")
    expected, actual = fedsim.run(tables), fedsim.run({**tables, **WAYS[way]})
    assert torch.allclose(actual.global_row, expected.global_row, rtol=0, atol=1e-12)


def test_the_generator_that_layers_draw_from_has_another_key(monkeypatch):
    """PyTorch's GPU generator is Philox too; with the same key it would repeat the words of dropout."""
    keys = set[int]()
    monkeypatch.setattr(gradient_rounds, "seed_everything", lambda device, *drawn: keys.add(draw_key(*drawn)))
    data = {"name": "tests.components:tiny", "train": 20}
    fedsim.run({"workers": 2, "rounds": 1, "seed": 3, "engine": "serial", "data": data})
    assert len(keys) == 2
    assert keys.isdisjoint({draw_key(3, "layers", 1, worker) for worker in range(2)})


@pytest.fixture
def row_dropout(prepared):
    """Return a function that returns the RowDropout of a small experiment with a model."""

    def of(model):
        task, shared = prepared(model if isinstance(model, str) else "dropout")
        if not isinstance(model, str):
            task.experiment.model.__dict__["component"] = model
        return RowDropout(task, shared, BatchSource(task, shared))

    return of


IMAGES = (3, 4, 6, 5)
CALLS = {
    "elements": (F.dropout, torch.rand(IMAGES), IMAGES[1:]),
    "channels_last": (F.dropout, torch.rand(IMAGES).contiguous(memory_format=torch.channels_last), IMAGES[1:]),
    "a transposed tensor": (F.dropout, torch.rand(3, 7, 5).transpose(1, 2), (5, 7)),
    "lines": (F.dropout1d, torch.rand(3, 8, 5), (8, 1)),
    "lines of one sample": (F.dropout1d, torch.rand(3, 5), (1,)),
    "channels": (F.dropout2d, torch.rand(IMAGES), (4, 1, 1)),
    "channels of lines": (F.dropout2d, torch.rand(3, 8, 5), (8, 1)),  # PyTorch also reads this as [batch, channels, :]
    "volumes": (F.dropout3d, torch.rand(3, 4, 2, 2, 2), (4, 1, 1, 1)),
    "volumes of one sample": (F.dropout3d, torch.rand(3, 2, 2, 2), (1, 1, 1)),
}


@pytest.mark.parametrize("p", [0.4, 1.0])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_multiplies_its_inputs_by_its_factors(name, inplace, p, row_dropout):
    function, inputs, shape = CALLS[name]
    dropout = row_dropout(partial(Mixed, True)).of(worker=4, round=2)
    passed = inputs.clone(memory_format=torch.preserve_format)
    with dropout.at(3, len(inputs)):
        outputs = function(passed, p, True, inplace)
    wanted = Dropout.of(function, inputs.shape, p)
    assert wanted.shape == shape
    key = torch.tensor([draw_key(0, "layers", 2, 4)])
    (factors,) = dropout_factors(key, 3, 1, len(inputs), [wanted], torch.double)
    assert torch.allclose(outputs, inputs * factors[0, 0].float())
    assert (outputs is passed) == inplace


def test_calls_that_were_not_recorded_have_the_masks_of_their_position_in_the_forward_pass(row_dropout):
    """The recorded calls are two, with other probabilities."""
    dropout, ones = row_dropout(partial(Mixed, True)).of(worker=4, round=2), torch.ones(3, 7)
    with dropout.at(3, len(ones)):
        outputs = [F.dropout(ones, 0.5) for _ in range(3)]
    key = torch.tensor([draw_key(0, "layers", 2, 4)])
    factors = dropout_factors(key, 3, 1, len(ones), [Dropout.of(F.dropout, ones.shape, 0.5)] * 3, torch.float32)
    assert [output.tolist() for output in outputs] == [of_layer[0, 0].tolist() for of_layer in factors]
    assert not torch.equal(outputs[1], outputs[0])


@pytest.mark.parametrize("p", [1.5, -0.5])
def test_a_wrong_probability_is_refused_as_pytorch_refuses_it(p, row_dropout):
    dropout = row_dropout(partial(Mixed, True)).of(worker=4, round=2)
    with pytest.raises(ValueError, match="has to be between 0 and 1"), dropout.at(0, 4):
        F.dropout(torch.ones(4, 5), p)


def test_steps_drawn_ahead_are_those_drawn_one_by_one():
    dropouts = [Dropout(F.dropout, 0.5, (7, 3)), Dropout(F.dropout2d, 0.2, (4, 1, 1))]
    keys, starts = torch.tensor([5, 6, 7]), torch.tensor([0, 2, 9])
    made = keys, 20, 8, dropouts, torch.double
    ahead = FactorsAhead(*made, first_step=starts)
    for step, rows in [(0, 3), (1, 3), (4, 2), (3, 1), (19, 1), (2, 3), (25, 2)]:
        factors = ahead.of(step, rows)
        for row in range(rows):
            expected = dropout_factors(keys[row : row + 1], int(starts[row]) + step, 1, 8, dropouts, torch.double)
            for of_all, alone in zip(factors, expected, strict=True):
                assert len(of_all) == rows
                assert torch.equal(of_all[row], alone[0, 0])


# Dropout calls of a model


class Recomputing(nn.Module):
    """A model that recomputes dropout in the backward pass, where the call cannot be identified."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(784, 16), nn.Linear(16, 10), reentrant

    def forward(self, images):
        hidden = self.first(images.flatten(1))
        if self.training:
            hidden = checkpoint(self.dropped, hidden, use_reentrant=self.reentrant)
        return self.last(hidden)

    def dropped(self, hidden):
        SEEN.append(F.dropout(torch.ones_like(hidden), 0.5))
        return hidden * SEEN[-1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_has_the_same_mask_in_both_passes(reentrant):
    SEEN.clear()
    tables = {"workers": 2, "rounds": 1, "engine": "serial", "local": {"batch_size": 3}}
    data = {"name": "tests.components:tiny", "train": 6}
    fedsim.run({**tables, "data": data, "model": {"name": f"{__name__}:Recomputing", "reentrant": reentrant}})
    passes = SEEN[-4:]
    assert all(torch.equal(passes[step], passes[step + 1]) for step in (0, 2))
    assert not torch.equal(passes[0], passes[2])


class Mixed(nn.Module):
    """A model with a dropout module and, if `functional`, a dropout function call."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.linear, self.drop, self.functional = nn.Linear(128, 3), nn.Dropout(0.3), functional

    def forward(self, images):
        hidden = self.drop(images.flatten(1))
        return self.linear(F.dropout(hidden, 0.2, self.training) if self.functional else hidden)


@pytest.mark.parametrize(("kind", "count"), [("dropout twice", 2), ("convolution", 0), ("alpha dropout", 0)])
def test_calls_are_recorded_where_masks_can_be_drawn(kind, count, row_dropout):
    assert len(row_dropout(kind).calls) == count


@pytest.mark.parametrize("functional", [False, True])
def test_dropout_modules_ask_for_their_factors_where_they_make_all_calls(functional, row_dropout):
    dropout, images = row_dropout(partial(Mixed, functional)), torch.ones(4, 2, 8, 8, dtype=torch.double)
    assert (len(dropout.calls), dropout.by_modules) == (1 + functional, not functional)
    model, of_round = dropout.new_module().train(), dropout.of(worker=4, round=2)
    called = []
    model.drop.register_forward_hook(lambda *_: called.append(True))
    with of_round.at(3, 4):
        assert torch._C._len_torch_function_stack() == functional
        outputs = model(images)
    expected = images.flatten(1)
    for factors in of_round.factors(3, 4):
        expected = expected * factors
    assert torch.equal(outputs, model.linear(expected))
    assert called
    assert isinstance(model.drop, nn.Dropout)


class Pooling(nn.Module):
    """A model whose linear layer follows max pooling, with or without dropout."""

    def __init__(self, p: float | None, functional: bool) -> None:
        super().__init__()
        self.convolution, self.linear = nn.Conv2d(2, 3, 3), nn.Linear(27, 10)
        self.pool = partial(F.max_pool2d, kernel_size=2) if functional else nn.MaxPool2d(2)
        self.p = p

    def forward(self, images):
        pooled = recorded(self.pool(self.convolution(images)))
        return self.linear((pooled if self.p is None else F.dropout(pooled, self.p, self.training)).flatten(1))


def recorded(pooled):
    """Return `pooled`, and append the gradient with which its backward pass begins to SEEN."""
    if pooled.grad_fn is not None:
        pooled.grad_fn.register_prehook(lambda gradients: SEEN.append(gradients[0]))
    return pooled


@pytest.mark.parametrize(("p", "functional"), [(None, False), (0.5, False), (0.5, True)])
def test_the_gradient_of_max_pooling_keeps_the_memory_format_of_the_images(p, functional, row_dropout):
    """A functional max pooling is only seen in models that call dropout as a function."""
    dropout = row_dropout(partial(Pooling, p, functional))
    model, plain = dropout.new_module().train(), Pooling(p, functional).double()
    plain.load_state_dict(model.state_dict())
    images = torch.randn(4, 2, 8, 8, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    images = images.contiguous(memory_format=torch.channels_last)
    of_round = dropout.of(worker=4, round=2)
    gradients = {}
    for name, module in (("ours", model), ("plain", plain)):
        SEEN.clear()
        with of_round.at(3, 4):
            outputs = module(images)
        (outputs * torch.linspace(-1, 1, 40).view(4, 10)).sum().backward()
        gradients[name] = SEEN[-1], *(parameter.grad for parameter in module.parameters())
    assert gradients["ours"][0].is_contiguous(memory_format=torch.channels_last)
    assert all(map(torch.equal, gradients["ours"], gradients["plain"]))
    assert type(model.pool).__name__ == type(plain.pool).__name__


@pytest.mark.parametrize("transformed", [torch.func.jacrev, lambda f: torch.func.vmap(torch.func.grad(f))])
def test_max_pooling_can_be_differentiated_by_torch_func(transformed, row_dropout):
    """A model may do so in its forward pass, and a training function of one's own for the gradient of each sample."""
    pool = row_dropout(partial(Pooling, None, False)).new_module().pool
    images = torch.randn(5, 1, 2, 6, 6, generator=torch.Generator().manual_seed(1))
    images = images.flatten(0, 1).contiguous(memory_format=torch.channels_last)
    batches = images if transformed is torch.func.jacrev else images.unsqueeze(1)

    def sums(of):
        return lambda images: of(images).square().sum()

    assert torch.equal(*(transformed(sums(of))(batches) for of in (pool, partial(F.max_pool2d, kernel_size=2))))


def test_a_full_device_is_not_taken_for_a_model_without_dropout(row_dropout, monkeypatch):
    def full(loss):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("fedsim.training.forward_functions._backward_under_modes", full)
    with pytest.raises(torch.OutOfMemoryError):
        row_dropout("dropout").of(worker=4, round=2)
