"""Updates, buffers and global rows that contain NaN or infinity."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

import fedsim
from fedsim.core.randomness import batch_order
from tests import components, models
from tests.runs.test_resuming import signed
from tests.textbook import start_of

TIMED = {"mode": "clock", "clock": {"slowdown": {"name": "list", "values": [1.0, 1.5, 2.2]}}}
MODES = {
    "rounds": {},
    "gradients": {"sync": "gradients"},
    "asgd": {**TIMED, "policy": "asgd"},
    "fedbuff": {**TIMED, "policy": {"name": "fedbuff"}},
    "fedasync": {**TIMED, "policy": "fedasync"},
    "ssp": {**TIMED, "policy": "ssp"},
    "locked race": {"mode": "race", "policy": "asgd", "race": {"runs": 1}, "processes": 2},
    "free race": {"mode": "race", "policy": "hogwild", "race": {"runs": 1}, "processes": 2},
}


@pytest.fixture
def tables(tiny_experiment):
    """Return an experiment in which some samples of worker 0 are NaN."""
    changes = {"data": "tests.components:with_a_hole", "partition": "tests.components:in_blocks", "model": "logistic"}
    return {**tiny_experiment, **changes, "rounds": 3, "local": {"batch_size": 16, "lr": 0.05}}


def in_mode(tables, mode):
    tables = {**tables, **MODES[mode]}
    if "race" in mode:
        tables["engine"] = "processes"
    return tables


@pytest.mark.parametrize("mode", MODES)
def test_an_update_with_nan_stops_the_run_with_worker_and_round(mode, tables, tmp_path, session):
    with pytest.raises(fedsim.ExperimentError, match=r"round 1: .*worker(s|) 0.* NaN|round 1: .* NaN .*workers? 0"):
        fedsim.run(in_mode(tables, mode), tmp_path / "run", session=session if "race" in mode else None)


@pytest.mark.parametrize("mode", MODES)
def test_an_update_with_nan_is_excluded_and_recorded(mode, tables, session):
    tables = {**in_mode(tables, mode), "aggregate": {"nonfinite": "exclude"}}
    result = fedsim.run(tables, session=session if "race" in mode else None)
    assert result.global_row.isfinite().all()
    excluded = [worker for record in result.history for worker in record["excluded"]]
    assert excluded
    assert set(excluded) == {0}
    assert result.test_accuracy > 0.2
    assert all(math.isfinite(record["test_loss"]) for record in result.history)


def test_an_excluded_worker_of_a_small_cohort_is_named_by_its_id(tables):
    tables |= {"data": "tests.components:with_a_hole_at_the_end", "cohort": 2, "aggregate": {"nonfinite": "exclude"}}
    history = fedsim.run(tables, rounds=6).history
    assert [record.excluded for record in history] == [[2] if 2 in record.cohort else [] for record in history]
    for record in history:
        coefficients = dict(zip(record.cohort, record.weights, strict=True))
        assert sum(coefficients.values()) == pytest.approx(1)
        assert [worker for worker, coefficient in coefficients.items() if not coefficient] == record.excluded
    assert {len(record.excluded) for record in history} == {0, 1}


@pytest.mark.parametrize("rule", ["mean", "medoid"])  # aggregated by columns, or as a whole
def test_an_excluded_worker_does_not_count_in_the_correction_of_the_update(rule, tables, monkeypatch):
    counts = set()
    monkeypatch.setattr(fedsim.clients.FedDyn, "correct", lambda *arguments: counts.add(arguments[-2:]))
    tables |= {"local": {"algorithm": "feddyn", **tables["local"]}, "aggregate": {"rule": rule, "nonfinite": "exclude"}}
    fedsim.run(tables)
    assert counts == {(2, 3)}, "workers aggregated, and all workers"


@pytest.mark.parametrize(
    ("algorithm", "engine"), [("scaffold", "serial"), ("scaffold", "processes"), ("mimelite", "batched")]
)
def test_a_worker_whose_message_is_nan_is_excluded_though_an_attack_replaces_its_update(
    algorithm, engine, tables, session
):
    """The run equals one in which worker 2 is honest and sends an update and a message that contain NaN."""
    excluding = {"rule": "mean", "nonfinite": "exclude"}
    tables |= {"data": "tests.components:with_a_hole_at_the_end", "aggregate": excluding, **ENGINES[engine]}
    tables |= {"local": {"algorithm": algorithm, **tables["local"]}}
    attacked = fedsim.run({**tables, "attack": {"name": "ipm", "workers": [2]}}, session=session)
    assert [record["excluded"] for record in attacked.history] == [[2]] * 3
    assert torch.equal(attacked.global_row, fedsim.run(tables, session=session).global_row)


@pytest.mark.parametrize("sync", ["parameters", "gradients"])
@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_buffers_with_nan_do_not_count_though_an_attack_replaces_their_update(sync, engine, tables, session):
    tables |= {"data": "tests.components:with_a_hole_at_the_end", "model": "tests.models:Normalised", "sync": sync}
    tables |= {"aggregate": {"rule": "mean", "nonfinite": "exclude"}, **ENGINES[engine]}
    attacked = fedsim.run({**tables, "attack": {"name": "ipm", "workers": [2]}}, session=session)
    assert all(tensor.isfinite().all() for tensor in attacked.model.state_dict().values())


@pytest.mark.parametrize("mode", ["rounds", "gradients", "fedbuff", "locked race", "free race"])
def test_the_train_loss_is_a_mean_over_updates_that_were_not_excluded(mode, tables, session):
    """Steps are tiny, so all losses are those of the initial model. All samples of worker 0 are NaN."""
    tables = {**in_mode(tables, mode), "rounds": 1, "model": "2nn", "aggregate": {"nonfinite": "exclude"}}
    tables.pop("clock", None)  # equal speeds: one update per worker and round
    tables["partition"] = {"name": "tests.components:same_last", "first": 60}
    tables["local"] = {"batch_size": 16, "lr": 1e-30}
    result = fedsim.run(tables, session=session if "race" in mode else None)
    inputs, targets = fedsim.load_dataset(tables["data"])[0].gather(torch.arange(60, 203))
    expected = torch.nn.functional.cross_entropy(result.model(inputs), targets).item()
    assert result.history[0]["train_loss"] == pytest.approx(expected, rel=1e-5)


def test_the_train_loss_is_nan_if_all_updates_were_excluded(tables):
    """Worker 0 is so fast that it sends all updates of the round."""
    clock = {"slowdown": {"name": "list", "values": [1.0, 100.0, 100.0]}}
    tables = {**tables, **MODES["fedbuff"], "rounds": 1, "clock": clock, "aggregate": {"nonfinite": "exclude"}}
    record = fedsim.run(tables).history[0]
    assert record["excluded"] == [0, 0, 0]
    assert math.isnan(record["train_loss"])


@pytest.mark.parametrize("mode", ["rounds", "asgd", "fedbuff"])
def test_an_update_with_nan_is_kept_on_demand(mode, tables):
    result = fedsim.run({**in_mode(tables, mode), "aggregate": {"nonfinite": "keep"}})
    assert not result.global_row.isfinite().any()
    assert [record["excluded"] for record in result.history] == [[]] * 3


@pytest.mark.parametrize("mode", ["rounds", "gradients", "asgd"])
def test_a_global_row_that_diverges_stops_the_run_and_the_last_checkpoint_stays(mode, tables, tmp_path):
    """Each worker's update is finite, but the server's step overflows."""
    clean = {**tables, "data": "tests.components:tiny", "checkpoint": {"every": 1}}
    good = fedsim.run({**in_mode(clean, mode), "rounds": 1}, tmp_path / "run")
    loud = {**in_mode(clean, mode), "local": {"batch_size": 16, "lr": 1e38}}

    def change_checkpoints(lr):
        for path in (tmp_path / "run" / "checkpoints").glob("*.json"):
            signed(path, lambda said, state: said["metadata"]["experiment"]["local"].update(lr=lr))

    change_checkpoints(1e38)
    with pytest.raises(fedsim.ExperimentError, match=r"round \d: (the global model has diverged|.* NaN)"):
        fedsim.run(loud, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "error.txt").read_text().startswith("round ")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert all(math.isfinite(json.loads(line)["test_loss"]) for line in lines)
    change_checkpoints(0.05)
    again = fedsim.run({**in_mode(clean, mode), "rounds": len(lines)}, tmp_path / "run", resume=True)
    assert again.global_row.isfinite().all()
    assert not (tmp_path / "run" / "error.txt").exists()
    if len(lines) == 1:
        assert torch.equal(again.global_row, good.global_row)


WITH_BUFFERS = {
    "model": "tests.models:Normalised",
    "precision": "float64",
    "rounds": 2,
    "data": "tests.components:with_a_hole_at_the_end",
    "partition": "tests.runs.test_nonfinite:in_uneven_blocks",
    "aggregate": {"nonfinite": "exclude", "weights": "samples"},
    "local": {"batch_size": 16, "lr": 0.0},
}
ENGINES = {
    "serial": {"engine": "serial"},
    "processes": {"engine": "processes", "processes": 2},
    "batched": {"engine": "batched", "processes": 1},
}


def in_uneven_blocks(labels, n_workers):
    """Consecutive blocks. Workers 0 and 1 have different numbers of samples, but the same number of batches."""
    return np.split(np.arange(len(labels)), [66, 140])


def statistics_of_finite_workers(policy, rounds):
    """Return the BatchNorm buffers of a model that never moves, averaged over workers 0 and 1 by sample counts."""
    train, _ = components.with_a_hole_at_the_end(None)
    train = train.to(torch.device("cpu"), torch.float64)
    shards, states = in_uneven_blocks(train.targets, 3), {}
    average = {name: buffer.clone() for name, buffer in start_of(models.Normalised).named_buffers()}
    for round in range(1, rounds + 1):
        for worker in (0, 1):
            model = start_of(models.Normalised).train()
            model.load_state_dict(states[worker] if policy == "local" and worker in states else average, strict=False)
            order = batch_order(0, round, worker, 0, len(shards[worker])).numpy()
            for batch in torch.from_numpy(shards[worker][order]).split(16):
                model(train.gather(batch)[0])
            states[worker] = {name: buffer.clone() for name, buffer in model.named_buffers()}
        first, second = (len(shards[worker]) / (len(shards[0]) + len(shards[1])) for worker in (0, 1))
        average = {name: first * states[0][name] + second * states[1][name] for name in average}
    return average


def without_a_hole(root):
    """The data set of `WITH_BUFFERS`, but without NaN."""
    return components.with_nan_at(slice(0))


FINITE = {"data": f"{__name__}:without_a_hole", "attack": {"name": "nan", "workers": [2]}}  # only an update is NaN


def test_global_buffers_stay_if_only_workers_of_weight_zero_have_finite_ones(tables):
    weights = {"aggregate": {"nonfinite": "exclude", "weights": [0.0, 0.0, 1.0]}}
    tables |= {**WITH_BUFFERS, **weights, "rounds": 1, "attack": {"name": "ipm", "workers": [2]}}
    assert fedsim.run(tables).model.layers[2].num_batches_tracked == 0


@pytest.mark.parametrize(
    ("engine", "sync", "policy", "changes"),
    [
        ("serial", "parameters", "local", {}),
        ("serial", "parameters", "average", FINITE),
        ("serial", "gradients", "average", {}),
        ("processes", "parameters", "average", {}),
        ("processes", "gradients", "local", {}),
        ("batched", "parameters", "local", {}),
        ("batched", "gradients", "average", {}),
    ],
)
def test_the_buffers_of_an_excluded_worker_are_excluded(engine, sync, policy, changes, tables, session):
    change = {**WITH_BUFFERS, **ENGINES[engine], "sync": sync, "buffers": policy, **changes}
    result = fedsim.run({**tables, **change}, session=session)
    assert [record["excluded"] for record in result.history] == [[2], [2]]
    for name, expected in statistics_of_finite_workers(policy, 2).items():
        buffer = result.model.state_dict()[name].double()
        assert torch.allclose(buffer, expected.double(), rtol=0, atol=1e-12), name


class Overflowing(models.Normalised):
    """A model with finite gradients and a buffer that overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([-math.inf, 0.0]))
        self.register_buffer("growing", torch.ones(3))

    def forward(self, images):
        if self.training:
            self.growing[1] *= 1e300
        return super().forward(images)


