"""Modules with common parameters; what is done with them on ranks is in test_distributed.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedsim
from fedsim.core.rows import new_rows
from fedsim.engines.distributed.parallel_trainer import SharedModel
from fedsim.engines.trainers.row_module import RowModule
from fedsim.runs.setup import task_of
from tests.models import Normalised, Recurrent, Stateful, Tied


class ByClosure(nn.Module):
    """Has a function that knows the module it was made for, and changes that one's buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(784, 10), nn.BatchNorm1d(10)
        self.head = lambda values: self.norm(values)

    def forward(self, images):
        return self.head(self.linear(images.flatten(1)))


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(784, 10)

    def forward(self, images):
        raise RuntimeError("not today")


class NotCopied(nn.Linear):
    def __init__(self) -> None:
        super().__init__(784, 10)

    def forward(self, images):
        return super().forward(images.flatten(1))

    def __deepcopy__(self, memo):
        raise TypeError("there is but one of me")


def task(**changes):
    return task_of(fedsim.Experiment(model="logistic", **changes), torch.device("cpu"))


def refusal(make):
    torch.manual_seed(0)
    start = make()
    state = start.state_dict()

    def again():
        module = make()
        module.load_state_dict(state)
        return module

    return SharedModel(again).refusal(task(), torch.rand(8, 1, 28, 28), torch.arange(8) % 10)


@pytest.mark.parametrize("make", [Normalised, Tied, Recurrent])
def test_modules_have_the_trainable_parameters_in_common_and_nothing_else(make):
    model = SharedModel(make)
    one, other = model.new_module(), model.new_module()
    assert [id(p) for p in one.parameters()] == [id(p) for p in model.parameters] == [id(p) for p in other.parameters()]
    assert not {id(b) for b in one.buffers()} & {id(b) for b in other.buffers()}
    assert not {id(m) for m in one.modules()} & {id(m) for m in other.modules()}


def test_parameters_without_gradient_are_each_modules_own():
    model = SharedModel(Stateful)
    one, other = model.new_module(), model.new_module()
    assert one.linear.weight is other.linear.weight
    assert one.features is not other.features
    assert torch.equal(one.features, other.features)


def test_their_gradients_add_up_in_one_row():
    model = SharedModel(Normalised)
    modules = [RowModule(model.new_module) for _ in range(2)]
    row, gradient = new_rows(2, modules[0].layout.d, torch.float32)
    row.copy_(modules[0].layout.read(modules[0].module))
    buffers = torch.zeros(2, modules[0].layout.n_buffer_values, dtype=torch.double)
    buffers[:] = modules[0].layout.read_buffers(modules[0].module)
    expected = torch.zeros_like(gradient)
    for module, own, inputs in zip(modules, buffers, torch.rand(2, 4, 1, 28, 28), strict=True):
        module.load(row, gradient, own)
        before = gradient.clone()
        module.module(inputs).square().sum().backward()
        expected += gradient - before
        module.store(own)
    assert torch.equal(gradient, expected)
    assert all(parameter.grad.data_ptr() >= gradient.data_ptr() for parameter in model.parameters)
    assert not torch.equal(*buffers)


def test_a_model_that_fails_by_itself_is_left_to_fail_in_training():
    assert refusal(Failing) is None


@pytest.mark.parametrize("make", [Normalised, Tied, Recurrent])
def test_what_trains_as_it_does_alone_is_not_refused(make):
    assert refusal(make) is None


def test_models_that_cannot_share_say_why():
    assert refusal(ByClosure) == "copies of the model that share its parameters train otherwise"
    assert refusal(NotCopied) == (
        "the model's parameters cannot be shared by copies of it: TypeError: there is but one of me"
    )


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, None),
        ({"aggregate": "mean"}, None),
        ({"aggregate": {"weights": "uniform"}}, None),
        ({"aggregate": {"nonfinite": "keep"}}, None),
        ({"precision": "bf16"}, None),
        ({"aggregate": {"rule": ["nnm", "mean"], "f": 1}}, 'aggregate.rule = "nnm + mean"'),
        ({"aggregate": {"rule": "qfedavg"}}, 'aggregate.rule = "qfedavg"'),
        ({"distributed": {"inner": "batched"}}, 'distributed.inner = "batched"'),
    ],
)
def test_it_is_for_means_that_nobody_needs_single_rows_for(changes, needed):
    done = task(engine="distributed", sync="gradients", **changes)
    assert done.rows_for == needed
    assert (done.hook is None) == (needed is not None)
    assert done.has_rows == (needed is not None)
    assert task(engine="distributed", **changes).has_rows
