"""`local.momentum_at = "worker"`: each worker sends its own momentum in rounds of gradients."""

from __future__ import annotations

import pytest
import torch

import fedsim
from fedsim.clients import SGD
from fedsim.core.randomness import sample_cohort
from fedsim.models import logistic
from fedsim.runs.loops.synchronous import SynchronousLoop
from fedsim.runs.setup import prepare
from tests import plugs
from tests.lethal import order
from tests.textbook import Federation

AT_WORKER = {"momentum_at": "worker", "momentum": 0.9, "dampening": 0.9}
LOCAL = {"batch_size": 16, "lr": 0.5, "steps": 3}
TABLES = {
    **{"rounds": 3, "workers": 5, "model": "logistic", "data": "tests.plugs:tiny", "sync": "gradients"},
    "records": {"curve": False},
}
EXCLUDES = {"aggregate": {"rule": "median", "nonfinite": "exclude"}, "attack": {"name": "nan", "workers": [1]}}
CASES = {
    "partial cohorts of uneven shards": {"workers": 7, "cohort": 3, "partition": "tests.plugs:uneven", "rounds": 4},
    "a robust rule under attack": {"attack": {"name": "alie", "workers": [4], "z": 1.5}, "aggregate": "krum"},
    "rows left out": EXCLUDES,
    "processors": {"processors": [{"name": "top_k", "k": 500}]},
}


def tables(engine="serial", **changes):
    local = {**LOCAL, **AT_WORKER, **changes.pop("local", {})}
    return {**TABLES, "engine": engine, "precision": "float64", "local": local, **changes}


