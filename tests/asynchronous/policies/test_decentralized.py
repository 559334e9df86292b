"""Policies in which each worker keeps its own model, compared with plain loops in this file."""

from __future__ import annotations

import pytest
import torch

from fedsim.asynchronous.policies.topologies import topology
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


def metropolis(adjacency):
    """Return Metropolis-Hastings weights, by a loop."""
    n = len(adjacency)
    degree = [sum(bool(adjacency[i][j]) for j in range(n) if j != i) for i in range(n)]
    weights = [
        [1 / (1 + max(degree[i], degree[j])) if i != j and adjacency[i][j] else 0.0 for j in range(n)] for i in range(n)
    ]
    for i in range(n):
        weights[i][i] = 1 - sum(weights[i])
    return weights


GIVEN = [[0.4, 0.3, 0.0, 0.3], [0.3, 0.2, 0.5, 0.0], [0.0, 0.5, 0.4, 0.1], [0.3, 0.0, 0.1, 0.6]]
WEIGHTS = {name: metropolis(topology.get(name).target(4)) for name in ("ring", "complete", "exponential", "star")}


@pytest.mark.parametrize("graph", [*WEIGHTS, "given"])
@pytest.mark.parametrize("name", ["gossip", "ad_psgd"])
def test_pairwise_averaging_matches_a_loop(name, graph):
    """Compare with a loop in which the gradient is computed at the start model and applied to the current model."""
    speeds = [1.0, 1.618, 2.718, 3.1416]
    weights = WEIGHTS.get(graph, GIVEN)
    run = simulate(policy_of(name), delays_of(speeds), seed=4, topology=GIVEN if graph == "given" else graph)
    run.advance(50)
    models, began, steps, at = [START] * 4, [START] * 4, [0] * 4, list(speeds)
    for _ in range(50):
        mine = at.index(min(at))
        gradient = some_result(began[mine], nth_step(mine, steps[mine]))
        neighbours = [other for other in range(4) if other != mine and weights[mine][other]]
        draws = numpy_generator(4, "neighbour", mine, steps[mine])
        shares = [weights[mine][other] for other in neighbours]
        equal = len(set(shares)) == 1
        theirs = draws.choice(neighbours, p=None if equal else [share / sum(shares) for share in shares])
        assert (
            not equal
            or theirs == neighbours[int(numpy_generator(4, "neighbour", mine, steps[mine]).integers(len(neighbours)))]
        )
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
    run = simulate(policy_of("gossip"), delays_of([2.0, 3.0]), buffers=buffers, global_buffers=[10.0])
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


# All at the same time


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("graph", [*WEIGHTS, "given"])
def test_d_psgd_matches_a_loop(graph, momentum):
    """Compare with Algorithm 1 of Lian et al. 2017: average the models, then step along old gradients."""
    weights, algorithm = WEIGHTS.get(graph, GIVEN), SGD(lr=LR, momentum=momentum)
    topology = GIVEN if graph == "given" else graph
    run = simulate(policy_of("d_psgd"), delays_of([1.0, 2.0, 2.0, 3.0]), topology=topology, algorithm=algorithm)
    run.advance(4 * 12)
    models, velocity = [START] * 4, [torch.zeros(3).double()] * 4
    for step in range(12):
        gradients = [some_result(models[worker], nth_step(worker, step)) for worker in range(4)]
        velocity = [momentum * v + gradient for v, gradient in zip(velocity, gradients, strict=True)]
        models = [
            sum(weights[worker][other] * models[other] for other in range(4)) - LR * velocity[worker]
            for worker in range(4)
        ]
    assert same(run.server.replicas, torch.stack(models))
    run.server.policy.publish(run.server)
    mean = sum(models) / 4
    assert same(run.row, mean)
    distance = (sum(float((model - mean).square().sum()) for model in models) / 4) ** 0.5
    assert run.server.policy.numbers(run.server)["consensus_distance"] == pytest.approx(distance, rel=1e-12)
    assert run.clock.now == 12 * 3  # as slow as the slowest worker
    assert run.applied == {0: 48}


def test_weights_of_departed_workers_return_to_the_diagonal():
    """Worker 3 leaves at 2.5, so the third and later averages are without it. The mean of the others stays."""
    run = simulate(policy_of("d_psgd"), delays_of([1.0] * 4), topology=GIVEN, departures={3: 2.5}, train=zero_result)
    run.server.replicas[:] = torch.tensor([1.0, 2.0, 4.0, 9.0]).view(4, 1)
    models = torch.tensor([1.0, 2.0, 4.0, 9.0]).double()
    run.advance(8)
    all_present = torch.tensor(GIVEN, dtype=torch.float64)
    models = all_present @ all_present @ models
    assert same(run.server.replicas[:, 0], models)
    assert run.clock.dispatcher.policy.moved(run.server, 0, 0) == (2, 2)
    run.advance(3)
    present = torch.tensor([[0.7, 0.3, 0.0], [0.3, 0.2, 0.5], [0.0, 0.5, 0.5]], dtype=torch.float64)
    assert same(run.server.replicas[:3, 0], present @ models[:3])
    assert run.clock.dispatcher.policy.moved(run.server, 0, 0) == (1, 1)
    assert run.clock.now == 3.0


@pytest.mark.parametrize("buffers", ["average", "local", "frozen"])
def test_buffers_of_d_psgd(buffers):
    """Training adds k + 1 to the buffer of worker k, in two steps of two workers with equal weights."""
    run = simulate(policy_of("d_psgd"), delays_of([2.0, 3.0]), buffers=buffers, global_buffers=[10.0]).advance(4)
    run.server.policy.publish(run.server)
    expected = {"average": (11.5 + 11.5 + 1 + 2) / 2, "local": 13.0, "frozen": 10.0}[buffers]
    assert run.server.shared.server.buffers.tolist() == [expected]
