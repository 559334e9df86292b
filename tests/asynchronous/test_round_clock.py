from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

import fedsim
from fedsim.clients import client_algorithm
from fedsim.delays import Delays
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


def nothing(workers, steps=1):
    """Return empty updates of the workers, by worker ID."""
    return {worker: [0] * steps for worker in workers}


def test_a_round_takes_as_long_as_its_slowest_worker():
    """Workers of 1, 2 and 3 s a step take 3, 1 and 2 steps; then the same round without the first worker."""
    clock = RoundClock(simulated.delays_of([1.0, 2.0, 3.0]))
    clock.pass_round({0: 3, 1: 1, 2: 2}, nothing(range(3)))
    assert clock.now == 6
    clock.pass_round({0: 3, 1: 1}, nothing(range(2)))
    assert clock.now == 9
    # worker 2 is the slowest of two common steps, then worker 0 is alone
    clock.pass_steps({0: [0, 0, 0], 1: [0], 2: [0, 0]})
    assert clock.now == 9 + 3 + 3 + 1


def clock_with_network(speeds, **of_model):
    """Return a clock with a latency of 0.5 s and a bandwidth of 20 bytes per second."""
    delays = simulated.delays_of(speeds)
    return RoundClock(Delays(delays.slowdowns, delays.noise, 0, 1.0, 0.5, 20.0), **of_model)


def test_a_round_takes_as_long_as_the_model_the_update_and_the_buffers_travel():
    clock = clock_with_network([1.0, 2.0], row_bytes=30, buffer_bytes=10, message_bytes=40)
    clock.pass_round({0: 2, 1: 2}, {0: [10], 1: [10]}, 90)
    assert clock.now == (length := 2 * 2 + 0.5 + (30 + 10 + 10 + 40 + 10 + 60) / 20)
    clock.pass_round({0: 2, 1: 2}, {0: [10], 1: [10]}, 90, overlapped=1)  # worker 1 computes for 2 seconds meanwhile
    assert clock.now == 2 * length - 2
    # buffers travel before the first and after the last step of a worker
    clock = clock_with_network([1.0, 2.0], row_bytes=30, buffer_bytes=10)
    clock.pass_steps({0: [70], 1: [10] * 3})  # worker 0 is the slower one in the first step
    assert clock.now == (1 + 0.5 + (30 + 10 + 10 + 70) / 20) + (2.5 + (30 + 10) / 20) + (2.5 + (30 + 10 + 10) / 20)


def test_each_worker_is_charged_its_own_update():
    """Worker 0 computes fast and sends much, worker 1 the opposite, worker 2 is last in neither."""
    clock = clock_with_network([1.0, 5.0, 4.0])
    clock.pass_round({0: 2, 1: 2, 2: 2}, {0: [200], 1: [20], 2: [20]})
    assert clock.now == 2 * 1 + 0.5 + 200 / 20
    clock.pass_round({0: 2, 1: 2, 2: 2}, {0: [100], 1: [20], 2: [100]})
    assert clock.now == 12.5 + 2 * 4 + 0.5 + 100 / 20
    before = clock.now
    clock.pass_steps({0: [200, 20, 100], 1: [20, 20], 2: [20, 200]})
    assert clock.now == before + (1 + 0.5 + 10) + (4 + 0.5 + 10) + (1 + 0.5 + 5)


@pytest.mark.parametrize("engine", ["serial", "processes"])
@pytest.mark.parametrize(("sync", "waits"), [("parameters", 1), ("gradients", 2)])
def test_a_round_waits_for_the_attacker_that_does_not_compress(sync, waits, engine, tiny_experiment):
    """The attacker sends 7850 numbers, the other workers 100 numbers with indices of 13 bits.

    All workers receive 7850 numbers. At 1 s per step, the attacker (worker 1) is the slowest, although worker 2
    computes for longer.
    """
    tables = {**tiny_experiment, "model": "logistic", "rounds": 1, "mode": "clock", "workers": 3, "sync": sync}
    tables |= {"engine": engine, "processes": 2} if engine == "processes" else {"engine": engine}
    tables |= {"attack": {"name": "sign_flipping", "workers": [1]}, "processors": [{"name": "top_k", "k": 100}]}
    tables |= {"local": {"steps": 2}, "clock": {"slowdown": {"name": "list", "values": [1, 1, 1.5]}, "bandwidth": 1e4}}
    record = fedsim.run(tables).history[0]
    honest = 400 + math.ceil(100 * 13 / 8)
    assert record["bytes_up"] == waits * (31400 + 2 * honest)
    of_attacker, of_slow = 2 * 1 + waits * (31400 + 31400) / 1e4, 2 * 1.5 + waits * (31400 + honest) / 1e4
    assert of_attacker > of_slow
    assert record["virtual_seconds"] == pytest.approx(of_attacker, rel=1e-12)


