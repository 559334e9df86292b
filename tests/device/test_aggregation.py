"""Every rule, pre-aggregator, attack and server optimizer on GPU tensors, compared with CPU tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedsim
from fedsim.aggregation import rule
from fedsim.aggregation.rule import pre_aggregator
from fedsim.byzantine.base import attack_strategy
from fedsim.server.optimizer import server_optimizer
from tests.device.agreement import COLUMNS, REAL, settings_of, some_gpu, to_gpu

N = 12
PRECISIONS = {torch.float64: 1e-9, **({torch.float32: 1e-4, torch.bfloat16: 5e-2} if REAL else {})}


def rows(kind: str = "ordinary") -> torch.Tensor:
    """Return float64 rows [n, d]."""
    updates = torch.randn(N, COLUMNS, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    if kind == "not finite":
        updates[2, 3], updates[5] = torch.nan, torch.inf
    if kind == "large":
        updates *= 1e140
        updates[1] = updates[0]
    return updates


def assert_same_on_gpu(function, *tensors: torch.Tensor, dtype: torch.dtype = torch.float64) -> None:
    """Check that a function returns the same on a GPU as in float64 on the CPU, or raises the same error."""
    rounded = [tensor.to(dtype) for tensor in tensors]
    expected = refusal_or(function, *(tensor.double() for tensor in rounded))
    with some_gpu():
        actual = refusal_or(function, *map(to_gpu, rounded))
        assert isinstance(actual, str) or actual.is_cuda
    if isinstance(expected, str):
        assert actual == expected
        return
    assert actual.dtype == dtype
    scale = max(1.0, float(expected.nan_to_num(posinf=0, neginf=0).abs().max()))
    actual, bound = actual.cpu().double() / scale, PRECISIONS[dtype]
    assert torch.allclose(actual, expected / scale, rtol=0, atol=bound, equal_nan=True)


def refusal_or(function, *tensors):
    """Return the result of a function, or the message of its error."""
    try:
        return function(*tensors)
    except fedsim.ExperimentError as error:
        return str(error)


def aggregated(registration, updates, root, **inputs):
    """Return the aggregate of `updates` by a rule with its required parameters."""
    settings = settings_of(registration)
    if "root" in registration.takes:
        inputs["root"] = root
    if "losses" in registration.takes:
        inputs["losses"] = torch.arange(1.0, len(updates) + 1, dtype=torch.double)
    return fedsim.aggregate(updates, rule=settings.pop("name"), **settings, **inputs)


def every(registry):
    return pytest.mark.parametrize("registration", list(registry), ids=lambda registration: registration.name)


each_precision = pytest.mark.parametrize("dtype", PRECISIONS, ids=str)


@pytest.mark.gpu
@each_precision
@every(rule)
def test_a_rule(registration, dtype):
    cases = {"ordinary": "error", "not finite": "exclude", **({"large": "error"} if dtype == torch.float64 else {})}
    for kind, nonfinite in cases.items():
        assert_same_on_gpu(
            lambda x, root, nonfinite=nonfinite: aggregated(registration, x, root, nonfinite=nonfinite),
            *(rows(kind), rows()[0]),
            dtype=dtype,
        )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "registration",
    [registration for registration in rule if "weights" in registration.takes],
    ids=lambda registration: registration.name,
)
def test_a_rule_with_weights(registration):
    weights = torch.arange(1.0, N + 1)
    assert_same_on_gpu(lambda x, root: aggregated(registration, x, root, weights=weights), rows(), rows()[0])
    assert_same_on_gpu(lambda x, w: aggregated(registration, x, x[0], weights=w), rows(), weights)


@pytest.mark.gpu
@each_precision
@every(pre_aggregator)
def test_a_pre_aggregator(registration, dtype):
    settings = settings_of(registration)
    name = settings.pop("name")
    for last in ("median", {"rule": "krum", "f": 1}):
        chain = [{"rule": name, **settings}, last]
        assert_same_on_gpu(lambda x, chain=chain: fedsim.aggregate(x, rule=chain), rows(), dtype=dtype)
    assert_same_on_gpu(lambda x: fedsim.pre_aggregate(x, name, **settings), rows(), dtype=dtype)


def median(x):
    return x.median(0).values


def attacked(registration, honest, last, own_updates=None):
    """Return three Byzantine rows."""
    settings = settings_of(registration)
    return fedsim.attack(
        honest, 3, settings.pop("name"), own_updates=own_updates, last=last, aggregate=median, **settings
    )


@pytest.mark.gpu
@each_precision
@every(attack_strategy)
def test_an_attack(registration, dtype):
    honest, own_updates, last = rows()[:8], rows()[8:11], rows()[11]
    for tensors in ((honest, last, own_updates), (honest, last)):
        assert_same_on_gpu(lambda *arguments: attacked(registration, *arguments), *tensors, dtype=dtype)


@every(attack_strategy)
def test_an_attack_makes_its_rows_on_the_gpu_in_one_block_of_columns(registration, gpu):
    launches = []
    for d in (10, 40_000):
        tensors = [to_gpu(torch.randn(size, dtype=torch.double)) for size in ((8, d), (d,), (3, d))]
        with gpu.counting() as counts:
            attacked(registration, *tensors)
        assert counts.uploads == 0, counts.table()
        assert counts.waits == 0 or "aggregate" in registration.takes, counts.table()
        launches.append(counts.launches)
    assert launches[0] == launches[1], counts.table()


def test_an_attack_without_own_rows_uploads_nothing(gpu):
    honest = to_gpu(rows()[:8])
    with gpu.counting() as counts:
        fedsim.attack(honest, 3, "sign_flipping")
    assert counts.uploads == 0, counts.table()


@pytest.mark.gpu
def test_updates_in_which_tensors_of_the_gpu_lie_beside_arrays():
    def aggregated_entries(x):
        updates = [{"a": row[:300], "b": np.array([float(index)])} for index, row in enumerate(x)]
        result = fedsim.aggregate(updates, rule="median")
        assert result["b"].tolist() == [(N - 1) / 2]
        return result["a"]

    assert_same_on_gpu(aggregated_entries, rows())


@pytest.mark.gpu
def test_updates_in_which_parameters_lie_on_two_devices():
    with some_gpu():
        updates = [{"a": torch.ones(2), "b": torch.ones(3, device="cuda") * index} for index in range(4)]
        result = fedsim.aggregate(updates, rule="mean")
        assert not result["a"].is_cuda
        assert result["b"].is_cuda


@pytest.mark.gpu
@every(server_optimizer)
def test_a_server_optimizer(registration):
    def moved(row, updates):
        settings = settings_of(registration)
        server = fedsim.ServerOptimizer(settings.pop("name"), **settings)
        for update in updates:
            row = server.step(row, update)
        return torch.cat([row, server.broadcast(row), *server.state.values()])

    assert_same_on_gpu(moved, rows()[0], rows()[1:4])
