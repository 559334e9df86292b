from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fedsim
from fedsim.core.rows import Layout
from fedsim.errors import SettingWarning
from fedsim.models import Net
from tests import components
from tests.textbook import small_two_nn, start_of, train_on_joint_batches

FIELDS = """
round test_loss test_accuracy train_loss validation_loss validation_accuracy metrics seconds virtual_seconds cohort
dropped samples weights clusters excluded attack_success bytes_up bytes_down top_bytes asynchronous race diverged
worker_accuracy worker_loss timeline train_losses
"""


@pytest.mark.parametrize(
    "more", [{}, {"engine": "batched"}, {"sync": "gradients"}, {"groups": [1, 0, 1]}, {"cohort": 2}]
)
def test_each_workers_training_loss_is_recorded(more, tiny_experiment):
    tables = {**tiny_experiment, "partition": "tests.components:uneven", "precision": "float64"}
    for record in fedsim.run({**tables, **more}).history:
        assert record.train_loss == pytest.approx(np.average(record.train_losses, weights=record.samples))
    first = fedsim.run({**tables, **more}).history[0]
    for worker, loss in zip(first.cohort, first.train_losses, strict=True):
        settings = {**tables, **more, "groups": None, "cohort": 1, "rounds": 1}
        alone = fedsim.run({**settings, "sampling": {"name": "fixed", "workers": [worker]}}).history[0]
        if more != {"sync": "gradients"}:  # there, workers compute gradients of one model that all have trained
            assert alone.train_losses == pytest.approx([loss])


def test_a_training_loss_that_is_not_finite_is_none(tiny_experiment):
    tables = {**tiny_experiment, "aggregate": {"nonfinite": "exclude"}, "partition": [[0, 1], [70, 71], [80, 81]]}
    tables["data"] = "tests.components:with_a_hole"
    (record, _) = fedsim.run(tables).history
    assert [loss is None for loss in record.train_losses] == [True, False, False]