@pytest.mark.parametrize("dampening", [0.0, 0.9])
def test_partial_cohorts_follow_a_loop_in_plain_pytorch(dampening):
    """Workers that are not in the cohort keep their momentum, and their batches go on by their own shard."""
    local = {"momentum": 0.9, "dampening": dampening, "weight_decay": 0.01}
    result = fedsim.run(tables(workers=6, cohort=2, rounds=6, aggregate="mean", local=local))
    federation, momenta = Federation(logistic, plugs.tiny, 6, 16), {}
    for round in range(1, 7):
        cohort = sample_cohort(0, round, 6, 2).tolist()
        batches = {worker: federation.batches(round, worker) for worker in cohort}
        for _ in range(3):
            for worker in cohort:
                gradient = federation.gradient(federation.row, next(batches[worker]))
                momenta[worker] = 0.9 * momenta.get(worker, 0.0) + (1 - dampening) * gradient
            mean = torch.stack([momenta[worker] for worker in cohort]).mean(0)
            federation.row = federation.row - 0.5 * (mean + 0.01 * federation.row)
    assert len(momenta) > 2
    assert torch.allclose(result.global_row, federation.row, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dampening", [0.0, 0.9])
def test_only_with_a_linear_rule_is_it_the_momentum_of_the_server(dampening):
    far = {}
    for rule in ("mean", "median"):
        at_worker, at_server = (
            fedsim.run(tables(aggregate=rule, local={"momentum_at": at, "dampening": dampening})).global_row
            for at in ("worker", "server")
        )
        far[rule] = float((at_worker - at_server).abs().max())
    assert far["mean"] < 1e-12
    assert far["median"] > 1e-4


def test_a_step_of_the_server_has_no_momentum():
    solver, row = SGD(lr=0.5, **AT_WORKER), torch.ones(2)
    assert solver.start(row) == {}
    solver.step(row, torch.ones(2), {})
    assert row.tolist() == [0.5, 0.5]


def test_dampened_momentum_begins_at_zero():
    """Unlike PyTorch's, whose first step is not dampened; from equal states the steps are the same."""
    solver, row = SGD(lr=1.0, momentum=0.9, dampening=0.5), torch.zeros(1)
    state = solver.start(row)
    for expected in (-0.5, -1.45):
        solver.step(row, torch.ones(1), state)
        assert row.item() == pytest.approx(expected)
    parameter = torch.nn.Parameter(torch.zeros(1))
    theirs = torch.optim.SGD([parameter], lr=1.0, momentum=0.9, dampening=0.5)
    theirs.state[parameter]["momentum_buffer"] = torch.zeros(1)
    for _ in range(2):
        parameter.grad = torch.ones(1)
        theirs.step()
    assert parameter.item() == row.item()


@pytest.fixture(scope="module")
def session():
    with fedsim.Session() as kept:
        yield kept


@pytest.mark.parametrize("case", CASES)
def test_spawn_gives_the_bits_of_serial_and_stacks_its_numbers(case, session):
    serial = fedsim.run(tables(**CASES[case]))
    spawn = fedsim.run(tables("spawn", processes=2, **CASES[case]), session=session)
    stacked = fedsim.run(tables("batched", processes=1, batched={"width": 2}, **CASES[case]))
    assert torch.equal(serial.global_row, spawn.global_row)
    assert torch.allclose(serial.global_row, stacked.global_row, rtol=0, atol=1e-9)


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_an_excluded_worker_keeps_the_momentum_of_before(engine):
    """Worker 2 has one sample. Its gradient is not finite, so the worker is always excluded."""
    changes = {"model": "tests.models:OneIsTooFew", "partition": "tests.plugs:ending_in_one", "workers": 3}
    experiment = fedsim.Experiment(
        **tables(engine, aggregate={"rule": "median", "nonfinite": "exclude"}, processes=1, **changes)
    )
    with fedsim.Session() as session, prepare(experiment, session) as (prepared, running):
        loop = SynchronousLoop(prepared, running)
        records = [loop.run_round(round) for round in (1, 2)]
        kept = running.worker_states.tensors()["rows.momentum"]
        assert running.shared.global_row.isfinite().all()
    assert [record.excluded for record in records] == [[2], [2]]
    assert [bool(row.any()) for row in kept] == [True, True]  # the third worker has kept nothing so far


@pytest.mark.parametrize("engine", ["serial", "spawn", "batched"])
def test_a_resumed_run_has_bitwise_the_same_result(engine, tmp_path, session):
    changes = {"workers": 7, "cohort": 3, "checkpoint": {"every": 1}, "processes": 2 if engine == "spawn" else 1}
    whole = fedsim.run(tables(engine, rounds=5, **changes), session=session)
    fedsim.run(tables(engine, **changes), tmp_path / "run", session=session)
    resumed = fedsim.run(tables(engine, rounds=5, **changes), tmp_path / "run", resume=True, session=session)
    assert torch.equal(whole.global_row, resumed.global_row)


def test_a_round_that_lost_a_process_is_repeated_with_the_momentum_of_before(tmp_path):
    changes = {"model": {"name": "tests.lethal:Mortal", "folder": str(tmp_path)}}

    def kill_in_round_2(record):
        order(str(tmp_path), *(["train"] if record["round"] == 1 else []))

    with pytest.warns(fedsim.errors.FedsimWarning, match="killed"):
        result = fedsim.run(tables("spawn", processes=2, **changes), on_round=kill_in_round_2)
    assert torch.equal(result.global_row, fedsim.run(tables(**changes)).global_row)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sync": "parameters"}, 'local.momentum_at = "worker": needs sync=gradients, not parameters'),
        ({"sync": "post_local", "gradient_rounds": 1}, "needs sync=gradients, not post_local"),
        (
            {"sync": "parameters", "mode": "clock", "policy": "asgd"},
            'needs rounds of gradients, and policy.name = "asgd" has none',
        ),
        ({"aggregate": "fltrust"}, "the rule fltrust compares it with a gradient of the server"),
        ({"local": {"solver": "fedprox"}}, "(the local solver is fedprox); momentum_at goes with sgd"),
        ({"local": {"keep_state": True}}, "local.keep_state = true"),
        ({"local": {"momentum": 0.0}}, "local.dampening = 0.9: needs local.momentum > 0"),
        ({"local": {"momentum": 0.0, "dampening": 0.0}}, 'local.momentum_at = "worker": needs local.momentum > 0'),
        ({"local": {"nesterov": True}}, "local.nesterov = true: needs local.dampening = 0"),
        ({"local": {"nesterov": True, "dampening": 0.0}}, "local.nesterov = true: needs local.momentum_at=server"),
    ],
)
def test_settings_without_a_meaning_are_refused_in_one_line(changes, message):
    with pytest.raises(fedsim.ExperimentError) as caught:
        fedsim.Experiment(**tables(**changes))
    assert message in str(caught.value)
    assert len(caught.value.lines) == 1
