"""Tests of each worker's model on the worker's own test samples."""

from __future__ import annotations

import csv
import itertools
import pickle
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedsim
from fedsim.clients import SGD, PersonalModel
from fedsim.core.philox import Stream, shuffles
from fedsim.core.randomness import draw_key
from fedsim.data import ListedShards, hold_out
from fedsim.data.partitions import partition_shards
from fedsim.records.reader import Run
from fedsim.records.worker_results import describe
from fedsim.runs.personal_models import PersonalModels
from fedsim.runs.setup import begun


@dataclass(frozen=True)
class KeepsItsRow(SGD, PersonalModel):
    """SGD in which each worker keeps its last trained row as its personal model."""

    def worker_state(self, row):
        return {"last": row.clone()}

    def finish(self, rows, state, worker):
        worker.kept["last"].copy_(rows)
        return {}

    def personal_rows(self, rows, worker_state):
        return worker_state["last"].clone()


@pytest.fixture
def tables(tiny_experiment):
    local = {"batch_size": 16, "lr": 0.05}
    data = {"name": "tests.components:tiny", "local_test_fraction": 0.25}
    tables = {**tiny_experiment, "local": local, "data": data, "partition": "dirichlet", "precision": "float64"}
    return {**tables, "records": {"figures": []}}


def test_the_test_samples_of_a_worker_are_not_trained_on():
    shards = ListedShards.of_arrays([np.arange(10), np.arange(10, 13), np.array([13])])
    train, test = hold_out(shards, 0.3, seed=1)
    assert [train.size(worker) for worker in range(3)] == [7, 2, 1]
    assert [test.size(worker) for worker in range(3)] == [3, 1, 0]
    for worker in range(3):
        both = torch.cat([train.of(worker), test.of(worker)])
        assert torch.equal(both.sort().values, shards.of(worker))
    assert not torch.equal(test.of(0), hold_out(shards, 0.3, seed=2)[1].of(0))


def test_the_figures_of_a_distribution():
    values = np.random.default_rng(0).random(37)
    samples = np.random.default_rng(1).integers(1, 9, 37)
    figures = describe(values.tolist(), samples.tolist())
    differences = [abs(a - b) for a, b in itertools.product(values, values)]
    assert figures["gini"] == pytest.approx(np.mean(differences) / (2 * values.mean()))
    assert figures["mean"] == pytest.approx(values.mean())
    assert figures["weighted_mean"] == pytest.approx((samples * values).sum() / samples.sum())
    assert figures["std"] == pytest.approx(values.std())
    assert figures["worst10"] == pytest.approx(np.sort(values)[:4].mean())
    assert describe([0.0, 0.0], [1, 2])["gini"] == 0
    assert describe([0.5], [3])["worst10"] == 0.5


def test_they_equal_those_of_plain_pytorch(tables, tmp_path):
    tables = {**tables, "rounds": 1, "worker_evaluation": {"fine_tune": 2}, "workers": 4}
    result = fedsim.run(tables, out=tmp_path / "run")
    train, _ = fedsim.load_dataset("tests.components:tiny")
    shards = partition_shards(train.targets, "dirichlet", 4, seed=0)
    trains, tests = hold_out(shards, 0.25, seed=0)
    read = Run.read(tmp_path / "run").workers
    assert read.round == 1
    assert read.workers == list(range(4))
    data = train.to(torch.device("cpu"), torch.float64)
    for worker in range(4):
        inputs, targets = data.gather(tests.of(worker))
        assert read.samples[worker] == len(targets)
        model = result.model.double()
        for kind, trained in (("global", model), ("fine_tuned", fine_tuned(model, data, trains.of(worker), worker))):
            with torch.no_grad():
                outputs = trained(inputs)
            assert read.loss[kind][worker] == pytest.approx(nn.functional.cross_entropy(outputs, targets).item())
            assert read.accuracy[kind][worker] == (outputs.argmax(1) == targets).double().mean().item()
    accuracies = read.accuracy["fine_tuned"]
    assert result.history[-1].metrics["fine_tuned_worker_accuracy_mean"] == pytest.approx(np.mean(accuracies))


