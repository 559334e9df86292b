"""Policies that take one gradient after another, compared with loops written here."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim.clients import SGD
from tests.asynchronous.simulated import (
    LR,
    START,
    delays_of,
    nth_step,
    policy_of,
    replayed,
    same,
    simulate,
    some_result,
)

SPEEDS = [1.0, 1.9, 2.7, 4.3]


def asgd(row, read, gradient, arrival, shared):
    return row - LR * gradient


def staleness_aware(row, read, gradient, arrival, shared):
    return row - LR / max(1, arrival.staleness) * gradient


def softsync_of_two(row, read, gradient, arrival, shared):
    buffered = shared.setdefault("buffered", [])
    buffered.append(gradient / max(1, arrival.staleness))
    if len(buffered) < 2:
        return row
    return row - LR * sum([buffered.pop(), buffered.pop()]) / 2


def compensated(row, read, gradient, arrival, shared):
    return row - LR * (gradient + 0.3 * gradient * gradient * (row - read))


def adaptively_compensated(row, read, gradient, arrival, shared):
    square = 0.8 * shared.get(arrival.worker, 0) + 0.2 * gradient * gradient
    shared[arrival.worker] = square
    return row - LR * (gradient + 0.3 / (square + 1e-7).sqrt() * gradient * gradient * (row - read))


RULES = {
    "asgd": ("asgd", {}, asgd),
    "hogwild": ("hogwild", {}, asgd),
    "locked": ("locked", {}, asgd),
    "ssp without bound": ("ssp", {"s": "inf"}, asgd),
    "k_async, k = 1": ("k_async", {"k": 1}, asgd),
    "staleness_aware": ("staleness_aware", {}, staleness_aware),
    "2-softsync of 4 workers": ("staleness_aware", {"softsync": 2}, softsync_of_two),
    "dc_asgd": ("dc_asgd", {"lam": 0.3}, compensated),
    "dc_asgd, adaptive": ("dc_asgd", {"lam": 0.3, "adaptive": True, "m": 0.8}, adaptively_compensated),
}


@pytest.mark.parametrize("kind", ["constant", "lognormal"])
@pytest.mark.parametrize("case", RULES)
def test_a_policy_is_its_formula(case, kind):
    name, params, rule = RULES[case]
    run = simulate(policy_of(name, **params), delays_of(SPEEDS, kind)).advance(60)
    assert same(run.row, replayed(run, rule))
    assert max(run.applied) >= 3


def downpour(speeds, n_fetch, n_push, arrivals):
    """Dean et al. 2012 by hand: fetch before every n_fetch-th step, push the sum after every n_push-th."""
    row, local = START.clone(), [START.clone() for _ in speeds]
    accrued, steps = [torch.zeros(3, dtype=torch.float64) for _ in speeds], [0] * len(speeds)
    at = list(speeds)
    for _ in range(arrivals):
        worker = int(np.argmin(at))
        gradient = some_result(local[worker], nth_step(worker, steps[worker]))
        steps[worker] += 1
        accrued[worker] += gradient
        local[worker] = local[worker] - LR * gradient
        if steps[worker] % n_push == 0:
            row = row - LR * accrued[worker]
            accrued[worker] = torch.zeros(3, dtype=torch.float64)
        if steps[worker] % n_fetch == 0:
            local[worker] = row.clone()
        at[worker] += speeds[worker]
    return row


@pytest.mark.parametrize(("n_fetch", "n_push"), [(1, 1), (1, 3), (2, 1), (2, 3), (3, 2), (5, 5)])
def test_downpour_is_the_loop_of_the_paper(n_fetch, n_push):
    speeds = [1.0, 1.234567, 1.718281]
    run = simulate(policy_of("asgd", n_fetch=n_fetch, n_push=n_push), delays_of(speeds)).advance(90)
    assert same(run.row, downpour(speeds, n_fetch, n_push, 90))


def test_hogwild_momentum_is_private_or_shared():
    """Two workers in turns, gradients of 1: by hand."""

    def row(momentum):
        solver = SGD(lr=1.0, momentum=0.5)
        run = simulate(
            policy_of("hogwild", momentum=momentum), delays_of([1.0, 1.0]), solver=solver, train=lambda r, m: r * 0 + 1
        )
        return run.advance(4).row - START

    assert same(row("private"), torch.full((3,), -(1 + 1 + 1.5 + 1.5), dtype=torch.float64))
    assert same(row("shared"), torch.full((3,), -(1 + 1.5 + 1.75 + 1.875), dtype=torch.float64))


# Stale synchronous parallel


@pytest.mark.parametrize("s", [0, 1, 3, "inf"])
@pytest.mark.parametrize("kind", ["constant", "shifted_exponential"])
def test_no_worker_is_more_than_s_steps_ahead(s, kind):
    """A worker that is at work has done at most s steps more than the slowest; and it does get as far as that."""
    run, most = simulate(policy_of("ssp", s=s), delays_of([1.0, 1.7, 4.1, 9.3], kind)), 0
    for _ in range(300):
        run.clock.advance()
        run.clock._start_idle()
        clocks = run.server.policy_state["clocks"].tolist()
        ahead = [clocks[slot] - min(clocks) for slot in run.clock.dispatcher.in_flight]
        most = max(most, *ahead)
        assert s == "inf" or max(ahead) <= s
        assert s == "inf" or max(clocks) - min(clocks) <= s + 1
    assert most == s or (s == "inf" and most > 20)


@pytest.mark.parametrize("s", [0, 2])
def test_ssp_does_not_wait_for_departed_workers(s):
    """It leaves at 7, in its first step, while all others wait; their gradients are applied when they go on."""
    run = simulate(policy_of("ssp", s=s), delays_of([1.0, 1.5, 100.0]), departures={2: 7.0})
    run.advance(2 * (s + 1))
    assert run.clock.now == 1.5 * (s + 1)
    assert run.server.policy.buffered(run.server) > 0
    run.advance(1)
    assert run.clock.now == 8.0
    assert run.server.version > s
    run.advance(40)
    clocks = run.server.policy_state["clocks"].tolist()
    assert clocks[2] == 0
    assert min(clocks[:2]) > 10
    assert run.server.policy_state["slowest"].item() == min(clocks[:2])
