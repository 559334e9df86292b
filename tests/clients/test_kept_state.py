"""`local.keep_state = true`: a worker's solver continues with the state of its last round."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import fedsim
from fedsim.core.randomness import sample_cohort
from fedsim.core.rows import Layout
from fedsim.models import logistic
from tests import plugs
from tests.clients.test_definitions import in_pytorch
from tests.lethal import order
from tests.textbook import Federation

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "beta1": 0.8, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1}),
}
TABLES = {
    **{"rounds": 4, "workers": 5, "cohort": 2, "model": "logistic", "data": "tests.plugs:tiny", "engine": "serial"},
    "records": {"curve": False},
}
KEPT = {"batch_size": 16, "steps": 3, "keep_state": True}


def tables(engine="serial", solver="adam", **changes):
    local = {**KEPT, "solver": solver, **OPTIMIZERS[solver][1], **changes.pop("local", {})}
    return {**TABLES, "engine": engine, "precision": "float64", "local": local, **changes}


@pytest.mark.parametrize("solver", OPTIMIZERS)
def test_each_worker_s_optimizer_lives_on_between_its_rounds(solver):
    """Plain PyTorch: one model and one optimizer for each worker, of which only the model begins again."""
    result = fedsim.run(tables(solver=solver, local={"steps": None, "epochs": 1}, rounds=6))
    federation = Federation(logistic, plugs.tiny, 5, 16)
    models = [logistic().double() for _ in range(5)]
    layout = Layout.of(models[0])
    make = in_pytorch(*OPTIMIZERS[solver]) if solver != "sgd" else partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizers = [make(model.parameters()) for model in models]
    for round in range(1, 7):
        rows = {}
        for worker in sample_cohort(0, round, 5, 2).tolist():
            model, optimizer = models[worker], optimizers[worker]
            layout.write(federation.row, model)
            for x, y in federation.epoch(round, worker):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            rows[worker] = layout.read(model)
        federation.row = federation.average(rows)
    assert torch.allclose(result.global_row, federation.row, rtol=0, atol=1e-12)


@pytest.mark.parametrize("solver", ["sgd", "adam"])
def test_spawn_gives_the_bits_of_serial_and_stacks_its_numbers(solver, session):
    changes = {"solver": solver, "partition": "tests.plugs:uneven"}
    serial = fedsim.run(tables(**changes))
    reset = fedsim.run(tables(**changes, local={"keep_state": False}))
    spawn = fedsim.run(tables("spawn", processes=2, **changes), session=session)
    stacked = fedsim.run(tables("batched", processes=1, batched={"width": 2}, **changes))
    assert not torch.allclose(serial.global_row, reset.global_row, rtol=0, atol=1e-6)
    assert torch.equal(serial.global_row, spawn.global_row)
    assert torch.allclose(serial.global_row, stacked.global_row, rtol=0, atol=1e-9)


def test_asynchronous_workers_that_wait_for_each_other_keep_their_state():
    """With a buffer for all workers, the virtual clock runs synchronous rounds."""
    asynchronous = fedsim.run(tables(mode="clock", cohort=5, policy="fedbuff"))
    synchronous = fedsim.run(tables(cohort=5, aggregate="mean"))
    assert torch.allclose(asynchronous.global_row, synchronous.global_row, rtol=0, atol=1e-9)


OWN_BUFFERS = {"model": "tests.models:Normalised", "buffers": "local"}


@pytest.mark.parametrize("engine", ["serial", "spawn", "batched"])
def test_a_resumed_run_has_bitwise_the_same_result(engine, tmp_path, session):
    changes = {**OWN_BUFFERS, "checkpoint": {"every": 1}, "processes": 2 if engine == "spawn" else 1}
    whole = fedsim.run(tables(engine, rounds=5, **changes), session=session)
    fedsim.run(tables(engine, rounds=3, **changes), tmp_path / "run", session=session)
    resumed = fedsim.run(tables(engine, rounds=5, **changes), tmp_path / "run", resume=True, session=session)
    assert torch.equal(whole.global_row, resumed.global_row)


def test_a_run_on_the_clock_is_resumed_to_the_bit(tmp_path):
    changes = {"mode": "clock", "policy": "fedbuff", "clock": {"speed": "lognormal"}, "checkpoint": {"every": 1}}
    whole = fedsim.run(tables(**changes))
    fedsim.run(tables(**changes, rounds=2), tmp_path / "run")
    assert torch.equal(fedsim.run(tables(**changes), tmp_path / "run", resume=True).global_row, whole.global_row)


@pytest.mark.parametrize("engine", ["spawn", "batched"])
def test_a_round_that_lost_a_process_is_repeated_with_the_state_of_before(engine, tmp_path):
    changes = {"model": {"name": "tests.lethal:Mortal", "folder": str(tmp_path)}}

    def kill_in_round_2(record):
        order(str(tmp_path), *(["train"] if record["round"] == 1 else []))

    with pytest.warns(fedsim.errors.FedsimWarning, match="killed"):
        result = fedsim.run(tables(engine, processes=2, **changes), on_round=kill_in_round_2)
    assert torch.allclose(result.global_row, fedsim.run(tables(**changes)).global_row, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sync": "gradients"}, "local.keep_state = true: needs local steps"),
        ({"mode": "clock", "policy": "asgd", "cohort": None}, "local.keep_state = true: needs local steps"),
        (
            {"mode": "race", "policy": "fedasync", "engine": "spawn", "cohort": None},
            "local.keep_state = true: keeps worker state",
        ),
        ({"solver": "sgd", "local": {"momentum": 0.0}}, "the solver has no state with these parameters"),
        ({"local": {"solver": "fedprox", "beta1": None}}, "is for solvers such as sgd and adam only"),
    ],
)
def test_settings_without_a_meaning_are_refused_in_one_line(changes, message):
    wanted = tables(**changes)
    if wanted["local"]["solver"] == "fedprox":
        wanted["local"] = {**KEPT, "solver": "fedprox"}
    with pytest.raises(fedsim.ExperimentError, match=message) as caught:
        fedsim.Experiment(**wanted)
    assert len(caught.value.lines) == 1


def test_a_run_folder_holds_the_key(tmp_path):
    fedsim.run(tables(rounds=1), tmp_path / "run")
    assert fedsim.load_experiment(tmp_path / "run" / "experiment.toml", allow_imports=True).local.keep_state