ONE_WORKER = {  # settings that change what travels
    "parameters": {},
    "gradients": {"sync": "gradients"},
    "gradients, then parameters": {"sync": "post_local", "switch_after_round": 1},
    "messages": {"local": {"algorithm": "scaffold", "steps": 3}},
    "personal parameters": {"local": {"algorithm": "fedper", "personal": ["*.bias"], "steps": 3}},
    "several global models": {"local": {"algorithm": "ifca", "k": 3, "steps": 3}},
    "compressed both ways": {"processors": [{"name": "qsgd"}], "downlink": [{"name": "top_k", "k": 5}]},
    "compressed gradients": {"processors": [{"name": "top_k", "k": 5}], "sync": "gradients"},
    "asgd": {"policy": {"name": "asgd", "n_push": 3}},
    "fedbuff": {"policy": "fedbuff"},
    "easgd": {"policy": {"name": "easgd", "period": 2}},
    "gossip": {"policy": "gossip"},
}


@pytest.mark.parametrize("case", ONE_WORKER)
def test_the_clock_charges_the_recorded_bytes(case):
    """If bytes alone take time, a single worker takes as many seconds as it sends and receives bytes."""
    tables = {"engine": "serial", "workers": 1, "rounds": 2, "mode": "clock", "local": {"steps": 3}}
    tables |= {"data": {"name": "tests.components:tiny", "train": 8}, "model": "tests.models:Normalised"}
    tables |= {"clock": {"bandwidth": 1.0, "step_seconds": 1e-9}, **ONE_WORKER[case]}
    history = fedsim.run(tables).history
    moved = [record["bytes_up"] + record["bytes_down"] for record in history]
    assert history[0]["virtual_seconds"] == pytest.approx(moved[0], abs=1e-6)
    assert history[1]["virtual_seconds"] == pytest.approx(moved[0] + moved[1], abs=1e-6)
    assert min(moved) > 0


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
    "accumulated gradients": {"algorithm": "sgd", "accumulation_steps": 2},
    "smaller batches left out": {"algorithm": "mimelite", "drop_last": True},
    "ifca": {"algorithm": "ifca", "k": 2},
    "kept momentum": {"algorithm": "sgd", "momentum": 0.9, "keep_optimizer_state": True},
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
    two_layers = {"name": "2nn", "classes": 10}  # the 8 training samples have fewer classes than the test samples
    model = two_layers if local["algorithm"] in ("dp_sgd", "pfedme") else "tests.models:Normalised"
    result = fedsim.run(
        **{"engine": "serial", "workers": 1, "rounds": 2, "mode": "clock", "policy": policy, "local": local},
        **{"data": {"name": "tests.components:tiny", "train": 8}, "model": model, "buffers": "local"},
        on_start=lambda metadata: passes.clear(),  # those of checks
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

    def seconds(worker, unit, steps, bytes, overlapped=0):
        asked.append((worker, unit, steps))
        return 1.0

    clock = RoundClock(SimpleNamespace(seconds=seconds))
    for cohort in ((0, 2), (1, 2)):
        if in_step:
            clock.pass_steps(nothing(cohort, steps=2))
        else:
            clock.pass_round(dict.fromkeys(cohort, 2), nothing(cohort))
    if in_step:
        assert asked == [(0, 0, 1), (2, 0, 1), (0, 1, 1), (2, 1, 1), (1, 0, 1), (2, 2, 1), (1, 1, 1), (2, 3, 1)]
    else:
        assert asked == [(0, 0, 2), (2, 0, 2), (1, 0, 2), (2, 1, 2)]
