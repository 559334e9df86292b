from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import fedsim
from fedsim.asynchronous.delays import Delays
from fedsim.clients import client_algorithm
from fedsim.rounds.round_clock import RoundClock, delays_of
from tests.asynchronous import simulated


def experiment(**clock):
    return fedsim.Experiment(workers=3, mode="clock", clock=clock, seed=5)


def test_delays_of_an_experiment():
    clock = {
        "step_seconds": 0.5,
        "slowdown": {"name": "list", "values": [1.0, 2.0, 3.0]},
        "latency": 0.25,
        "bandwidth": 10.0,
    }
    delays = delays_of(experiment(**clock))
    assert delays.seconds(1, 0, 4) == 4.0
    assert delays.seconds(2, 9, 2, 20) == 3.0 + 0.25 + 2.0
    noisy, same = (delays_of(experiment(noise={"name": "lognormal", "sigma": 0.3})) for _ in range(2))
    assert noisy.seconds(2, 7, 1) == same.seconds(2, 7, 1)
    assert noisy.seed == 5


def test_a_round_takes_as_long_as_its_slowest_worker():
    """Workers of 1, 2 and 3 s a step take 3, 1 and 2 steps; then the same round without the first worker."""
    clock = RoundClock(simulated.delays_of([1.0, 2.0, 3.0]))
    clock.pass_round({0: 3, 1: 1, 2: 2}, processed_bytes=0, in_step=False)
    assert clock.now == 6
    clock.pass_round({0: 3, 1: 1}, processed_bytes=0, in_step=False)
    assert clock.now == 9
    # worker 2 is the slowest of two common steps, then worker 0 is alone
    clock.pass_round({0: 3, 1: 1, 2: 2}, processed_bytes=0, in_step=True)
    assert clock.now == 9 + 3 + 3 + 1


def test_a_round_takes_as_long_as_the_model_the_update_and_the_buffers_travel():
    delays = simulated.delays_of([1.0, 2.0])
    delays = Delays(delays.slowdowns, delays.noise, 0, 1.0, 0.5, 20.0)
    for in_step, seconds in ((False, 4 + 0.5 + 3), (True, 2 * (2 + 0.5 + 3))):
        clock = RoundClock(delays, row_bytes=30, buffer_bytes=10)
        clock.pass_round({0: 2, 1: 2}, processed_bytes=10, in_step=in_step)
        assert clock.now == seconds


@pytest.mark.parametrize("policy", ["sync", "fedbuff"])
def test_the_messages_of_a_client_algorithm_travel_with_its_model(policy, tiny_experiment):
    """In each direction the model and a message (one row and one number) are sent at one number per second."""
    tables = {**tiny_experiment, "model": "logistic", "rounds": 1, "mode": "clock", "policy": policy}
    tables |= {"local": {"algorithm": "tests.components:Counting", "steps": 2}, "clock": {"bandwidth": 4.0}}
    assert fedsim.run(tables).history[0]["virtual_seconds"] == 2 + 2 * (2 * 7850 + 1)


FURTHER = {  # in addition to all client algorithms with their defaults
    "ditto of few steps": {"algorithm": "ditto", "personal_steps": 2},
    "fedsam with rho = 0": {"algorithm": "fedsam", "rho": 0.0},
    "pfedme of three inner steps": {"algorithm": "pfedme", "inner_steps": 3},
    "scaffold with full gradients": {"algorithm": "scaffold", "option": 1},
    "apfl that adapts": {"algorithm": "apfl", "adaptive": True},
    "accumulated gradients": {"algorithm": "sgd", "accumulate": 2},
    "smaller batches left out": {"algorithm": "mimelite", "drop_last": True},
    "kept momentum": {"algorithm": "sgd", "momentum": 0.9, "keep_state": True},
}
LOCAL = {**{registration.name: {"algorithm": registration.name} for registration in client_algorithm}, **FURTHER}
ASYNCHRONOUS = ("sgd", "fedsam", "ditto of few steps", "mimelite", "scaffold with full gradients")


@pytest.mark.parametrize(
    ("policy", "case"), [*(("sync", case) for case in LOCAL), *(("fedbuff", case) for case in ASYNCHRONOUS)]
)
def test_a_round_takes_as_long_as_its_backward_passes(policy, case, monkeypatch):
    """One worker has 8 samples in batches of 3: an epoch has 3 batches, or 2 without the incomplete one."""
    passes, backward, grad = [], torch.Tensor.backward, torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **more: (passes.append(1), grad(*args, **more))[1])
    monkeypatch.setattr(torch.Tensor, "backward", lambda *args, **more: (passes.append(1), backward(*args, **more)))
    local = {"epochs": 2, "batch_size": 3, **LOCAL[case]}
    if "personal" in client_algorithm.get(local["algorithm"]).parameters.model_fields:
        local["personal"] = ["*.bias"]
    # The statistics of pFedMe's personal model take one more forward pass, which the clock does not charge. BatchNorm
    # has no gradients of single samples, which DP-SGD needs.
    model = "2nn" if local["algorithm"] in ("dp_sgd", "pfedme") else "tests.models:Normalised"
    result = fedsim.run(
        **{"engine": "serial", "workers": 1, "rounds": 2, "mode": "clock", "policy": policy, "local": local},
        **{"data": {"name": "tests.components:tiny", "train": 8}, "model": model, "buffers": "local"},
        on_start=lambda facts: passes.clear(),  # those of checks
    )
    assert result.history[-1]["virtual_seconds"] == len(passes) > 0


def test_a_gradient_that_is_sent_takes_the_time_of_one_gradient(tiny_experiment):
    """The cost that the algorithm declares concerns its own local steps and is ignored here."""
    tables = {**tiny_experiment, "model": "logistic", "rounds": 1, "mode": "clock", "clock": {"step_seconds": 0.5}}
    tables |= {"local": {"algorithm": "tests.components:Costly", "steps": 4}, "workers": 2}
    seconds = [
        fedsim.run({**tables, **how}).history[0]["virtual_seconds"]
        for how in ({}, {"policy": "fedbuff"}, {"sync": "gradients"}, {"policy": "asgd"})
    ]
    assert seconds == [6, 6, 2, 2]


@pytest.mark.parametrize("in_step", [False, True])
def test_each_worker_counts_its_own_units(in_step):
    """The delays are those of any other policy and do not depend on the cohorts."""
    asked = []

    def seconds(worker, unit, steps, bytes):
        asked.append((worker, unit, steps))
        return 1.0

    clock = RoundClock(SimpleNamespace(seconds=seconds))
    clock.pass_round({0: 2, 2: 2}, processed_bytes=0, in_step=in_step)
    clock.pass_round({1: 2, 2: 2}, processed_bytes=0, in_step=in_step)
    if in_step:
        assert asked == [(0, 0, 1), (2, 0, 1), (0, 1, 1), (2, 1, 1), (1, 0, 1), (2, 2, 1), (1, 1, 1), (2, 3, 1)]
    else:
        assert asked == [(0, 0, 2), (2, 0, 2), (1, 0, 2), (2, 1, 2)]