@pytest.mark.parametrize("mode", ["rounds", "gradients", "asgd", "locked race"])
def test_global_buffers_that_become_infinite_stop_the_run(mode, tables, session):
    tables = {
        **in_mode(tables, mode),
        "data": "tests.components:tiny",
        "model": "tests.runs.test_nonfinite:Overflowing",
    }
    with pytest.raises(fedsim.ExperimentError, match=r"round 1: .* buffers .*\(1 of 38 numbers"):
        fedsim.run(tables, session=session if "race" in mode else None)
    keeping = {**tables, "aggregate": {"nonfinite": "keep"}}
    assert len(fedsim.run(keeping, session=session if "race" in mode else None).history) == 3
    if mode != "locked race":  # a race keeps no earlier model
        stopped = fedsim.run({**tables, "aggregate": {"nonfinite": "stop"}})
        assert torch.equal(stopped.model.growing, torch.ones(3)), "the buffers are those from before the round"


@pytest.mark.parametrize("nonfinite", ["error", "exclude"])
def test_if_all_updates_diverge_the_error_names_the_learning_rate(nonfinite, tables):
    diverging = {
        **tables,
        "data": "tests.components:tiny",
        "local": {"lr": 1e38},
        "aggregate": {"nonfinite": nonfinite},
    }
    with pytest.raises(fedsim.ExperimentError, match=r"^round 1: all 3 updates contain NaN or infinity; reduce"):
        fedsim.run(diverging)
