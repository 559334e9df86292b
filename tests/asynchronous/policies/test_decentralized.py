"""Policies in which each worker keeps its own model, compared with plain loops in this file."""

from __future__ import annotations

import pytest
import torch

from fedsim.asynchronous.policies.decentralized import GRAPHS, complete, exponential, ring
from fedsim.clients import SGD
from fedsim.core.randomness import numpy_generator
from fedsim.errors import ExperimentError
from tests.asynchronous.simulated import (
    LR,
    START,
    delays_of,
    nth_step,
    policy_of,
    same,
    simulate,
    some_result,
    zero_result,
)

# Elastic averaging


@pytest.mark.parametrize(("period", "alpha", "momentum"), [(1, None, 0.0), (3, 0.3, 0.9), (1, 0.3, 0.9)])
def test_synchronous_elastic_averaging_matches_a_loop(period, alpha, momentum):
    """Compare with a loop in which all elastic differences use the old centre, which then moves by their sum."""
    n, algorithm = 3, SGD(lr=LR, momentum=momentum, nesterov=momentum > 0)
    chosen = policy_of("easgd", alpha=alpha, period=period, synchronous=True)
    run = simulate(chosen, delays_of([1.0, 2.0, 2.0], "lognormal"), algorithm=algorithm).advance(12 * n)
    models, centre, velocity = [START] * n, START, [torch.zeros(3).double()] * n
    for step in range(12):
        for worker in range(n):
            gradient = some_result(models[worker], nth_step(worker, step))
            velocity[worker] = momentum * velocity[worker] + gradient
            direction = gradient + momentum * velocity[worker] if momentum else gradient
            models[worker] = models[worker] - LR * direction
        if (step + 1) % period == 0:
            elastic = [(0.9 / n if alpha is None else alpha) * (model - centre) for model in models]
            models = [model - e for model, e in zip(models, elastic, strict=True)]
            centre = centre + sum(elastic)
    assert run.server.version == 12 // period
    assert same(run.row, centre)
    assert same(run.server.replicas, torch.stack(models))


def test_asynchronous_elastic_averaging_matches_a_loop():
    speeds = [1.0, 1.618, 2.718]
    run = simulate(policy_of("easgd", alpha=0.4, period=2), delays_of(speeds)).advance(40)
    models, centre, steps, at = [START] * 3, START, [0] * 3, list(speeds)
    for _ in range(40):
        worker = at.index(min(at))
        models[worker] = models[worker] - LR * some_result(models[worker], nth_step(worker, steps[worker]))
        steps[worker] += 1
        if steps[worker] % 2 == 0:
            elastic = 0.4 * (models[worker] - centre)
            models[worker], centre = models[worker] - elastic, centre + elastic
        at[worker] += speeds[worker]
    assert same(run.row, centre)
    assert same(run.server.replicas, torch.stack(models))


def test_easgd_counts_exchanges_only():
    run = simulate(policy_of("easgd", period=4), delays_of([1.0, 1.1])).advance(17)
    exchanges = sum((arrival.unit + 1) % 4 == 0 for arrival in run.arrivals)
    assert run.server.version == run.clock.dispatcher.stats.up == exchanges
    # worker 0 exchanges at 4 and 8, worker 1 at 4.4 and 8.8: after the first exchange they alternate
    assert run.clock.dispatcher.stats.staleness == {0: 1, 1: 3}


def test_synchronous_easgd_does_not_wait_for_departed_workers():
    """Worker 2 leaves at 7 while the other two wait for it; then these two exchange."""
    run = simulate(
        policy_of("easgd", period=1, synchronous=True, alpha=0.5),
        delays_of([1.0, 2.0, 100.0]),
        departures={2: 7.0},
        train=zero_result,
    )
    run.server.replicas[:] = torch.tensor([1.0, 3.0, 9.0]).view(3, 1)
    run.server.global_row.zero_()
    run.advance(2)
    assert run.server.version == 0
    run.advance(1)
    assert run.clock.now == 8
    assert run.server.version == 1
    assert run.row.tolist() == [2.0] * 3  # half of 1 and half of 3
    assert run.server.replicas[:, 0].tolist() == [0.5, 1.5, 9.0]
    run.advance(20)
    assert run.server.version > 9


# Pairs


def test_graphs_by_hand():
    assert ring(0, 5) == [1, 4]
    assert ring(0, 2) == [1]
    assert ring(0, 1) == complete(0, 1) == exponential(0, 1) == []
    assert complete(1, 4) == [0, 2, 3]
    assert exponential(0, 8) == [1, 2, 4, 6, 7]
    assert exponential(3, 6) == [1, 2, 4, 5]  # 3 +- 1, 2 and 4


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", ["gossip", "ad_psgd"])
def test_pairwise_averaging_matches_a_loop(name, graph):
    """Compare with a loop in which the gradient is computed at the start model and applied to the current model."""
    speeds = [1.0, 1.618, 2.718, 3.1416]
    run = simulate(policy_of(name, graph=graph), delays_of(speeds), seed=4).advance(50)
    models, began, steps, at = [START] * 4, [START] * 4, [0] * 4, list(speeds)
    for _ in range(50):
        mine = at.index(min(at))
        gradient = some_result(began[mine], nth_step(mine, steps[mine]))
        neighbours = GRAPHS[graph](mine, 4)
        theirs = neighbours[int(numpy_generator(4, "neighbour", mine, steps[mine]).integers(len(neighbours)))]
        if name == "gossip":
            models[mine] = models[mine] - LR * gradient
        models[mine] = models[theirs] = (models[mine] + models[theirs]) / 2
        if name == "ad_psgd":
            models[mine] = models[mine] - LR * gradient
        steps[mine] += 1
        began[mine] = models[mine]
        at[mine] += speeds[mine]
    assert same(run.server.replicas, torch.stack(models))
    run.server.policy.publish(run.server)
    assert same(run.row, torch.stack(models).mean(0))


def test_a_single_worker_steps_alone_and_none_is_an_error():
    run = simulate(policy_of("gossip"), delays_of([1.0]), departures={0: 2.5}).advance(2)
    model = START
    for step in range(2):
        model = model - LR * some_result(model, nth_step(0, step))
    assert same(run.server.replicas[0], model)
    with pytest.raises(ExperimentError, match="no worker is busy"):
        run.advance(1)
    with pytest.raises(ExperimentError, match="all workers have left .clock.departures., so no model remains"):
        run.server.policy.publish(run.server)


@pytest.mark.parametrize("buffers", ["average", "local", "frozen"])
def test_buffers_of_pairs(buffers):
    """Training adds k + 1 to the buffer of worker k; two neighbouring workers take 2 s and 3 s."""
    run = simulate(policy_of("gossip", graph="complete"), delays_of([2.0, 3.0]), buffers=buffers, global_buffers=[10.0])
    run.advance(3)  # three arrivals, at 2, 3 and 4 s: workers 0, 1 and 0
    run.server.policy.publish(run.server)
    expected = {
        # mean(11, 10) = 10.5; mean(12, 10.5) = 11.25, where 12 began at 10;
        # then mean(11.5, 11.25), where 11.5 began at 10.5
        "average": 11.375,
        "local": (12 + 12) / 2,
        "frozen": 10.0,
    }
    assert run.server.shared.server.buffers.tolist() == [expected[buffers]]