def test_gradient_averaging_is_single_process_sgd_on_the_joint_batch(tiny_experiment):
    """With momentum and weight decay. Shards are uneven, so some workers finish an epoch early."""
    local = {"batch_size": 16, "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
    tables = {**tiny_experiment, "precision": "float64", "partition": "tests.components:uneven", "local": local}
    result = fedsim.run({**tables, "sync": "gradients"})
    train = components.tiny(None)[0].to(torch.device("cpu"), torch.float64)
    shards = fedsim.dataset_split(train, "tests.components:uneven", 3, seed=0)
    assert len({len(shard) for shard in shards}) == 3
    model = start_of(small_two_nn)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    train_on_joint_batches(model, optimizer, train, shards, (1, 2))
    assert torch.allclose(result.global_row, Layout.of(model).read(model), rtol=0, atol=1e-12)


@pytest.mark.parametrize("sync", ["parameters", "gradients"])
@pytest.mark.parametrize("model", ["net", "tests.models:Stateful"])
def test_workers_do_not_influence_each_other(model, sync, tiny_experiment):
    """Only the last worker has a weight; the shards of the others change."""
    tables = {**tiny_experiment, "aggregate": {"weights": [0.0, 0.0, 1.0]}, "model": model, "sync": sync}
    rows = [
        fedsim.run({**tables, "partition": {"name": "tests.components:same_last", "first": first}}).global_row
        for first in (10, 140)
    ]
    assert torch.equal(*rows)


def test_the_history_has_one_complete_record_per_round(tiny_experiment):
    result = fedsim.run({**tiny_experiment, "workers": 5, "cohort": 2, "rounds": 3})
    assert [record["round"] for record in result.history] == [1, 2, 3]
    for record in result.history:
        assert set(record) == set(FIELDS.split())
        assert set(record["seconds"]) == {"broadcast", "train", "aggregate", "test"}
        assert len(record["cohort"]) == 2
        assert record["bytes_up"] == record["bytes_down"] == 2 * 4 * 16_330
        assert json.loads(json.dumps(record)) == record
    assert result.test_accuracy == result.history[-1]["test_accuracy"]


def test_losses_and_accuracy_equal_those_of_the_returned_model(tiny_experiment):
    result = fedsim.run(tiny_experiment)
    _, test = components.tiny(None)
    metrics = fedsim.test(result.model, fedsim.CustomSubset(test, range(len(test))).batches(1000))
    assert metrics.loss == pytest.approx(result.history[-1]["test_loss"], rel=1e-5)
    assert metrics.accuracy == pytest.approx(result.test_accuracy)


def test_the_model_is_the_global_row_on_the_cpu_in_evaluation_mode(tiny_experiment):
    result = fedsim.run({**tiny_experiment, "model": "net"})
    assert isinstance(result.model, Net)
    assert not result.model.training
    assert torch.equal(Layout.of(result.model).read(result.model), result.global_row)
    assert all(p.grad is None for p in result.model.parameters())


def test_train_loss_is_the_mean_per_sample_seen(tiny_experiment):
    """With learning rate 0 it equals the loss of the initial model on all training samples."""
    local = {"lr": 0.0, "batch_size": 16}
    for sync in ("parameters", "gradients"):
        tables = {**tiny_experiment, "local": local, "rounds": 1, "sync": sync, "partition": "tests.components:uneven"}
        loss = fedsim.run(tables).history[0]["train_loss"]
        train, _ = components.tiny(None)
        with torch.no_grad():
            x, y = train.gather(torch.arange(len(train)))
            assert loss == pytest.approx(
                F.cross_entropy(start_of(small_two_nn, dtype=torch.float32)(x), y).item(), rel=1e-5
            )


@pytest.mark.parametrize("engine", [{}, {"engine": "processes", "processes": 1}], ids=["serial", "processes"])
def test_a_run_leaves_global_state_as_it_was(engine, tiny_experiment):
    torch.manual_seed(5)
    np.random.seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    numpy_before = np.random.get_state()[1].copy()
    fedsim.run({**tiny_experiment, **engine, "model": "net", "threads_per_process": 2, "rounds": 1})
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(numpy_before, np.random.get_state()[1])
    assert torch.get_num_threads() == threads


def test_batchnorm_statistics_follow_the_policy(tiny_experiment):
    tables = {**tiny_experiment, "model": "tests.models:Normalised", "rounds": 1}
    averaged = fedsim.run({**tables, "buffers": "average"}).model.layers[2]
    with pytest.warns(SettingWarning, match=r'^buffers = "frozen": .*layers.2.running_mean.* are never updated'):
        server = fedsim.run({**tables, "buffers": "frozen"}).model.layers[2]
    assert averaged.running_mean.any()
    assert averaged.num_batches_tracked == 5
    assert not server.running_mean.any()
    assert server.num_batches_tracked == 0
    with pytest.raises(fedsim.ExperimentError, match=r'buffers = "error": .*layers.2.running_mean'):
        fedsim.run({**tables, "buffers": "error"})


def test_workers_that_keep_their_buffers_start_from_them(tiny_experiment):
    tables = {**tiny_experiment, "model": "tests.models:Normalised", "workers": 1, "rounds": 3, "buffers": "local"}
    assert fedsim.run(tables).model.layers[2].num_batches_tracked == 3 * 13


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "tests.models:LetsGo"}, "model: replaces the data of linear.weight during training"),
        ({"model": "tests.models:MovesFrozen"}, "model: changes the frozen parameter slow.weight during training"),
        ({"aggregate": "tests.components:refusing"}, "^aggregate.f = 5: needs more than 10 workers, not 3$"),
        (
            {"engine": "processes", "processes": 1, "aggregate": "tests.components:refusing"},
            "^aggregate.f = 5: needs more than 10 workers, not 3$",
        ),
        ({"device": "cuda:99"}, "device"),
    ],
)
def test_a_wrong_component_or_size_gives_a_one_line_error(tiny_experiment, change, message):
    with pytest.raises(fedsim.ExperimentError, match=message):
        fedsim.run({**tiny_experiment, "workers": 3, **change})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("tests.components:negative_labels", "the training set contains the label -1; class labels must be"),
        ("tests.components:no_test", "the test set is empty"),
        ("tests.components:int32_labels", "targets must be an int64"),
    ],
)
def test_wrong_data_give_a_one_line_error(tiny_experiment, data, message):
    with pytest.raises(fedsim.DataError, match=f'data.name = "{data}": .*{message}'):
        fedsim.run({**tiny_experiment, "data": data})