def fine_tuned(model, data, positions, worker):
    """Return a copy of a model after two epochs of SGD, in the batch orders of the worker's round 1."""
    copy = deepcopy(model).train()
    optimizer, n = torch.optim.SGD(copy.parameters(), lr=0.05), len(positions)
    for epoch in range(2):
        key = torch.tensor([draw_key(0, "batches", 1, worker)])
        lengths = n + n % 2
        places, _ = shuffles(Stream(key, torch.tensor([epoch])), torch.tensor([n]), torch.tensor([0]), lengths // 2)
        for batch in positions[places[:n]].split(16):
            inputs, targets = data.gather(batch)
            optimizer.zero_grad()
            nn.functional.cross_entropy(copy(inputs), targets).backward()
            optimizer.step()
    return copy


USED = {
    "the global model": ({"algorithm": "sgd"}, {}),
    "a complete personal model": ({"algorithm": "ditto", "lam": 1.0}, {"engine": "processes", "processes": 2}),
    "personal parameters": ({"algorithm": "fedper", "personal": ["*.bias"]}, {"mode": "clock"}),
    "a model that starts late": ({"algorithm": "pfedme", "eta": 0.05}, {"engine": "batched", "processes": 1}),
}


@pytest.mark.parametrize("case", USED)
def test_the_accuracy_of_workers_is_that_of_the_model_that_each_of_them_would_use(case, tables, tmp_path):
    local, changes = USED[case]
    tables = {**tables, "rounds": 2, "workers": 5, "cohort": 2, "checkpoint": {"every": 2}, **changes}
    live = fedsim.run(tables, tmp_path / "run", local={"batch_size": 16, "lr": 0.2, **local})
    assert len({worker for record in live.history for worker in record.cohort}) < 5, "some workers take no part"
    train, _ = fedsim.load_dataset("tests.components:tiny")
    shards = hold_out(partition_shards(train.targets, "dirichlet", 5, seed=0), 0.25, seed=0)[1]
    data = train.to(torch.device("cpu"), torch.float64)
    for result in (live, fedsim.load_run(tmp_path / "run", allow_imports=True)):
        losses, accuracies, samples = [], [], []
        for worker in range(5):
            model = result.model if case == "the global model" else result.personal_model(worker)
            inputs, targets = data.gather(shards.of(worker))
            outputs = model.double()(inputs)
            losses.append(nn.functional.cross_entropy(outputs, targets).item())
            accuracies.append((outputs.argmax(1) == targets).double().mean().item())
            samples.append(len(targets))
        record = result.history[-1]
        assert len(set(samples)) > 1
        assert (result.worker_accuracy, record.worker_accuracy) == pytest.approx([np.mean(accuracies)] * 2)
        assert record.worker_loss == pytest.approx(np.mean(losses))
        assert record.metrics["worker_accuracy_weighted_mean"] == pytest.approx(np.average(accuracies, weights=samples))
        assert record.metrics["worker_accuracy_std"] == pytest.approx(np.std(accuracies))
        assert "global_worker_accuracy_mean" in record.metrics
        assert result.history[0].worker_accuracy is None


def test_personal_models_that_do_not_exist_are_refused_with_a_remedy(tables, tmp_path):
    tables |= {"local": {"algorithm": "ditto", "batch_size": 16}}
    ditto = fedsim.run(tables, tmp_path / "run", checkpoint={"every": 2})
    without = fedsim.run(tables, tmp_path / "without", checkpoint={"every": 0})
    for worker in (3, -1, True, 1.5):
        with pytest.raises(
            fedsim.ExperimentError, match=r"^worker = .*: must be an ID from 0 to 2, or a name in worker_names$"
        ):
            ditto.personal_model(worker)
    with pytest.raises(fedsim.ExperimentError, match=r'^local.algorithm = "sgd": .* use result.model$'):
        fedsim.run(tables, local={"algorithm": "sgd"}).personal_model(0)
    with pytest.raises(fedsim.RecordError, match=r"no checkpoint of round 2; .* checkpoint.every=2$"):
        without.personal_model(0)
    with pytest.raises(fedsim.RecordError, match=r"this run has no folder; .* checkpoint.every=2$"):
        replace(without, folder=None).personal_model(0)
    copied = pickle.loads(pickle.dumps(ditto)).personal_model(np.int64(1)).state_dict()
    assert all(map(torch.equal, copied.values(), ditto.personal_model(1).state_dict().values()))


def test_results_hold_no_worker_states(tables):
    tables |= {"local": {"algorithm": "ditto", "batch_size": 16}, "engine": "processes", "processes": 2}
    tables |= {"worker_state_memory": 1, "rounds": 1}
    results, files = [fedsim.run(tables)], Path("/proc/self/fd")
    before = len(list(files.iterdir())) if files.is_dir() else 0
    results += [fedsim.run(tables) for _ in range(2)]
    assert (len(list(files.iterdir())) if files.is_dir() else 0) == before
    assert not any(isinstance(value, PersonalModels) for value in vars(results[0]).values())


def test_personal_models_are_tested_with_the_buffers_of_their_workers(tables, tmp_path):
    local = {**tables["local"], "algorithm": f"{__name__}:KeepsItsRow", "epochs": 2}
    tables |= {"rounds": 1, "workers": 3, "partition": "iid", "model": "tests.models:Normalised", "local": local}
    tables |= {"buffers": "local", "worker_evaluation": {}}
    result = fedsim.run(tables, tmp_path / "run", checkpoint={"every": 1})
    read = Run.read(tmp_path / "run").workers
    with fedsim.Session() as session, begun(fedsim.Experiment(**tables), session) as (task, engine):
        data, model = engine.shared.data, task.new_module()
    for worker in range(3):
        trained = fine_tuned(model, data.train, data.shards.of(worker), worker).eval()
        inputs, targets = data.train.gather(data.worker_tests.of(worker))
        with torch.no_grad():
            expected = nn.functional.cross_entropy(trained(inputs), targets).item()
        assert read.loss["personal"][worker] == pytest.approx(expected, rel=1e-9)
        own = result.personal_model(worker).state_dict()
        assert all(torch.allclose(own[name].double(), value.double()) for name, value in trained.state_dict().items())


MODELS = {
    "2nn": {},
    "buffers kept by workers": {"model": "tests.models:Normalised", "buffers": "local", "local": {"drop_last": True}},
}


@pytest.mark.parametrize("case", MODELS)
def test_training_is_the_same_without_them(tables, case):
    tables = {**tables, "rounds": 3, "cohort": 2, **MODELS[case], "worker_evaluation": {"fine_tune": 1, "every": 100}}
    seldom = fedsim.run(tables)
    often = fedsim.run(tables, worker_evaluation={"every": 1})
    assert torch.equal(seldom.global_row, often.global_row)
    assert [record.train_loss for record in seldom.history] == [record.train_loss for record in often.history]
    assert [bool(record.metrics) for record in often.history] == [True] * 3
    assert [bool(record.metrics) for record in seldom.history] == [False, False, True]
    assert seldom.history[-1].metrics == often.history[-1].metrics


@pytest.mark.parametrize(
    "changes",
    [{"engine": "processes", "processes": 2}, {"engine": "batched", "processes": 1}],
    ids=["processes", "batched"],
)
def test_engines_agree(tables, changes):
    tables = {**tables, "cohort": 2, "workers": 5, "worker_evaluation": {"fine_tune": 1}}
    tables["local"] = {**tables["local"], "algorithm": f"{__name__}:KeepsItsRow"}
    metrics = [fedsim.run(tables, **more).history[-1].metrics for more in ({}, changes)]
    assert metrics[0] == pytest.approx(metrics[1], abs=1e-9)
    assert {name.partition("worker_")[0] for name in metrics[0]} == {"", "global_", "fine_tuned_"}


def test_a_resumed_run_repeats_them(tables, tmp_path):
    tables = {
        **tables,
        "rounds": 4,
        "cohort": 2,
        "worker_evaluation": {"every": 2},
        "checkpoint": {"every": 1, "keep": 4},
        "records": {"curve": False},
    }
    tables["local"] = {**tables["local"], "algorithm": f"{__name__}:KeepsItsRow"}
    whole = fedsim.run(tables, out=tmp_path / "whole")

    def stop(record):
        if record.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedsim.run(tables, out=tmp_path / "part", on_round=stop)
    resumed = fedsim.run(tables, out=tmp_path / "part", resume=True)
    assert [record.metrics for record in resumed.history] == [record.metrics for record in whole.history]
    for round in (2, 4):
        files = [(tmp_path / run / f"workers-{round:05d}.csv").read_text() for run in ("whole", "part")]
        assert files[0] == files[1]
    assert (tmp_path / "part" / "workers.png").is_file()


def test_byzantine_workers_and_workers_without_test_samples_are_not_tested(tables, tmp_path):
    tables = {**tables, "attack": {"name": "sign_flipping", "workers": [1]}, "workers": 5}
    fedsim.run(tables, out=tmp_path / "run", worker_evaluation={"workers": 5})
    with (tmp_path / "run" / "workers-00002.csv").open() as file:
        assert [row["worker"] for row in csv.DictReader(file)] == ["0", "2", "3", "4"]


def test_of_a_large_population_a_sample_is_tested(tables, tmp_path):
    tables = {**tables, "workers": 10**5, "cohort": 3, "partition": {"name": "virtual", "samples": 20}}
    fedsim.run(tables, out=tmp_path / "run", worker_evaluation={"workers": 7})
    assert len(set(Run.read(tmp_path / "run").workers.workers)) == 7


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"records": {"updates": [2]}, "worker_evaluation": {"every": 2}}, "records.updates"),
        ({"mode": "clock", "policy": "fedasync"}, "data.local_test_fraction"),
        ({"data": {"local_test_fraction": 1.0}}, "data.local_test_fraction"),
        ({"attack": {"name": "label_flipping", "fraction": 0.4, "resample": True}}, "data.local_test_fraction"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tables, changes, key):
    with pytest.raises(fedsim.ExperimentError) as error:
        fedsim.run(tables, **changes)
    assert [line.startswith(key) for line in error.value.lines] == [True]


