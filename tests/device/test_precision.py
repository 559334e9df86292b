"""On a GPU, TF32 is off wherever float32 is promised, even if the user has enabled it."""

from __future__ import annotations

import pytest
import torch

import fedsim
from fedsim.aggregation.numerics import lazy_rows
from fedsim.asynchronous.policies.model_updates import FedBuff
from fedsim.asynchronous.server_state import ServerState
from fedsim.engines import base
from tests.device.pretend import GPU, SMALL, pretend_gpu, upload
from tests.engines.in_process import InProcessPool

CLOCK = {"mode": "clock", "policy": {"name": "k_sync", "k": 2}, "clock": {"slowdown": "lognormal"}}
RACE = {"engine": "processes", "processes": 2, "mode": "race", "policy": "fedbuff", "race": {"runs": 1}}


@pytest.fixture
def seen(monkeypatch):
    """Yield a list for whether TF32 was allowed at some points of a run; the user has enabled TF32."""
    switches = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = True
    yield []
    assert all(switch.allow_tf32 for switch in switches), "the user's setting has been restored"
    for switch, value in zip(switches, before, strict=True):
        switch.allow_tf32 = value


def allowed():
    return torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("mode", [CLOCK, RACE], ids=["clock", "race"])
def test_policies_work_in_full_precision(mode, gpu, seen, tiny_experiment, monkeypatch):
    monkeypatch.setattr(base, "ProcessPool", InProcessPool)
    combine, publish = ServerState.combine_gradients, FedBuff.publish
    noted = lambda server, slots: seen.append(allowed()) or combine(server, slots)  # noqa: E731
    monkeypatch.setattr(ServerState, "combine_gradients", noted)
    monkeypatch.setattr(FedBuff, "publish", lambda policy, server: seen.append(allowed()) or publish(policy, server))
    experiment = {**tiny_experiment, "device": "cuda", "model": "logistic", "rounds": 1, **mode}
    fedsim.run(experiment)
    assert seen
    assert not any(seen)


@pytest.mark.parametrize(
    "call",
    [
        lambda rows, noted: fedsim.aggregate(rows, noted),
        lambda rows, noted: fedsim.pre_aggregate(rows, lambda updates: noted(updates).expand(2, -1)),
        lambda rows, noted: fedsim.attack(rows, "opt_alie", 1, aggregate=noted),
        lambda rows, noted: fedsim.attack(rows, lambda own_updates: noted(own_updates)[None], 1),
    ],
    ids=["aggregate", "pre_aggregate", "attack with a rule", "an own attack"],
)
def test_functions_by_hand_work_in_full_precision(call, gpu, seen):
    def noted(updates):
        assert updates.device == GPU
        seen.append(allowed())
        return updates.mean(0)

    call(upload(torch.rand(3, 5)), noted)
    assert seen
    assert not any(seen)


def test_built_in_rules_multiply_in_full_precision(gpu, seen, monkeypatch):
    combine = lazy_rows.combine
    monkeypatch.setattr(lazy_rows, "combine", lambda *arguments: seen.append(allowed()) or combine(*arguments))
    fedsim.aggregate(upload(torch.rand(6, 5)), ["nnm", "multi_krum"], f=1)
    assert seen == [False]


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_a_precision_that_the_card_would_emulate_or_ignore_is_refused(precision, tiny_experiment):
    tables = {**tiny_experiment, "device": "cuda", "model": "logistic", "rounds": 1, "precision": precision}
    with pretend_gpu():
        fedsim.run(tables)
    line = rf'precision = "{precision}": cuda:0 does not support .* compute capability 8.0 or higher; use float32'
    with pretend_gpu(SMALL), pytest.raises(fedsim.ExperimentError, match=line):
        fedsim.run(tables)
