"""IFCA in whole runs: Algorithm 1 of Ghosh et al. 2020 as plain loops in float64, special cases and refusals."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import fedsim
from fedsim.core.randomness import draw_key
from fedsim.core.rows import Layout
from fedsim.runs.setup import begun
from tests import models
from tests.clients.plain_loops import BATCH, COHORT, MODEL, ROUNDS, TABLES, WORKERS, Workers
from tests.matrix import in_turn
from tests.textbook import finished

K = 3
ENGINES = [
    {"engine": "serial"},
    {"engine": "batched", "processes": 1, "batched": {"stack_size": 2}},
    {"engine": "processes", "processes": 2},
    {"engine": "auto"},
]
VARIANTS = {
    "one model": (1, {}, {}),
    "two models, momentum": (2, {"momentum": 0.5, "weight_decay": 0.01}, {}),
    "three models": (3, {}, {}),
    "equal weights": (3, {}, {"aggregate": "mean"}),
    "given weights, one of them 0": (3, {}, {"aggregate": {"weights": [1.0, 2.0, 0.0, 1.0, 0.5]}}),
}


def tables_of(k=K, **changes):
    local = {"algorithm": "ifca", "k": k, "epochs": 2, "batch_size": BATCH, "lr": 0.1, **changes.pop("local", {})}
    return {**TABLES, "engine": "serial", "local": local, **changes}


def initial_row(k):
    """Return the initial parameters of model number k: drawn from the seed, the purpose "model", and k if it is > 0."""
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(draw_key(0, "model", *([k] if k else [])))
        model = models.sized(hidden=tuple(MODEL["hidden"])).double()
    return Layout.of(model).read(model)


def reference(fed, k, weights, momentum=0.0, weight_decay=0.0, lr=0.1):
    """Return the k models, and the selected model of each worker of each cohort."""
    rows, selected = [initial_row(index) for index in range(k)], []
    for round, cohort in enumerate(fed.cohorts(), 1):
        sums, totals, choices = [torch.zeros_like(row) for row in rows], [0.0] * k, []
        for worker in cohort:
            everything = fed.train.gather(fed.shards[worker])
            losses = [fed.loss(row, everything).item() for row in rows]
            choice = losses.index(min(losses))
            x, v = rows[choice].clone(), torch.zeros_like(rows[choice])
            for batch in fed.batches(round, worker):
                v = momentum * v + fed.gradient(x, batch) + weight_decay * x
                x = x - lr * v
            sums[choice] += weights[worker] * x
            totals[choice] += weights[worker]
            choices.append(choice)
        rows = [sums[c] / totals[c] if totals[c] else rows[c] for c in range(k)]
        selected.append(choices)
    return rows, selected


@in_turn(("variant", "engine"), VARIANTS, ENGINES)
def test_whole_runs_equal_algorithm_1(variant, engine):
    """The cohorts are partial and the shards uneven. In each case, some models are selected by nobody in some round."""
    k, local, changes = VARIANTS[variant]
    fed = Workers()
    weights = [len(shard) for shard in fed.shards]
    if changes:
        weights = [1.0] * WORKERS if changes["aggregate"] == "mean" else changes["aggregate"]["weights"]
    rows, selected = reference(fed, k, weights, **local)
    run = finished(tables_of(k, local=local, **changes, **engine))
    assert [record.clusters for record in run.records] == (selected if k > 1 else [[]] * ROUNDS)
    for mine, row in zip(run.models, rows, strict=True):
        torch.testing.assert_close(mine[0], row, rtol=0, atol=1e-10)
    assert k == 1 or any(len(set(choices)) < k for choices in selected)
    assert k < 3 or len({choice for choices in selected for choice in choices}) > 1


def test_one_model_is_federated_averaging_bit_for_bit():
    tested = {"data": {"name": "tests.components:tiny", "local_test_fraction": 0.25}}
    ifca, sgd = finished(tables_of(1, **tested)), finished(tables_of(1, **tested) | {"local": SGD})
    assert torch.equal(ifca.row, sgd.row)
    for ours, theirs in zip(ifca.records, sgd.records, strict=True):
        for key in theirs.keys() - {"seconds"}:
            assert ours[key] == theirs[key]


SGD = {"algorithm": "sgd", "epochs": 2, "batch_size": BATCH, "lr": 0.1}


class EqualAtFirst(nn.Module):
    """A model with the same outputs for all initial parameters, one of which is drawn but unused."""

    def __init__(self):
        super().__init__()
        self.unused, self.linear = nn.Parameter(torch.randn(1)), nn.Linear(784, 10)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, images):
        return self.linear(images.flatten(1))


def test_of_equal_models_workers_select_the_first():
    run = finished(tables_of(model=f"{__name__}:EqualAtFirst", rounds=2))
    assert [record.clusters for record in run.records] == [[0] * COHORT] * 2


def test_a_model_that_nobody_selects_does_not_change():
    run = finished(tables_of(rounds=1))
    unselected = set(range(K)) - set(run.records[0].clusters)
    assert unselected
    for k in range(K):
        assert torch.equal(run.models[k][0], initial_row(k)) == (k in unselected)


def test_the_rule_and_the_weights_are_those_of_each_model():
    run = finished(tables_of(rounds=1, cohort=None, aggregate="median"))
    record = run.records[0]
    assert record.weights is None
    for k in set(record.clusters):
        updates = run.updates[[slot for slot, cluster in enumerate(record.clusters) if cluster == k]]
        mine = run.models[k][0] - initial_row(k)
        torch.testing.assert_close(mine, fedsim.aggregate(updates, "median"), rtol=0, atol=1e-12)
    record = finished(tables_of(rounds=1, cohort=None)).records[0]
    for k in set(record.clusters):
        own = [share for share, c in zip(record.weights, record.clusters, strict=True) if c == k]
        assert sum(own) == pytest.approx(1)


@pytest.mark.parametrize("buffers", ["average", "local", "frozen"])
def test_each_model_has_its_own_buffers(buffers):
    """Buffers are averaged over the workers of each model, unless they are frozen. Only averages are sent."""
    tables = tables_of(2, model="tests.models:Normalised", buffers=buffers, rounds=2)
    run = finished({**tables, "aggregate": "mean"})
    start = finished({**tables, "rounds": 1, "local": {**tables["local"], "lr": 0.0}, "buffers": "frozen"}).models
    for k, (_, own) in enumerate(run.models):
        moved = buffers != "frozen" and any(k in record.clusters for record in run.records)
        assert torch.equal(own, start[k][1]) != moved
    numbers = len(run.row) + (len(run.models[0][1]) if buffers == "average" else 0)
    assert (run.records[0].bytes_down, run.records[0].bytes_up) == (2 * COHORT * 8 * numbers, COHORT * 8 * numbers)


def test_each_worker_is_tested_with_the_model_that_it_selects(tmp_path):
    """Personal models are those that workers selected last, in runs and in their folders."""
    data = {"name": "tests.components:tiny", "local_test_fraction": 0.25}
    tables = tables_of(data=data, cohort=None, local={"lr": 0.0}, checkpoint={"every": 2})
    result = fedsim.run(tables, tmp_path / "run")
    train, _ = fedsim.load_dataset("tests.components:tiny")
    tests = finished_shards(tables)
    data, correct = train.to(torch.device("cpu"), torch.float64), []
    for loaded in (result, fedsim.load_run(tmp_path / "run", allow_imports=True)):
        correct = []
        for worker, positions in enumerate(tests):
            model, cluster = loaded.personal_model(worker), loaded.history[-1].clusters[worker]
            assert torch.equal(Layout.of(model).read(model).double(), initial_row(cluster))
            inputs, targets = data.gather(positions)
            correct.append((model.double()(inputs).argmax(1) == targets).double().mean().item())
        assert loaded.worker_accuracy == pytest.approx(sum(correct) / WORKERS)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["clusters"] for line in lines] == [record.clusters for record in result.history]
    assert result.global_row.double().equal(initial_row(0))


def finished_shards(tables):
    """Return the positions of each worker's local test samples."""
    with fedsim.Session() as session, begun(fedsim.Experiment(**tables), session) as (_, engine):
        return [engine.shared.data.worker_tests.of(worker) for worker in range(WORKERS)]