def test_a_model_may_have_extra_state(tiny_experiment, tmp_path):
    result = fedsim.run({**tiny_experiment, "model": "tests.models:WithExtraState"}, tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    assert result.model.get_extra_state() == {"version": 2}


def test_a_diverged_worker_of_weight_zero_has_no_effect():
    updates = torch.tensor([[1.0, 2.0], [float("nan"), float("-inf")], [3.0, 4.0]])
    assert fedsim.aggregate(updates, weights=[1.0, 0.0, 1.0]).tolist() == [2.0, 3.0]


def test_callbacks_get_the_metadata_and_every_round(tiny_experiment):
    starts, rounds = [], []
    result = fedsim.run(tiny_experiment, on_start=starts.append, on_round=rounds.append)
    assert rounds == result.history
    (metadata,) = starts
    assert sum(metadata.shard_sizes) == metadata.train_samples == 203
    assert metadata.parameters == 16_330
    assert metadata.how == {"engine": "serial", "threads": 1, "processes": 1}


def scoring_rule(updates, metrics):
    metrics["macro_f1"] = 1.0
    return updates.mean(0)


def scoring_strategy(n_workers, metrics):
    metrics["macro_f1"] = 1.0
    return list(range(n_workers))


@pytest.mark.parametrize("changes", [{"aggregate": "scoring_rule"}, {"sampling": "scoring_strategy"}], ids=str)
def test_a_component_that_records_a_number_with_the_name_of_a_metric_is_an_error(changes, tiny_experiment):
    paths = {key: f"{__name__}:{name}" for key, name in changes.items()}
    with pytest.raises(fedsim.ExperimentError, match='a component also records a number named "macro_f1"; give the m'):
        fedsim.run({**tiny_experiment, **paths, "metrics": ["macro_f1"]})
    assert fedsim.run({**tiny_experiment, **paths}).history[0].metrics == {"macro_f1": 1.0}


REMEMBERED, ATTACKED = [], []


def rule_that_remembers(updates, state, last):
    result = updates.mean(0)
    REMEMBERED.append((state.get("result"), None if last is None else last.clone(), result))
    return result, {"result": result}


def test_a_rule_gets_its_state_and_its_last_result(tiny_experiment):
    REMEMBERED.clear()
    fedsim.run({**tiny_experiment, "rounds": 3, "aggregate": f"{__name__}:rule_that_remembers"})
    (kept, last, result), *later = REMEMBERED
    assert (kept, last, len(later)) == (None, None, 2)
    for kept, last, next_result in later:
        assert torch.equal(kept, result)
        assert torch.equal(last, result)
        result = next_result


def attack_that_remembers(honest, state):
    ATTACKED.append(dict(state))
    return honest[0], {"sent": honest[0]}


def test_rule_and_attack_forget_when_a_run_changes_to_averaging_parameters(tiny_experiment):
    REMEMBERED.clear()
    ATTACKED.clear()
    attack, rule = {"name": f"{__name__}:attack_that_remembers", "workers": [1]}, f"{__name__}:rule_that_remembers"
    tables = {**tiny_experiment, "local": {"steps": 2}, "sync": "post_local", "switch_after_round": 1}
    fedsim.run({**tables, "attack": attack, "aggregate": rule})
    assert [bool(state) for state in ATTACKED] == [False, True, False]
    assert [kept is not None for kept, _, _ in REMEMBERED] == [False, True, False]


def test_steps_end_when_only_workers_of_weight_zero_have_samples_left(tiny_experiment):
    tables = {**tiny_experiment, "sync": "gradients", "partition": "tests.components:uneven", "rounds": 1}
    sizes = fedsim.run(tables).history[0].samples
    weights = [float(size == min(sizes)) for size in sizes]
    (record,) = fedsim.run({**tables, "aggregate": {"weights": weights}}).history
    assert record.bytes_up == 3 * 4 * 16_330 * -(-min(sizes) // 16)
