"""The results of small experiments stay the same to 1e-12 when code is restructured.

There is one experiment per component, mode and synchronisation, with engine=serial in float64. `python -m
tests.test_frozen_numbers` adds the numbers of new components. If numbers change intentionally, rewrite all of them with
`python -m tests.test_frozen_numbers all` and give the reason in the commit.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

import fedsim
from fedsim.aggregation.rule import pre_aggregator, rule
from fedsim.asynchronous.policies import policy
from fedsim.byzantine.base import attack_strategy
from fedsim.clients import client_algorithm
from fedsim.data.augmentation import augmentation
from fedsim.data.partitions.base import partition_strategy
from fedsim.server.optimizer import server_optimizer
from tests.device.agreement import settings_of
from tests.engines.test_contract import CASES, NET

FILE = Path(__file__).with_name("frozen_numbers.json")
TOLERANCE = 1e-12

SMALL = {
    "rounds": 3,
    "workers": 6,
    "cohort": 5,
    "model": "logistic",
    "data": {"name": "tests.components:tiny", "train": 120},
    "partition": {"name": "dirichlet", "alpha": 0.5},
    "precision": "float64",
    "local": {"batch_size": 8, "lr": 0.05, "momentum": 0.5},
}
# too slow, too new, or of another library
NOT_FROZEN = {
    *("a large model", "worker state and messages", "worker state of rows left out", "transforms of torchvision"),
    "bfloat16",  # whose rounding depends on the instructions of the CPU
}
SLOW = {  # cases whose components have an experiment of their own
    *("case: fedprox", "case: scaffold", "case: scaffold with full gradients", "case: fednova", "case: feddyn"),
    *("case: adam", "case: adamw", "case: adagrad", "case: augmentation", "case: a rule with a state"),
    *("case: a rule that draws", "case: a rule that asks for losses", "case: an adaptive server", "case: dropout"),
    *("case: virtual shards and data of the server's own", "case: an attack tuned to the rule"),
    *("case: an attack that draws", "case: an attack on data", "case: workers that see their samples differently"),
}
SETTINGS_OF_ALGORITHMS = {
    "fedbn": {"model": "tests.models:Normalised", "buffers": "local"},
    "fedrep": {
        "local": {
            "algorithm": "fedrep",
            "batch_size": 8,
            "lr": 0.01,
            "personal": ["*bias"],
            "steps": 4,
            "head_steps": 2,
        }
    },
    "ifca": {"model": {"name": "tests.models:sized", "hidden": [8]}},  # a model with random initial parameters
    "muon": {"model": {"name": "tests.models:sized", "hidden": [8]}},
    "moon": {"model": {"name": "tests.models:sized", "hidden": [8]}},  # a model with hidden features
}
ATTACK = {"name": "sign_flipping", "workers": [1, 4]}


def named(registration, key):
    """Return the table of a component whose name is stored under `key`."""
    settings = settings_of(registration)
    return {key: settings.pop("name"), **settings}


def experiments():
    """Return the tables of each experiment by name."""
    clock = {"mode": "clock", "clock": {"slowdown": {"name": "lognormal"}, "noise": "shifted_exponential"}}
    plain = {"workers": 3, "cohort": None, "partition": "iid", "data": {**SMALL["data"], "train": 203}}
    plain["local"] = {**SMALL["local"], "batch_size": 12}
    cases = {  # the numbers of net are those for whole images
        name: {key: value for key, value in case.items() if value != NET["data"]} for name, case in CASES.items()
    }
    tables_by_name = {f"case: {name}": {**plain, **case} for name, case in cases.items() if name not in NOT_FROZEN}
    tables_by_name |= {
        f"gradients: {name}": {**plain, **cases[name], "sync": "gradients"}
        for name in (
            "plain averaging",
            "dropout",
            "a rule by distances, under attack",
            "buffers averaged",
            "rows left out",
        )
    }
    on_graph = {**clock, "workers": 9, "cohort": None, "policy": {"name": "d_psgd", "topology": "complete"}}
    on_arrival = {**clock, "cohort": None, "policy": "asgd"}
    for registration in rule:
        needs = "own" if "own" in registration.takes else "models" if "models" in registration.takes else None
        tables_by_name[f"rule: {registration.name}"] = {
            "attack": ATTACK,
            "aggregate": named(registration, "rule"),
            **{"own": on_graph, "models": on_arrival, None: {"workers": 12, "cohort": 11}}[needs],
        }
    for registration in pre_aggregator:
        rules = {"rule": [named(registration, "rule"), "median"]}
        tables_by_name[f"pre-aggregator: {registration.name}"] = {
            "attack": ATTACK,
            "aggregate": rules,
            "workers": 12,
            "cohort": 11,
        }
    for registration in attack_strategy:
        attack = settings_of(registration, workers=[1, 4])
        tables_by_name[f"attack: {registration.name}"] = {
            "attack": attack,
            "aggregate": {"rule": "median", "nonfinite": "exclude"},
            **(on_graph if "weights" in registration.takes else {}),
        }
    for registration in partition_strategy:
        if registration.name not in ("natural", "given"):  # whose shards come with the data
            tables_by_name[f"partition: {registration.name}"] = {"partition": named(registration, "name")}
    for registration in client_algorithm:
        local = {"batch_size": 8, "lr": 0.01, **named(registration, "algorithm")}
        tables_by_name[f"algorithm: {registration.name}"] = {
            "local": local,
            **SETTINGS_OF_ALGORITHMS.get(registration.name, {}),
        }
    for registration in server_optimizer:
        tables_by_name[f"server: {registration.name}"] = {"server": named(registration, "name")}
    for registration in augmentation:
        tables_by_name[f"augmentation: {registration.name}"] = {
            "data": {**SMALL["data"], "augment": [settings_of(registration)]}
        }
    for registration in policy:
        sync = {"sync": "gradients"} if registration.name == "sync" else {}
        more = {"model": "tests.models:Normalised", "policy": settings_of(registration), "cohort": 6, **sync}
        tables_by_name[f"policy: {registration.name}"] = {**clock, **more}
    rules_and_attacks = {
        "fedbuff, median, ipm": ({"name": "fedbuff", "k": 4}, "median", {"name": "ipm", "knows": "buffer"}),
        "k_async, centered_clipping, alie": (
            {"name": "k_async", "k": 4},
            {"rule": "centered_clipping", "tau": 0.5},
            {"name": "alie", "z": 1.5, "slowdown": "fastest"},
        ),
        "asgd, norm_clipping, mimic": (
            {"name": "asgd", "n_push": 2},
            {"rule": "norm_clipping", "c": 0.3},
            {"name": "mimic", "start_round": 2},
        ),
        "fedasync, afl_guard, gaussian": (
            "fedasync",
            {"rule": "afl_guard", "lam": 2.0, "root_every": 3, "root_samples": 30},
            {"name": "gaussian", "std": 0.1},
        ),
        "easgd, bucketing + geometric_median, sign_flipping": (
            {"name": "easgd", "synchronous": True, "period": 2},
            {"rule": [{"rule": "bucketing", "s": 2}, "geometric_median"]},
            {"name": "sign_flipping"},
        ),
        "d_psgd, trimmed_mean, dissensus": ({"name": "d_psgd", "topology": "complete"}, "trimmed_mean", "dissensus"),
        "gossip, norm_clipping, ipm": ("gossip", {"rule": "norm_clipping", "c": 0.3}, {"name": "ipm", "eps": 2.0}),
    }
    for name, (chosen, aggregate, attack) in rules_and_attacks.items():
        attack = {**({"name": attack} if isinstance(attack, str) else attack), "workers": [1, 4]}
        more = {"policy": chosen, "aggregate": aggregate, "attack": attack, "cohort": 6}
        tables_by_name[f"asynchronous: {name}"] = {**clock, **more}
    # with lr=0.05, this experiment turns rounding of 1e-16 into 1e-12, so the numbers differ between CPUs
    tables_by_name["policy: ad_psgd"]["local"] = {**SMALL["local"], "lr": 0.01}
    return {name: {**SMALL, **tables} for name, tables in tables_by_name.items()}


def numbers(result):
    """Return the stored numbers of a result: projections of the global row, and the numbers of each round."""
    row = result.global_row.double()
    state = torch.cat([value.double().flatten() for value in result.model.state_dict().values()])
    rounds = [[number for key in KEYS for number in numbers_in(record[key])] for record in result.history]
    return {"row": [*projections(row), *projections(state)], "rounds": rounds}


KEYS = ("test_loss", "test_accuracy", "train_loss", "attack_success", "weights", "bytes_up", "virtual_seconds")


def projections(row):
    """Return three weighted sums over all elements, which change if any element changes."""
    at = torch.arange(len(row), dtype=torch.double)
    return [float(row @ torch.cos(k * at + k)) for k in (1, 2, 3)]


def numbers_in(value):
    if value is None:
        return []
    return [float(number) for number in value] if isinstance(value, list) else [float(value)]


def run(tables):
    return numbers(fedsim.run({**tables, "engine": "serial", "device": "cpu"}))


@pytest.fixture(scope="module")
def frozen():
    return json.loads(FILE.read_text())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in experiments()]
)
@pytest.mark.filterwarnings("ignore::fedsim.errors.FedsimWarning")
def test_the_numbers_of_an_experiment_stay(name, frozen):
    computed, expected = run(experiments()[name]), frozen[name]
    pairs = [(computed["row"], expected["row"]), *zip(computed["rounds"], expected["rounds"], strict=True)]
    for ours, theirs in pairs:
        assert len(ours) == len(theirs)
        for our_number, their_number in zip(ours, theirs, strict=True):
            assert math.isclose(our_number, their_number, rel_tol=TOLERANCE, abs_tol=TOLERANCE) or (
                our_number != our_number and their_number != their_number
            )


def test_every_component_is_held(frozen):
    assert set(frozen) == set(experiments())
    assert set(frozen) > SLOW


def write(held):
    """Write the numbers of all experiments, one line each. Numbers in `held` are kept, missing ones are computed."""
    numbers_by_name = {name: held.get(name) or run(tables) for name, tables in experiments().items()}
    lines = [f"{json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in numbers_by_name.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    write({} if "all" in sys.argv[1:] else json.loads(FILE.read_text()))
