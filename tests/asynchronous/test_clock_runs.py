"""Runs with mode = "clock", compared with plain loops, with the synchronous loop, and between engines."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedsim
from fedsim.asynchronous.policies import policy
from fedsim.data import TensorData
from fedsim.runs.loops import clock_loop as simulation
from tests.engines.zoo import experiment as zoo_experiment
from tests.matrix import in_turn
from tests.textbook import Federation

FEATURES, CLASSES = 6, 3


def points(root, *, samples: int = 60):
    generator = torch.Generator().manual_seed(3)
    inputs, targets = torch.randn(samples + 20, FEATURES, generator=generator), torch.arange(samples + 20) % CLASSES
    inputs[:, 0] += targets
    return TensorData(inputs[:samples], targets[:samples]), TensorData(inputs[samples:], targets[samples:])


def linear(*, hidden: int = 0) -> nn.Module:
    """Return a model with 21 parameters, or with 10 * hidden + 3 if it has a hidden layer."""
    if not hidden:
        return nn.Linear(FEATURES, CLASSES)
    return nn.Sequential(nn.Linear(FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, CLASSES))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Dropout(0.4), nn.Linear(16, CLASSES))


SMALL = {
    "rounds": 3,
    "workers": 4,
    "engine": "serial",
    "model": f"{__name__}:linear",
    "data": f"{__name__}:points",
    "local": {"batch_size": 4, "lr": 0.1},
    "mode": "clock",
}
JITTER = {"slowdown": {"name": "geometric", "ratio": 3.0}, "noise": "lognormal", "latency": 0.1, "bandwidth": 1000.0}

# Settings under which each policy with one worker equals plain SGD. Every policy must have such settings.
NEUTRAL = {
    "hogwild": {},
    "locked": {},
    "asgd": {},
    "staleness_aware": {},
    "dc_asgd": {},  # without staleness there is nothing to compensate
    "ssp": {},
    "k_sync": {"k": 1},
    "k_async": {"k": 1},
    "backup_workers": {"backups": 0},
    "basgd": {"b": 1},
    "fedasync": {"alpha": 1.0},
    "fedbuff": {},
    "async_local_sgd": {"lr": 1.0, "beta": 0.0},
    "easgd": {"alpha": 0.0},  # alpha = 0 leaves the worker's own model alone
    "eamsgd": {"alpha": 0.0},
    "ad_psgd": {},
    "gossip": {},
    "d_psgd": {},
    "sync": {},  # run with sync = "gradients"
}
FROM_DIFFERENCES = {"fedbuff", "async_local_sgd"}  # in float64, w + (x - w) equals x only if w and x are float32 values


@pytest.fixture
def servers(monkeypatch):
    """Return a list that collects the server of each run in a test."""
    made = []

    class Watched(simulation.ServerState):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(simulation, "ServerState", Watched)
    return made


def run(chosen=None, **changes):
    tables = {**SMALL, **changes}
    if chosen is not None:
        tables["policy"] = chosen
    return fedsim.run(tables)


def without_times(history):
    return [{key: value for key, value in record.items() if key != "seconds"} for record in history]


def plain_sgd(rounds, dtype, momentum=0.0, fresh=False):
    """Return the row after plain SGD over the batches of worker 0; `fresh`: reset the momentum in each round."""
    alone = Federation(linear, points, 1, 4, "contiguous", dtype=dtype)
    velocity = torch.zeros_like(alone.row)
    for round in range(1, rounds + 1):
        velocity = torch.zeros_like(velocity) if fresh else velocity
        for batch in alone.epoch(round, 0):
            velocity.mul_(momentum).add_(alone.gradient(alone.row, batch))
            alone.row.add_(velocity, alpha=-0.1)
    return alone.row


@pytest.mark.parametrize(
    ("name", "precision"),
    [  # each policy in one precision by default, alternating; in the other one with `-m slow`
        pytest.param(registration.name, precision, marks=pytest.mark.slow if (index + shift) % 2 else ())
        for index, registration in enumerate(policy)
        for shift, precision in enumerate(("float32", "float64"))
    ],
)
def test_one_worker_and_neutral_settings_equal_plain_sgd_bit_for_bit(name, precision, servers):
    assert name in NEUTRAL, f"{name}: add settings to NEUTRAL under which one worker is plain SGD"
    registration = policy.get(name)
    chosen = registration.bind(registration.check(NEUTRAL[name]))
    by_step = chosen.in_rounds or chosen.work == "gradient"
    for momentum in (0.0, 0.5):
        if chosen.needs_momentum and not momentum:
            continue
        changes = {"sync": "gradients"} if chosen.in_rounds else {}
        local = {**SMALL["local"], "momentum": momentum}
        result = run(
            {"name": name, **NEUTRAL[name]},
            workers=1,
            precision=precision,
            local=local,
            partition="contiguous",
            clock=JITTER,
            **changes,
        )
        expected = plain_sgd(3, getattr(torch, precision), momentum, fresh=not by_step)
        row = servers[-1].replicas[0] if name in ("easgd", "eamsgd") else result.global_row
        if precision == "float64" and name in FROM_DIFFERENCES:
            assert torch.allclose(row, expected, rtol=0, atol=1e-14)
        else:
            assert torch.equal(row, expected)
        accounts = [record["asynchronous"] or {} for record in result.history]
        assert {tau for account in accounts for tau in account.get("staleness", [])} <= {"0"}


# Against the synchronous loop


@pytest.mark.parametrize(
    ("model", "precision"),
    [(f"{__name__}:linear", "float32"), ({"name": f"{__name__}:linear", "hidden": 3301}, "float64")],
    ids=["one block of columns", "three blocks"],
)
@pytest.mark.parametrize("chosen", [{"name": "ssp", "s": 0}, {"name": "k_sync", "k": 5}], ids=["ssp", "k_sync"])
def test_ssp_0_and_k_sync_of_all_equal_the_synchronous_run_bit_for_bit(chosen, model, precision):
    """The virtual times are equal, too."""
    changes = {
        "workers": 5,
        "rounds": 2,
        "model": model,
        "local": {"batch_size": 7, "lr": 0.1, "momentum": 0.5, "weight_decay": 0.01},
        "precision": precision,
        "clock": JITTER,
    }
    together = run(sync="gradients", aggregate="mean", **changes)
    apart = run(chosen, **changes)
    assert torch.equal(together.global_row, apart.global_row)
    for key in ("test_loss", "test_accuracy", "samples", "cohort", "bytes_up", "bytes_down"):
        assert [record[key] for record in together.history] == [record[key] for record in apart.history], key
    for sync_record, async_record in zip(together.history, apart.history, strict=True):
        assert sync_record["virtual_seconds"] == pytest.approx(async_record["virtual_seconds"], rel=1e-12)
        assert sync_record["train_loss"] == pytest.approx(async_record["train_loss"], rel=1e-12)
    assert apart.history[-1]["asynchronous"]["staleness"] == {"0": 10}
    assert apart.history[-1]["asynchronous"]["updates"] == 4


def test_algorithm_state_is_that_of_the_synchronous_run():
    """Policies with one state on the server and policies with one state per worker, for one worker."""
    local = {"batch_size": 7, "lr": 0.05, "algorithm": "adam"}
    for workers, policies in ((3, ({"name": "ssp", "s": 0},)), (1, ("asgd", "hogwild", "gossip"))):
        together = run(sync="gradients", aggregate="mean", workers=workers, local=local)
        for chosen in policies:
            assert torch.equal(together.global_row, run(chosen, workers=workers, local=local).global_row)


@pytest.mark.parametrize(
    ("server", "model", "precision"),
    [
        *((server, "linear", "float64") for server in ("adam", "slowmo", {"name": "bmuf", "nesterov": True})),
        ("sgd", "linear", "float32"),
        ("sgd", "normalised", "float64"),
    ],
)
def test_fedbuff_of_all_at_equal_speeds_is_fedavg(server, model, precision):
    changes = {"precision": precision, "server": server, "model": f"{__name__}:{model}"}
    together, apart = run(aggregate="mean", **changes), run("fedbuff", **changes)
    tolerance = {"float32": 1e-6, "float64": 1e-9}[precision]
    for name, value in together.model.state_dict().items():
        assert torch.allclose(value.double(), apart.model.state_dict()[name].double(), rtol=0, atol=tolerance), name
    for sync_record, async_record in zip(together.history, apart.history, strict=True):
        for key in ("virtual_seconds", "samples", "bytes_up", "cohort"):
            assert sync_record[key] == async_record[key]
        assert sync_record["test_loss"] == pytest.approx(async_record["test_loss"], abs=1e-4)


def test_a_straggler_delays_the_synchronous_run_only():
    """The virtual times are computed by hand."""
    clock = {"slowdown": {"name": "list", "values": [1.0, 1.0, 1.0, 10.0]}}
    waits, goes_on = run(clock=clock), run("fedasync", clock=clock)
    assert [record["virtual_seconds"] for record in waits.history] == [40.0, 80.0, 120.0]
    assert [record["virtual_seconds"] for record in goes_on.history] == [8.0, 12.0, 16.0]
    assert [record["cohort"] for record in goes_on.history] == [[0, 1, 2]] * 3


# Engine against engine

CASES = {
    "asgd": {"policy": {"name": "asgd", "n_fetch": 2, "n_push": 3}},
    "dc_asgd, adaptive": {"policy": {"name": "dc_asgd", "adaptive": True}},
    "ssp": {"policy": {"name": "ssp", "s": 1}},
    "k_sync": {"policy": {"name": "k_sync", "k": 2}},
    "ad_psgd with BatchNorm": {"policy": "ad_psgd", "model": f"{__name__}:normalised"},
    "a sampled cohort": {"policy": "fedasync", "workers": 7, "cohort": 3},
    "a sampled cohort with a buffer": {"policy": {"name": "fedbuff", "k": 2}, "workers": 7, "cohort": 3},
    "own buffers of a sampled cohort": {
        **{"policy": "fedasync", "workers": 7, "cohort": 3},
        **{"model": f"{__name__}:normalised", "buffers": "local", "local": {"batch_size": 3, "lr": 0.1}},
    },
    "worker state and messages": {
        **{"policy": "fedasync", "workers": 7, "cohort": 3},
        "local": {"algorithm": "tests.components:Counting", "batch_size": 3},
    },
    "dropout, by steps": {"policy": "asgd", "model": f"{__name__}:dropping"},
    "steps in proportion to speed": {"policy": {"name": "async_local_sgd", "dylu": True}},
    "departures": {"policy": "gossip", "clock": {**JITTER, "departures": {"1": 5.0}}},
    "d_psgd with BatchNorm on a random graph, departures": {
        "policy": {"name": "d_psgd", "topology": {"name": "erdos_renyi", "p": 0.7}},
        **{"model": f"{__name__}:normalised", "clock": {**JITTER, "departures": {"1": 5.0}}},
    },
    "BatchNorm, buffers of the server": {
        **{"policy": "hogwild", "model": f"{__name__}:normalised"},
        "buffers": "frozen",
    },
    "augmentation, by steps": {
        **{key: value for key, value in zoo_experiment("convolution").items() if key in ("model", "partition")},
        **{"workers": 5, "policy": "asgd"},
        "data": {"name": "tests.engines.zoo:pictures", "augment": ["flip", {"name": "shift", "pixels": 1}]},
    },
}


@in_turn(("case", "engine"), CASES, ["processes", "batched"])
def test_engines_agree(case, engine, session):
    """`processes` is bit-identical to `serial`; `batched` agrees up to rounding."""
    tables = {**SMALL, "rounds": 2, "clock": JITTER, "precision": "float64", **CASES[case]}
    serial = fedsim.run(tables)
    if engine == "processes":
        spawned = fedsim.run({**tables, "engine": "processes", "processes": 2}, session=session)
        assert torch.equal(serial.global_row, spawned.global_row)
        assert without_times(serial.history) == without_times(spawned.history)
        for name, value in serial.model.state_dict().items():
            assert torch.equal(value, spawned.model.state_dict()[name]), name
        return
    stacked = fedsim.run({**tables, "engine": "batched", "processes": 1, "batched": {"stack_size": 2}})
    for name, value in serial.model.state_dict().items():
        assert torch.allclose(value, stacked.model.state_dict()[name], rtol=0, atol=1e-9), name
    for key in ("virtual_seconds", "asynchronous", "samples", "cohort", "bytes_up", "bytes_down"):
        assert [record[key] for record in serial.history] == [record[key] for record in stacked.history]


# Records


def test_the_records_of_a_run_by_hand():
    """FedAsync, two workers with 1 s and 2 s a step, 2 steps a round; a model of 21 float32 parameters has 84 bytes."""
    clock = {"slowdown": {"name": "list", "values": [1.0, 2.0]}}
    tables = {"workers": 2, "rounds": 2, "local": {"steps": 2, "batch_size": 4, "lr": 0.1}, "clock": clock}
    first, second = run("fedasync", **tables).history
    # worker 0 arrives at 2, 4, 6, ... s and worker 1 at 4, 8, ... s; a round has two arrivals, or more with ties
    assert first["virtual_seconds"] == 4.0
    assert first["cohort"] == [0, 1]
    assert first["samples"] == [16, 8]
    assert first["asynchronous"] == {
        "updates": 3,
        "arrivals": 3,
        "staleness": {"0": 2, "2": 1},
        "buffered": 0,
        "discarded": 0,
        "rejected": {},
    }
    assert first["bytes_up"] == 3 * 84
    assert first["bytes_down"] == 3 * 84
    assert second["virtual_seconds"] == 6.0
    assert second["cohort"] == [0]
    assert second["samples"] == [8]
    assert second["asynchronous"] == {
        "updates": 4,
        "arrivals": 4,
        "staleness": {"0": 1},
        "buffered": 0,
        "discarded": 0,
        "rejected": {},
    }
    assert second["bytes_down"] == 2 * 84


def test_an_overflowing_row_is_an_error():
    with pytest.raises(
        fedsim.ExperimentError, match="round 1: (the global model has diverged|the result of worker \\d)"
    ):
        run("asgd", local={"lr": 1e38, "batch_size": 4})


def test_data_poisoning_has_an_effect():
    attack = {"name": "backdoor", "workers": [1], "value": 9.0, "size": 1}
    data = {"model": {"name": "tests.engines.zoo:model", "kind": "convolution"}, "data": "tests.engines.zoo:pictures"}
    attacked, honest = run("asgd", attack=attack, **data), run("asgd", **data)
    assert attacked.history[-1]["attack_success"] is not None
    assert not torch.equal(attacked.global_row, honest.global_row)


def test_workers_of_a_large_population_are_drawn_on_demand():
    population = {"workers": 10**6, "partition": {"name": "virtual", "samples": 8}}
    history = run({"name": "fedbuff", "k": 2}, cohort=3, clock={**JITTER, "noise": "lognormal"}, **population).history
    seen = [worker for record in history for worker in record["cohort"]]
    assert len(set(seen)) == len(seen) == 9
    assert max(seen) > 10**5
    assert {samples for record in history for samples in record["samples"]} == {8}


# Buffers


def test_averaged_buffers_equal_those_of_the_synchronous_run():
    changes = {"workers": 3, "rounds": 1, "model": f"{__name__}:normalised", "precision": "float64", "clock": JITTER}
    together = run(sync="gradients", aggregate="mean", **changes)
    apart = run({"name": "ssp", "s": 0}, **changes)
    assert torch.equal(together.global_row, apart.global_row)
    for name, value in together.model.state_dict().items():
        assert torch.allclose(value.double(), apart.model.state_dict()[name].double(), rtol=0, atol=1e-12), name


def test_workers_take_steps_in_proportion_to_their_speed(tiny_experiment):
    """At 0.5, 1 and 2 seconds per step, 8, 4 and 2 steps take 4 seconds each."""
    tables = {**tiny_experiment, "model": "logistic", "workers": 3, "rounds": 1, "mode": "clock", "engine": "serial"}
    tables |= {"policy": {"name": "async_local_sgd", "dylu": True}, "local": {"steps": 8, "batch_size": 2}}
    tables |= {"clock": {"step_seconds": 0.5, "slowdown": {"name": "list", "values": [1, 2, 4]}}}
    (record,) = fedsim.run(tables).history
    assert record.samples == [16, 8, 4]
    assert record.virtual_seconds == 4.0


# Rules and attacks

SLOW = {"slowdown": {"name": "geometric", "ratio": 3.0}}


def loss_after(rounds=3, **settings):
    return fedsim.run(**SMALL | {"clock": SLOW, "rounds": rounds} | settings).history[-1].test_loss


@pytest.mark.parametrize("name", ["fedbuff", "fedasync", "async_local_sgd", "d_psgd", "ad_psgd"])
def test_an_attack_changes_no_digit_before_its_first_round(name):
    settings = SMALL | {"clock": SLOW, "policy": name}
    attacked, honest = (
        fedsim.run(**settings, **attack).history[1]
        for attack in ({"attack": {"name": "ipm", "workers": [1], "start_round": 3}}, {})
    )
    assert (attacked.test_loss, attacked.metrics) == (honest.test_loss, honest.metrics)


def test_a_mean_keeps_its_last_result_for_attacks_that_use_it():
    losses = [
        loss_after(policy="fedbuff", attack={"name": "free_rider", "what": what, "workers": [1]})
        for what in ("zero", "last")
    ]
    assert losses[0] != losses[1]


def test_an_attack_that_can_never_know_enough_vectors_is_an_error():
    attack = {"name": "alie", "workers": [1], "knows": "buffer"}
    with pytest.raises(fedsim.ExperimentError, match="at least 2 honest workers, not 1"):
        loss_after(policy={"name": "fedbuff", "k": 2}, attack=attack)


def test_attacks_do_not_change_personal_parameters():
    local = {"algorithm": "fedper", "personal": ["2.*"], "batch_size": 4, "lr": 0.1}
    settings = SMALL | {"policy": "fedbuff", "local": local, "model": f"{__name__}:dropping"}
    attacked = fedsim.run(**settings, attack={"name": "gaussian", "workers": [1]}).model.state_dict()
    assert torch.equal(attacked["2.weight"], fedsim.run(**settings | {"rounds": 1}).model.state_dict()["2.weight"])


def test_the_coefficients_of_buffers_are_not_those_of_workers():
    history = fedsim.run(**SMALL, policy={"name": "basgd", "b": 2}, aggregate="geometric_median").history
    assert [record.weights for record in history] == [None] * 3


def test_workers_whose_elastic_differences_are_all_excluded_do_not_wait_for_ever():
    policy = {"name": "easgd", "synchronous": True, "period": 1}
    attack, clock = {"name": "nan", "workers": [1, 2]}, SLOW | {"departures": {"0": 9.0, "3": 9.0}}
    settings = {"policy": policy, "attack": attack, "aggregate": {"nonfinite": "exclude"}, "clock": clock}
    assert loss_after(6, **settings) > 0


def test_workers_of_ssp_do_not_wait_longer_if_results_are_excluded():
    """Two fast workers wait for one that takes 3 s for each of 6 steps."""
    clock = {"slowdown": {"name": "list", "values": [1.0, 1.0, 3.0]}, "step_seconds": 1.0}
    settings = {"workers": 3, "rounds": 1, "policy": {"name": "ssp", "s": 0}, "clock": clock, "local": {"steps": 6}}
    attack, aggregate = {"name": "nan", "workers": [2]}, {"nonfinite": "exclude"}
    for more in ({}, {"attack": attack, "aggregate": aggregate}):
        (record,) = fedsim.run(**{**SMALL, **settings, **more}).history
        assert record.virtual_seconds == 18.0
