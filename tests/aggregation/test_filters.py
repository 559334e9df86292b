"""The rules that accept or reject each row, compared with loops written from their papers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import fedsim
from fedsim.aggregation import AggregationInputs, make_pipeline, resolve
from fedsim.errors import ExperimentError


def zeno_plus_plus(x, v, gamma, rho, epsilon):
    """Return the accepted rows, scaled to the norm of v."""
    taken = []
    for row in x:
        g = row * np.linalg.norm(v) / np.linalg.norm(row)
        if gamma * np.dot(v, g) - rho * np.dot(g, g) >= -gamma * epsilon:
            taken.append(g)
    return taken


@pytest.mark.parametrize("n", [1, 12])
@pytest.mark.parametrize("params", [{}, {"rho": 0.03}, {"rho": 0.1, "epsilon": 6.0}, {"gamma": 0.02, "rho": 0.008}])
def test_zeno_plus_plus_matches_its_definition(n, params):
    counts = set()
    for seed in range(30):
        rng = np.random.default_rng(seed)
        x, v = rng.standard_normal((n, 6)) * rng.exponential(size=(n, 1)), rng.standard_normal(6)
        taken = zeno_plus_plus(x, v, **{"gamma": 0.1, "rho": 0.001, "epsilon": 0.0, **params})
        ours = fedsim.aggregate(torch.from_numpy(x), "zeno_plus_plus", root=torch.from_numpy(v), **params)
        assert np.allclose(ours, np.mean(taken, axis=0) if taken else np.zeros(6), rtol=0, atol=1e-12)
        counts.add(len(taken))
    assert len(counts) > 1  # some rows were accepted, and some were not


@pytest.mark.parametrize("n", [1, 12])
@pytest.mark.parametrize("lam", [0.9, 1.5])
def test_afl_guard_matches_its_definition(n, lam):
    counts = set()
    for seed in range(30):
        rng = np.random.default_rng(seed)
        x, root = rng.standard_normal((n, 3)), rng.standard_normal(3)
        taken = [row for row in x if math.dist(row, root) <= lam * math.hypot(*root)]
        ours = fedsim.aggregate(torch.from_numpy(x), "afl_guard", root=torch.from_numpy(root), lam=lam)
        assert np.allclose(ours, np.mean(taken, axis=0) if taken else np.zeros(3), rtol=0, atol=1e-12)
        counts.add(len(taken))
    assert len(counts) > 1


def test_filters_by_the_servers_update_with_rows_or_updates_of_zeros():
    zero, one = torch.zeros(1, 2), torch.ones(1, 2)
    for x, root in [(zero, one), (one, zero), (zero, zero)]:
        for name, params in [("zeno_plus_plus", {}), ("afl_guard", {"lam": 2.0})]:
            assert not fedsim.aggregate(x, name, root=root[0], **params).any()
    with pytest.raises(ExperimentError, match="needs the parameter gamma, because the client algorithm has no lr"):
        make_pipeline(resolve("zeno_plus_plus", {}))(AggregationInputs(one, root=one[0], local_lr=None))


def lipschitz(now, then):
    """Return the empirical Lipschitz coefficient of two pairs (gradient, model)."""
    change, moved = np.linalg.norm(now[0] - then[0]), np.linalg.norm(now[1] - then[1])
    return change / moved if moved > 0 else (math.inf if change > 0 else 0.0)


def kardam(arrivals, f, against):
    """Return for each arrival (worker, gradient, model) whether it is accepted."""
    latest, coefficients, accepted_last, in_a_row, verdicts = {}, {}, None, 0, []
    for worker, gradient, model in arrivals:
        now = gradient, model
        if worker not in latest:
            latest[worker] = now
        elif (latest[worker][1] != model).any():
            coefficients[worker] = lipschitz(now, latest[worker])
            latest[worker] = now
        m = len(coefficients)
        if m == 0:
            verdict = True
        else:
            threshold = sorted(coefficients.values())[m - f - 1] if m > f else min(coefficients.values())
            if against == "server":
                verdict = lipschitz(now, accepted_last) <= threshold
            else:
                verdict = worker not in coefficients or coefficients[worker] <= threshold
        verdict = verdict or in_a_row >= len(latest)
        in_a_row = 0 if verdict else in_a_row + 1
        accepted_last = now if verdict else accepted_last
        verdicts.append(verdict)
    return verdicts


def arrivals_of(seed, count=60, workers=5):
    """Return arrivals of noisy gradients of |x|^2 / 2, where worker 0 sends large ones, and some models are equal."""
    rng = np.random.default_rng(seed)
    models = np.cumsum(rng.standard_normal((count, 4)), axis=0)
    arrivals = []
    for number in range(count):
        worker = int(rng.integers(workers))
        model = models[int(rng.integers(max(0, number - 3), number + 1))]  # stale, and sometimes read before
        gradient = model + 0.3 * rng.standard_normal(4)
        arrivals.append((worker, gradient * (30 if worker == 0 else 1), model))
    return arrivals


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("dampening", ["exponential", "inverse"])
@pytest.mark.parametrize("against", ["server", "worker"])
@pytest.mark.parametrize("f", [0, 1, 3])
def test_kardam_matches_its_definition_over_many_arrivals(rows, dampening, against, f):
    arrivals, state, verdicts = arrivals_of(f), {}, []
    staleness = np.random.default_rng(1).integers(0, 9, len(arrivals))
    expected = kardam(arrivals, f, against)
    pipeline = make_pipeline(resolve("kardam", {"f": f, "against": against, "dampening": dampening, "alpha": 0.3}))
    for start in range(0, len(arrivals), rows):
        part = slice(start, start + rows)
        workers, x, models = zip(*arrivals[part], strict=True)
        inputs = AggregationInputs(
            torch.from_numpy(np.array(x)),
            models=torch.from_numpy(np.array(models)),
            staleness=torch.from_numpy(staleness[part]),
            workers=list(workers),
            state=state,
        )
        before = {name: tensor.clone() for name, tensor in state.items()}
        result = pipeline(inputs)
        assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
        taken = [
            gradient * (math.exp(-0.3 * tau) if dampening == "exponential" else 1 / (1 + tau))
            for gradient, tau, accepted in zip(x, staleness[part], expected[part], strict=True)
            if accepted
        ]
        assert np.allclose(result.update, np.mean(taken, axis=0) if taken else np.zeros(4), rtol=0, atol=1e-12)
        verdicts += (result.shares != 0).tolist()
        state = result.state
    assert verdicts == expected
    assert len(set(expected)) == (1 if f == 0 and against == "worker" else 2)
