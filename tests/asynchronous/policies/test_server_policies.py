"""Policies with one model on the server, compared with plain loops in this file and with theory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsim.asynchronous.policies.model_updates import WEIGHTINGS
from fedsim.clients import SGD
from fedsim.errors import ExperimentError
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
def test_a_policy_matches_its_formula(case, kind):
    name, params, rule = RULES[case]
    run = simulate(policy_of(name, **params), delays_of(SPEEDS, kind)).advance(60)
    assert same(run.row, replayed(run, rule))
    assert max(run.applied) >= 3


def downpour(speeds, n_fetch, n_push, arrivals):
    """Return the Downpour SGD model (Dean et al. 2012): fetch before every n_fetch-th step, push after n_push steps."""
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
def test_downpour_matches_the_loop_of_the_paper(n_fetch, n_push):
    speeds = [1.0, 1.234567, 1.718281]
    run = simulate(policy_of("asgd", n_fetch=n_fetch, n_push=n_push), delays_of(speeds)).advance(90)
    assert same(run.row, downpour(speeds, n_fetch, n_push, 90))


def test_hogwild_momentum_is_private_or_shared():
    """Two workers take turns and all gradients are 1; expected values computed by hand."""

    def row(momentum):
        algorithm = SGD(lr=1.0, momentum=0.5)
        run = simulate(
            policy_of("hogwild", momentum=momentum),
            delays_of([1.0, 1.0]),
            algorithm=algorithm,
            train=lambda r, m: r * 0 + 1,
        )
        return run.advance(4).row - START

    assert same(row("private"), torch.full((3,), -(1 + 1 + 1.5 + 1.5), dtype=torch.float64))
    assert same(row("shared"), torch.full((3,), -(1 + 1.5 + 1.75 + 1.875), dtype=torch.float64))


# Stale synchronous parallel


@pytest.mark.parametrize("s", [0, 1, 3, "inf"])
@pytest.mark.parametrize("kind", ["constant", "shifted_exponential"])
def test_no_worker_is_more_than_s_steps_ahead(s, kind):
    """A busy worker is at most s steps ahead of the slowest one, and some worker reaches that distance."""
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
    """A worker leaves at 7, in its first step, while all others wait; then their gradients are applied."""
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


def k_sync_by_hand(delays, n, k, updates):
    """Return the K-sync row and its update times: k gradients are averaged a round; late workers repeat their batch."""
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
def test_k_sync_and_backup_match_the_loop_of_the_paper(k, speeds, kind):
    row, times = k_sync_by_hand(delays_of(speeds, kind), 5, k, 12)
    for chosen in (policy_of("k_sync", k=k), policy_of("backup_workers", backups=5 - k)):
        run = simulate(chosen, delays_of(speeds, kind)).advance(12 * k)
        assert run.server.version == 12
        assert run.times[k - 1 :: k] == pytest.approx(times, rel=1e-12)
        assert same(run.row, row)
        assert run.clock.dispatcher.stats.cancelled.total() == 12 * (5 - k)
        assert {arrival.staleness for arrival in run.arrivals} == {0}
        assert sum(map(len, run.trained)) == 12 * k, "cancelled work is not computed"


def test_k_async_by_hand():
    """Three workers take 1, 2 and 3.5 s, k = 2: the first two wait for the update, the third continues."""
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
    assert run.clock.dispatcher.stats.cancelled.total() == 0


# BASGD


def middle(means):
    return torch.stack(means).quantile(0.5, dim=0)


def trimmed(means):
    return torch.stack(means).sort(dim=0).values[1:-1].mean(0)


COMBINED = {"mean": (lambda means: sum(means) / len(means), 0), "median": (middle, 0), "trimmed_mean": (trimmed, 1)}


@pytest.mark.parametrize("kind", ["constant", "lognormal"])
@pytest.mark.parametrize("name", COMBINED)
@pytest.mark.parametrize("b", [3, 5])
def test_basgd_matches_the_algorithm_of_the_paper(b, name, kind):
    """A gradient of worker s is stored in buffer s mod b, and a step is taken when all buffers have changed."""
    combined, f = COMBINED[name]
    run = simulate(policy_of("basgd", b=b), delays_of([1.0, 2.7, 1.9, 4.3, 1.2], kind), rule={"rule": name}, f=f)
    run.advance(60)
    stored = [[] for _ in range(b)]

    def rule(row, read, gradient, arrival, memory):
        stored[arrival.worker % b].append(gradient)
        if not all(stored):
            return row
        row = row - LR * combined([sum(gradients) / len(gradients) for gradients in stored])
        for gradients in stored:
            gradients.clear()
        return row

    assert same(run.row, replayed(run, rule))
    assert run.server.version >= 4
    assert run.server.policy.buffered(run.server) == sum(map(len, stored))


def test_policies_that_equal_asgd_use_the_rule_as_a_filter():
    rows = [
        simulate(policy_of(name, **params), delays_of(SPEEDS), rule={"rule": "norm_clipping", "c": 0.5}).advance(40).row
        for name, params in [("basgd", {"b": 1}), ("ssp", {"s": "inf"}), ("asgd", {})]
    ]
    assert same(rows[0], rows[2])
    assert same(rows[1], rows[2])


def test_basgd_does_not_wait_for_buffers_whose_workers_have_left():
    run = simulate(policy_of("basgd", b=3), delays_of([1.0, 1.5, 2.0]), rule={"rule": "median"}, departures={2: 5.0})
    run.advance(4)
    assert run.server.version == 1
    run.advance(40)
    assert run.server.version > 10
    assert run.server.policy.buffered(run.server) <= 2


def test_a_rule_that_lacks_vectors_after_departures_says_so():
    run = simulate(
        policy_of("basgd", b=3), delays_of([1.0, 1.5, 2.0]), rule={"rule": "krum", "f": 0}, departures={2: 5.0}
    )
    line = r"combines 2 vectors here because 1 of 3 workers have left: krum: needs"
    with pytest.raises(ExperimentError, match=line):
        run.advance(40)


# FedAsync


@pytest.mark.parametrize("kind", WEIGHTINGS)
def test_fedasync_matches_its_formula(kind):
    parameters = {"constant": {}, "polynomial": {"a": 0.7}, "hinge": {"a": 0.7, "b": 1}}[kind]
    run = simulate(
        policy_of("fedasync", alpha=0.6, staleness=kind, **parameters), delays_of([1.0, 1.7123, 7.3219])
    ).advance(40)

    def rule(row, read, model, arrival, memory):
        tau = arrival.staleness
        s = {"constant": 1.0, "polynomial": (tau + 1) ** -0.7, "hinge": 1.0 if tau <= 1 else 1 / (0.7 * (tau - 1) + 1)}
        return (1 - 0.6 * s[kind]) * row + 0.6 * s[kind] * model

    assert same(run.row, replayed(run, rule))
    assert max(run.applied) > 2


# FedBuff


@pytest.mark.parametrize(("k", "exponent"), [(1, 0.5), (3, 0.5), (3, 0.0), (5, 1.0)])
def test_fedbuff_matches_its_formula(k, exponent):
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
    """Two workers (1 s and 2.5 s) return models that are 1 larger; k = 2, staleness 1 has weight 1 / sqrt(2).

    In the buffers, worker 0 adds 1 and worker 1 adds 2.
    """
    delays = delays_of([1.0 / 3, 2.5 / 3])
    run = simulate(policy_of("fedbuff", k=2), delays, train=lambda row, item: row + 1, global_buffers=[8.0])
    run.advance(1)
    assert run.server.shared.server.buffers.item() == 8
    run.advance(2)
    assert same(run.row, START + 1)  # both updates are from worker 0
    assert run.server.shared.server.buffers.item() == 9
    run.advance(1)  # second buffer: worker 1 (started at version 0), then worker 0
    assert [arrival.staleness for arrival in run.arrivals] == [0, 0, 1, 0]
    assert same(run.row, START + 1 + (1 + 0.5**0.5) / 2)
    assert run.server.shared.server.buffers.item() == pytest.approx(9 + ((10 - 9) + 0.5**0.5 * (10 - 9)) / 2)


# Asynchronous local SGD


@pytest.mark.parametrize(("n", "c"), [(None, 0.0), (None, 0.25), (None, 0.1), (1, 0.5), (3, 0.2), (7, 0.0)])
def test_async_local_sgd_is_the_algorithm_of_the_paper(n, c):
    """Compare with Liu et al. 2024 (delayed Nesterov) at outer learning rate 0.6 and momentum 0.8."""
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
    assert run.server.policy.buffered(run.server) == 0, "each result moves the row on arrival"


def test_dylu_steps_are_proportional_to_speed():
    """The fastest worker takes 12 steps and every worker at least one, so all arrive at about the same time."""
    run = simulate(policy_of("async_local_sgd", dylu=True), delays_of([0.7, 1.4, 2.1, 100.0]), size=48)
    run.server.step_seconds.copy_(torch.tensor([0.7, 1.4, 2.1, 100.0]))
    run.advance(3)
    assert {item.worker: item.steps for item in run.trained[0]} == {0: 12, 1: 6, 2: 4, 3: 1}
    assert run.times == pytest.approx([8.4] * 3, abs=1e-9)
    assert run.clock.dispatcher.stats.samples == {0: 48, 1: 24, 2: 16}
    run = simulate(policy_of("async_local_sgd", dylu=True), delays_of([0.7, 2.1, 1.4]), size=10)
    run.server.step_seconds.copy_(torch.tensor([0.7, 2.1, 1.4]))
    run.advance(1)
    assert {item.worker: item.steps for item in run.trained[0]} == {0: 3, 1: 1, 2: 1}, (
        "3 x 0.7 / 0.7 is below 3 as a float"
    )
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


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("k_sync", {"k": 5}, "policy.k = 5: must be at most 4, the number of concurrent workers"),
        ("backup_workers", {"backups": 4}, "policy.backups = 4: must be less than 4, the number of concurrent"),
        ("basgd", {"b": 5}, "policy.b = 5: must be at most 4, the number of concurrent workers"),
        ("fedasync", {"b": 1}, 'policy.b = 1: is only used with policy.staleness = "hinge"'),
        ("fedasync", {"staleness": "constant", "a": 2.0}, 'policy.a = 2: is only used with policy.staleness = "hinge"'),
    ],
)
def test_impossible_settings_are_refused(name, params, message):
    with pytest.raises(ExperimentError, match=message):
        policy_of(name, **params).check(4)


@pytest.mark.parametrize(
    ("name", "params", "after_each"),
    [
        ("asgd", {}, [8 + 1 / 4, 8.25 + (10 - 8.25) / 4]),
        ("dc_asgd", {}, [8 + 1 / 4, 8.25 + (10 - 8.25) / 4]),
        ("staleness_aware", {}, [8 + 1 / 4, 8.25 + (10 - 8.25) / 4]),
        ("async_local_sgd", {}, [8 + 1 / 4, 8.25 + (10 - 8.25) / 4]),
        ("fedasync", {"alpha": 0.6}, [8 + 0.6 * 1, 8.6 + 0.6 * 2**-0.5 * (10 - 8.6)]),
        ("k_sync", {"k": 2}, [8, (9 + 10) / 2]),
        ("k_async", {"k": 2}, [8, (9 + 10) / 2]),
        ("easgd", {"period": 1}, [8 + 1 / 4, 8.25 + (10 - 8.25) / 4]),
    ],
)
def test_buffers_after_the_first_two_results(name, params, after_each):
    """Four workers begin with the buffer 8. Worker 0 arrives first and sends 9, then worker 1 sends 10."""
    run = simulate(policy_of(name, **params), delays_of([1.0, 1.5, 9.0, 9.0]), global_buffers=[8.0])
    for expected in after_each:
        run.advance(1)
        assert run.server.shared.server.buffers.item() == pytest.approx(expected, rel=1e-12)
