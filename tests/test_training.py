from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedsim
from fedsim.models import Net, logistic, two_nn
from fedsim.training import loss_for
from tests.plugs import Normalised


@pytest.fixture
def batches():
    torch.manual_seed(0)
    return [(torch.randn(n, 1, 28, 28), torch.randint(0, 10, (n,))) for n in (8, 8, 3)]


def test_log_probabilities_get_nll_and_logits_cross_entropy():
    logits = torch.randn(6, 10)
    assert loss_for(logits) is F.cross_entropy
    assert loss_for(logits.log_softmax(1)) is F.nll_loss
    assert loss_for(torch.zeros(6, 10)) is F.cross_entropy


def test_probabilities_are_refused():
    with pytest.raises(ValueError, match="returns probabilities"):
        loss_for(torch.randn(6, 10).softmax(1))


def test_anything_but_classes_is_refused():
    with pytest.raises(ValueError, match=r"\[batch, classes\]"):
        loss_for(torch.randn(6))


@pytest.mark.parametrize("factory", [lambda: Net(dropout=0.0), two_nn])
def test_train_epoch_is_the_plain_loop(factory, batches):
    torch.manual_seed(1)
    ours = factory()
    plain = factory()
    plain.load_state_dict(ours.state_dict())
    tally = fedsim.train_epoch(ours, batches, torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(plain(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item() * len(y))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
    assert tally.samples == 19
    assert tally.loss == pytest.approx(sum(losses) / 19, rel=1e-6)


def test_train_epoch_takes_a_data_loader():
    data = TensorDataset(torch.randn(20, 1, 28, 28), torch.randint(0, 10, (20,)))
    model = two_nn()
    tally = fedsim.train_epoch(model, DataLoader(data, batch_size=6), torch.optim.Adam(model.parameters()))
    assert tally.samples == 20


def test_finding_out_the_loss_changes_no_buffer(batches):
    model, reference = Normalised(), Normalised()
    reference.load_state_dict(model.state_dict())
    fedsim.train_epoch(model, batches, torch.optim.SGD(model.parameters(), lr=0.0))
    fedsim.train_epoch(reference, batches, torch.optim.SGD(reference.parameters(), lr=0.0), F.cross_entropy)
    for a, b in zip(model.buffers(), reference.buffers(), strict=True):
        assert torch.equal(a, b)


def test_test_gives_the_mean_loss_and_the_fraction_of_hits(batches):
    model = two_nn()
    result = fedsim.test(model, batches)
    x, y = torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])
    with torch.no_grad():
        assert result.loss == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-6)
        assert result.accuracy == pytest.approx((model(x).argmax(1) == y).float().mean().item())


def test_test_trains_nothing(batches):
    model = Normalised()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fedsim.test(model, batches)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_nothing_to_do_is_not_a_number():
    model = logistic()
    assert torch.tensor(fedsim.test(model, []).loss).isnan()
    assert torch.tensor(fedsim.train_epoch(model, [], torch.optim.SGD(model.parameters(), lr=1)).loss).isnan()


def test_a_custom_loss_is_used(batches):
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    tally = fedsim.train_epoch(
        model, batches, torch.optim.SGD(model.parameters(), lr=0.0), loss=lambda out, y: out.sum() * 0 + 2.0
    )
    assert tally.loss == pytest.approx(2.0)
