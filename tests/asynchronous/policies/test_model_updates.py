"""Policies whose workers send models, compared with loops written here."""

from __future__ import annotations

import pytest
import torch

from fedsim.asynchronous.policies.model_updates import WEIGHTINGS
from tests.asynchronous.simulated import START, delays_of, policy_of, replayed, same, simulate

# FedAsync


@pytest.mark.parametrize("kind", WEIGHTINGS)
def test_fedasync_is_its_formula(kind):
    own = {"constant": {}, "polynomial": {"a": 0.7}, "hinge": {"a": 0.7, "b": 1}}[kind]
    run = simulate(policy_of("fedasync", alpha=0.6, staleness=kind, **own), delays_of([1.0, 1.7123, 7.3219])).advance(
        40
    )

    def rule(row, read, model, arrival, memory):
        tau = arrival.staleness
        s = {"constant": 1.0, "polynomial": (tau + 1) ** -0.7, "hinge": 1.0 if tau <= 1 else 1 / (0.7 * (tau - 1) + 1)}
        return (1 - 0.6 * s[kind]) * row + 0.6 * s[kind] * model

    assert same(run.row, replayed(run, rule))
    assert max(run.applied) > 2


# FedBuff


@pytest.mark.parametrize(("k", "exponent"), [(1, 0.5), (3, 0.5), (3, 0.0), (5, 1.0)])
def test_fedbuff_is_its_formula(k, exponent):
    run = simulate(policy_of("fedbuff", k=k, exponent=exponent), delays_of([1.0, 1.7123, 2.3456, 7.3219])).advance(50)
    deltas = []

    def rule(row, read, model, arrival, memory):
        deltas.append((model - read) / (1 + arrival.staleness) ** exponent)
        if len(deltas) < k:
            return row
        update = sum(deltas) / k
        deltas.clear()
        return row + update

    assert same(run.row, replayed(run, rule))
    assert run.server.policy.buffered(run.server) == 50 % k == len(deltas)


def test_fedbuff_by_hand():
    """Workers of 1 and 2.5 s whose models are 1 more than they got; k = 2, staleness 1 counts 1 / sqrt(2).

    What worker 0 gets in its buffer it returns with 1 more, worker 1 with 2 more.
    """
    delays = delays_of([1.0 / 3, 2.5 / 3])
    run = simulate(policy_of("fedbuff", k=2), delays, train=lambda row, item: row + 1, global_buffers=[8.0])
    run.advance(1)
    assert run.server.shared.global_buffers.item() == 8
    run.advance(2)
    assert same(run.row, START + 1)  # worker 0 twice
    assert run.server.shared.global_buffers.item() == 9
    run.advance(1)  # worker 1, from version 0, is the first of the second buffer and worker 0 its second
    assert [arrival.staleness for arrival in run.arrivals] == [0, 0, 1, 0]
    assert same(run.row, START + 1 + (1 + 0.5**0.5) / 2)
    assert run.server.shared.global_buffers.item() == pytest.approx(9 + ((10 - 9) + 0.5**0.5 * (10 - 9)) / 2)


# Asynchronous local SGD


@pytest.mark.parametrize(("n", "c"), [(None, 0.0), (None, 0.25), (None, 0.1), (1, 0.5), (3, 0.2), (7, 0.0)])
def test_async_local_sgd_is_the_algorithm_of_the_paper(n, c):
    """Liu et al. 2024, delayed Nesterov, with outer learning rate 0.6 and momentum 0.8."""
    chosen = policy_of("async_local_sgd", lr=0.6, beta=0.8, n=n, c=c)
    run, n, momentum = simulate(chosen, delays_of([1.0, 1.7123, 2.3456, 7.3219])).advance(45), n or 4, 0 * START
    gathered = []

    def rule(row, read, model, arrival, memory):
        nonlocal momentum
        gathered.append(read - model)
        share = c
        if len(gathered) % n == 0:
            momentum, share = 0.8 * momentum + sum(gathered[-n:]) / n, 1 - c * n + c
        return row - 0.6 * (share * 0.8 * momentum + gathered[-1] / n)

    assert same(run.row, replayed(run, rule))
    assert run.server.policy.buffered(run.server) == 0, "each has moved the row when it came"


def test_dylu_steps_are_proportional_to_speed():
    """12 steps for the fastest, and at least one; so they arrive at about the same time."""
    run = simulate(policy_of("async_local_sgd", dylu=True), delays_of([0.7, 1.4, 2.1, 100.0]), size=48)
    run.server.step_seconds.copy_(torch.tensor([0.7, 1.4, 2.1, 100.0]))
    run.advance(3)
    assert {item.worker: item.steps for item in run.trained[0]} == {0: 12, 1: 6, 2: 4, 3: 1}
    assert run.times == pytest.approx([8.4] * 3, abs=1e-9)
    assert run.clock.dispatcher.stats.samples == {0: 48, 1: 24, 2: 16}
    run = simulate(policy_of("async_local_sgd", dylu=True), delays_of([0.7, 2.1, 1.4]), size=10)
    run.server.step_seconds.copy_(torch.tensor([0.7, 2.1, 1.4]))
    run.advance(1)
    assert {item.worker: item.steps for item in run.trained[0]} == {0: 3, 1: 1, 2: 1}, "though 3 x 0.7 / 0.7 < 3"
    without = simulate(policy_of("async_local_sgd"), delays_of([0.7, 1.4]), size=48).advance(2)
    assert {item.worker: without.scheduler.steps(item) for item in without.trained[0]} == {0: 12, 1: 12}


def test_dylu_ignores_departed_workers():
    run = simulate(policy_of("async_local_sgd", dylu=True), delays_of([1.0, 2.0, 4.0]), size=48, departures={0: 1.0})
    run.server.step_seconds.copy_(torch.tensor([1.0, 2.0, 4.0]))
    run.advance(6)
    steps = {(item.worker, item.round): item.steps for items in run.trained for item in items}
    assert steps[1, 1] == 6
    assert steps[1, 2] == 12
    assert steps[2, 2] == 6
