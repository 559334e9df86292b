from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedsim
from fedsim.core.training import DEFAULT_LOSS, check_outputs
from fedsim.models import Net, logistic, two_nn

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
    """The bias of a last layer of zeros is the log of the class prior."""
    model = logistic()
    torch.nn.init.constant_(model[1].bias, -2.302585)
    batches = [(torch.randn(50, 784), torch.randint(0, 10, (50,)))] * 20
    losses = [fedsim.train_epoch(model, batches, torch.optim.SGD(model.parameters(), lr=1.0)).loss for _ in range(3)]
    assert min(losses) > 0


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (torch.nn.Softmax(dim=1), "returns probabilities"),
        (torch.nn.Identity(), None),
        (torch.nn.LogSoftmax(dim=1), None),
        (torch.nn.Flatten(0), "must return a tensor"),
        (torch.nn.LSTM(10, 3), "not tuple"),
    ],
    ids=["probabilities", "logits", "log-probabilities", "flat", "tuple"],
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