def test_a_worker_that_has_not_taken_part_has_no_personal_model(tmp_path):
    result = fedsim.run(tables_of(rounds=1, checkpoint={"every": 1}), tmp_path / "run")
    absent = min(set(range(WORKERS)) - set(result.history[0].cohort))
    with pytest.raises(fedsim.ExperimentError, match=f"^worker = {absent}: has selected no global model"):
        result.personal_model(absent)


def test_a_resumed_run_continues_with_all_models(tmp_path):
    whole = fedsim.run(tables_of(checkpoint={"every": 1}), tmp_path / "whole")
    fedsim.run(tables_of(checkpoint={"every": 1}, rounds=2), tmp_path / "part")
    rest = fedsim.run(tables_of(checkpoint={"every": 1}), tmp_path / "part", resume=True)
    assert [record.clusters for record in rest.history] == [record.clusters for record in whole.history]
    for worker in set(whole.history[-1].cohort):
        pair = [Layout.of(model).read(model) for model in (rest.personal_model(worker), whole.personal_model(worker))]
        assert torch.equal(*pair)


@pytest.mark.parametrize(
    "engine", [{"engine": "serial"}, {"engine": "processes", "processes": 2}], ids=["serial", "two"]
)
@pytest.mark.parametrize("rule", ["weighted_mean", "geometric_median"])
def test_a_model_whose_updates_are_all_excluded_does_not_change(rule, engine):
    """Here the attacker is the only worker of its model. If all updates are excluded, the run ends."""
    tables = tables_of(cohort=None, rounds=1, **engine, aggregate={"rule": rule, "nonfinite": "exclude"})
    clusters = finished({**tables, "engine": "serial"}).records[0].clusters
    alone = next(worker for worker, cluster in enumerate(clusters) if clusters.count(cluster) == 1)
    run = finished({**tables, "attack": {"name": "nan", "workers": [alone]}})
    assert run.records[0].excluded == [alone]
    assert torch.equal(run.models[clusters[alone]][0], initial_row(clusters[alone]))
    assert all(row.isfinite().all() for row, _ in run.models)
    local = {**tables["local"], "lr": 3e38, "epochs": 10}
    with pytest.raises(
        fedsim.ExperimentError, match=r"^round 1: all 5 updates contain NaN or infinity; reduce local.lr$"
    ):
        finished({**tables, "local": local})


def equal_models():
    torch.manual_seed(3)
    return models.sized(hidden=(6,))


def test_one_model_allows_what_several_refuse():
    for changes in ({"server": "adam"}, {"records": {"updates": [1]}}):
        fedsim.run(tables_of(1, **changes, rounds=1))


def test_validation_results_of_the_first_model_choose_no_value():
    data = {"name": "tests.components:tiny", "validation_fraction": 0.2}
    with pytest.raises(
        fedsim.ExperimentError, match="workers use different global models; remove tune, .*metric=worker_accuracy"
    ):
        fedsim.compare(tables_of(data=data), {"local.lr": [0.1, 0.2]}, tune="local.lr")
