"""Rows, and training steps and tests on rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedsim
from fedsim.core.rows import ALIGNMENT, Layout, bind, index_of, new_rows, pull_down
from fedsim.core.training import DEFAULT_LOSS, check_outputs
from fedsim.models import Net, logistic, two_nn
from tests.models import Normalised

LABELS = torch.arange(6)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def batches():
    return [(torch.randn(n, 1, 28, 28), torch.randint(0, 10, (n,))) for n in (8, 8, 3)]


def test_the_default_loss_and_its_gradient_are_nll_or_cross_entropy():
    logits = torch.randn(6, 10, dtype=torch.double, requires_grad=True)
    targets = torch.arange(6)
    for outputs, loss in ((logits, F.cross_entropy), (logits.log_softmax(1), F.nll_loss)):
        ours, theirs = DEFAULT_LOSS(outputs, targets), loss(outputs, targets)
        gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (ours, theirs)]
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-14)
        assert torch.allclose(*gradients, rtol=0, atol=1e-14)


def test_logits_that_are_log_probabilities_at_first_are_trained_as_logits():
    """A zero last layer whose bias is the log class prior returns log-probabilities."""
    model = logistic()
    torch.nn.init.constant_(model[1].bias, -2.302585)
    batches = [(torch.randn(50, 784), torch.randint(0, 10, (50,)))] * 10
    losses = [fedsim.train_epoch(model, batches, torch.optim.SGD(model.parameters(), lr=1.0)).loss for _ in range(3)]
    assert min(losses) > 0


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (torch.nn.Softmax(dim=1), "returns probabilities"),
        (torch.nn.Identity(), None),
        (torch.nn.LogSoftmax(dim=1), None),
        (torch.nn.Flatten(0), "must return a tensor"),
        (torch.nn.LSTM(10, 3), "it returned tuple"),
        (torch.nn.Sequential(torch.nn.Linear(10, 1), torch.nn.Flatten(0)), "if these are losses, pass task=lambda"),
    ],
    ids=["probabilities", "logits", "log-probabilities", "flat", "tuple", "losses"],
)
def test_outputs_other_than_logits_or_log_probabilities_are_an_error(model, message):
    if message is None:
        check_outputs(model, torch.randn(6, 10), LABELS, classes=10)
        with pytest.raises(fedsim.ExperimentError, match="has 10 classes, but the labels go up to 10"):
            check_outputs(model, torch.randn(6, 10), LABELS, classes=11)
    else:
        with pytest.raises(fedsim.ExperimentError, match=message):
            check_outputs(model, torch.randn(6, 10), LABELS)


@pytest.mark.parametrize("factory", [lambda: Net(dropout=0.0), two_nn])
def test_train_epoch_is_the_plain_loop(factory, batches):
    ours = factory()
    plain = factory()
    plain.load_state_dict(ours.state_dict())
    metrics = fedsim.train_epoch(ours, batches, torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(plain(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item() * len(y))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
    assert metrics.samples == 19
    assert metrics.loss == pytest.approx(sum(losses) / 19, rel=1e-6)


def test_test_gives_the_mean_loss_and_the_accuracy(batches):
    model = two_nn()
    result = fedsim.test(model, batches)
    x, y = torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])
    with torch.no_grad():
        assert result.loss == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-6)
        assert result.accuracy == pytest.approx((model(x).argmax(1) == y).float().mean().item())


def test_without_batches_the_loss_is_nan():
    model = logistic()
    assert torch.tensor(fedsim.test(model, []).loss).isnan()
    assert torch.tensor(fedsim.train_epoch(model, [], torch.optim.SGD(model.parameters(), lr=1)).loss).isnan()


def test_a_custom_loss_is_used(batches):
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    metrics = fedsim.train_epoch(
        model, batches, torch.optim.SGD(model.parameters(), lr=0.0), loss=lambda out, y: out.sum() * 0 + 2.0
    )
    assert metrics.loss == pytest.approx(2.0)
    assert fedsim.test(model, batches, nn.CrossEntropyLoss()).loss == pytest.approx(fedsim.test(model, batches).loss)


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
    second_module = Net()
    layout.write(row, second_module)
    assert torch.equal(layout.read(second_module), row)
    row.zero_()
    assert layout.read(second_module).any(), "write copies; the module keeps its own parameters"


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


def test_a_module_bound_without_a_row_for_gradients_trains_its_row(module):
    row, gradient = (new_rows(2, Layout.of(module).d, torch.float32).copy_(Layout.of(module).read(module))).unbind()
    bind(module, row, gradient)
    start = row.clone()
    layout = bind(module, row)
    assert all(parameter.grad is None for parameter in module.parameters())
    module(torch.randn(2, 1, 28, 28)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    gradients = torch.cat([parameter.grad.flatten() for parameter in module.parameters()])
    assert torch.allclose(row, start - 0.1 * gradients)
    assert torch.equal(layout.read(module), row)
    assert torch.equal(gradient, start)  # no longer used


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
    second_module = Normalised()
    layout.write_buffers(row, second_module)
    for name, value in module.named_buffers():
        assert torch.equal(dict(second_module.named_buffers())[name], value), name


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
    row_index = index_of(slots, torch.device("cpu"))
    assert row_index == index if index is not None else row_index.tolist() == slots
    global_row, rows = torch.arange(5.0), torch.zeros(7, 5)
    pull_down(global_row, rows, row_index)
    assert [slot for slot in range(7) if torch.equal(rows[slot], global_row)] == slots


@pytest.mark.parametrize("sizes", [(5, 6), (6, 5), (5, None)])
def test_a_row_of_the_wrong_size_is_refused_when_a_module_is_bound(sizes):
    rows = [None if size is None else torch.zeros(size) for size in sizes]
    with pytest.raises(ValueError, match=r"must have shape \(6,\), not \(5,\)"):
        fedsim.bind(torch.nn.Linear(2, 2), *rows)
