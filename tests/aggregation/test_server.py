from __future__ import annotations

import pytest
import torch

from fedsim.aggregation.server import ServerMomentum, ServerSGD, server_optimizer


def steps(optimizer, row, updates):
    row = row.clone()
    state = optimizer.start(row)
    for update in updates:
        optimizer.step(row, update.clone(), state)
    return row


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(n, generator=generator, dtype=torch.double).squeeze(0) for n in ((1, 7), (4, 7)))


def test_sgd_adds_the_update(case):
    row, updates = case
    assert torch.allclose(steps(ServerSGD(), row, updates), row + updates.sum(0), atol=1e-12)
    assert torch.allclose(steps(ServerSGD(lr=0.5), row, updates), row + updates.sum(0) / 2, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_torch_optim_sgd_on_the_negated_update(case, nesterov):
    row, updates = case
    parameter = torch.nn.Parameter(row.clone())
    theirs = torch.optim.SGD([parameter], lr=0.5, momentum=0.9, nesterov=nesterov)
    for update in updates:
        parameter.grad = -update
        theirs.step()
    ours = steps(ServerMomentum(lr=0.5, momentum=0.9, nesterov=nesterov), row, updates)
    assert torch.allclose(ours, parameter.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("plug", list(server_optimizer), ids=lambda plug: plug.name)
def test_every_server_optimizer_is_elementwise_and_leaves_the_update_alone(plug, case):
    row, updates = case
    optimizer = plug.bind(plug.check({}))
    whole = steps(optimizer, row, updates)
    parts = [steps(optimizer, row[part], updates[:, part]) for part in (slice(0, 3), slice(3, 7))]
    assert torch.equal(torch.cat(parts), whole)
    update = updates[0].clone()
    optimizer.step(row.clone(), update, optimizer.start(row))
    assert torch.equal(update, updates[0])
