"""Whole runs on the pretend GPU agree with the CPU for every engine, component, policy and precision."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

import fedsim
from fedsim.asynchronous.policies import policy
from fedsim.byzantine.base import attack_strategy
from fedsim.cli.rule_replay import load_round
from fedsim.clients import client_algorithm
from fedsim.data.augmentation import augmentation
from fedsim.data.partitions.base import partition_strategy
from fedsim.models import model
from fedsim.server.optimizer import server_optimizer
from tests import components
from tests.device.agreement import (
    CLOSE,
    DATA,
    ENGINES,
    FULL,
    REAL,
    ROUNDING,
    SAMPLES,
    TINY,
    assert_agrees_with_the_cpu,
    assert_same_model,
    assert_same_results,
    every,
    run_on_cpu,
    run_on_gpu,
    settings_of,
    some_gpu,
    to_gpu,
    with_small_data,
)
from tests.engines.test_contract import ALL_CASES, REFUSED, syncs_of
from tests.matrix import in_turn
from tests.waves import in_waves

pytestmark = pytest.mark.gpu


def with_engines(name, values, engines=("serial", "batched")):
    """Pair each value with one engine, alternating. The remaining pairs are marked `slow`."""
    return in_turn((name, "engine"), values, engines)


CONTRACT = {  # cases with a component or partition, or rounds, that no other test in this file has
    "parameters": [
        *("scaffold with full gradients", "feddyn of rows left out", "worker state of rows left out", "dropout"),
        *("transforms of torchvision", "processed updates", "next token"),
        *("gradients first, then parameters", "buffers kept by workers", "state that no row holds"),
        *("shared and unused parameters", "token numbers", "a rule by distances, under attack", "pre-aggregators"),
        *("a rule with a state", "a rule that asks for losses", "an attack tuned to the rule"),
        *("an attack tuned to a rule by distances of clipped rows", "a server that broadcasts something else"),
        "virtual shards of uneven sizes, under attack",
    ],
    "gradients": [
        *("partial cohorts of uneven shards", "dropout", "buffers averaged", "a rule by distances, under attack"),
        *("a rule that asks for losses", "rows left out"),
    ],
}
RUNS = {f"{case}, {sync}": (case, sync) for sync, cases in CONTRACT.items() for case in cases}
if REAL:
    RUNS = {f"{case}, {sync}": (case, sync) for case in ALL_CASES for sync in syncs_of((case,))}


@with_engines("run", RUNS, tuple(ENGINES) if REAL else ("serial", "batched"))
def test_the_contract_of_engines(run, engine):
    case, sync = RUNS[run]
    if REAL:
        tables = {**FULL, "sync": sync, **ALL_CASES[case], "precision": "float64"}
    else:
        local = {"local": {"batch_size": 8, "steps": 3}} if sync == "gradients" else {}
        tables = with_small_data({**TINY, **local, "sync": sync, **ALL_CASES[case], "precision": "float64"})
    if reason := REFUSED.get((ENGINES[engine]["engine"], case)):
        with pytest.raises(fedsim.ExperimentError, match=reason):
            assert_agrees_with_the_cpu(tables, engine)
    else:
        assert_agrees_with_the_cpu(tables, engine)


WAVES = (
    "worker state of rows left out",
    "processed updates",
    "buffers kept by workers",
    "scaffold",
    "ditto with BatchNorm",
)


@with_engines("case", WAVES)
def test_a_cohort_in_waves(case, engine):
    tables = with_small_data({**TINY, **ALL_CASES[case], "precision": "float64"})
    narrow = {"batched": {"stack_size": 2}} if engine == "batched" else {}
    with in_waves():
        assert_same_results(run_on_cpu(tables), run_on_gpu({**tables, **narrow}, **ENGINES[engine]))


def with_algorithm(registration, **more):
    """Return an experiment with a client algorithm, and with a model that the algorithm can train."""
    settings = settings_of(registration, **more)
    local = {"algorithm": settings.pop("name"), "batch_size": 8, "lr": 0.01, **settings}
    tables = {**TINY, "local": local, "partition": "tests.components:uneven"}
    if registration.name == "fedrep":
        local["steps"] = 3
    if registration.name in ("moon", "ifca"):  # need a model with hidden features, and one that starts at random
        tables["model"] = {"name": "2nn", "hidden": 8}
    if registration.name == "fedbn":  # needs a model with normalisation layers
        tables["model"] = "tests.models:layer_normalised"
    return tables


def with_server_optimizer(registration):
    settings = settings_of(registration)
    return {**TINY, "rounds": 3, "server": {"name": settings.pop("name"), **settings}}


@with_engines("registration", client_algorithm)
def test_a_local_algorithm(registration, engine):
    assert_agrees_with_the_cpu(with_algorithm(registration), engine)


# Adaptive algorithms divide by the root of mean squared gradients plus eps. With the default of 1e-8, rounding errors
# of gradients near zero would become steps of the size of lr. With this eps, such steps are less than 1e-6.
EPS = 1e-3
ADAPTIVE = [registration for registration in client_algorithm if "eps" in registration.parameters.model_fields]


@with_engines("registration", [*client_algorithm, *server_optimizer] if REAL else ADAPTIVE)
def test_an_algorithm_or_a_server_optimizer_in_float32(registration, engine):
    """Without a GPU, only algorithms that magnify rounding errors are run."""
    if registration in ADAPTIVE:
        tables = {**with_algorithm(registration, eps=EPS), "model": {"name": "2nn", "hidden": 20}}
    else:
        tables = (with_algorithm if registration in client_algorithm else with_server_optimizer)(registration)
    result = run_on_gpu({**tables, "precision": "float32"}, **ENGINES[engine])
    assert_same_model(run_on_cpu(tables), result, CLOSE["float32"] if REAL else 1e-6)


@with_engines("registration", attack_strategy)
def test_an_attack(registration, engine):
    attack = settings_of(registration, workers=[1, 4])
    graph = {"mode": "clock", "policy": "d_psgd"} if "weights" in registration.takes else {}
    tables = {**TINY, **graph, "workers": 6, "attack": attack, "aggregate": {"rule": "median", "nonfinite": "exclude"}}
    assert_agrees_with_the_cpu(tables, engine)


def test_a_rule_that_finds_updates_that_are_not_finite_counts_the_other_workers():
    """In feddyn, the correction of the global model depends on the number of updates that have been aggregated."""
    tables = {
        **TINY,
        "workers": 6,
        "local": {"algorithm": "feddyn", "batch_size": 8, "lr": 0.05},
        "attack": {"name": "nan", "workers": [1, 4]},
        "aggregate": {"rule": "geometric_median", "nonfinite": "exclude"},
    }
    assert_agrees_with_the_cpu(tables, "serial")


@with_engines("registration", [each for each in partition_strategy if hasattr(each.target, "transforms")])
def test_a_partition_that_changes_samples(registration, engine):
    settings = settings_of(registration)
    assert_agrees_with_the_cpu({**TINY, "partition": {"name": settings.pop("name"), **settings}}, engine)


@with_engines("registration", augmentation)
def test_an_augmentation(registration, engine):
    assert_agrees_with_the_cpu({**TINY, "data": {**DATA, "augment": [settings_of(registration)]}}, engine)


OTHER_DATA = "linear", "char_lstm", "gpt"  # models that do not classify images
LARGE = "resnet32", "resnet56"


@with_engines("registration", [each for each in model if each.name not in (*OTHER_DATA, *LARGE)])
def test_a_model(registration, engine):
    tables = {
        **TINY,
        "rounds": 1,
        "workers": 2,
        "data": {**DATA, "test": 20},
        "model": settings_of(registration),
        "local": {"steps": 2, "batch_size": 4},
    }
    assert_agrees_with_the_cpu(tables, engine)


@every(policy)
def test_a_policy_on_the_clock(registration):
    tables = {
        **TINY,
        "workers": 4,
        "model": "tests.models:Normalised",
        "mode": "clock",
        "policy": settings_of(registration),
    }
    tables["clock"] = {"slowdown": {"name": "lognormal"}, "noise": "shifted_exponential"}
    if registration.name == "sync":
        tables["sync"] = "gradients"
    assert_agrees_with_the_cpu(tables, "serial")


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
@with_engines("sync", ["parameters", "gradients"])
def test_a_precision(precision, sync, engine):
    tables = {**TINY, "model": {"name": "2nn", "hidden": 20}, "sync": sync}
    result = run_on_gpu({**tables, "precision": precision}, **ENGINES[engine])
    assert_same_model(run_on_cpu({**tables, "precision": "float32"}), result, CLOSE[precision])


RESUMED = {
    "rounds": {"aggregate": "centered_clipping", "server": "adam"},
    "clock": {"mode": "clock", "policy": "fedbuff"},
}


@with_engines("case", RESUMED)
def test_a_resumed_run(case, engine, tmp_path):
    tables = {**TINY, "model": "tests.models:Normalised", **RESUMED[case]}
    expected = run_on_cpu({**tables, "rounds": 3})
    with some_gpu():
        tables |= {**ENGINES[engine], "checkpoint": {"every": 1}, "device": "cuda"}
        fedsim.run({**tables, "rounds": 1}, tmp_path / "run")
        result = fedsim.run({**tables, "rounds": 3}, tmp_path / "run", resume=True)
    assert_same_results(expected, result)


def test_updates_on_record(tmp_path):
    tables = {**TINY, "rounds": 1, "aggregate": {"rule": "fltrust", "root_samples": 20}}
    tables["records"] = {"updates": [1], "curve": False}
    fedsim.run({**tables, "device": "cpu", "engine": "serial"}, tmp_path / "expected")
    with some_gpu():
        fedsim.run({**tables, "device": "cuda", "engine": "serial"}, tmp_path / "found")
    expected, actual = (load_round(tmp_path / name, allow_imports=True).tensors for name in ("expected", "found"))
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.allclose(expected[name], actual[name], rtol=0, atol=ROUNDING), name


def test_training_and_testing_by_hand():
    def train(device):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)).double().to(device)
        data, _ = components.tiny(None, train=SAMPLES)
        data = data.to(torch.device(device), torch.double)
        row, grad_row = (fedsim.new_rows(1, 7850, torch.double, device)[0] for _ in range(2))
        fedsim.Layout.of(module).write(fedsim.Layout.of(module).read(module), module)
        row.copy_(fedsim.Layout.of(module).read(module))
        fedsim.bind(module, row, grad_row)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        shards = fedsim.dataset_split(data, "contiguous", 2)
        fedsim.train_epoch(module, shards[0].batches(8), optimizer)
        return row.cpu(), fedsim.test(module, shards[1].batches(8)).loss

    expected, loss = train("cpu")
    with some_gpu():
        row_from_gpu, loss_on_gpu = train("cuda")
    assert torch.allclose(row_from_gpu, expected, rtol=0, atol=ROUNDING)
    assert loss_on_gpu == pytest.approx(loss)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_labels_on_the_gpu_are_split_as_labels_on_the_host(shape):
    labels = torch.arange(12) % 3
    pairs = list(zip(labels, labels, strict=True))
    expected = [shard.indices for shard in fedsim.dataset_split(pairs, "classes_per_worker", 3, k=1)]
    with some_gpu():
        on_gpu = [(label, label.view(shape)) for label in to_gpu(labels)]
        for data in (on_gpu, TensorDataset(to_gpu(labels), to_gpu(labels))):
            shards = fedsim.dataset_split(data, "classes_per_worker", 3, k=1)
            assert all(torch.equal(shard.indices, one) for shard, one in zip(shards, expected, strict=True))
        for strategy, parameters in {"iid": {}, "classes_per_worker": {"k": 1}, "virtual": {"samples": 4}}.items():
            shards = fedsim.partition(to_gpu(labels), strategy, 3, **parameters)
            of_host = fedsim.partition(labels, strategy, 3, **parameters)
            assert [shard.tolist() for shard in shards] == [shard.tolist() for shard in of_host]
            counts = fedsim.label_counts(to_gpu(labels), shards)
            assert counts.tolist() == fedsim.label_counts(labels, shards).tolist()
