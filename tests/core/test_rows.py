from __future__ import annotations

import pytest
import torch
from torch import nn

from fedsim.core.rows import ALIGNMENT, Layout, bind, index_of, new_rows, pull_down
from fedsim.models import Net
from tests.models import Normalised


@pytest.fixture
def module():
    torch.manual_seed(0)
    return Net(dropout=0.0)


def test_a_layout_covers_the_row_without_gap_or_overlap(module):
    layout = Layout.of(module)
    ends = [0]
    for entry in layout.parameters:
        assert entry.span.start == ends[-1]
        ends.append(entry.span.stop)
    assert ends[-1] == layout.d == 21_840


def test_read_and_write_are_inverse(module):
    layout = Layout.of(module)
    row = layout.read(module)
    other = Net()
    layout.write(row, other)
    assert torch.equal(layout.read(other), row)
    row.zero_()
    assert layout.read(other).any(), "write copies; the module keeps its own parameters"


def test_bound_parameters_and_gradients_are_views_of_the_rows(module):
    layout = Layout.of(module)
    start = layout.read(module)
    row, gradient = start.clone(), torch.zeros_like(start)
    layout.bind(module, row, gradient)
    row.add_(1)
    assert torch.equal(layout.read(module), start + 1)
    module(torch.randn(2, 1, 28, 28)).sum().backward()
    assert gradient.any()
    assert torch.equal(gradient, torch.cat([p.grad.flatten() for p in module.parameters()]))


def test_binding_again_moves_the_module_to_other_rows(module):
    layout = Layout.of(module)
    rows, gradients = new_rows(2, layout.d, torch.float32), new_rows(2, layout.d, torch.float32)
    for row, gradient in zip(rows, gradients, strict=True):
        layout.bind(module, row, gradient)
    gradients.zero_()
    module(torch.randn(2, 1, 28, 28)).sum().backward()
    assert not gradients[0].any()
    assert gradients[1].any()


def test_bind_refuses_a_row_of_the_wrong_length(module):
    with pytest.raises(ValueError, match=r"shape \(21840,\), not \(5,\)"):
        bind(module, torch.zeros(5), torch.zeros(21_840))


def test_shared_parameters_are_one_entry_and_frozen_ones_none():
    linear = nn.Linear(4, 4)
    assert Layout.of(nn.Sequential(linear, linear)).d == 20
    module = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))
    assert [entry.name for entry in Layout.of(module).parameters] == ["1.weight", "1.bias"]


def test_buffers_survive_the_row_exactly_integers_included():
    module = Normalised()
    module.layers[2].running_mean.normal_()
    module.layers[2].num_batches_tracked.fill_(2**40 + 1)
    layout = Layout.of(module)
    row = layout.read_buffers(module)
    other = Normalised()
    layout.write_buffers(row, other)
    for name, value in module.named_buffers():
        assert torch.equal(dict(other.named_buffers())[name], value), name


def test_buffers_that_are_not_saved_are_no_part_of_the_row():
    module = nn.Linear(2, 2)
    module.register_buffer("mask", torch.ones(3), persistent=False)
    assert Layout.of(module).n_buffer_values == 0
    assert Layout.of(module).read_buffers(module).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [1, 16, 21_840, 199_210])
def test_every_row_of_a_matrix_starts_on_a_cache_line(d, dtype):
    rows = new_rows(3, d, dtype)
    assert rows.shape == (3, d)
    assert not rows.any()
    assert {row.data_ptr() % ALIGNMENT for row in rows} == {0}


@pytest.mark.parametrize(
    ("slots", "index"), [([], slice(0, 0)), ([3], slice(3, 4, 1)), ([1, 3, 5], slice(1, 6, 2)), ([0, 1, 3], None)]
)
def test_evenly_spaced_rows_are_pulled_down_through_a_view_and_others_by_an_index(slots, index):
    found = index_of(slots, torch.device("cpu"))
    assert found == index if index is not None else found.tolist() == slots
    global_row, rows = torch.arange(5.0), torch.zeros(7, 5)
    pull_down(global_row, rows, found)
    assert [slot for slot in range(7) if torch.equal(rows[slot], global_row)] == slots