def test_an_evaluation_of_one_step_does_not_end_a_run_of_longer_rounds(tables):
    tables["local"] = {"algorithm": "per_fedavg", "steps": 4, "batch_size": 200}
    fedsim.run(tables, worker_evaluation={"fine_tune": 1})


def test_a_number_of_workers_is_required_in_the_first_round_that_tests_them(tables):
    stop = {"metric": "metrics.typo", "patience": 9, "mode": "max"}
    with pytest.raises(fedsim.ExperimentError, match="stop.metric"):
        fedsim.run(tables, rounds=4, worker_evaluation={"every": 2}, stop=stop)


def test_patience_counts_the_rounds_in_which_workers_are_tested(tables):
    for metric in ("metrics.global_worker_accuracy_mean", "worker_accuracy"):
        stop = {"metric": metric, "patience": 1, "mode": "max", "min_delta": 2.0}
        result = fedsim.run(tables, rounds=9, worker_evaluation={"every": 2}, stop=stop)
        assert len(result.history) == 4  # the first test is the best one; the second does not improve on it


def test_the_terminal_shows_them(tables, capsys):
    fedsim.run(tables, rounds=2, worker_evaluation={"fine_tune": 1}, progress=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("3 workers: ")]
    assert len(lines) == 1
    assert "after local training" in lines[0]


def test_a_damaged_table_gives_a_one_line_error(tables, tmp_path):
    fedsim.run(tables, out=tmp_path / "run")
    for line in ("1,x", "1\r2,3", "1" * 200_000):
        (tmp_path / "run" / "workers-00002.csv").write_text(f"worker,samples\n{line}\n", newline="")
        with pytest.raises(fedsim.errors.RecordError, match="workers-00002.csv"):
            Run.read(tmp_path / "run")
