"""Inputs and outputs of a stacked module. test_probe.py compares many models with rows that are trained alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedsim.core.rows import new_rows
from fedsim.training.stacked_module import StackedModule
from tests.engines import zoo

K, BATCH = 3, 4


def gradients_of(stacked, rows):
    """Return the gradients of all parameters for random inputs, by name."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(K, BATCH, 2, 8, 8, generator=generator, dtype=torch.double)
    targets, weights = torch.arange(K * BATCH).view(K, BATCH) % zoo.CLASSES, torch.full((K, BATCH), 1 / BATCH).double()
    _, gradients = stacked.gradients(stacked.views(rows), [], inputs, targets, weights)
    return {entry.name: gradient for entry, gradient in zip(stacked.layout.parameters, gradients, strict=True)}


class Shared(nn.Module):
    """A model in which two parameters are added (autograd gives them one gradient tensor) and a third is summed."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.summed = (nn.Parameter(torch.zeros(3, n)) for n in (128, 128, 2))

    def forward(self, pictures):
        return F.linear(pictures.flatten(1), self.first + self.second) * self.summed.sum()


def test_gradients_have_memory_of_their_own():
    """A client algorithm may write to these gradients."""
    stacked = StackedModule(lambda: Shared().double())
    gradients = list(gradients_of(stacked, new_rows(K, stacked.layout.d, torch.double).fill_(0.1)).values())
    before = [gradient.clone() for gradient in gradients]
    assert torch.equal(before[0], before[1])
    assert all(gradient.any() for gradient in before)
    for gradient in gradients:
        gradient[0, 0, 0] += 1
    for gradient, old in zip(gradients, before, strict=True):
        old[0, 0, 0] += 1
        assert torch.equal(gradient, old)


@pytest.mark.parametrize("merged", [False, True])
def test_parameters_are_views_of_the_rows_which_nothing_moves_but_the_algorithm(merged):
    stacked = StackedModule(lambda: zoo.model(kind="convolution").double(), merged=merged)
    rows = new_rows(K, stacked.layout.d, torch.double).fill_(0.1)
    before, views = rows.clone(), stacked.views(rows)
    gradients_of(stacked, rows)
    assert torch.equal(rows, before)
    for number, (view, entry) in enumerate(zip(views, stacked.layout.parameters, strict=True)):
        view.fill_(number)
        assert (rows[:, entry.span] == number).all()


class OfSequences(nn.Module):
    """A recurrent network that reads each picture as a sequence."""

    def __init__(self):
        super().__init__()
        self.network = nn.GRU(8, zoo.CLASSES, batch_first=True)

    def forward(self, pictures):
        return self.network(pictures.flatten(1, 2))[0][:, -1]


def test_a_recurrent_network_never_moves_its_parameters_out_of_their_rows(monkeypatch):
    """On a GPU, PyTorch would copy them to one chunk of memory when it notices other parameters."""
    stacked = StackedModule(lambda: OfSequences().double(), merged=True)
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda network: pytest.fail("moves its parameters"))
    rows = new_rows(K, stacked.layout.d, torch.double).fill_(0.1)
    assert all(gradient.any() for gradient in gradients_of(stacked, rows).values())


def test_whole_numbers_that_an_average_has_made_fractions_of_are_rounded():
    stacked = StackedModule(lambda: zoo.model(kind="BatchNorm"))
    rows = torch.full((1, stacked.layout.n_buffer_values), 2.6, dtype=torch.double)
    assert stacked.unpack_buffers(rows)[-1].tolist() == [3]
