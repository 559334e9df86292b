"""Policies that wait for the first k gradients, compared with loops written here and with theory."""

from __future__ import annotations

import numpy as np
import pytest

from tests.asynchronous.simulated import (
    LR,
    START,
    delays_of,
    nth_step,
    policy_of,
    same,
    simulate,
    some_result,
)


def k_sync_by_hand(delays, n, k, updates):
    """Round by round, all workers start, the first k gradients are averaged, and late workers repeat their batch."""
    row, done, begun, now, times = START.clone(), [0] * n, [0] * n, 0.0, []
    for _ in range(updates):
        seconds = []
        for worker in range(n):
            seconds.append(delays.seconds(worker, begun[worker], 1))
            begun[worker] += 1
        first = sorted(np.argsort(seconds, kind="stable")[:k].tolist())
        row = row - LR * sum(some_result(row, nth_step(worker, done[worker])) for worker in first) / k
        for worker in first:
            done[worker] += 1
        now += max(seconds[worker] for worker in first)
        times.append(now)
    return row, times


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("speeds", [[1.0] * 5, [1.0, 1.0, 1.5, 1.6, 5.0]])
@pytest.mark.parametrize("kind", ["constant", "shifted_exponential"])
def test_k_sync_and_backup_are_the_loop_of_the_paper(k, speeds, kind):
    row, times = k_sync_by_hand(delays_of(speeds, kind), 5, k, 12)
    for chosen in (policy_of("k_sync", k=k), policy_of("backup", backups=5 - k)):
        run = simulate(chosen, delays_of(speeds, kind)).advance(12 * k)
        assert run.server.version == 12
        assert run.times[k - 1 :: k] == pytest.approx(times, rel=1e-12)
        assert same(run.row, row)
        assert run.clock.dispatcher.stats.discarded == 12 * (5 - k)
        assert {arrival.staleness for arrival in run.arrivals} == {0}
        assert sum(map(len, run.trained)) == 12 * k, "cancelled work is not computed"


def test_k_async_by_hand():
    """Workers of 1, 2 and 3.5 s, k = 2: the first two wait for the update, the third continues."""
    run = simulate(policy_of("k_async", k=2), delays_of([1.0, 2.0, 3.5]))
    run.advance(2)
    first = START - LR * (some_result(START, nth_step(0, 0)) + some_result(START, nth_step(1, 0))) / 2
    assert run.times == [1, 2]
    assert same(run.row, first)
    run.advance(2)
    assert run.times == [1, 2, 3, 3.5]
    second = first - LR * (some_result(first, nth_step(0, 1)) + some_result(START, nth_step(2, 0))) / 2
    assert same(run.row, second)
    assert [arrival.staleness for arrival in run.arrivals] == [0, 0, 0, 1]
    run.advance(1)
    assert run.times[-1] == 4.0
    assert run.server.policy.buffered(run.server) == 1
    assert run.clock.dispatcher.stats.discarded == 0
